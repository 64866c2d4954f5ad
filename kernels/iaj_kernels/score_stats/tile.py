"""S_p on one tile of scores, for every fast path: two loops over the keys of a row.

"When Does Polynomial Attention Concentrate?", section 3. S_p divides by the weight r_* of the
target, so the target must be known before anything is summed:

1. `score`: z = scale q.k, -inf where hidden. Hidden scores have no further effect.
2. First loop, `raise_peak`: the greatest score and the first key that has it; `peak` then reduces.
3. `target_weight`: u_* = z_* + b, r_* = min(max(u_*, 0), tau), and 1 / r_* for the rows that have
   a target weight.
4. Second loop, `without_target` and `distractors`: over all keys but the target, the greatest z_j,
   the number of positive r_j, and sum_j (r_j / r_*)^p for every degree p.
5. `finish`: margin, relative margin and status of each row.

The target is left out by its index and never subtracted, and a ratio is taken before its power. A
key that ties with the target has the ratio 1 exactly, and is known by its score: r (1 / r) can miss
1 by a rounding, and so can an r whose bias the compiler added before the score was rounded. Rows at
S_p = 1 are the boundary that the paper's criterion S_p < 1 is about.

A tile is any float32 array whose last two axes are queries and keys.
"""

from collections.abc import Callable, Mapping
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.attention import tiles
from iaj_kernels.score_stats.config import Config, RowStats, Status

# A smaller target weight counts as 0: a CPU or GPU may flush it, and it has no finite reciprocal.
_SMALLEST = float(np.finfo(np.float32).tiny)


def default_tiles(sizes: Mapping[str, int], dtype: Any) -> dict[str, int]:
    """The tiles of a call that tuning has not measured."""
    queries, float32 = min(tiles.side(sizes["T"]), 64), dtype == jnp.float32
    return {
        "queries": queries,
        "keys": 64 if float32 or sizes["H"] <= 128 else 32,
        "warps": 8 if float32 and queries == 64 else 4,
        "stages": 2,
    }


class Peak(NamedTuple):
    """Running maximum over the tiles so far; one per column, so that no tile is reduced.

    Attributes:
      top: `[..., Q, Y]`, the greatest score; inf after a NaN, which no valid row holds.
      tile: int32 `[..., Q, Y]`, the first tile with that score.
      star: `[..., Q]`, the score of the target; None where the target is the argmax.
    """

    top: jax.Array
    tile: jax.Array
    star: jax.Array | None


class Reductions(NamedTuple):
    """Results of the two loops for each row: `[...]`, `[X, ...]` and `[P, X, ...]`."""

    top: jax.Array
    argmax: jax.Array
    star: jax.Array
    runner_up: jax.Array
    active: jax.Array
    sums: jax.Array


def score(config: Config, product: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The scores of a tile of products q.k; `mask` is None where every key is visible."""
    z = product * config.scale
    if config.soft_cap is not None:
        z = jnp.tanh(z * (1.0 / config.soft_cap)) * config.soft_cap
    return z if mask is None else jnp.where(mask, z, -jnp.inf)


def no_peak(shape: tuple[int, ...], has_target: bool) -> Peak:
    """Rows before their first tile."""
    lowest = jnp.full(shape, -jnp.inf, jnp.float32)
    star = jnp.full(shape[:-1], -jnp.inf, jnp.float32) if has_target else None
    return Peak(lowest, jnp.zeros(shape, jnp.int32), star)


def raise_peak(peak: Peak, z: jax.Array, tile: jax.Array, is_target: jax.Array | None) -> Peak:
    """Updates the peak by tile number `tile`; tiles come in the order of their keys."""
    # Explicit, because a GPU's maximum drops NaN and a CPU's keeps it.
    z = jnp.where(z < jnp.inf, z, jnp.inf)
    star = peak.star
    if star is not None and is_target is not None:
        star = jnp.maximum(star, jnp.max(jnp.where(is_target, z, -jnp.inf), axis=-1))
    return Peak(jnp.maximum(peak.top, z), jnp.where(z > peak.top, tile, peak.tile), star)


def peak(peak: Peak) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The greatest score, the first key that has it, and the score of the target, `[..., Q]`."""
    Y = peak.top.shape[-1]
    column = lax.broadcasted_iota(jnp.int32, peak.top.shape, peak.top.ndim - 1)
    top = jnp.max(peak.top, axis=-1)
    first = jnp.where(peak.top == top[..., None], peak.tile * Y + column, jnp.int32(2**31 - 1))
    return top, jnp.min(first, axis=-1), top if peak.star is None else peak.star


def clipped(config: Config, u: jax.Array) -> jax.Array:
    """min(max(u, 0), tau)."""
    r = jnp.maximum(u, 0.0)
    return r if config.cap == math.inf else jnp.minimum(r, config.cap)


def _divide(x: jax.Array) -> jax.Array:
    return 1.0 / x


def target_weight(
    config: Config,
    star: jax.Array,
    bias: jax.Array,
    reciprocal: Callable[[jax.Array], jax.Array] = _divide,
) -> tuple[jax.Array, jax.Array]:
    """r_* and 1 / r_*, correctly rounded; (inf, 0) for a row without a target weight.

    Args:
      reciprocal: the reciprocal of a backend whose division rounds otherwise.
    """
    r_star = clipped(config, star + bias)
    r_star = jnp.where(r_star >= _SMALLEST, r_star, jnp.inf)
    return r_star, reciprocal(r_star)


def without_target(z: jax.Array, is_target: jax.Array) -> jax.Array:
    """The scores without the target's: -inf in its place."""
    return jnp.where(is_target, -jnp.inf, z)


def distractors(
    config: Config,
    z: jax.Array,
    star: jax.Array,
    bias: jax.Array,
    r_star: jax.Array,
    inverse: jax.Array,
) -> tuple[jax.Array, ...]:
    """The number of distractors in a tile with weight, and the sums of (r_j / r_*)^p: `[..., Q]`.

    Args:
      z: the scores of a tile, from `without_target`.
      star: the score of the target, `[..., Q]`.
      r_star, inverse: the two results of `target_weight`, `[..., Q]`.
    """
    r = clipped(config, z + bias)
    ties = z == star[..., None]
    if config.cap != math.inf:
        ties |= r == r_star[..., None]
    ratio = jnp.where(ties, 1.0, r * inverse[..., None])
    active = jnp.sum(r > 0.0, axis=-1, dtype=jnp.int32)
    return active, *(jnp.sum(power, axis=-1) for power in powers(ratio, config.degrees))


def powers(x: jax.Array, degrees: tuple[float, ...]) -> list[jax.Array]:
    """x^p of x >= 0 for each degree: whole ones by squarings that they share."""
    squarings = [x]
    results = []
    for p in degrees:
        if not isinstance(p, int):
            results.append(x**p)
            continue
        while len(squarings) < p.bit_length():
            squarings.append(squarings[-1] * squarings[-1])
        factors = [each for bit, each in enumerate(squarings) if p >> bit & 1]
        results.append(functools.reduce(operator.mul, factors))
    return results


def finish(
    config: Config, result: Reductions, bias: jax.Array, target: jax.Array | None, S: int
) -> RowStats:
    """The statistics of the rows, `[X, ...]`.

    Args:
      bias: `[X]` with an axis of size 1 for each of a row's.
      target: key indices `[...]`, or None for the argmax.
    """
    top, star, runner_up = result.top[None], result.star[None], result.runner_up[None]
    u_top, u_star = top + bias, star + bias
    r_star = clipped(config, u_star)

    empty = top == -jnp.inf
    # Adding b is monotone, so the shifted scores are finite if the greatest is; no NaN passes.
    invalid = ~(u_top < jnp.inf)
    if target is not None:
        invalid |= ((target < 0) | (target >= S))[None]
    empty = jnp.broadcast_to(empty, invalid.shape)
    unread = empty | invalid
    live = ~unread & (r_star >= _SMALLEST)

    s_p = jnp.where(live[..., None], jnp.moveaxis(result.sums, 0, -1), jnp.inf)
    active = jnp.where(live, result.active, 0)
    margin = jnp.where(unread, 0.0, star - runner_up)
    rho = jnp.where(live, margin / jnp.where(live, u_star, 1.0), 0.0)
    # With a distractor above the threshold rho < 1, but rounding can reach 1.
    below_one = 1.0 - float(np.finfo(np.float32).epsneg)
    rho = jnp.where(active > 0, jnp.minimum(rho, below_one), rho)

    status = jnp.where(u_star >= config.cap, int(Status.SATURATED), int(Status.ACTIVE))
    status = jnp.where(live, status, int(Status.DEAD))
    status = jnp.where(invalid, int(Status.INVALID), status)
    status = jnp.where(empty, int(Status.EMPTY), status)
    return RowStats(
        s_p=s_p,
        target_mass=1.0 / (1.0 + s_p),
        margin=margin,
        relative_margin=rho,
        active=active,
        argmax=jnp.where(unread, -1, result.argmax[None]).astype(jnp.int32),
        status=status.astype(jnp.int32),
        u_star=jnp.where(unread, 0.0, u_star),
        r_star=jnp.where(live, r_star, 0.0),
    )
