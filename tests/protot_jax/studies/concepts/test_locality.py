"""Half-life against repetition: detected within layers, and not where only depth relates them."""

import itertools

import numpy as np
import pytest
from scipy import stats

from protot_jax.studies.concepts.locality import half_life_repetition


def run(half_life_Q, repetition_Q, layer_Q, *, noise=0.0, samples=199, seed=0):
    """Samples of texts whose repetition scores differ by that much noise."""
    noise_SQ = np.random.default_rng(seed).normal(0.0, noise, (samples, len(half_life_Q)))
    return half_life_repetition(
        half_life_Q, repetition_Q, layer_Q, repetition_Q + noise_SQ, texts=100, seed=seed
    )


def test_a_falling_repetition_is_found_with_its_quartiles():
    rng = np.random.default_rng(0)
    layer_Q = np.repeat([0, 1], 20)
    half_life_Q = np.tile(np.linspace(1, 30, 20), 2) + 0.5 * layer_Q
    repetition_Q = 0.6 - 0.01 * half_life_Q + 0.02 * rng.normal(size=40)
    result = run(half_life_Q, repetition_Q, layer_Q, noise=0.01)
    assert result.spearman.value < -0.9
    # Two-sided, and no permutation comes near.
    assert result.spearman.p == pytest.approx(2 / 200)
    assert result.spearman.low < result.spearman.value < result.spearman.high < -0.7
    assert (result.spearman.prototypes, result.spearman.texts) == (40, 100)
    order = np.argsort(half_life_Q)
    for edge, place in zip(result.edges, (10, 20, 30), strict=True):
        assert half_life_Q[order[place - 1]] <= edge < half_life_Q[order[place]]
    assert result.quartiles == pytest.approx(
        [repetition_Q[order[start : start + 10]].mean() for start in range(0, 40, 10)]
    )
    assert result.cohens_d.value > 3
    assert result.cohens_d.p == pytest.approx(2 / 200)
    assert 1 < result.cohens_d.low < result.cohens_d.value


def with_a_trend(rng, size=32):
    """Six layers: both go with depth, and neither with the other in any layer."""
    layer_Q = np.repeat(np.arange(6), size)
    half_life_Q = np.exp(0.4 * layer_Q + 0.5 * rng.normal(size=6 * size))
    return half_life_Q, 0.6 - 0.04 * layer_Q + 0.1 * rng.normal(size=6 * size), layer_Q


def test_a_trend_over_layers_is_no_relation():
    half_life_Q, repetition_Q, layer_Q = with_a_trend(np.random.default_rng(0))
    result = run(half_life_Q, repetition_Q, layer_Q, noise=0.02)
    # What exchanging prototypes of all layers takes for one.
    assert stats.spearmanr(half_life_Q, repetition_Q).pvalue < 1e-6
    assert result.overall_spearman < -0.4
    assert result.overall_cohens_d > 1
    assert abs(result.spearman.value) < 0.15
    assert result.spearman.p > 0.1
    assert result.spearman.low < 0 < result.spearman.high
    assert result.cohens_d.p > 0.1
    assert result.cohens_d.low < 0 < result.cohens_d.high


def test_p_is_uniform_where_depth_alone_relates_them():
    ps, covered = [], 0
    for seed in range(250):
        sample = with_a_trend(np.random.default_rng(seed), size=12)
        result = run(*sample, samples=99, seed=seed).spearman
        ps.append(result.p)
        covered += result.low <= 0 <= result.high
    # 99.9 % binomial limits of 250 tests.
    for level in (0.1, 0.5):
        low, high = stats.binom(250, level).ppf([0.0005, 0.9995])
        assert low <= np.sum(np.array(ps) <= level) <= high
    assert covered >= stats.binom(250, 0.95).ppf(0.001)


def test_p_is_the_share_of_all_exchanges_within_layers():
    rng = np.random.default_rng(3)
    layer_Q = np.array([0, 0, 0, 1, 1, 1, 1])
    half_life_Q, repetition_Q = rng.random(7), rng.random(7).round(1)
    result = run(half_life_Q, repetition_Q, layer_Q, samples=5_000).spearman

    def within(repetition_Q):
        ranks = [
            np.concatenate(
                [stats.rankdata(x[layer_Q == k]) - (layer_Q == k).sum() / 2 for k in (0, 1)]
            )
            for x in (half_life_Q, repetition_Q)
        ]
        # Each layer's ranks less their mean.
        for x in ranks:
            for k in (0, 1):
                x[layer_Q == k] -= x[layer_Q == k].mean()
        return ranks[0] @ ranks[1] / np.sqrt((ranks[0] @ ranks[0]) * (ranks[1] @ ranks[1]))

    null = np.array(
        [
            within(repetition_Q[[*first, *last]])
            for first in itertools.permutations(range(3))
            for last in itertools.permutations(range(3, 7))
        ]
    )
    assert len(null) == 144
    assert result.value == pytest.approx(within(repetition_Q))
    tails = [(null >= result.value - 1e-9).mean(), (null <= result.value + 1e-9).mean()]
    exact = min(1.0, 2 * min(tails))
    assert 0.05 < exact < 1
    # Three standard errors of twice a share of 5,000.
    error = 2 * np.sqrt(exact / 2 * (1 - exact / 2) / 5_000)
    assert result.p == pytest.approx(exact, abs=3 * error + 4e-4)


def test_one_layer_gives_the_correlation_of_scipy():
    rng = np.random.default_rng(1)
    half_life_Q = rng.random(60)
    repetition_Q = np.round(rng.random(60) - 0.1 * half_life_Q, 1)
    result = run(half_life_Q, repetition_Q, np.zeros(60, int))
    expected = stats.spearmanr(half_life_Q, repetition_Q).statistic
    assert result.spearman.value == pytest.approx(expected, rel=1e-12)
    assert result.overall_spearman == pytest.approx(expected, rel=1e-12)
    edges = np.quantile(half_life_Q, [0.25, 0.75])
    groups = repetition_Q[half_life_Q <= edges[0]], repetition_Q[half_life_Q > edges[1]]
    pooled = np.sqrt(sum(group.var() * 15 for group in groups) / 28)
    d = (groups[0].mean() - groups[1].mean()) / pooled
    assert result.cohens_d.value == pytest.approx(d)
    assert result.overall_cohens_d == pytest.approx(d)


def test_the_interval_widens_with_the_noise_of_texts():
    rng = np.random.default_rng(4)
    half_life_Q, layer_Q = rng.random(64), np.repeat(np.arange(4), 16)
    repetition_Q = -0.3 * half_life_Q + 0.05 * rng.normal(size=64)
    still, noisy = (
        run(half_life_Q, repetition_Q, layer_Q, noise=noise, samples=499).spearman
        for noise in (0.0, 0.2)
    )
    assert still.high - still.low < noisy.high - noisy.low
    assert still.p == noisy.p


@pytest.mark.parametrize("size", [0, 3, 12])
def test_what_cannot_be_computed_is_none(size):
    layer_Q = np.arange(size) % 2
    result = run(np.full(size, 6.58), np.full(size, 0.5), layer_Q, samples=99)
    for one in (result.spearman, result.cohens_d):
        assert (one.value, one.low, one.high, one.p) == (None,) * 4
        assert one.prototypes == size
    assert result.overall_spearman is result.overall_cohens_d is None
