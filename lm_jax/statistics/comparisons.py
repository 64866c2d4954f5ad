"""Tests and sizes of differences: of paired outcomes, of several p-values, of two samples.

Two recipes on the same prompts have the exact McNemar test [1] with Tango's score interval [2],
because an unpaired comparison ignores the pairing.

[1] McNemar, Psychometrika 1947.  [2] Tango, Statistics in Medicine 1998.
[3] Fleiss, Levin & Paik, Statistical Methods for Rates and Proportions, ch. 4.
[4] Holm, Scandinavian Journal of Statistics 1979.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

from lm_jax.errors import UsageError
from lm_jax.statistics.intervals import Interval, check_open_unit, finite


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
    """Returns the change (won - lost) / n of a success rate with Tango's score interval [2].

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
    check_open_unit("confidence", confidence)
    z = float(stats.norm.ppf((1 + confidence) / 2))
    low, high = _lowest_change(lost, won, n, z), -_lowest_change(won, lost, n, z)
    return Interval((won - lost) / n, low, high, n)


def noninferiority(lost: int, won: int, n: int, tolerance: float) -> float:
    """Returns the one-sided p of a loss of `tolerance` or more, by Tango's score test [2].

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
    check_open_unit("tolerance", tolerance)
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

    Solves `d = (z_confidence + z_power) * sqrt((p q + p' q') / n)` with `p' = p +- d` [3], for a
    two-sided test on independent samples; positive, in units of a rate. At p = 0.78 and n = 200 a
    gain needs 10.4 points, which is the "about 10 points" that the polynomial attention paper
    quotes (appendix B), while the drops that it reports need 12.5. Returns NaN when no change in
    that direction suffices.
    """
    for name, value in (("p", p), ("power", power), ("confidence", confidence)):
        check_open_unit(name, value)
    if n < 1:
        raise UsageError(f"minimum_detectable_effect: n={n}; need 1 trial or more")
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
    """Returns p-values corrected for their number [4], to be compared with one level for all."""
    order = np.argsort(p, kind="stable")
    factors = np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    # A larger p must not come out below a smaller one.
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(np.asarray(p)[order] * factors))
    return adjusted.tolist()


def cohens_d(first: ArrayLike, second: ArrayLike) -> float:
    """Returns (mean(first) - mean(second)) / pooled standard deviation of two 1-D samples."""
    first, second = finite("cohens_d: first", first), finite("cohens_d: second", second)
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
