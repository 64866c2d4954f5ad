"""Prototype-mediated robustness: how much of a divergence goes where the routing is held.

Prototype Transformer, section 5.2, Table 4. Of a sentence x and its perturbed form x',

    PMR = (JS_base - JS_clamped) / JS_base,

where JS_clamped is with the gates of x' set to those of x. The paper prints the mean of this ratio,
which pairs with a tiny JS_base dominate: the mean of its own table is -0.000 for punctuation, where
the JS falls from 0.398 to 0.322 on average. So the ratio of means and the median are given too.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_jax.errors import UsageError

# In nats. JS is about the mean square of the differences of log-probabilities, over 8. Logits in
# float32 are good to about 1e-5, which is 2 % of a JS of 1e-7 and more of a smaller one.
FLOOR = 1e-7


class PMR(NamedTuple):
    """Prototype-mediated robustness of n pairs; 1 where holding the routing removes all of the JS.

    Attributes:
      mean_of_ratios: mean of PMR over pairs, as in the paper; NaN without any.
      ratio_of_means: 1 - mean JS_clamped / mean JS_base, over all pairs; NaN if that is below the
        floor.
      median: median of PMR over pairs; NaN without any.
      below_floor: share of pairs whose JS_base is below the numerical floor. Their PMR is a ratio
        of rounding errors, or 0 / 0, and is in neither the mean nor the median.
    """

    mean_of_ratios: float
    ratio_of_means: float
    median: float
    below_floor: float


def pmr(js_base: ArrayLike, js_clamped: ArrayLike, *, floor: float = FLOOR) -> PMR:
    """Summarises PMR over pairs.

    Args:
      js_base: divergences in nats without a clamp, `[n]`.
      js_clamped: divergences with the clamp, `[n]`.
      floor: numerical floor in nats.

    Raises:
      UsageError: the two are not of one length, are empty, or hold negative or infinite numbers.
    """
    base, clamped = np.asarray(js_base, np.float64), np.asarray(js_clamped, np.float64)
    if base.ndim != 1 or base.shape != clamped.shape or not base.size:
        raise UsageError(
            f"pmr: js_base {base.shape} and js_clamped {clamped.shape} must be 1-D, not empty and "
            "of one length; pass one divergence per pair"
        )
    for name, values in (("js_base", base), ("js_clamped", clamped)):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise UsageError(f"pmr: {name} has values that are negative or not finite; drop them")
    floor = max(floor, np.finfo(np.float64).tiny)
    each = ratios(base, clamped, floor=floor)
    kept = each[np.isfinite(each)]
    mean = base.mean()
    return PMR(
        mean_of_ratios=float(kept.mean()) if kept.size else float("nan"),
        ratio_of_means=float(1 - clamped.mean() / mean) if mean >= floor else float("nan"),
        median=float(np.median(kept)) if kept.size else float("nan"),
        below_floor=float(1 - kept.size / base.size),
    )


def ratios(js_base: np.ndarray, js_clamped: np.ndarray, *, floor: float = FLOOR) -> np.ndarray:
    """PMR of each pair, NaN where JS_base is below the floor."""
    known = js_base >= floor
    return np.where(known, 1 - js_clamped / np.where(known, js_base, 1.0), np.nan)
