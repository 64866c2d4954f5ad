"""Whether prototypes that forget soon repeat the same tokens.

Prototype Transformer, appendix A.8, Table 21: Spearman's correlation of half-life with token
repetition, and the mean repetition in quartiles of half-life with Cohen's d of the first against
the last. p-values come from permutations, since prototypes of one model are too alike for the
asymptotic ones to be trusted; intervals are bootstraps over prototypes. What cannot be computed,
as a correlation with a constant, is NaN.
"""

from collections.abc import Callable
import dataclasses

import numpy as np
from scipy import stats as scipy_stats

from lm_jax import stats

_NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Tested:
    """A statistic, its two-sided permutation p, its 95 % interval, and the prototypes behind it."""

    value: float
    p: float
    low: float
    high: float
    n: int


@dataclasses.dataclass(frozen=True)
class Locality:
    """Table 21. Quartiles are means of repetition, short half-lives first; NaN for an empty one."""

    spearman: Tested
    quartiles: list[float]
    cohens_d: Tested


def half_life_repetition(
    half_life_Q: np.ndarray, repetition_Q: np.ndarray, *, permutations: int, seed: int
) -> Locality:
    """Relates the half-lives of Q prototypes to their repetition scores."""
    if not len(half_life_Q):
        nothing = Tested(_NAN, _NAN, _NAN, _NAN, 0)
        return Locality(nothing, [_NAN] * 4, nothing)
    edges = np.quantile(half_life_Q, [0.25, 0.5, 0.75])
    # The first quartile holds its edge, as in Table 21.
    quartile_Q = np.searchsorted(edges, half_life_Q, side="left")
    groups = [repetition_Q[quartile_Q == q] for q in range(4)]
    ends = np.concatenate([groups[0], groups[-1]])
    first = np.arange(len(ends)) < len(groups[0])

    def spearman(half_life: np.ndarray, score: np.ndarray) -> float:
        if np.ptp(half_life) == 0 or np.ptp(score) == 0:
            return _NAN
        # `spearmanr` takes ten times as long, and this runs thousands of times.
        ranks = scipy_stats.rankdata(half_life), scipy_stats.rankdata(score)
        return float(np.corrcoef(*ranks)[0, 1])

    def effect(is_first: np.ndarray, score: np.ndarray) -> float:
        short, long = score[is_first], score[~is_first]
        if min(len(short), len(long)) < 2 or np.ptp(short) == np.ptp(long) == 0:
            return _NAN
        return stats.cohens_d(short, long)

    test = {"permutations": permutations, "seed": seed}
    return Locality(
        spearman=_tested(spearman, half_life_Q, repetition_Q, **test),
        quartiles=[float(group.mean()) if len(group) else _NAN for group in groups],
        cohens_d=_tested(effect, first, ends, **test),
    )


def _tested(
    statistic: Callable[[np.ndarray, np.ndarray], float],
    x: np.ndarray,
    y: np.ndarray,
    *,
    permutations: int,
    seed: int,
) -> Tested:
    """A statistic of pairs, tested by pairing anew and resampled by whole pairs."""
    n = len(x)
    value = statistic(x, y)
    if not np.isfinite(value):
        return Tested(_NAN, _NAN, _NAN, _NAN, n)
    permuted = scipy_stats.permutation_test(
        (y,),
        lambda shuffled: statistic(x, shuffled),
        permutation_type="pairings",
        vectorized=False,
        n_resamples=permutations,
        rng=np.random.default_rng(seed),
    )

    def resampled(places: np.ndarray) -> float:
        drawn = places.astype(int)
        return statistic(x[drawn], y[drawn])

    interval = stats.clustered_bootstrap(np.arange(n), np.arange(n), resampled, seed=seed)
    return Tested(value, float(permuted.pvalue), interval.low, interval.high, n)
