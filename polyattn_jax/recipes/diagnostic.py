"""The row diagnostic S_p: how much mass a pointwise row map can put on the target key.

From "When Does Polynomial Attention Concentrate?", section 3 and Appendix T. `row_stats` computes
S_p by its definition (`iaj_kernels.score_stats.reference`) on an array of scores; the operation
`iaj_kernels.score_stats` does so from queries and keys. `relative_error_bound` proves how far a
computed S_p can be from the exact one, and `classify` decides only what that bound allows.
"""

from collections.abc import Callable, Sequence
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.score_stats import reference
from iaj_kernels.score_stats.config import RowStats, Status
from lm_jax.errors import UsageError

Array = jax.Array | np.ndarray

__all__ = [
    "RowStats",
    "Safety",
    "Status",
    "approximate_required_degree",
    "classify",
    "relative_error_bound",
    "required_degree",
    "row_stats",
    "softmax_error_bound",
]


class Safety(enum.IntEnum):
    """What S_p says of an ACTIVE row under the criterion S_p < 1 (Remark 4.5)."""

    SAFE = 0
    UNSAFE = 1
    TIE = 2  # S_p = 1 exactly: the boundary rows of Appendix P
    UNDECIDED = 3  # closer to the boundary than the rounding error


def row_stats(
    scores: Array,
    *,
    mask: Array | None = None,
    degrees: Sequence[float] = (2, 4, 8, 16),
    bias: Array | float = 0.0,
    target: Array | int | None = None,
    row_map: Callable[[Any, Any], Any] | None = None,
    cap: float = math.inf,
) -> RowStats:
    """Reduces each row of `scores[..., S]` to its concentration statistics.

    Arithmetic is in the dtype of `scores`, float32 at least. If no argument is a JAX array, numpy
    computes and returns it: float64 rows need no `enable_x64`. Otherwise it works under `jit`,
    `vmap` and `scan`, and holds about four arrays of the size of `scores`, none multiplied by the
    number of degrees.

    Args:
      scores: `[..., S]`; a key of score -inf is masked.
      mask: true where a key may be read; broadcasts to `scores`. Masked scores are never looked at.
      degrees: the powers p > 0, static. They index the last axis of `s_p`.
      bias: b, possibly traced; a scalar or an array that broadcasts to `scores`.
      target: indices `[...]` of the answer keys; None takes the argmax. A masked target is DEAD.
      row_map: `(scores, bias) -> weights[..., S]`, for S_phi in place of S_p: the last axis then
        has one entry, `degrees` is not read, and `active` counts distractors of positive weight.
      cap: tau of section 3.

    Raises:
      UsageError: no key axis, a degree that is not a positive number, or a `row_map` that says it
        is `signed`.
    """
    arrays = (scores, mask, bias, target, cap)
    xp = jnp if any(isinstance(a, jax.Array) for a in arrays) else np
    scores = xp.asarray(scores)
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise UsageError(f"scores: shape {scores.shape} has no keys; the last axis must be keys")
    if getattr(row_map, "signed", False):
        raise UsageError(
            f"row_map: S of a row is not defined for {row_map}, whose weights may be negative; "
            "pass a map whose weights are not"
        )
    if row_map is None and not (len(degrees) and all(0 < p < math.inf for p in degrees)):
        raise UsageError(f"degrees: {tuple(degrees)} must be one or more positive numbers")
    z = scores.astype(jnp.promote_types(scores.dtype, np.float32))
    if mask is not None:
        z = xp.where(xp.broadcast_to(xp.asarray(mask), z.shape), z, -np.inf)
    # Overflow to inf and inf - inf are answered by INVALID or by S_p = inf.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        weight = None
        if row_map is not None:
            degrees, weight = (1,), xp.asarray(row_map(z, bias)).astype(z.dtype)
        return reference.row_stats(xp, z, bias, target, degrees=degrees, cap=cap, weight=weight)


def relative_error_bound(p: float, num_keys: int, dtype: Any = np.float32) -> float:
    """Bound on |computed S_p / exact S_p - 1| for a row of at most `num_keys` unmasked keys.

    Let u be the unit roundoff, half the machine epsilon. Every rounded operation returns the exact
    result times e^d. Errors d add under products, and a sum of nonnegative terms has an error no
    larger than the largest of its terms' plus that of its own additions. |d| is at most
    u' = u / (1 - 32 u) for +, - and *, 4 u' for a quotient (2 ulp, the GPU's; IEEE gives u') and
    32 u' for a library power (16 ulp, wider than any of CPU or GPU documents).

    1. r_j = min(max(z_j + b, 0), tau): one addition, u'. Rounding is monotone and keeps signs, so
       clipping to 0 and tau adds nothing.
    2. r_j / r_*: two such errors and a quotient, 6 u'.
    3. Power: p times that, 6 p u'; then p - 1 products in whatever order an integer p takes
       (repeated squaring doubles the error so far and adds one), or one library power.
    4. Sum of at most n - 1 terms in any order: n - 2 additions on any path.

    In all t = (7 p - 1 + n - 2) u', or (6 p + 32 + n - 2) u' for a p that is not an integer, and
    the relative error is at most e^t - 1. A fused multiply-add only drops a rounding.

    The scores and b count as exact in the dtype they come in. Not covered: results below the
    smallest normal number w, which may be flushed to 0 (they move S_p by at most
    n ((w / r_*)^p + w) in absolute terms), and results above the largest, which give inf.
    """
    roundoff = float(np.finfo(jnp.promote_types(dtype, np.float32)).eps) / 2
    power = 7 * p - 1 if p == int(p) else 6 * p + 32
    return math.expm1((power + max(num_keys - 2, 0)) * roundoff / (1 - 32 * roundoff))


def softmax_error_bound(num_keys: int, dtype: Any = np.float32) -> float:
    """The relative error bound for S of softmax with the argmax as target, wherever S >= 1/2.

    With u', quotients and library functions as above, and d_j = z_j - z_* <= 0:

    1. The rounding of d_j to d_j (1 + e), |e| <= u', multiplies e^d_j by at most e^(|d_j| u'). The
       terms e^d_j / S are a distribution q over m <= n - 1 keys, and sum_j q_j |d_j| is its entropy
       minus log S, hence at most log(m / S). So S moves by less than 1.001 log(2 n) u' of itself.
    2. The exponential 32 u'. The row's total divides both weights and cancels, but for the two
       quotients; a third one divides them. 12 u'.
    3. Sum of at most n - 1 terms: n - 2 additions.

    A row with S < 1/2 has an absolute error below that of S = 1/2, so it is never taken for S >= 1.
    """
    roundoff = float(np.finfo(jnp.promote_types(dtype, np.float32)).eps) / 2
    steps = 44 + max(num_keys - 2, 0) + 1.001 * math.log(2 * num_keys)
    return math.expm1(steps * roundoff / (1 - 32 * roundoff))


def classify(s_p: Array, *, bound: Array | float = 0.0, epsilon: float = 0.0) -> Array:
    """The `Safety` (int32) of each `s_p` under S_p < 1, or S_p < 1 + epsilon if `epsilon` > 0.

    The strict criterion is the recall criterion and the paper's tables; epsilon = 1e-6 is the
    tolerance of Appendix P, under which its boundary rows (S_p = 1) count as safe. TIE exists only
    under the strict one; a computed 1.0 is certainly a tie where `active` is 1 and `margin` 0.
    The safety of rows that are not ACTIVE means nothing: select by `status`.

    Args:
      bound: relative error of `s_p`, from `relative_error_bound`, broadcasting to it. Rows that it
        leaves on both sides of the boundary are UNDECIDED. 0 takes `s_p` as exact.
    """
    xp = jnp if isinstance(s_p, jax.Array) or isinstance(bound, jax.Array) else np
    s_p = xp.asarray(s_p)
    error = xp.broadcast_to(xp.asarray(bound, s_p.dtype), s_p.shape)
    # A few ulp more, because the edges below are rounded as well.
    error = xp.where(error > 0, error + 4 * np.finfo(s_p.dtype).eps, error).astype(s_p.dtype)
    edge = s_p.dtype.type(1 + epsilon)
    result = xp.full(s_p.shape, int(Safety.UNDECIDED), np.int32)
    # |computed - exact| <= error * exact brackets the exact value by computed / (1 -+ error).
    result = xp.where(s_p < edge * (1 - error), int(Safety.SAFE), result)
    result = xp.where(s_p >= edge * (1 + error), int(Safety.UNSAFE), result)
    tie = (s_p == 1) if epsilon == 0 else xp.zeros(s_p.shape, bool)
    return xp.where(tie, int(Safety.TIE), result).astype(np.int32)


def required_degree(
    active: Array | int, relative_margin: Array | float, *, clip: float | None = None
) -> Array:
    """p* = log A / log(1 / (1 - rho)), the worst-case sufficient degree (Corollary 4.3).

    Every p >= p* has S_p <= 1. Corner cases: 0 for A <= 1 (or rho >= 1, which leaves A = 0), inf
    where no degree suffices: A > 1 at rho = 0, and a negative rho (a target below a rival).

    Args:
      clip: upper bound on rho; None is exact, 0.99 is what the paper's scripts use (Appendix P).
    """
    return _degree(active, relative_margin, clip, lambda xp, rho: -xp.log1p(-rho))


def approximate_required_degree(active: Array | int, relative_margin: Array | float) -> Array:
    """(u_* / Delta) log A, the small-rho form of `required_degree`; never below it."""
    return _degree(active, relative_margin, None, lambda xp, rho: rho)


def _degree(active, relative_margin, clip, decay):
    arrays = (active, relative_margin)
    xp = jnp if any(isinstance(a, jax.Array) for a in arrays) else np
    rho = xp.asarray(relative_margin)
    rho = rho.astype(jnp.promote_types(rho.dtype, np.float32))
    active = xp.asarray(active).astype(rho.dtype)
    none_needed = (active == 0) | (rho >= 1) | ((active == 1) & (rho >= 0))
    finite = ~none_needed & (rho > 0)
    inner = xp.where(finite, rho if clip is None else xp.minimum(rho, clip), 0.5)
    degree = xp.log(xp.maximum(active, 1)) / decay(xp, inner)
    return xp.where(none_needed, 0, xp.where(finite, degree, np.inf)).astype(rho.dtype)
