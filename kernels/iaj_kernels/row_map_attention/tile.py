"""Arithmetic of the row maps on a tile of scores, for streams of key tiles; jnp in, jnp out.

A kernel walks over key tiles of one row with a *centre*, by which weights are divided so that
neither they nor their sum overflows, and rescales what it has summed whenever the centre moves:

    1. centre' = moved(centre, largest u of the tile), sums *= rescale(centre, centre')
    2. w = weight(u, pivot(centre')); sum += w; out += w v
    3. at the end (closed): the output is out times a number of the row, and two numbers are saved,
       from which the backward pass has the pattern as weight(u, pivot) factor.

Centres: softmax, log2 of the denominator; sigmoid, min(largest u, 0), since
sigma(u) e^-M = 1 / (e^M + e^(M-u)) needs one exponential and underflows nowhere that matters;
relu^p, the largest r, as the map does not depend on the scale of r. A centre needs no gradient, for
the pattern does not depend on it. Un-normalised maps have a centre that does not move.

The exponential maps work with u in units of ln 2, so that e^x is one `exp2`. A hidden key has
u = -inf, and weight and slope 0. Everything is float32.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.attention import tiles
from iaj_kernels.row_map_attention.maps import RowMap

# By the widest head. Those that compile for an H200 with little or no spilling and the fewest
# instructions per score; not timed.
_TILES: Mapping[int, tiles.Table] = {
    64: {"forward": (64, 128, 4, 2), "dq": (64, 64, 4, 2), "dkv": (64, 64, 4, 2)},
    128: {"forward": (128, 64, 8, 2), "dq": (128, 64, 8, 2), "dkv": (64, 128, 8, 2)},
    256: {"forward": (128, 64, 8, 2), "dq": (128, 32, 8, 2), "dkv": (32, 32, 4, 1)},
}
# Full float32 products do not use tensor cores, and their operands fill registers.
_FLOAT32_TILES: tiles.Table = dict.fromkeys(("forward", "dq", "dkv"), (32, 32, 4, 1))


def default_tiles(sizes: Mapping[str, int], dtype: Any) -> dict[str, int]:
    """The tiles of a call that tuning has not measured."""
    if dtype == jnp.float32:
        return tiles.named(_FLOAT32_TILES)
    return tiles.named(_TILES[min(width for width in _TILES if width >= sizes["H"])])


LOG2E = math.log2(math.e)
# Below every score; finite, since -inf - -inf is NaN.
LOWEST = -1e30
TINY = float(np.finfo(np.float32).tiny)
HUGE = float(np.finfo(np.float32).max)
ONE_UP = float(np.nextafter(np.float32(1), np.float32(2)))


class Logits(NamedTuple):
    """u = gain z + offset, kept in parts: most maps need no product of their own to form it.

    `gain` is a positive number. `offset` broadcasts to z and is constant along the keys.
    """

    z: jax.Array
    gain: float
    offset: jax.Array | float

    def largest(self, axis: int) -> jax.Array:
        """The largest u along the axis of the keys."""
        offset = self.offset if jnp.ndim(self.offset) == 0 else jnp.max(self.offset, axis)
        return jnp.max(self.z, axis) * self.gain + offset

    def hidden(self, mask: jax.Array | None) -> "Logits":
        """The logits with u = -inf where the mask is false."""
        return self if mask is None else self._replace(z=jnp.where(mask, self.z, -jnp.inf))


class Weights(NamedTuple):
    """Weights, their slope by the score without `row_slope`, and r over its largest for relu^p."""

    weight: jax.Array
    slope: jax.Array
    share: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Elementary:
    """Elementary functions for which a GPU has faster instructions.

    `plus(x, y, z)` is x y + z; `share(u, pivot)` is u pivot brought into [0, 1]; `less(x, y)` is
    x - x y.
    """

    exp2: Callable[[jax.Array], jax.Array]
    log2: Callable[[jax.Array], jax.Array]
    reciprocal: Callable[[jax.Array], jax.Array]
    plus: Callable[[jax.Array, jax.Array | float, jax.Array | float], jax.Array]
    share: Callable[[Logits, jax.Array], jax.Array]
    less: Callable[[jax.Array, jax.Array], jax.Array]


EXACT = Elementary(
    exp2=jnp.exp2,
    log2=jnp.log2,
    reciprocal=jnp.reciprocal,
    plus=lambda x, y, z: x * y + z,
    share=lambda u, pivot: jnp.clip((u.z * u.gain + u.offset) * pivot, 0.0, 1.0),
    less=lambda x, y: x - x * y,
)


def logits(
    row_map: RowMap, dot: jax.Array, bias: jax.Array, scale: float, cap: float | None
) -> tuple[Logits, jax.Array | None]:
    """u of the products q.k, and d score / d (scale q.k), which is None without a soft cap."""
    # How many units of u make one unit of score.
    unit = 1.0 if row_map.relu else LOG2E
    offset = bias * unit if row_map.biased else 0.0
    if cap is None:
        return Logits(dot, scale * unit, offset), None
    capped = jnp.tanh(dot * (scale / cap))
    return Logits(capped, cap * unit, offset), 1.0 - capped * capped


def first_centre(row_map: RowMap, visible: jax.Array) -> jax.Array:
    """The centre before any key, of rows that see `visible` keys (float32, at least 1)."""
    match row_map.kind:
        case "softmax" | "sigmoid":
            return jnp.full_like(visible, LOWEST)
        case "relu_power":
            # The smallest normal number: it has a reciprocal, and a dead row keeps it.
            return jnp.full_like(visible, TINY)
        case "ramapuram_sigmoid" if row_map.minus_log_n:
            return jnp.log2(visible)
        case _:
            return jnp.zeros_like(visible)


def moved(row_map: RowMap, centre: jax.Array, largest: jax.Array) -> jax.Array:
    """The centre after keys with the largest u `largest`, which is -inf if all are hidden."""
    match row_map.kind:
        case "softmax" | "relu_power":
            return jnp.maximum(centre, largest)
        case "sigmoid":
            return jnp.maximum(centre, jnp.minimum(largest, 0.0))
        case _:
            return centre


def rescale(row_map: RowMap, old: jax.Array, new: jax.Array) -> jax.Array:
    """The factor from sums of weights about one centre to sums about another; in [0, 1]."""
    if row_map.kind == "relu_power":
        return _power(old / new, row_map.p, EXACT)
    return jnp.exp2(old - new)


def pivot(row_map: RowMap, centre: jax.Array) -> jax.Array:
    """The number of a row that weights about `centre` take, so that no key costs a division."""
    # A slightly larger reciprocal, so that the largest key has exactly 1: a row with one active key
    # then has exactly no gradient.
    return ONE_UP / centre if row_map.kind == "relu_power" else centre


def folded(u: Logits, pivot: jax.Array, plus: Callable[..., jax.Array] = EXACT.plus) -> jax.Array:
    """u pivot in one `plus` of a score, the row's numbers being multiplied first.

    A row without an active key has a pivot of 2^126, which overflows against a gain of 4 and blows
    up the rounding of a score at the threshold: all its keys get 0.
    """
    pivot = jnp.where(pivot < _NO_CENTRE, pivot, 0.0)
    return plus(u.z, u.gain * pivot, u.offset * pivot)


# The pivot of a row whose centre is still the smallest normal number is above it.
_NO_CENTRE = 1.0 / TINY


def weight(
    row_map: RowMap, u: Logits, pivot: jax.Array, elementary: Elementary = EXACT
) -> jax.Array:
    """Weights about the centre of `pivot`, which broadcasts against u."""
    match row_map.kind:
        case "softmax":
            return elementary.exp2(elementary.plus(u.z, u.gain, u.offset - pivot))
        case "sigmoid" | "ramapuram_sigmoid":
            return _sigmoid(row_map, u, pivot, elementary)[0]
        case _:
            return _power(_active(row_map, u, pivot, elementary), row_map.p, elementary)


def weight_and_slope(
    row_map: RowMap, u: Logits, pivot: jax.Array, elementary: Elementary = EXACT
) -> Weights:
    """Weights and their slopes on a tile, for the backward pass."""
    match row_map.kind:
        case "softmax":
            w = weight(row_map, u, pivot, elementary)
            return Weights(w, w, None)
        case "sigmoid" | "ramapuram_sigmoid":
            w, complement = _sigmoid(row_map, u, pivot, elementary)
            # x w is 1 - sigma(u) without the cancellation; x is infinite where w is 0.
            return Weights(w, w * (jnp.minimum(complement, HUGE) * w), None)
        case _:
            x = _active(row_map, u, pivot, elementary)
            share = x if row_map.normalised else None
            if row_map.p == 1:
                return Weights(x, (x > 0).astype(x.dtype), share)
            slope = _power(x, row_map.p - 1, elementary)
            return Weights(slope * x, slope, share)


def bias_terms(
    row_map: RowMap,
    weights: Weights,
    centred_g: jax.Array,
    by_score: jax.Array,
    elementary: Elementary = EXACT,
) -> tuple[jax.Array, ...]:
    """Terms of a tile in the row sums of `bias_gradient`.

    Args:
      row_map: a map that reads the bias.
      weights: the weights of the tile.
      centred_g: g - delta of a normalised map, g of another.
      by_score: the gradients by u without `row_slope`: slope times `centred_g`.
      elementary: the functions of the device.
    """
    if row_map.kind == "sigmoid":
        return by_score, weights.slope, weights.weight * centred_g
    if weights.share is None:
        return (by_score,)
    return (elementary.less(by_score, weights.share),)


def bias_gradient(by_score: jax.Array, *rounding: jax.Array) -> jax.Array:
    """The gradient of a row by its bias without `row_slope`, from the sums of its `bias_terms`.

    delta is rounded, and its error times the sum of all slopes is in the plain sum of the gradients
    by the scores. Where these nearly cancel it is most of that sum, and each map takes it out:

    - relu^p over its sum does not depend on the scale of r, so the gradients by r times r add up to
      nothing. Their part is left out term by term, nearly all of it where the largest r are alike.
    - sigma over its sum has a pattern that adds up to 1, so the pattern times g - delta adds up to
      the error of delta: the further sums, of the slopes and of that product. Keys far below 0,
      where sigma is an exponential, have slopes that are the pattern.
    """
    if not rounding:
        return by_score
    slope, error = rounding
    return by_score - slope * error


def sums_for_bias(row_map: RowMap) -> int:
    """How many `bias_terms` there are."""
    return 3 if row_map.kind == "sigmoid" else 1


def closed(
    row_map: RowMap, centre: jax.Array, total: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(scale of the output, pivot, factor)` of rows whose weights add up to `total`.

    The pattern is `weight(u, pivot) factor`. The factor is 0 exactly where the total is, in rows
    that are dead or see no key, and else 1 unless the map is a relu.
    """
    # A row with a NaN is not dead: the NaN must reach the output.
    alive = total != 0
    live_total = jnp.where(alive, total, 1.0)
    one = alive.astype(total.dtype)
    match row_map.kind:
        case "softmax" | "sigmoid":
            return one / live_total, jnp.where(alive, centre + jnp.log2(live_total), 0.0), one
        case "relu_power":
            return one / live_total, pivot(row_map, centre), one / live_total
        case "relu_over_length":
            factor = one * _power(visible, -row_map.alpha, EXACT)
            return factor, centre, factor
        case _:
            return one, centre, one


def row_slope(row_map: RowMap, pivot: jax.Array, factor: jax.Array) -> jax.Array:
    """The factor of d pattern / d score that all keys of the row share."""
    match row_map.kind:
        case "relu_power":
            # In this order: a dead row's pivot is huge, and its factor 0.
            return row_map.p * (factor * pivot)
        case "relu_over_length":
            return row_map.p * factor
        case _:
            return factor


def _active(row_map: RowMap, u: Logits, pivot: jax.Array, elementary: Elementary) -> jax.Array:
    """max(u, 0), in units of the centre where the map is normalised."""
    if row_map.normalised:
        return elementary.share(u, pivot)
    return jnp.maximum(elementary.plus(u.z, u.gain, u.offset), 0.0)


def _sigmoid(
    row_map: RowMap, u: Logits, pivot: jax.Array, elementary: Elementary
) -> tuple[jax.Array, jax.Array]:
    """sigma(u) about the centre, and sigma(-u) / sigma(u) in the same units."""
    shift = elementary.exp2(pivot) if row_map.normalised else 1.0
    complement = elementary.exp2(elementary.plus(u.z, -u.gain, pivot - u.offset))
    return elementary.reciprocal(shift + complement), complement


def _power(x: jax.Array, p: float, elementary: Elementary) -> jax.Array:
    """x^p for x >= 0, and 0 at x = 0 whatever p; an integer p > 0 is a few products."""
    if p == 1:
        return x
    if p == int(p) and p > 0:
        return lax.integer_pow(x, int(p))
    return jnp.where(x == 0, 0.0, elementary.exp2(p * elementary.log2(x)))
