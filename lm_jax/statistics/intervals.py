"""Intervals of rates, means, medians and ratios.

Rates have Wilson intervals [1], which hold their coverage at 0 and n successes. Rows that share a
prompt have a bootstrap over whole prompts [2], whose percentiles are too near to each other where
there are few: below `MANY_CLUSTERS` the interval is Student's t with the bootstrap's standard error
[5], and below `FEWEST_CLUSTERS` `cluster_interval` gives none.

[1] Wilson, JASA 1927.  [2] Field & Welsh, JRSS B 2007, cluster bootstrap.
[3] MacKinnon & White, Journal of Econometrics 1985.
[4] Zou & Donner, Statistics in Medicine 2008.
[5] Hesterberg, American Statistician 2015: percentiles of a mean are near those of a normal
    interval times sqrt((n - 1) / n), 18 % narrower than Student's at n = 10 and 47 % at n = 4.
"""

from collections.abc import Callable
import dataclasses
import math
import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

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
    check_open_unit("confidence", confidence)
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
    values = finite("clustered_bootstrap: values", values)
    check_open_unit("confidence", confidence)
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
    values = finite("cluster_interval: values", values)
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
    values = finite("median_interval: values", values)
    check_open_unit("confidence", confidence)
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
    HC2 of the weighted mean [3] and one degree of freedom less than the effective number of values,
    (sum w)^2 / sum w^2; equal weights change nothing.
    """
    values = finite("student_interval: values", values)
    check_open_unit("confidence", confidence)
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
    """Returns first - second of two independent estimates, from their intervals (MOVER [4]).

    `n` is the smaller of the two.
    """
    estimate = first.estimate - second.estimate
    below = math.hypot(first.estimate - first.low, second.high - second.estimate)
    above = math.hypot(first.high - first.estimate, second.estimate - second.low)
    return Interval(estimate, estimate - below, estimate + above, min(first.n, second.n))


def finite(field: str, values: ArrayLike) -> np.ndarray:
    """The values as an array of floats, all of which must be finite."""
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{field} must be numbers; {error}") from error
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise UsageError(f"{field}: {bad} of {array.size} are not finite; drop and count them")
    return array


def check_open_unit(name: str, value: float) -> None:
    """Refuses what is not between 0 and 1."""
    if not 0 < value < 1:
        raise UsageError(f"{name}={value!r} must lie between 0 and 1, both excluded")
