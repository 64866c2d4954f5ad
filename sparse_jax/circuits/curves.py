"""Explained effect of circuits of growing size, the size that explains enough, CPR and CMD.

    f(k) = (m(C_k) - m(empty)) / (m(whole) - m(empty))

with the metric's mean over prompts above and below the line (section 4.2; MIB, Mueller et al.
2025). C_k keeps the k components of highest rank, and nothing is clipped: a circuit may explain
more than the model, or less than none.
"""

from collections.abc import Sequence
import math

import numpy as np
from scipy import stats

from lm_jax.statistics import FEWEST_CLUSTERS, MANY_CLUSTERS

Floats = Sequence[float] | np.ndarray

# Sizes as shares of all components, at which MIB evaluates circuits.
MIB_FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# Division by no effect, whose result is not finite.
_quiet = np.errstate(divide="ignore", invalid="ignore")


@_quiet
def explained(metric_KB: np.ndarray, empty_B: np.ndarray, whole_B: np.ndarray) -> np.ndarray:
    """f at each size, `[K]`: ratio of means over prompts; not finite without an effect."""
    return (metric_KB - empty_B).mean(1) / (whole_B - empty_B).mean()


@_quiet
def explained_intervals(
    metric_KB: np.ndarray,
    empty_B: np.ndarray,
    whole_B: np.ndarray,
    *,
    prompt_B: np.ndarray | None = None,
    seed: int = 0,
    resamples: int = 2_000,
) -> tuple[np.ndarray, np.ndarray]:
    """Standard error of f over prompts, `[K]`, and its 95 % interval, `[K, 2]`.

    Pairs of one clean prompt are drawn together. A ratio of means over pairs is the ratio of the
    prompts' sums, so the sums are what is drawn (Field & Welsh, JRSS B 2007, cluster bootstrap).

    The interval has the percentiles of a bootstrap from `MANY_CLUSTERS` prompts on, Student's t and
    the error below, and no ends below `FEWEST_CLUSTERS`, as in `lm_jax.statistics`. The error is
    that of a ratio of means, to first order: the spread over prompts of the numerator less f times
    the denominator. The standard deviation of the resamples has no bound where some of them have
    hardly an effect to explain.

    Args:
      metric_KB: metric of each pair in circuits of growing size.
      empty_B, whole_B: metric of each pair without any component, and in the whole model.
      prompt_B: number of each pair's clean prompt, from 0; None where no two share one.
      seed: random seed of the bootstrap.
      resamples: samples of the bootstrap.
    """
    if prompt_B is not None:
        metric_KB, empty_B, whole_B = (
            sum_by_prompt(each, prompt_B) for each in (metric_KB, empty_B, whole_B)
        )
    change_B = whole_B - empty_B
    residual_KB = metric_KB - empty_B - explained(metric_KB, empty_B, whole_B)[:, None] * change_B
    error_K = residual_KB.std(1, ddof=1) / math.sqrt(len(change_B)) / abs(change_B.mean())
    if (n := len(empty_B)) < MANY_CLUSTERS:
        t = stats.t.ppf(0.975, n - 1) if n >= FEWEST_CLUSTERS else math.inf
        f_K = explained(metric_KB, empty_B, whole_B)
        # No error times infinity is no number.
        reach_K = np.full_like(error_K, t) if math.isinf(t) else t * error_K
        return error_K, np.stack([f_K - reach_K, f_K + reach_K], 1)
    index = np.random.default_rng(seed).integers(0, len(empty_B), (resamples, len(empty_B)))
    drawn = np.stack(
        [explained(metric_KB[:, rows], empty_B[rows], whole_B[rows]) for rows in index]
    )
    return error_K, np.quantile(drawn, [0.025, 0.975], axis=0).T


def sum_by_prompt(values_XB: np.ndarray, prompt_B: np.ndarray) -> np.ndarray:
    """Sums over the pairs of each prompt, along the last axis; the values where none is shared."""
    order_B = np.argsort(prompt_B, kind="stable")
    first_P = np.unique(prompt_B[order_B], return_index=True)[1]
    if len(first_P) == len(prompt_B):
        return values_XB
    return np.add.reduceat(values_XB[..., order_B], first_P, axis=-1)


def crossing(sizes_K: np.ndarray, explained_K: np.ndarray, fraction: float = 0.9) -> float:
    """Number of components at which the explained effect first reaches `fraction`.

    Between two sizes it is interpolated linearly in the logarithm of the size. NaN where no size
    reaches it; the first size where that does.

    Args:
      sizes_K: rising numbers of components, at least 1.
      explained_K: f at each.
      fraction: the share to reach.
    """
    reached = np.flatnonzero(explained_K >= fraction)
    if not len(reached):
        return math.nan
    k = int(reached[0])
    if k == 0:
        return float(sizes_K[0])
    low, high = explained_K[k - 1], explained_K[k]
    share = (fraction - low) / (high - low)
    return float(np.exp(np.interp(share, [0.0, 1.0], np.log(sizes_K[k - 1 : k + 1]))))


def needed(sizes_K: np.ndarray, explained_K: np.ndarray, fraction: float) -> int:
    """Whole number of components at the `crossing`; the last size where no size reaches it."""
    size = crossing(sizes_K, explained_K, fraction)
    return math.ceil(size) if math.isfinite(size) else int(sizes_K[-1])


def sizes(count: int, points: int = 24) -> np.ndarray:
    """Numbers of components from 1 to `count`, near to even in the logarithm, each once."""
    return np.unique(np.round(np.geomspace(1, count, points)).astype(int))


def cpr_cmd(fractions: Floats, faithfulness: Floats) -> tuple[float, float]:
    """Circuit performance ratio and circuit-model distance of one ranking, by MIB's trapezoids.

    Both are trapezoids over the share k of components: of f, and of |1 - f|. Nothing is
    extrapolated below the first share, so over `MIB_FRACTIONS` a perfect circuit has 0.999 and 0.

    Raises:
      ValueError: not two rising shares or more, or not as many values.
    """
    k, f = np.asarray(fractions, np.float64), np.asarray(faithfulness, np.float64)
    if k.ndim != 1 or len(k) < 2 or k.shape != f.shape or (np.diff(k) <= 0).any():
        raise ValueError("give rising fractions, two or more, and a faithfulness for each")
    return float(np.trapezoid(f, k)), float(np.trapezoid(np.abs(1.0 - f), k))


def log_area(fractions: Floats, faithfulness: Floats) -> float:
    """Mean of f over ln k, which weighs small circuits as much as large ones."""
    k = np.log(np.asarray(fractions, np.float64))
    return float(np.trapezoid(np.asarray(faithfulness, np.float64), k) / (k[-1] - k[0]))
