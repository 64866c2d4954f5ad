"""Concentration and dependence of gates, against definitions and closed forms."""

import numpy as np
import pytest
from scipy import stats

from lm_jax import statistics as our_stats
from protot_jax.studies.concepts import measures, resampling


@pytest.fixture
def gate_MR():
    rng = np.random.default_rng(0)
    return rng.dirichlet(np.full(7, 0.4), 50)


def test_gini_is_the_mean_difference_over_twice_the_mean(gate_MR):
    pairs = np.abs(gate_MR[:, :, None] - gate_MR[:, None, :]).mean((1, 2))
    np.testing.assert_allclose(
        measures.gini(gate_MR), pairs / (2 * gate_MR.mean(1)), rtol=1e-12, atol=1e-14
    )


def test_entropy_is_that_of_scipy_and_does_not_depend_on_the_scale(gate_MR):
    expected = stats.entropy(gate_MR, axis=1)
    np.testing.assert_allclose(measures.entropy(3 * gate_MR), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("row", "l1", "gini", "entropy"),
    [([0.25] * 4, 1.0, 0.0, np.log(4)), ([0.0, 1.0, 0.0, 0.0], 4.0, 0.75, 0.0)],
)
def test_even_and_single_gates_have_the_extreme_values(row, l1, gini, entropy):
    gate_MR = np.array([row])
    assert measures.l1_ratio(gate_MR) == pytest.approx([l1])
    assert measures.gini(gate_MR) == pytest.approx([gini])
    assert measures.entropy(gate_MR) == pytest.approx([entropy])


def test_half_life_halves_also_where_the_decay_rounds_to_one():
    decays = np.array([0.1, 0.9, 0.99])
    result = measures.half_life(np.log(decays / (1 - decays)))
    np.testing.assert_allclose(decays**result, 0.5, rtol=1e-12)
    # 1 - sigmoid(20) = exp(-20), of which float32 knows nothing.
    assert measures.half_life(np.array(20.0)) == pytest.approx(np.log(2) * np.exp(20), rel=1e-6)


def test_a_gate_that_the_token_decides_has_the_entropy_of_the_token():
    token_M = np.tile(np.arange(10), 300)
    result = measures.mutual_information(token_M, token_M / 10)
    # Ten cells in each of the three tables: one correction remains.
    assert result == pytest.approx(np.log(10) + 9 / (2 * len(token_M)), rel=1e-12)


def test_a_sparse_gate_that_the_token_decides_has_the_entropy_of_on_and_off():
    """Its quantiles are all 0: active on one token of twenty."""
    token_M = np.tile(np.arange(20), 100)
    result = measures.mutual_information(token_M, np.where(token_M == 7, 0.6, 0.0))
    # Token and both have 20 cells in use, the gate two.
    assert result == pytest.approx(stats.entropy([0.05, 0.95]) + 1 / (2 * 2_000), rel=1e-12)


def test_the_correction_removes_the_bias_of_an_independent_gate():
    rng = np.random.default_rng(1)
    result, uncorrected = [], []
    for _ in range(40):
        token_M, gate_M = rng.integers(20, size=4_000), rng.random(4_000)
        result.append(measures.mutual_information(token_M, gate_M))
        bins = np.argsort(np.argsort(gate_M)) * 10 // 4_000
        counts = stats.contingency.crosstab(token_M, bins).count
        uncorrected.append(
            stats.entropy(counts.sum(0))
            + stats.entropy(counts.sum(1))
            - stats.entropy(counts, axis=None)
        )
    # 19 x 9 degrees of freedom over 2 x 4,000 tokens.
    assert np.mean(uncorrected) == pytest.approx(19 * 9 / 8_000, rel=0.05)
    assert abs(np.mean(result)) < 0.0005


def test_chance_shows_what_rare_tokens_still_give():
    rng = np.random.default_rng(5)
    # Few tokens of many kinds: the correction cannot account for cells without a sample.
    token_M, gate_MR = rng.integers(400, size=2_000), rng.dirichlet(np.ones(3), 2_000)
    entries = measures.of_prototypes(gate_MR, token_M)
    counts_SN = resampling.bootstrap_counts(20, 99, seed=0)
    result = measures.of_layer(gate_MR, np.arange(2_000) // 100, entries, counts_SN)
    assert result.mutual_information > 0.2
    assert result.mutual_information_by_chance == pytest.approx(result.mutual_information, abs=0.03)
    # A gate that the token decides is far above its own chance.
    (tied,) = measures.of_prototypes(token_M[:, None] / 400, token_M)
    assert tied.mutual_information > tied.mutual_information_by_chance + 1.0


def test_a_constant_gate_says_nothing():
    token_M = np.arange(100) % 7
    assert measures.mutual_information(token_M, np.full(100, 0.3)) == pytest.approx(0, abs=1e-12)


def test_memory_is_the_discounted_mean_of_what_came_before():
    write_NT = np.random.default_rng(2).random((2, 6))
    beta = 0.7
    expected = [
        [(1 - beta) * sum(beta ** (i - 1 - j) * write[j] for j in range(i)) for i in range(6)]
        for write in write_NT
    ]
    np.testing.assert_allclose(measures.memory(write_NT, beta), expected, rtol=1e-12)


def test_the_health_of_a_router_is_counted():
    gate_MR = np.array([[0.7, 0.295, 0.005], [0.2, 0.795, 0.005]])
    token_M = np.array([3, 4])
    prototypes = measures.of_prototypes(gate_MR, token_M)
    counts_SN = np.array([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    layer = measures.of_layer(gate_MR, np.arange(2), prototypes, counts_SN)
    assert [each.top_1 for each in prototypes] == [0.5, 0.5, 0.0]
    assert [each.active for each in prototypes] == [1.0, 1.0, 0.0]
    # Across tokens, and so not Eq. 3, which is across prototypes.
    assert prototypes[0].peak_over_mean == pytest.approx(0.7 / 0.45)
    assert (layer.active, layer.dead) == (2.0, 1)
    assert layer.top_1 == pytest.approx((0.7 + 0.795) / 2)
    assert layer.margin == pytest.approx((0.405 + 0.595) / 2)
    assert layer.max_share == pytest.approx((0.295 + 0.795) / 2)
    assert layer.usage_gini == pytest.approx(float(measures.gini(gate_MR.mean(0))))


def test_intervals_of_router_health_are_bootstraps_over_texts():
    rng = np.random.default_rng(6)
    # Texts differ more than their tokens do, so that tokens are no independent units.
    text_M = np.repeat(np.arange(80), rng.integers(3, 9, size=80))
    gate_MR = np.stack([rng.dirichlet(np.full(5, rng.uniform(0.1, 3.0))) for _ in range(80)])[
        text_M
    ]
    counts_SN = resampling.bootstrap_counts(80, 1_000, seed=0)
    result = measures.of_layer(gate_MR, text_M, measures.of_prototypes(gate_MR, text_M), counts_SN)
    token_values = {
        "l1_ratio": measures.l1_ratio(gate_MR),
        "entropy": measures.entropy(gate_MR),
        "active": (gate_MR >= measures.ACTIVE).sum(1),
    }
    for name, values_M in token_values.items():
        wanted = our_stats.clustered_bootstrap(values_M, text_M, seed=1)
        assert getattr(result, name) == pytest.approx(wanted.estimate)
        width = wanted.high - wanted.low
        # Two bootstraps of a thousand samples agree to a few percent of their width.
        assert getattr(result.intervals, name) == pytest.approx(
            (wanted.low, wanted.high), abs=0.1 * width
        )
        alone = our_stats.clustered_bootstrap(values_M, np.arange(len(text_M)), seed=1)
        assert width > 1.5 * (alone.high - alone.low)
    # Statistics of shares, by drawing texts in a loop.
    drawn = []
    for count_N in counts_SN:
        share_R = gate_MR[np.repeat(np.arange(len(text_M)), count_N[text_M].astype(int))].sum(0)
        drawn.append((measures.gini(share_R), share_R.max() / share_R.sum()))
    for name, values_S in zip(("usage_gini", "max_share"), np.transpose(drawn), strict=True):
        assert getattr(result.intervals, name) == pytest.approx(
            tuple(np.quantile(values_S, [0.025, 0.975]))
        )
