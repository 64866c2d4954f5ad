"""The calibrated bias b_auto: the 5 % mass rule, solved exactly over a stream of score rows.

From "When Does Polynomial Attention Concentrate?", Appendices B and J: b_auto is the smallest b for
which the average softmax row places at most 5 % of its mass on keys whose score lies below -b.

Let M(t) be the mass strictly below t, averaged over all rows. M is a step function that rises just
above each score, so the largest t with M(t) <= budget is itself a score, the weighted quantile of
all (score, softmax weight) pairs, and b_auto = -t. A model has too many pairs to keep, so
`calibrate`

1. numbers the float32 values in order (zero and the normal numbers, 4.26e9 of them);
2. keeps a bracket of two numbers with M(low) <= budget < M(high), at first all of them;
3. measures M at `num_thresholds` numbers spread evenly inside it, in one pass over the model;
4. keeps the piece in which M crosses the budget, and goes on until the ends are neighbours.

With 256 thresholds that is 4 passes, whatever the model, and no grid is left. What remains is
rounding of M itself: masses are summed in the scores' dtype within a layer and in float64 across
layers.
"""

from collections.abc import Callable
import dataclasses
import hashlib
from importlib import resources
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax import attention
from lm_jax.errors import BadInputError, CorruptError, UsageError

CALIBRATION_TEXT_SHA256 = "d5265ce3965f39d2cd5eff5ac4c831b87651fa616647943ab308d15bdec7dc3e"

_TINY_BITS = int(np.float32(np.finfo(np.float32).tiny).view(np.int32))
_LAST = int(np.float32(np.finfo(np.float32).max).view(np.int32)) - _TINY_BITS + 1


class MassBelow(NamedTuple):
    """Softmax mass strictly below each threshold, summed over rows, and the number of rows."""

    total_M: Any
    rows: Any


@dataclasses.dataclass(frozen=True)
class Calibration:
    """b_auto, the average mass strictly below -b_auto, and what it took to find them."""

    bias: float
    mass: float
    passes: int
    rows: int


def mass_below(scores: jax.Array, thresholds_M: jax.Array) -> MassBelow:
    """Reduces `scores[..., T, S]` to the mass below each of the ascending `thresholds_M`.

    A key of score -inf is masked; a row with no key is not counted. Fit to be a record reducer of
    `attn.scores`: it returns `[M]` and `[]`, and holds a few arrays `[T, S]` and one `[T, M + 1]`,
    because the leading axes are walked one by one. Sums run over keys, then rows, then the leading
    axes, which keeps each of them short.
    """
    T, S = scores.shape[-2:]
    M = thresholds_M.shape[0]
    dtype = jnp.promote_types(scores.dtype, jnp.float32)

    def of_one(scores_TS):
        scores_TS = scores_TS.astype(dtype)
        weight_TS = attention.softmax(scores_TS)
        slot_TS = jnp.searchsorted(thresholds_M, scores_TS, side="right", method="scan_unrolled")
        # A NaN counts as below everything, so that `calibrate` sees it.
        slot_TS = jnp.where(jnp.isnan(scores_TS), 0, slot_TS)
        empty_TM = jnp.zeros((T, M + 1), dtype)
        histogram_TM = jax.vmap(lambda h, slot, w: h.at[slot].add(w))(empty_TM, slot_TS, weight_TS)
        return histogram_TM.cumsum(-1)[:, :M].sum(0)

    total = jax.lax.map(of_one, scores.reshape(-1, T, S)).sum(0)
    return MassBelow(total, (scores != -jnp.inf).any(-1).sum())


def calibrate(
    measure: Callable[[np.ndarray], MassBelow],
    *,
    budget: float = 0.05,
    num_thresholds: int = 256,
) -> Calibration:
    """The smallest bias under which the average row has at most `budget` of its mass below -bias.

    Args:
      measure: one pass over the calibration text. Takes ascending float32 thresholds `[M]`, always
        `num_thresholds` of them, so that a compiled pass is reused. Returns a `MassBelow` whose
        `total_M` may be `[..., M]` and `rows` `[...]`, for example one entry per layer: they are
        added up here in float64.
      budget: share of mass in [0, 1).

    Scores that are not zero but below the smallest normal float32 count as zero.

    Raises:
      UsageError: a budget outside [0, 1), or fewer than one threshold.
      BadInputError: no rows, or masses that are not finite.
    """
    if not 0 <= budget < 1:
        raise UsageError(f"budget: {budget} must be at least 0 and below 1")
    if num_thresholds < 1:
        raise UsageError(f"num_thresholds: {num_thresholds} must be at least 1")
    low, high, mass, rows, passes = -_LAST - 1, _LAST + 1, 0.0, 0, 0
    while high - low > 1:
        steps = np.arange(1, num_thresholds + 1, dtype=np.int64)
        numbers = np.minimum(low + -(-steps * (high - low) // (num_thresholds + 1)), high)
        inside = numbers < high
        average, rows = _average(measure(_from_order(np.minimum(numbers, _LAST))))
        passes += 1
        within = inside & (np.maximum.accumulate(average) <= budget)
        count = int(within.sum())
        if count < inside.sum():
            high = int(numbers[count])
        if count:
            low, mass = int(numbers[count - 1]), float(average[count - 1])
    threshold = float(_from_order(np.array([low]))[0])
    return Calibration(bias=0.0 - threshold, mass=mass, passes=passes, rows=rows)


def _average(measured: MassBelow) -> tuple[np.ndarray, int]:
    total = np.asarray(measured.total_M, np.float64)
    total = total.reshape(-1, total.shape[-1]).sum(0)
    rows = int(np.asarray(measured.rows).sum(dtype=np.int64))
    if rows == 0:
        raise BadInputError("calibration: no row has an unmasked key; give a longer text")
    if not np.isfinite(total).all():
        raise BadInputError("calibration: the softmax mass is not finite; check the model's scores")
    return total / rows, rows


def _from_order(numbers: np.ndarray) -> np.ndarray:
    """The float32 at each place in the order of zero (0) and the normal numbers (+-1, +-2, ...)."""
    size = np.abs(numbers)
    bits = np.where(size == 0, 0, size + (_TINY_BITS - 1)).astype(np.int32)
    return np.copysign(bits.view(np.float32), np.where(numbers < 0, -1, 1).astype(np.float32))


def exact_bias(scores: np.ndarray, *, budget: float = 0.05) -> float:
    """The same rule for scores `[..., S]` that fit in memory: sort all keys, in float64."""
    z = np.asarray(scores, np.float64).reshape(-1, scores.shape[-1])
    z = z[(z > -np.inf).any(-1)]
    weight = np.exp(z - z.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    values, place = np.unique(z[z > -np.inf], return_inverse=True)
    below = np.bincount(place, weight[z > -np.inf]).cumsum() / len(z)
    # The first value with more than the budget at or below it is the last with less below it.
    return 0.0 - float(values[np.argmax(below > budget)])


def calibration_text() -> str:
    """The shipped text: about 1,500 tokens of an 1825 presidential message (see `data/README.md`).

    Raises:
      CorruptError: if the file is not the one that was shipped.
    """
    raw = resources.files("polyattn_jax").joinpath("data/calibration.txt").read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != CALIBRATION_TEXT_SHA256:
        raise CorruptError(
            f"polyattn_jax/data/calibration.txt: sha256 {found[:12]} is not the shipped "
            f"{CALIBRATION_TEXT_SHA256[:12]}; reinstall the package"
        )
    return raw.decode("ascii")
