"""Statistics against closed forms, scipy, exact enumeration and seeded simulation."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import optimize, special
from scipy import stats as oracle

from lm_jax import statistics
from lm_jax.errors import UsageError
from lm_jax.run.files import write_json
from lm_jax.run.results import load_result


def _wilson_formula(successes, n, z):
    """Wilson (1927), written out."""
    p = successes / n
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return centre - reach, centre + reach


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("successes", "n"), [(0, 200), (200, 200), (156, 200), (1, 3), (7, 50)])
def test_wilson_is_the_closed_form(successes, n, confidence):
    result = statistics.wilson(successes, n, confidence)
    low, high = _wilson_formula(successes, n, oracle.norm.ppf((1 + confidence) / 2))
    assert (result.estimate, result.n) == (successes / n, n)
    np.testing.assert_allclose((result.low, result.high), (low, high), atol=1e-12)


def test_wilson_gives_the_bounds_that_the_paper_quotes():
    assert round(100 * statistics.wilson(200, 200).low, 2) == 98.12
    assert round(100 * statistics.wilson(500, 500).low, 2) == 99.24
    assert round(100 * statistics.wilson(0, 200).high, 2) == 1.88
    half = statistics.wilson(25, 50)
    assert round(50 * (half.high - half.low), 1) == 13.4


@pytest.mark.parametrize("p", [0.5, 0.78, 0.97])
def test_wilson_covers_a_rate_as_often_as_it_says(p):
    # exact coverage: the binomial weight of the counts whose interval holds p
    n = 60
    held = [k for k in range(n + 1) if p in statistics.wilson(k, n)]
    assert abs(oracle.binom.pmf(held, n, p).sum() - 0.95) < 0.03


@pytest.mark.parametrize(
    ("successes", "n", "named"),
    [(3, 2, "successes=3"), (-1, 5, "successes=-1"), (0, 0, "n=0"), (0.5, 10, "successes=0.5")],
)
def test_wilson_refuses_what_is_no_count(successes, n, named):
    with pytest.raises(UsageError, match=named):
        statistics.wilson(successes, n)


def test_bootstrap_of_a_mean_agrees_with_scipy_when_each_row_is_its_own_cluster():
    values = np.random.default_rng(0).normal(size=80)
    result = statistics.clustered_bootstrap(values, np.arange(80), resamples=4000, seed=1)
    interval = oracle.bootstrap(
        (values,), np.mean, n_resamples=4000, method="percentile", rng=2
    ).confidence_interval
    np.testing.assert_allclose((result.low, result.high), interval, atol=0.02)
    assert result.estimate == values.mean()


def test_bootstrap_sees_that_repeated_rows_add_no_information():
    values = np.random.default_rng(3).normal(size=40)
    clusters = np.arange(40)
    once = statistics.clustered_bootstrap(values, clusters, seed=5)
    often = statistics.clustered_bootstrap(np.repeat(values, 25), np.repeat(clusters, 25), seed=5)
    np.testing.assert_allclose((often.low, often.high), (once.low, once.high), rtol=1e-12)
    assert often.n == 40


def test_bootstrap_of_a_mean_equals_the_general_path_on_clusters_of_unlike_size():
    rng = np.random.default_rng(4)
    clusters = np.array(["b", "a", "c", "d"])[rng.integers(4, size=30)]
    values = rng.normal(size=30)
    fast = statistics.clustered_bootstrap(values, clusters, seed=7, resamples=200)
    slow = statistics.clustered_bootstrap(
        values, clusters, lambda x: x.mean(), seed=7, resamples=200
    )
    np.testing.assert_allclose((fast.low, fast.high), (slow.low, slow.high), rtol=1e-12)


def test_bootstrap_covers_where_the_interval_over_rows_does_not():
    rng = np.random.default_rng(11)
    prompts, rows, runs = 40, 8, 150
    clusters = np.repeat(np.arange(prompts), rows)
    clustered, naive = 0, 0
    for run in range(runs):
        values = np.repeat(rng.normal(size=prompts), rows) + 0.3 * rng.normal(size=prompts * rows)
        clustered += 0.0 in statistics.clustered_bootstrap(
            values, clusters, resamples=300, seed=run
        )
        naive += abs(values.mean()) < 1.96 * values.std() / math.sqrt(values.size)
    # three standard errors of 150 draws at 0.95 are 0.053
    assert clustered / runs > 0.95 - 0.07
    assert naive / runs < 0.7


def test_bootstrap_is_reproducible_and_follows_the_seed():
    values, clusters = np.arange(20.0), np.arange(20) // 2
    first, again, other = (
        statistics.clustered_bootstrap(values, clusters, np.median, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("n", [2, 5, 12, 29])
def test_of_few_clusters_the_interval_of_a_mean_is_students(n):
    """But for the noise of the bootstrap's standard error, whose relative size is 1 / sqrt(2 B)."""
    values, B = np.random.default_rng(n).normal(size=n), 4000
    own = statistics.clustered_bootstrap(values, np.arange(n), resamples=B, seed=0)
    wanted = statistics.student_interval(values)
    # Five of these errors, or twice that for two values, whose resamples have a spread of 0 or 1.
    assert own.high - own.low == pytest.approx(wanted.high - wanted.low, rel=10 / math.sqrt(2 * B))
    assert own.low + own.high == pytest.approx(2 * own.estimate)
    many = np.random.default_rng(n).normal(size=30)
    percentile = statistics.clustered_bootstrap(many, np.arange(30), seed=0)
    assert percentile.low + percentile.high != pytest.approx(2 * percentile.estimate, abs=1e-12)


def test_of_six_clusters_the_interval_covers_and_percentiles_would_not():
    rng, runs = np.random.default_rng(0), 400
    covered = percentile = 0
    for run in range(runs):
        values = rng.normal(size=6)
        covered += 0.0 in statistics.clustered_bootstrap(
            values, np.arange(6), resamples=300, seed=run
        )
        means = values[rng.integers(6, size=(300, 6))].mean(1)
        low, high = np.quantile(means, [0.025, 0.975])
        percentile += low <= 0 <= high
    # Three standard errors of 400 draws at 0.95 are 0.033.
    assert covered / runs >= 0.95 - 0.033 > percentile / runs


def test_of_too_few_clusters_there_is_no_interval():
    """Such as "0.71 [0.71, 0.71]" of two sources."""
    for n in range(1, statistics.FEWEST_CLUSTERS):
        few = statistics.cluster_interval([0.71] * n, np.arange(n), seed=0)
        assert few == statistics.Interval(pytest.approx(0.71), -math.inf, math.inf, n)
        assert not few.bounded and 0.0 in few
    values = np.arange(float(statistics.FEWEST_CLUSTERS))
    result = statistics.cluster_interval(values, np.arange(len(values)), seed=0)
    assert result.bounded and result.n == len(values) == 5
    # Rows of one cluster are no further clusters.
    assert not statistics.cluster_interval(values, values // 2, seed=0).bounded


def test_an_interval_without_ends_is_stored_and_read(tmp_path):
    few = statistics.cluster_interval([1.0, 2.0], [0, 1], seed=0)
    write_json(tmp_path / "interval.json", few)
    assert load_result(tmp_path / "interval.json", statistics.Interval) == few


def test_the_interval_of_a_ratio_is_one_of_its_logarithm():
    values = np.exp(np.random.default_rng(1).normal(size=8))

    def ratio(rows):
        return float(rows[:, 0].mean() / rows[:, 1].mean())

    pairs = np.stack([values, values[::-1]], 1)
    own = statistics.cluster_interval(pairs, np.arange(8), ratio, log=True, seed=0)
    other = statistics.cluster_interval(pairs[:, ::-1], np.arange(8), ratio, log=True, seed=0)
    assert own.low * own.high == pytest.approx(own.estimate**2)
    # Whichever of the two is above the line.
    assert (1 / own.high, 1 / own.low) == pytest.approx((other.low, other.high))
    negative = statistics.cluster_interval(values - 1, np.arange(8), log=True, seed=0)
    assert not negative.bounded


def test_an_interval_stays_within_what_its_statistic_may_be():
    shares = [1.0, 1.0, 1.0, 1.0, 0.0]
    own = statistics.cluster_interval(shares, np.arange(5), within=(0.0, 1.0), seed=0)
    assert own.estimate == 0.8 and 0 < own.low < own.high == 1.0
    assert statistics.clustered_bootstrap(shares, np.arange(5), seed=0).high > 1.0


@pytest.mark.parametrize(
    ("values", "clusters", "named"),
    [
        ([1.0, 2.0], [0], "one length"),
        ([1.0, np.nan], [0, 1], "1 of 2 are not finite"),
        ([1.0, 2.0], [0, 0], "need 2 or more"),
        (["a", "b"], [0, 1], "must be numbers"),
    ],
)
def test_bootstrap_names_the_field_it_cannot_use(values, clusters, named):
    with pytest.raises(UsageError, match=named):
        statistics.clustered_bootstrap(values, clusters, seed=0)


def test_mcnemar_is_the_exact_binomial_test_on_discordant_pairs():
    before = np.repeat([1, 1, 0, 0], [100, 12, 3, 85])
    after = np.repeat([1, 0, 1, 0], [100, 12, 3, 85])
    result = statistics.mcnemar(before, after)
    tail = sum(math.comb(15, k) for k in range(4)) / 2**15
    assert (result.b, result.c, result.delta.n) == (12, 3, 200)
    assert result.p_value == pytest.approx(2 * tail, rel=1e-12)
    assert result.delta.estimate == pytest.approx(-9 / 200)
    mirrored = statistics.mcnemar(after, before)
    assert mirrored.p_value == result.p_value
    assert mirrored.delta.low == pytest.approx(-result.delta.high)


def test_mcnemar_without_discordant_pairs_keeps_an_interval():
    result = statistics.mcnemar(np.ones(200), np.ones(200, bool))
    assert (result.p_value, result.delta.estimate) == (1.0, 0.0)
    z = oracle.norm.ppf(0.975)
    assert result.delta.high == pytest.approx(z**2 / (200 + z**2))
    assert result.delta.low == -result.delta.high


def score_of_a_change(lost, won, n, change):
    """The score of `change`, the likelihood under it being maximised numerically."""

    def minus_log_likelihood(losses):
        rates = np.array([losses, losses + change, 1 - 2 * losses - change])
        return -special.xlogy([lost, won, n - lost - won], np.maximum(rates, 0)).sum()

    span = max(0.0, -change), (1 - change) / 2
    options = {"xatol": 1e-14}
    best = optimize.minimize_scalar(
        minus_log_likelihood, bounds=span, method="bounded", options=options
    )
    return (won - lost - n * change) / math.sqrt(n * (2 * best.x + change * (1 - change)))


@pytest.mark.parametrize(("lost", "won", "n"), [(7, 1, 21), (1, 0, 40), (3, 3, 20), (0, 5, 100)])
def test_interval_of_a_paired_change_holds_what_the_score_test_does_not_reject(lost, won, n):
    result, z = statistics.paired_change(lost, won, n), oracle.norm.ppf(0.975)
    assert score_of_a_change(lost, won, n, result.low) == pytest.approx(z, rel=1e-4)
    assert score_of_a_change(lost, won, n, result.high) == pytest.approx(-z, rel=1e-4)
    assert result.low < (won - lost) / n < result.high


@pytest.mark.parametrize("tolerance", [0.05, 0.3])
def test_noninferiority_is_shown_where_the_interval_lies_above_the_tolerance(tolerance):
    for lost, won in outcomes(24)[::3].tolist():
        p = statistics.noninferiority(lost, won, 24, tolerance)
        assert (p < 0.025) == (statistics.paired_change(lost, won, 24).low > -tolerance)
    score = score_of_a_change(2, 1, 80, -tolerance)
    p = statistics.noninferiority(2, 1, 80, tolerance)
    assert p == pytest.approx(oracle.norm.sf(score), rel=1e-6)


def outcomes(n):
    """All counts (lost, won) of n pairs."""
    return np.array([(b, c) for b in range(n + 1) for c in range(n + 1 - b)])


@pytest.mark.parametrize("n", [10, 20, 40])
def test_interval_of_a_paired_change_covers_it(n):
    # exact coverage, over all counts of n pairs
    counts = outcomes(n)
    intervals = [statistics.paired_change(int(b), int(c), n) for b, c in counts]
    low, high = (np.array([getattr(i, end) for i in intervals]) for end in ("low", "high"))
    cells = np.column_stack([counts, n - counts.sum(1)])
    shares = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
    covered = []
    for lost in shares:
        for won in shares:
            if lost + won < 1:
                weight = oracle.multinomial.pmf(cells, n, [lost, won, 1 - lost - won])
                held = (low - 1e-12 <= won - lost) & (won - lost <= high + 1e-12)
                covered.append(weight[held].sum())
    assert min(covered) > 0.92
    assert np.mean(covered) > 0.95


@pytest.mark.parametrize("counts", [(-1, 0, 4), (3, 2, 4), (0, 0, 0)])
def test_counts_of_no_pairs_are_refused(counts):
    with pytest.raises(UsageError, match="need counts, lost"):
        statistics.paired_change(*counts)
    with pytest.raises(UsageError, match="need counts, lost"):
        statistics.noninferiority(*counts, 0.05)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [([1, 0], [1], "one length"), ([], [], "not empty"), ([1, 2], [0, 1], "before holds values")],
)
def test_mcnemar_names_what_it_cannot_use(before, after, named):
    with pytest.raises(UsageError, match=named):
        statistics.mcnemar(before, after)


def test_minimum_detectable_effect_gives_the_ten_points_of_the_paper_as_a_gain():
    gain = statistics.minimum_detectable_effect(0.78, 200, direction="gain")
    drop = statistics.minimum_detectable_effect(0.78, 200)
    assert (round(gain, 3), round(drop, 3)) == (0.104, 0.125)


@pytest.mark.parametrize(("p", "direction"), [(0.78, "drop"), (0.78, "gain"), (0.5, "drop")])
def test_minimum_detectable_effect_is_found_with_the_stated_power(p, direction):
    n, sign = 400, 1 if direction == "gain" else -1
    shifted = p + sign * statistics.minimum_detectable_effect(p, n, direction=direction)
    # exact power of the unpooled z test over all pairs of counts
    k = np.arange(n + 1)
    first, second = np.meshgrid(k / n, k / n, indexing="ij")
    spread = np.sqrt((first * (1 - first) + second * (1 - second)) / n)
    rejected = np.abs(first - second) > oracle.norm.ppf(0.975) * spread
    weight = np.outer(oracle.binom.pmf(k, n, p), oracle.binom.pmf(k, n, shifted))
    assert weight[rejected].sum() == pytest.approx(0.8, abs=0.02)


def test_effects_that_no_change_can_reach_are_nan():
    assert math.isnan(statistics.minimum_detectable_effect(0.99, 10, direction="gain"))


def test_median_interval_has_the_order_statistics_of_the_binomial():
    values = np.random.default_rng(0).permutation(np.arange(100.0))
    result = statistics.median_interval(values)
    # 40 is the greatest k with P(Binomial(100, 1/2) < k) <= 0.025
    assert (result.estimate, result.low, result.high) == (49.5, 39.0, 60.0)
    with pytest.raises(UsageError, match="5 values have no"):
        statistics.median_interval(np.arange(5))


def test_student_interval_is_that_of_scipy_and_covers_the_mean_of_three_values():
    values = [3.0, 4.5, 4.0]
    result = statistics.student_interval(values, 0.9)
    want = oracle.ttest_1samp(values, 0.0).confidence_interval(0.9)
    np.testing.assert_allclose((result.low, result.high), (want.low, want.high), rtol=1e-12)
    assert (result.estimate, result.n) == (pytest.approx(11.5 / 3), 3)
    drawn = np.random.default_rng(0).normal(5.0, 2.0, (2_000, 3))
    covered = np.mean([5.0 in statistics.student_interval(row) for row in drawn])
    # Binomial: 0.95 within 4 standard deviations of 2,000 draws.
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2_000)
    assert statistics.student_interval([2.0, 2.0]) == statistics.Interval(2.0, 2.0, 2.0, 2)
    with pytest.raises(UsageError, match="2 or more"):
        statistics.student_interval([1.0])


def test_student_interval_of_weighted_values_is_that_of_a_ratio():
    values, rng = [3.0, 4.5, 4.0], np.random.default_rng(0)
    same = dataclasses.astuple(statistics.student_interval(values, weights=[7, 7, 7]))
    np.testing.assert_allclose(same, dataclasses.astuple(statistics.student_interval(values)))
    weights = np.array([100, 20, 60, 127, 127, 40])
    drawn = rng.normal(size=(2_000, 6))
    covered = np.mean([0.0 in statistics.student_interval(row, weights=weights) for row in drawn])
    # A nominal 0.95; the percentile bootstrap covers 0.88 of six equal weights.
    assert 0.93 < covered < 0.975
    with pytest.raises(UsageError, match="weights"):
        statistics.student_interval(values, weights=[1, 0, 2])


def test_a_difference_has_newcombes_interval():
    first, second = statistics.wilson(56, 70), statistics.wilson(48, 80)
    result = statistics.difference(first, second)
    # Newcombe, Statistics in Medicine 1998, table II, method 10, example (a).
    np.testing.assert_allclose((result.low, result.high), (0.0524, 0.3339), atol=5e-5)
    assert (result.estimate, result.n) == (pytest.approx(0.2), 70)


def test_cohens_d_is_the_difference_in_pooled_deviations():
    first, second = np.array([2.0, 4.0, 6.0]), np.array([1.0, 3.0])
    pooled = math.sqrt((2 * first.var(ddof=1) + second.var(ddof=1)) / 3)
    assert statistics.cohens_d(first, second) == pytest.approx(2 / pooled)
    assert statistics.cohens_d(second, first) == -statistics.cohens_d(first, second)
    with pytest.raises(UsageError, match="neither sample varies"):
        statistics.cohens_d([1.0, 1.0], [2.0, 2.0])


def test_a_clustered_ratio_is_one_of_sums_and_a_mean_where_all_counts_are_one():
    rng = np.random.default_rng(0)
    above, below, clusters = rng.random(40), rng.integers(1, 9, 40), np.arange(40) // 4
    got = statistics.clustered_ratio(above, below, clusters, resamples=200)
    assert got.estimate == pytest.approx(above.sum() / below.sum())
    assert got.low < got.estimate < got.high and got.n == 10
    ones = statistics.clustered_ratio(above, np.ones(40), clusters, resamples=200, seed=3)
    mean = statistics.clustered_bootstrap(above, clusters, resamples=200, seed=3)
    for name in ("estimate", "low", "high"):
        assert getattr(ones, name) == pytest.approx(getattr(mean, name))


def test_holm_by_hand():
    # 0.01 x 4, 0.015 x 3 = 0.045, which is kept below by nothing, 0.03 x 2 = 0.06, and 0.9.
    assert statistics.holm([0.9, 0.03, 0.01, 0.015]) == pytest.approx([0.9, 0.06, 0.04, 0.045])
    # A later one is never below an earlier one, and none above 1.
    assert statistics.holm([0.5, 0.02, 0.021]) == pytest.approx([0.5, 0.06, 0.06])
    assert statistics.holm([0.7, 0.8]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_several_nulls_are_seldom_rejected():
    p_SC = np.random.default_rng(3).random((4_000, 4))
    rejected = sum(min(statistics.holm(p_C)) <= 0.05 for p_C in p_SC)
    low, high = oracle.binom(4_000, 0.05).ppf([0.0005, 0.9995])
    assert low - 30 <= rejected <= high
    assert np.count_nonzero(p_SC.min(1) <= 0.05) > 600
