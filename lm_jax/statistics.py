"""Intervals and paired tests for every rate and median that a report prints.

Rates have Wilson intervals [1], which hold their coverage at 0 and n successes; rows that share a
prompt have a bootstrap over whole prompts [2], whose percentiles are too near to each other where
there are few: below `MANY_CLUSTERS` the interval is Student's t with the bootstrap's standard error
[9], and below `FEWEST_CLUSTERS` `cluster_interval` gives none; two recipes on the same prompts have
the exact McNemar test [3] with Tango's score interval [4], because an unpaired comparison ignores
the pairing. scipy does the statistics; this module adds validation, one result type and what scipy
lacks.

[1] Wilson, JASA 1927.  [2] Field & Welsh, JRSS B 2007, cluster bootstrap.
[3] McNemar, Psychometrika 1947.  [4] Tango, Statistics in Medicine 1998.
[5] Fleiss, Levin & Paik, Statistical Methods for Rates and Proportions, ch. 4.
[6] Holm, Scandinavian Journal of Statistics 1979.
[7] MacKinnon & White, Journal of Econometrics 1985.
[8] Zou & Donner, Statistics in Medicine 2008.
[9] Hesterberg, American Statistician 2015: percentiles of a mean are near those of a normal
    interval times sqrt((n - 1) / n), 18 % narrower than Student's at n = 10 and 47 % at n = 4.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
import operator
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from lm_jax.errors import UsageError
from lm_jax.run.results import Real

# Percentiles of a bootstrap over this many clusters hold their coverage.
MANY_CLUSTERS = 30
# A t interval of fewer rests on the shape of a distribution that nobody has seen.
FEWEST_CLUSTERS = 5


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate, the ends of its two-sided interval (same unit) and the count it rests on.

    The ends are -inf and inf where the data allow no interval (`bounded` is false).
    """

    estimate: float
    low: Real
    high: Real
    n: int

    @property
    def bounded(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class McNemar:
    """A paired comparison of two binary outcomes.

    `b` pairs were right before and wrong after, `c` the other way round. `delta` is the change of
    the success rate, after minus before, with `n` the number of pairs; `p_value` is two-sided.
    """

    b: int
    c: int
    p_value: float
    delta: Interval


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Returns the Wilson score interval of a rate, without continuity correction, in 0..1."""
    try:
        successes, n = operator.index(successes), operator.index(n)
    except TypeError as error:
        raise UsageError(
            f"wilson: successes={successes!r}, n={n!r} must be whole counts; pass counts, not rates"
        ) from error
    if not 0 <= successes <= n or n == 0:
        raise UsageError(f"wilson: successes={successes}, n={n}; need 0 <= successes <= n, n >= 1")
    _check_open_unit("confidence", confidence)
    ends = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return Interval(successes / n, float(ends.low), float(ends.high), n)


def clustered_bootstrap(
    values: ArrayLike,
    clusters: ArrayLike,
    statistic: Callable[[np.ndarray], float] = np.mean,
    *,
    resamples: int = 1000,
    confidence: float = 0.95,
    log: bool = False,
    within: tuple[float, float] = (-math.inf, math.inf),
    seed: int,
) -> Interval:
    """Returns the interval of `statistic` when whole clusters are resampled.

    `clusters` is 1-D and as long as `values`; rows of equal cluster id stay together. Values
    may have further axes after the rows if `statistic` is not the mean.
    `n` of the result counts clusters, since these are the independent units. Rows have equal
    weights, so a large cluster counts for more than a small one. The ends are those of
    `resampled_interval`, of two clusters or more; `cluster_interval` gives none of too few.
    """
    values, clusters = np.asarray(values), np.asarray(clusters)
    axes_fit = values.ndim == 1 or (values.ndim > 1 and statistic is not np.mean)
    if not axes_fit or values.shape[:1] != clusters.shape:
        raise UsageError(
            f"clustered_bootstrap: values {values.shape} and clusters {clusters.shape} must be 1-D "
            "and of one length; pass one cluster id per row"
        )
    values = _finite("clustered_bootstrap: values", values)
    _check_open_unit("confidence", confidence)
    if resamples < 100:
        raise UsageError(f"clustered_bootstrap: resamples={resamples}; use 100 or more")
    _, cluster_of_row, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    if sizes.size < 2:
        raise UsageError(
            f"clustered_bootstrap: clusters holds {sizes.size} distinct id; need 2 or more"
        )
    drawn = np.random.default_rng(seed).integers(sizes.size, size=(resamples, sizes.size))
    if statistic is np.mean:
        sums = np.bincount(cluster_of_row, weights=values)
        replicates = sums[drawn].sum(1) / sizes[drawn].sum(1)
    else:
        rows = np.split(values[np.argsort(cluster_of_row, kind="stable")], np.cumsum(sizes)[:-1])
        replicates = [statistic(np.concatenate([rows[i] for i in picks])) for picks in drawn]
    return resampled_interval(
        float(statistic(values)),
        replicates,
        sizes.size,
        confidence=confidence,
        log=log,
        within=within,
    )


def cluster_interval(
    values: ArrayLike,
    clusters: ArrayLike,
    statistic: Callable[[np.ndarray], float] = np.mean,
    **options: Any,
) -> Interval:
    """Returns `clustered_bootstrap`, with no ends where there are fewer than `FEWEST_CLUSTERS`."""
    n = np.unique(np.asarray(clusters)).size
    if n >= FEWEST_CLUSTERS:
        return clustered_bootstrap(values, clusters, statistic, **options)
    values = _finite("cluster_interval: values", values)
    return Interval(float(statistic(values)), -math.inf, math.inf, n)


def resampled_interval(
    estimate: float,
    replicates: ArrayLike,
    n: int,
    *,
    confidence: float = 0.95,
    log: bool = False,
    within: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    """Returns the interval of an estimate from its values on bootstrap samples of n clusters.

    From `MANY_CLUSTERS` on the ends are percentiles of the replicates. Below, they are
    estimate -+ t s sqrt(n / (n - 1)) with the replicates' standard deviation s and Student's t of
    n - 1 degrees of freedom; of a mean this is Student's interval, but for the noise of s.

    Args:
      estimate: the statistic of the sample.
      replicates: the statistic of each resample; the ends are NaN where one of them is not finite.
      n: number of clusters, 2 or more.
      confidence: level of the interval, between 0 and 1.
      log: whether the t interval is of the logarithm, as that of a ratio is; all must be above 0,
        or the ends are NaN.
      within: the values that the statistic may have, which the ends do not leave.
    """
    replicates = np.asarray(replicates, float)
    # What is not finite is for the caller, not for a warning.
    with np.errstate(all="ignore"):
        if n >= MANY_CLUSTERS:
            tail = (1 - confidence) / 2
            ends = np.quantile(replicates, [tail, 1 - tail])
        else:
            centre, spread = np.asarray(estimate, float), replicates
            if log:
                centre, spread = np.log(centre), np.log(spread)
            error = np.std(spread) * math.sqrt(n / (n - 1))
            reach = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
            ends = np.array([centre - reach, centre + reach])
            ends = np.clip(np.exp(ends) if log else ends, *within)
    return Interval(estimate, float(ends[0]), float(ends[1]), n)


def clustered_ratio(
    above: ArrayLike,
    below: ArrayLike,
    clusters: ArrayLike,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Returns sum(above) / sum(below) with the interval of `clustered_bootstrap`.

    All three are 1-D and of one length, such as losses, tokens and documents of windows.
    """

    def ratio(rows: np.ndarray) -> float:
        total, count = rows.sum(0)
        return float(total / count)

    rows = np.stack([np.asarray(above, float), np.asarray(below, float)], 1)
    return clustered_bootstrap(rows, clusters, ratio, resamples=resamples, seed=seed)


def median_interval(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """Returns the distribution-free interval of a median, from order statistics.

    Both tails are exact binomial ones, so that the coverage is at least `confidence`. Samples too
    small to have such an interval (fewer than 6 at 0.95) are refused.
    """
    values = _finite("median_interval: values", values)
    _check_open_unit("confidence", confidence)
    if values.ndim != 1 or values.size == 0:
        raise UsageError(f"median_interval: values {values.shape} must be 1-D and not empty")
    ends = stats.quantile_test(values, p=0.5).confidence_interval(confidence)
    if not (math.isfinite(ends.low) and math.isfinite(ends.high)):
        raise UsageError(
            f"median_interval: {values.size} values have no {confidence:g} interval; add values"
        )
    return Interval(float(np.median(values)), float(ends.low), float(ends.high), values.size)


def student_interval(
    values: ArrayLike, confidence: float = 0.95, *, weights: ArrayLike | None = None
) -> Interval:
    """Returns the mean of 2 or more independent values with Student's t interval.

    With `weights` above 0, such as the tokens of texts, it is sum(w x) / sum(w) with the variance
    HC2 of the weighted mean [7] and one degree of freedom less than the effective number of values,
    (sum w)^2 / sum w^2; equal weights change nothing.
    """
    values = _finite("student_interval: values", values)
    _check_open_unit("confidence", confidence)
    if values.ndim != 1 or values.size < 2:
        raise UsageError(f"student_interval: values {values.shape} must be 1-D and 2 or more")
    weights = np.ones(values.size) if weights is None else np.asarray(weights, float)
    if weights.shape != values.shape or not (np.isfinite(weights) & (weights > 0)).all():
        raise UsageError(
            f"student_interval: weights {weights.shape} must be finite, above 0, and one per value"
        )
    part = weights / weights.sum()
    mean = float(part @ values)
    freedom = 1 / float(part @ part) - 1
    error = math.sqrt(np.sum((part * (values - mean)) ** 2 / (1 - part)))
    reach = float(stats.t.ppf((1 + confidence) / 2, freedom)) * error
    return Interval(mean, mean - reach, mean + reach, values.size)


def difference(first: Interval, second: Interval) -> Interval:
    """Returns first - second of two independent estimates, from their intervals (MOVER [8]).

    `n` is the smaller of the two.
    """
    estimate = first.estimate - second.estimate
    below = math.hypot(first.estimate - first.low, second.high - second.estimate)
    above = math.hypot(first.high - first.estimate, second.estimate - second.low)
    return Interval(estimate, estimate - below, estimate + above, min(first.n, second.n))


def mcnemar(before: ArrayLike, after: ArrayLike, confidence: float = 0.95) -> McNemar:
    """Compares two binary outcomes of the same n items, 1-D and in the same order.

    The test is the exact binomial one on the discordant pairs (p = 1 without any); the interval of
    `delta` is that of `paired_change`.
    """
    before, after = np.asarray(before), np.asarray(after)
    if before.ndim != 1 or before.shape != after.shape or before.size == 0:
        raise UsageError(
            f"mcnemar: before {before.shape} and after {after.shape} must be 1-D, not empty and of "
            "one length; pass one outcome per item, in the same order"
        )
    for name, outcome in (("before", before), ("after", after)):
        if not np.isin(outcome, (0, 1)).all():
            raise UsageError(f"mcnemar: {name} holds values other than 0 and 1; pass outcomes")
    before, after = before.astype(bool), after.astype(bool)
    b, c = int((before & ~after).sum()), int((~before & after).sum())
    p_value = float(stats.binomtest(b, b + c).pvalue) if b + c else 1.0
    return McNemar(b, c, p_value, paired_change(b, c, before.size, confidence))


def paired_change(lost: int, won: int, n: int, confidence: float = 0.95) -> Interval:
    """Returns the change (won - lost) / n of a success rate with Tango's score interval [4].

    Of n pairs, `lost` were right before and wrong after and `won` the other way round. The interval
    holds every change d that the score test does not reject: with q the most likely share of losses
    where the share of gains is q + d,

        |won - lost - n d| <= z sqrt(n (2 q + d (1 - d))).

    Without discordant pairs it reaches z^2 / (n + z^2) to each side. Enumerated over all counts of
    10, 20 and 40 pairs, the 95 % interval covers in 92 % of cases or more for every pair of shares
    tried, and in 95 % on average (tests/lm_jax/test_statistics.py).
    """
    if min(lost, won) < 0 or lost + won > n or n < 1:
        raise UsageError(
            f"paired_change: lost={lost}, won={won}, n={n}; need counts, lost + won <= n and n >= 1"
        )
    _check_open_unit("confidence", confidence)
    z = float(stats.norm.ppf((1 + confidence) / 2))
    low, high = _lowest_change(lost, won, n, z), -_lowest_change(won, lost, n, z)
    return Interval((won - lost) / n, low, high, n)


def noninferiority(lost: int, won: int, n: int, tolerance: float) -> float:
    """Returns the one-sided p of a loss of `tolerance` or more, by Tango's score test [4].

    It is below (1 - confidence) / 2 exactly where the interval of `paired_change` lies above
    -tolerance.

    Args:
      lost, won, n: the counts that `paired_change` takes.
      tolerance: success rate that may be lost, between 0 and 1.
    """
    if min(lost, won) < 0 or lost + won > n or n < 1:
        raise UsageError(
            f"noninferiority: lost={lost}, won={won}, n={n}; need counts, lost + won <= n, n >= 1"
        )
    _check_open_unit("tolerance", tolerance)
    return float(stats.norm.sf(_score(lost, won, n, -tolerance)))


def _score(lost: int, won: int, n: int, d: float) -> float:
    """Tango's score of a change d, which falls as d grows."""
    shift = won - lost - n * d
    # the likelihood of q is greatest at the larger root of 2 n q^2 + linear q - lost d (1 - d)
    linear = (2 * n + lost - won) * d - lost - won
    root = math.sqrt(max(linear**2 + 8 * n * lost * d * (1 - d), 0.0))
    variance = n * ((root - linear) / (2 * n) + d * (1 - d))
    if shift == 0:
        return 0.0
    return math.copysign(math.inf, shift) if variance <= 0 else shift / math.sqrt(variance)


def _lowest_change(lost: int, won: int, n: int, z: float) -> float:
    """The least d whose score is at most z."""

    def excess(d: float) -> float:
        return _score(lost, won, n, d) - z

    if lost == n:
        return -1.0
    ends = -1.0, (won - lost) / n
    return float(optimize.root_scalar(excess, bracket=ends, method="bisect", xtol=1e-15).root)


def minimum_detectable_effect(
    p: float,
    n: int,
    *,
    power: float = 0.8,
    confidence: float = 0.95,
    direction: Literal["gain", "drop"] = "drop",
) -> float:
    """Returns the least change of a rate `p` that two samples of `n` trials each would detect.

    Solves `d = (z_confidence + z_power) * sqrt((p q + p' q') / n)` with `p' = p +- d` [5], for a
    two-sided test on independent samples; positive, in units of a rate. At p = 0.78 and n = 200 a
    gain needs 10.4 points, which is the "about 10 points" that the polynomial attention paper
    quotes (appendix B), while the drops that it reports need 12.5. Returns NaN when no change in
    that direction suffices.
    """
    for name, value in (("p", p), ("power", power), ("confidence", confidence)):
        _check_open_unit(name, value)
    _check_count("minimum_detectable_effect", n)
    if direction not in ("gain", "drop"):
        raise UsageError(f"minimum_detectable_effect: direction={direction!r}; use gain or drop")
    sign = 1 if direction == "gain" else -1
    reach = stats.norm.ppf((1 + confidence) / 2) + stats.norm.ppf(power)

    def excess(effect: float) -> float:
        shifted = p + sign * effect
        return float(effect - reach * math.sqrt((p * (1 - p) + shifted * (1 - shifted)) / n))

    most = 1 - p if direction == "gain" else p
    return (
        float(optimize.root_scalar(excess, bracket=(0.0, most)).root)
        if excess(most) > 0
        else math.nan
    )


def holm(p: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number [6], to be compared with one level for all."""
    order = np.argsort(p, kind="stable")
    factors = np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    # A larger p must not come out below a smaller one.
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(np.asarray(p)[order] * factors))
    return adjusted.tolist()


def cohens_d(first: ArrayLike, second: ArrayLike) -> float:
    """Returns (mean(first) - mean(second)) / pooled standard deviation of two 1-D samples."""
    first, second = _finite("cohens_d: first", first), _finite("cohens_d: second", second)
    if first.ndim != 1 or second.ndim != 1 or min(first.size, second.size) < 2:
        raise UsageError(
            f"cohens_d: first {first.shape} and second {second.shape} must be 1-D with 2 or more "
            "values each"
        )
    squares = first.var() * first.size + second.var() * second.size
    if squares == 0:
        raise UsageError("cohens_d: neither sample varies; report the difference of means instead")
    pooled = math.sqrt(squares / (first.size + second.size - 2))
    return float((first.mean() - second.mean()) / pooled)


def _finite(field: str, values: ArrayLike) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{field} must be numbers; {error}") from error
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise UsageError(f"{field}: {bad} of {array.size} are not finite; drop and count them")
    return array


def _check_open_unit(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UsageError(f"{name}={value!r} must lie between 0 and 1, both excluded")


def _check_count(where: str, n: int) -> None:
    if n < 1:
        raise UsageError(f"{where}: n={n}; need 1 trial or more")
