"""Curves, crossings, CPR and CMD against closed forms."""

import math

import numpy as np
import pytest

from sparse_jax.circuits import curves


def test_explained_effect_of_the_whole_is_one_and_of_nothing_zero():
    rng = np.random.default_rng(0)
    empty, whole = rng.normal(0, 1, 20), rng.normal(4, 1, 20)
    halfway = 0.25 * empty + 0.75 * whole
    result = curves.explained(np.stack([empty, halfway, whole]), empty, whole)
    np.testing.assert_allclose(result, [0, 0.75, 1], atol=1e-12)
    error, interval = curves.explained_intervals(
        np.stack([empty, halfway, whole]), empty, whole, resamples=200
    )
    # The same share of every prompt: no prompt says otherwise.
    np.testing.assert_allclose(error, 0, atol=1e-12)
    np.testing.assert_allclose(interval, [[0, 0], [0.75, 0.75], [1, 1]], atol=1e-12)


def test_the_standard_error_is_that_of_a_mean():
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 1, (1, 400))
    error, interval = curves.explained_intervals(noise + 5, np.zeros(400), np.full(400, 10.0))
    wanted = noise.std(ddof=1) / 10 / math.sqrt(400)
    assert error[0] == pytest.approx(wanted)
    # 2,000 resamples give an end of the interval to a twentieth, two of which are allowed for.
    assert abs((interval[0, 1] - interval[0, 0]) / (2 * 1.96 * wanted) - 1) < 0.12


def test_the_standard_error_is_the_spread_over_samples_of_prompts():
    # The effect to explain differs between prompts, as does what is explained of it.
    change = np.random.default_rng(2).normal(4, 2, (400, 200))
    found = 0.5 * change + np.random.default_rng(3).normal(0, 1, change.shape)
    empty = np.zeros(200)
    shares = [
        curves.explained(one[None], empty, whole)[0]
        for one, whole in zip(found, change, strict=True)
    ]
    errors = [
        curves.explained_intervals(one[None], empty, whole, resamples=1)[0][0]
        for one, whole in zip(found, change, strict=True)
    ]
    # The spread of 400 is known to 3.5 %, three of which are allowed for.
    assert np.mean(errors) == pytest.approx(np.std(shares, ddof=1), rel=0.11)


def test_the_standard_error_is_finite_where_a_resample_has_next_to_no_effect_to_explain():
    # The second and third weigh up the first, and almost nothing is left.
    change = np.array([-3.001, 1.0, 2.0, 2.0, 2.0, 2.001])
    error, _ = curves.explained_intervals(np.full((1, 6), 0.5), np.zeros(6), change)
    # Their mean is 1, so that f is a half.
    assert error[0] == pytest.approx(np.std(0.5 * change, ddof=1) / math.sqrt(6))


def pairs_of_prompts(rng, prompts, *, sizes=(1, 2, 5)):
    """Pairs, some of which share a clean prompt, and with it most of what differs by pair."""
    prompt_B = rng.permutation(np.repeat(np.arange(prompts), rng.choice(sizes, prompts)))
    shared_P, own_B = rng.normal(0, 1, prompts), rng.normal(0, 0.3, len(prompt_B))
    change_B = 4 + shared_P[prompt_B] + own_B
    share_P = 0.5 + rng.normal(0, 0.3, prompts)
    metric_B = share_P[prompt_B] * change_B + rng.normal(0, 0.1, len(prompt_B))
    return prompt_B, metric_B[None], np.zeros(len(prompt_B)), change_B


def resampled_by_hand(prompt_B, metric_KB, empty_B, whole_B, *, seed, resamples):
    """Ends of the percentile interval of drawing whole prompts, pair by pair."""
    prompts = sorted(set(prompt_B.tolist()))
    drawn = np.random.default_rng(seed).integers(0, len(prompts), (resamples, len(prompts)))
    found = []
    for picks in drawn:
        rows = [b for pick in picks for b in np.flatnonzero(prompt_B == prompts[pick])]
        above = [metric_KB[:, b] - empty_B[b] for b in rows]
        found.append(np.sum(above, 0) / sum(whole_B[b] - empty_B[b] for b in rows))
    return np.quantile(found, [0.025, 0.975], axis=0).T


def test_pairs_of_one_prompt_are_drawn_together():
    """Against drawing by hand, and the error of a ratio whose terms are sums of clusters."""
    given = pairs_of_prompts(np.random.default_rng(4), 40)
    prompt_B, metric_KB, _, whole_B = given
    error_K, ends_K2 = curves.explained_intervals(
        *given[1:], prompt_B=prompt_B, seed=5, resamples=300
    )
    wanted = resampled_by_hand(*given, seed=5, resamples=300)
    np.testing.assert_allclose(ends_K2, wanted, rtol=1e-12)
    f = metric_KB.sum() / whole_B.sum()
    total_P = [(metric_KB[0] - f * whole_B)[prompt_B == p].sum() for p in range(40)]
    # Field & Welsh (2007): the variance of a sum of independent clusters.
    variance = 40 * np.var(total_P, ddof=1) / whole_B.sum() ** 2
    assert error_K[0] == pytest.approx(math.sqrt(variance), rel=1e-12)


@pytest.mark.parametrize("count", [4, 12, 40])
def test_prompts_that_nothing_shares_have_the_same_bits_as_without_their_numbers(count):
    rng = np.random.default_rng(6)
    empty_B, whole_B = rng.normal(0, 1, count), rng.normal(4, 1, count)
    given = rng.normal(2, 1, (7, count)), empty_B, whole_B
    plain = curves.explained_intervals(*given, seed=1, resamples=200)
    numbered = curves.explained_intervals(*given, prompt_B=np.arange(count), seed=1, resamples=200)
    for one, other in zip(plain, numbered, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("prompts", [12, 40])
def test_an_interval_over_prompts_covers_where_one_over_pairs_does_not(prompts):
    """Of 300 samples whose mean explained effect is a half."""
    rng, within, naive = np.random.default_rng(7), 0, 0
    for _ in range(300):
        prompt_B, *given = pairs_of_prompts(rng, prompts, sizes=(6,))
        _, ((low, high),) = curves.explained_intervals(*given, prompt_B=prompt_B, resamples=200)
        within += low <= 0.5 <= high
        _, ((low, high),) = curves.explained_intervals(*given, resamples=200)
        naive += low <= 0.5 <= high
    # 95 % of 300 are 285, whose standard deviation is 3.8; a bootstrap of 40 clusters is short of
    # it by about 2 %. Six pairs of a prompt narrow the interval over pairs to sqrt(1 / 6) of it,
    # which covers 58 %.
    assert within >= 0.93 * 300 - 3 * 3.8
    assert naive <= 0.7 * 300


def test_a_crossing_is_interpolated_in_the_logarithm():
    sizes = np.array([1, 10, 100])
    assert curves.crossing(sizes, np.array([0.0, 0.8, 1.0])) == pytest.approx(10**1.5)
    assert curves.crossing(sizes, np.array([0.95, 0.8, 1.0])) == 1
    assert curves.crossing(sizes, np.array([0.0, 1.8, 0.2])) == pytest.approx(10**0.5)
    assert math.isnan(curves.crossing(sizes, np.array([0.0, 0.8, 0.89])))
    assert curves.crossing(sizes, np.array([0.0, 0.5, 1.0]), 0.5) == pytest.approx(10)


def test_sizes_begin_at_one_and_end_at_all():
    for count in (1, 2, 36, 19_584):
        result = curves.sizes(count)
        assert result[0] == 1 and result[-1] == count
        assert (np.diff(result) > 0).all() and len(result) <= 24


def test_a_perfect_circuit_and_the_sum_of_both_areas():
    """MIB, evaluation.py: 0.999 and 0; and for one ranking both sum to 0.999 or more."""
    fractions = curves.MIB_FRACTIONS
    assert curves.cpr_cmd(fractions, [1.0] * 10) == pytest.approx((0.999, 0.0), abs=1e-12)
    assert curves.cpr_cmd(fractions, [0.0] * 10) == pytest.approx((0.0, 0.999), abs=1e-12)
    rng = np.random.default_rng(2)
    for _ in range(200):
        values = rng.normal(0.7, 0.6, 10)
        cpr, cmd = curves.cpr_cmd(fractions, values)
        assert cpr + cmd >= 0.999 - 1e-12
        steps = np.diff(fractions)
        assert cpr == pytest.approx((steps * (values[1:] + values[:-1]) / 2).sum())
        off = np.abs(1 - values)
        assert cmd == pytest.approx((steps * (off[1:] + off[:-1]) / 2).sum())
    assert curves.log_area(fractions, [0.4] * 10) == pytest.approx(0.4)


@pytest.mark.parametrize("fractions", [(0.1,), (0.1, 0.1), (0.2, 0.1), (0.1, 0.2, 0.3)])
def test_fractions_that_do_not_rise_are_refused(fractions):
    with pytest.raises(ValueError, match="rising fractions"):
        curves.cpr_cmd(fractions, [0.5, 0.6])
