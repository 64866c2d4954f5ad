"""The lag tests detect a read one token before the write, and keep their level under the null."""

import itertools

import numpy as np
import pytest
from scipy import stats

from protot_jax.studies.concepts import lag


def run(write_NTR, read_NTR, *, resamples=500, seed=0):
    result = lag.of_layer(write_NTR, read_NTR, np.ones(write_NTR.shape[:2], bool))
    return result, lag.tests([result], resamples=resamples, seed=seed)


def test_a_read_one_token_before_the_write_is_found():
    rng = np.random.default_rng(0)
    read_NTR = rng.random((60, 12, 6))
    write_NTR = np.roll(read_NTR, 1, axis=1)
    write_NTR[:, 0] = rng.random((60, 6))
    result, tests = run(write_NTR, read_NTR)
    assert [lag.LAGS[k] for k in result.correlation_RK.argmax(1)] == [-1] * 6
    for one in (tests.lead, tests.own_lead):
        assert one.p < 0.01
        assert 0.9 < one.low < one.value < one.high
        assert (one.value, one.prototypes, one.texts) == (pytest.approx(1.0, abs=0.15), 6, 60)


def test_a_write_one_token_before_the_read_leads_backwards():
    write_NTR = np.random.default_rng(1).random((60, 12, 6))
    # Reads agree with writes at both 0 and 1.
    result, tests = run(write_NTR, write_NTR + np.roll(write_NTR, 1, axis=1))
    for one in (tests.lead, tests.own_lead):
        assert one.value < one.high < -0.3
        assert one.p < 0.01
    assert set(result.correlation_RK.argmax(1)) <= {lag.LAGS.index(0), lag.LAGS.index(1)}


def test_a_common_cause_leads_but_no_more_for_own_gates():
    """200 texts in which every read gate is one token before every write gate."""
    rng = np.random.default_rng(2)
    cause_NT = rng.normal(size=(200, 31, 1))
    read_NTR = cause_NT[:, 1:] + 0.6 * rng.normal(size=(200, 30, 16))
    write_NTR = cause_NT[:, :-1] + 0.6 * rng.normal(size=(200, 30, 16))
    _, tests = run(write_NTR, read_NTR)
    assert tests.lead.value == pytest.approx(1 / 1.36, abs=0.05)
    assert tests.lead.p == pytest.approx(2 / 501)
    assert tests.lead.low > 0.6
    assert abs(tests.own_lead.value) < 0.01
    assert tests.own_lead.p > 0.1
    assert tests.own_lead.low < 0 < tests.own_lead.high


def test_gates_that_peak_together_do_not_lead_though_their_neighbours_lead_less():
    """200 texts in which all gates peak at lag 0, a prototype's own a little less than others."""
    rng = np.random.default_rng(3)
    cause_NT = rng.normal(size=(200, 30, 1))
    noise_NTR = 0.7 * rng.normal(size=(200, 30, 16))
    write_NTR, read_NTR = cause_NT + noise_NTR, cause_NT - 0.2 * noise_NTR
    read_NTR += 0.6 * rng.normal(size=(200, 30, 16))
    _, tests = run(write_NTR, read_NTR)
    assert tests.lead.value < tests.lead.high < -0.5
    assert tests.lead.p == pytest.approx(2 / 501)
    assert 0.02 < tests.own_lead.low < tests.own_lead.value < 0.2
    assert tests.own_lead.p == pytest.approx(2 / 501)


def smooth(rng, shape):
    """Series with autocorrelation, as gates have: first-order, coefficient 0.8."""
    N, T, C = shape
    x_NTC = rng.normal(size=(N, T + 20, C))
    for t in range(1, T + 20):
        x_NTC[:, t] += 0.8 * x_NTC[:, t - 1]
    return x_NTC[:, 20:]


def unrelated(rng):
    return smooth(rng, (40, 16, 8)), smooth(rng, (40, 16, 8))


def from_the_same_tokens(rng):
    """As in a model with random weights: all gates depend on the text, none on its namesake."""
    x_NTC = smooth(rng, (40, 16, 5))
    # What a layer may know of the token before.
    x_NTC = np.concatenate([x_NTC, np.roll(x_NTC, 1, axis=1)], axis=-1)
    return tuple(np.tanh(x_NTC @ rng.normal(size=(10, 8))) for _ in range(2))


@pytest.mark.parametrize("draw", [unrelated, from_the_same_tokens])
def test_the_own_lead_is_rarely_significant_under_the_null(draw):
    results = [run(*draw(np.random.default_rng(seed)))[1].own_lead for seed in range(60)]
    # Of 60 tests at 5 %, more than 8 come below in less than one case out of a hundred.
    assert sum(one.p < 0.05 for one in results) <= 8
    assert np.median([one.p for one in results]) > 0.25
    # The interval is that of the test.
    for one in results:
        assert (one.p > 0.05) == (one.low <= 0 <= one.high)


def test_p_is_uniform_where_nothing_leads():
    """The prototypes of a layer are near copies, so that they are no independent units."""
    results = []
    for seed in range(500):
        rng = np.random.default_rng(seed)
        layers = []
        for _ in range(2):
            write_NTR, read_NTR = rng.normal(size=(2, 80, 9, 1)) + 0.3 * rng.normal(
                size=(2, 80, 9, 4)
            )
            layers.append(lag.of_layer(write_NTR, read_NTR, np.ones((80, 9), bool)))
        results.append(lag.tests(layers, resamples=199, seed=seed))
    # 99.9 % binomial limits of 500 tests.
    for name in ("lead", "own_lead"):
        p_S = np.array([getattr(tests, name).p for tests in results])
        for level in (0.05, 0.5):
            low, high = stats.binom(500, level).ppf([0.0005, 0.9995])
            assert low <= np.count_nonzero(p_S <= level) <= high, (name, level)
    held = sum(tests.lead.low <= 0 <= tests.lead.high for tests in results)
    assert held >= stats.binom(500, 0.95).ppf(0.0005)


def test_the_bootstrap_draws_whole_texts():
    """Against a loop that puts each sample of texts together and correlates it anew."""
    rng = np.random.default_rng(6)
    write_NTR, read_NTR = rng.random((2, 12, 7, 3))
    token_mask_NT = np.arange(7) < rng.integers(4, 8, size=(12, 1))
    layer = lag.of_layer(write_NTR, read_NTR, token_mask_NT)
    counts_SN = lag.bootstrap_counts(12, 20, seed=5)
    found_S = lag._resampled([layer.sums_N6R], counts_SN)
    for result, count_N in zip(found_S, counts_SN.astype(int), strict=True):
        drawn = np.repeat(np.arange(12), count_N)
        again = lag.of_layer(write_NTR[drawn], read_NTR[drawn], token_mask_NT[drawn])
        assert result == pytest.approx(np.diagonal(again.lead_RR).mean(), rel=1e-9)


def test_correlations_are_those_of_a_loop_over_pairs():
    rng = np.random.default_rng(3)
    N, T, R = 6, 9, 2
    write_NTR, read_NTR = rng.random((2, N, T, R))
    token_mask_NT = np.arange(T) < rng.integers(5, T + 1, size=(N, 1))
    # As after a mark at the beginning.
    token_mask_NT[:, 0] = False
    result = lag.of_layer(write_NTR, read_NTR, token_mask_NT)

    def correlation(k, r, s):
        pairs = []
        for write_T, read_T, counted_T in zip(
            write_NTR[..., r], read_NTR[..., s], token_mask_NT, strict=True
        ):
            write_T, read_T = (x - x[counted_T].mean() for x in (write_T, read_T))
            pairs += [
                (write_T[i], read_T[i + k])
                for i in range(T)
                if 0 <= i + k < T and counted_T[i] and counted_T[i + k]
            ]
        write, read = np.transpose(pairs)
        return write @ read / np.sqrt((write @ write) * (read @ read))

    for r in range(R):
        expected = [correlation(k, r, r) for k in lag.LAGS]
        np.testing.assert_allclose(result.correlation_RK[r], expected, rtol=1e-9, atol=1e-12)
    leads = [[correlation(-1, r, s) - correlation(0, r, s) for s in range(R)] for r in range(R)]
    np.testing.assert_allclose(result.lead_RR, leads, rtol=1e-9, atol=1e-12)


def test_p_is_the_share_of_all_changes_of_owners():
    # Of the six ways, two have a mean as high as the present one, 2 / 3.
    lead_RR = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    result = own_lead(lead_RR, permutations=20_000)
    # Own 1, 1 and 0; neighbours 1 / 2, 1 / 2 and 0.
    assert result.value == pytest.approx(1 / 3)
    assert result.p == pytest.approx(2 * 2 / 6, abs=0.02)


def own_lead(*leads, permutations):
    layers = [
        lag.LayerLag(np.zeros((len(lead_RR), 11)), lead_RR, np.ones((2, 6, len(lead_RR))))
        for lead_RR in leads
    ]
    return lag.tests(layers, resamples=permutations, seed=0).own_lead


def test_the_interval_holds_the_differences_that_the_exchange_does_not_reject():
    """Enumerated: all 24 x 6 ways to give the read gates of two layers to owners."""
    rng = np.random.default_rng(7)
    leads = [rng.normal(size=(4, 4)), rng.normal(size=(3, 3))]
    for lead_RR in leads:
        lead_RR += 1.5 * np.eye(len(lead_RR))
    result = own_lead(*leads, permutations=20_000)
    ways = list(
        itertools.product(itertools.permutations(range(4)), itertools.permutations(range(3)))
    )

    def rejected(d):
        less = [lead_RR - d * np.eye(len(lead_RR)) for lead_RR in leads]
        sums = np.array(
            [
                sum(
                    m[np.arange(len(m)), list(way)].sum()
                    for m, way in zip(less, owners, strict=True)
                )
                for owners in ways
            ]
        )
        own = sum(np.trace(m) for m in less)
        tails = (sums >= own - 1e-9).mean(), (sums <= own + 1e-9).mean()
        return 2 * min(tails) <= 0.05

    grid = np.linspace(result.low - 1.0, result.high + 1.0, 201)
    kept = [d for d in grid if not rejected(d)]
    step = grid[1] - grid[0]
    # The share of a permutation among 20,000 drawn ones is not quite its share of all.
    assert result.low == pytest.approx(min(kept), abs=0.1 + step)
    assert result.high == pytest.approx(max(kept), abs=0.1 + step)
    assert result.low < result.value < result.high


def test_too_few_ways_have_no_interval():
    # Two owners can change in one way, which no test at 5 % can reject.
    result = own_lead(np.array([[1.0, 0.0], [0.0, 1.0]]), permutations=999)
    assert result.value == 1.0
    assert result.p == pytest.approx(1.0, abs=0.1)
    assert result.low is result.high is None


def test_a_gate_that_never_moves_is_left_out():
    rng = np.random.default_rng(4)
    write_NTR, read_NTR = rng.random((2, 20, 8, 3))
    write_NTR[..., 1] = 0.0
    result, tests = run(write_NTR, read_NTR)
    assert np.isnan(result.correlation_RK[1]).all()
    assert tests.lead.prototypes == tests.own_lead.prototypes == 2
    assert np.isfinite([tests.lead.value, tests.lead.p, tests.lead.low, tests.lead.high]).all()


def test_no_layer_means_no_test():
    tests = lag.tests([], resamples=99, seed=0)
    for one in (tests.lead, tests.own_lead):
        assert one.prototypes == 0
        assert (one.value, one.p, one.low, one.high) == (None,) * 4
