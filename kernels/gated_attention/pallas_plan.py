"""What the Triton kernels of `gated_attention` share: their tiles, their inputs, their loads.

A program owns one tile of queries (or of keys) and walks over tiles of the other side. Arrays keep
their `[B, T, N, H]` layout and any length: a tile may reach past the end of an array, and there a
load reads zero and a store writes nothing. The key head of a query head is found by block index,
so grouped heads are never copied.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
import jax.numpy as jnp

from kernels import dispatch, noise, tuning
from kernels.gated_attention.config import Config
from kernels.visibility import Visibility, key_blocks, query_blocks

OP = "gated_attention"
KERNELS = ("forward", "queries", "keys")

# The least side of a tile: what a tensor core multiplies.
_LEAST = 16

# By head width: queries, keys, warps and stages of a tile of the kernels. Compiled for an H200, no
# main loop among them spills a register. float32 products are exact, so no tensor core makes them
# and their tiles are small.
_TENSOR_CORE_TILES: Mapping[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    128: ((128, 64, 8, 2), (128, 64, 8, 2), (32, 128, 8, 2)),
    256: ((128, 64, 8, 2), (128, 32, 8, 1), (64, 32, 8, 1)),
}
_EXACT_TILES: Mapping[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    64: ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    128: ((32, 32, 8, 1), (16, 32, 8, 1), (32, 32, 8, 1)),
    256: ((16, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static sizes of one kernel: of the call, then of a tile (X queries, Y keys)."""

    config: Config
    causal: bool
    T: int
    S: int
    N: int
    K: int
    H: int
    X: int
    Y: int
    warps: int
    stages: int

    @property
    def G(self) -> int:
        """Query heads to a key head."""
        return self.N // self.K

    @property
    def width(self) -> int:
        """The head width in a tile, a power of two."""
        return _power_of_two(self.H)

    @property
    def query_tiles(self) -> int:
        """The last may reach past T."""
        return -(-self.T // self.X)

    @property
    def key_tiles(self) -> int:
        """The last may reach past S."""
        return -(-self.S // self.Y)


class Inputs(NamedTuple):
    """What every kernel reads: the arrays, their block specs, or the references to them.

    `words_3` uint32 is the seed and the origin (batch, head) of the noise; the window and the
    segments are None where the call has none.
    """

    words_3: Any
    bias_N: Any
    start_B: Any
    window_1: Any
    query_segments_BT: Any
    key_segments_BS: Any
    q_BTNH: Any
    k_BSKH: Any
    v_BSKH: Any


def lacks(config: Config, H: int) -> str:
    """Why the kernels do not serve a call; empty if they do."""
    if config.renormalise:
        return "has no renormalise=True; pass implementation='xla'"
    widest = max(_TENSOR_CORE_TILES)
    if widest < H:
        return f"serves heads up to {widest} wide and this is {H}; pass implementation='xla'"
    return ""


def _power_of_two(size: int) -> int:
    return max(1 << max(size - 1, 0).bit_length(), _LEAST)


def plan(config: Config, causal: bool, q_BTNH: jax.Array, k_BSKH: jax.Array, kernel: str) -> Plan:
    """The plan of one of `KERNELS`: the last two give the gradients of q, and of k and v."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    sizes = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H}
    chosen = tuning.tiles(
        OP, config.target.device_kind, sizes, q_BTNH.dtype, _heuristic(q_BTNH.dtype, H)
    )
    X, Y, warps, stages = (
        chosen[f"{kernel}_{what}"] for what in ("queries", "keys", "warps", "stages")
    )
    X, Y = config.blocks or (X, Y)
    own = Y if kernel == "keys" else X
    X, Y = min(X, _power_of_two(T)), min(Y, _power_of_two(S))
    # A short tile leaves nothing to do for some of its warps.
    warps = max(1, warps * (Y if kernel == "keys" else X) // own)
    return Plan(config, causal, T, S, N, K, H, X, Y, warps, stages)


def _heuristic(dtype: Any, H: int) -> dict[str, int]:
    table = _TENSOR_CORE_TILES if dispatch.exact_dot(dtype) is None else _EXACT_TILES
    width = min(each for each in table if each >= H)
    return {
        f"{kernel}_{what}": size
        for kernel, sizes in zip(KERNELS, table[width], strict=True)
        for what, size in zip(("queries", "keys", "warps", "stages"), sizes, strict=True)
    }


def inputs(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    bias_N: jax.Array,
    seed: jax.Array,
    origin: jax.Array,
    visibility: Visibility,
) -> Inputs:
    """The arrays of a call."""
    words = [jnp.asarray(x).astype(jnp.uint32) for x in (seed, origin[0], origin[1])]
    return Inputs(
        words_3=jnp.stack(words),
        bias_N=bias_N,
        start_B=visibility.start_B,
        window_1=None if visibility.window is None else visibility.window[None],
        query_segments_BT=visibility.query_segments_BT,
        key_segments_BS=visibility.key_segments_BS,
        q_BTNH=q_BTNH,
        k_BSKH=k_BSKH,
        v_BSKH=v_BSKH,
    )


class Specs(NamedTuple):
    """The grid of a kernel, the specs of its inputs, and those of what has an entry per query.

    A program is (query head, query tile, batch row) or (key head, key tile, batch row).
    """

    grid: tuple[int, int, int]
    inputs: Inputs
    rows_BTNH: pl.BlockSpec
    rows_BNT: pl.BlockSpec
    heads_BN: pl.BlockSpec


def query_major(plan: Plan, inputs: Inputs) -> Specs:
    """A program has one tile of queries, and every key.

    The last queries see the most keys under a causal mask, and start first.
    """
    last = plan.query_tiles - 1
    rows_BTNH = pl.BlockSpec((None, plan.X, None, plan.width), lambda n, i, b: (b, last - i, n, 0))
    keys = pl.BlockSpec(
        (None, plan.key_tiles * plan.Y, None, plan.width),
        lambda n, i, b: (b, 0, lax.div(n, jnp.int32(plan.G)), 0),
    )
    specs = Inputs(
        words_3=pl.BlockSpec((3,), lambda n, i, b: (0,)),
        bias_N=pl.BlockSpec((1,), lambda n, i, b: (n,)),
        start_B=pl.BlockSpec((1,), lambda n, i, b: (b,)),
        window_1=pl.BlockSpec((1,), lambda n, i, b: (0,)),
        query_segments_BT=pl.BlockSpec((None, plan.X), lambda n, i, b: (b, last - i)),
        key_segments_BS=pl.BlockSpec((None, plan.key_tiles * plan.Y), lambda n, i, b: (b, 0)),
        q_BTNH=rows_BTNH,
        k_BSKH=keys,
        v_BSKH=keys,
    )
    return Specs(
        (plan.N, plan.query_tiles, inputs.q_BTNH.shape[0]),
        where_given(specs, inputs),
        rows_BTNH,
        pl.BlockSpec((None, None, plan.X), lambda n, i, b: (b, n, last - i)),
        pl.BlockSpec((None, 1), lambda n, i, b: (b, n)),
    )


def key_major(plan: Plan, inputs: Inputs) -> Specs:
    """A program has one tile of keys, and every query of the heads that read them."""
    rows, G = plan.query_tiles * plan.X, plan.G
    rows_BTNH = pl.BlockSpec((None, rows, G, plan.width), lambda k, j, b: (b, 0, k, 0))
    keys = pl.BlockSpec((None, plan.Y, None, plan.width), lambda k, j, b: (b, j, k, 0))
    specs = Inputs(
        words_3=pl.BlockSpec((3,), lambda k, j, b: (0,)),
        bias_N=pl.BlockSpec((G,), lambda k, j, b: (k,)),
        start_B=pl.BlockSpec((1,), lambda k, j, b: (b,)),
        window_1=pl.BlockSpec((1,), lambda k, j, b: (0,)),
        query_segments_BT=pl.BlockSpec((None, rows), lambda k, j, b: (b, 0)),
        key_segments_BS=pl.BlockSpec((None, plan.Y), lambda k, j, b: (b, j)),
        q_BTNH=rows_BTNH,
        k_BSKH=keys,
        v_BSKH=keys,
    )
    return Specs(
        (plan.K, plan.key_tiles, inputs.q_BTNH.shape[0]),
        where_given(specs, inputs),
        rows_BTNH,
        pl.BlockSpec((None, G, rows), lambda k, j, b: (b, k, 0)),
        pl.BlockSpec((None, G), lambda k, j, b: (b, k)),
    )


def where_given(specs: Any, inputs: Any) -> Any:
    """`specs`, a named tuple, with None where `inputs` has it."""
    pairs = zip(specs, inputs, strict=True)
    return type(specs)(*(None if array is None else spec for spec, array in pairs))


def walk(ranges: list[tuple[Any, Any, bool]], body: Any, carry: Any) -> Any:
    """`carry` after `body(index, carry, hidden)` for each index of the ranges in turn."""
    for low, high, hidden in ranges:
        carry = lax.fori_loop(low, high, lambda i, c, hidden=hidden: body(i, c, hidden), carry)
    return carry


def key_ranges(plan: Plan, refs: Inputs, first: jax.Array) -> list[tuple[Any, Any, bool]]:
    """Half-open ranges of the key tiles that the queries from position `first` on see.

    The third entry tells whether pairs of these tiles may be hidden: at the far edge of the window,
    on the diagonal, past the last key. Tiles between the edges are not masked.
    """
    window = None if refs.window_1 is None else refs.window_1[0]
    low, high = key_blocks(plan.causal, window, first, plan.X, plan.S, plan.Y)
    if refs.key_segments_BS is not None:
        return [(low, high, True)]
    whole_low, whole_high = low, jnp.int32(plan.S // plan.Y)
    if plan.causal:
        whole_high = jnp.minimum(whole_high, _down(first + 1, plan.Y))
    if window is not None:
        whole_low = _up(first + plan.X - window, plan.Y)
    after = plan.causal or plan.S % plan.Y != 0
    return _cut(low, whole_low, whole_high, high, window is not None, after)


def query_ranges(plan: Plan, refs: Inputs, first: jax.Array) -> list[tuple[Any, Any, bool]]:
    """As `key_ranges`, of the query tiles that see the keys from position `first` on.

    Queries past the last are zeros, and are not masked.
    """
    window = None if refs.window_1 is None else refs.window_1[0]
    start = refs.start_B[0]
    low, high = query_blocks(plan.causal, window, start, first, plan.Y, plan.T, plan.X)
    if refs.key_segments_BS is not None:
        return [(low, high, True)]
    whole_low, whole_high = low, high
    if plan.causal:
        whole_low = _up(first + (plan.Y - 1) - start, plan.X)
    if window is not None:
        # The window may be as large as an int32 holds, and must not wrap.
        past = first - start
        reach = past + jnp.minimum(window, plan.query_tiles * plan.X - past)
        whole_high = jnp.minimum(high, _down(reach, plan.X))
    return _cut(low, whole_low, whole_high, high, plan.causal, window is not None)


def _cut(low, whole_low, whole_high, high, before: bool, after: bool):
    whole_low = jnp.clip(whole_low, low, high)
    whole_high = jnp.clip(whole_high, whole_low, high)
    ranges = [(whole_low, whole_high, False)]
    if before:
        ranges.insert(0, (low, whole_low, True))
    if after:
        ranges.append((whole_high, high, True))
    return ranges


def _down(position: jax.Array, block: int) -> jax.Array:
    return lax.div(jnp.maximum(position, 0), jnp.int32(block))


def _up(position: jax.Array, block: int) -> jax.Array:
    return lax.div(jnp.maximum(position, 0) + (block - 1), jnp.int32(block))


def seen(
    plan: Plan, refs: Inputs, query: jax.Array, key: jax.Array, segments: tuple[Any, Any]
) -> jax.Array | None:
    """Where a tile is visible; None where all of it is.

    Args:
      segments: those of the queries and of the keys, laid as `query` and `key`; or None, None.
    """
    window = None if refs.window_1 is None else refs.window_1[0]
    visibility = Visibility(plan.causal, refs.start_B, window, None, None)
    mask = visibility.tile(query, key, *segments)
    if plan.S % plan.Y:
        mask = key < plan.S if mask is None else mask & (key < plan.S)
    return mask


def entries(first: jax.Array, count: int, axis: int) -> jax.Array:
    """`first .. first + count - 1` along `axis` of a tile, the other axis being 1."""
    shape = (count, 1) if axis == 0 else (1, count)
    return first + lax.broadcasted_iota(jnp.int32, shape, axis)


def inside(first: jax.Array, count: int, length: int) -> jax.Array | None:
    """Which of `first .. first + count - 1` are below `length`; None where whole tiles fit."""
    if length % count == 0:
        return None
    return first + lax.broadcasted_iota(jnp.int32, (count,), 0) < length


def matrix_inside(plan: Plan, rows_inside: jax.Array | None, rows: int) -> jax.Array | None:
    """Where a tile `[rows, width]` lies inside an array `[., H]`; None where it all does."""
    shape = (rows, plan.width)
    mask = None if rows_inside is None else jnp.broadcast_to(rows_inside[:, None], shape)
    if plan.width != plan.H:
        columns = lax.broadcasted_iota(jnp.int32, shape, 1) < plan.H
        mask = columns if mask is None else mask & columns
    return mask


def load(at: Any, mask: jax.Array | None) -> jax.Array:
    """What the reference `at` points to, zero outside of `mask`."""
    if mask is None:
        return plt.load(at)
    return plt.load(at, mask=mask, other=jnp.zeros((), at.dtype))


def load_along(at: Any, mask: jax.Array | None, axis: int) -> jax.Array:
    """The vector that `at` points to, laid along `axis` of a tile."""
    vector = load(at, mask)
    return vector[:, None] if axis == 0 else vector[None, :]


def store(at: Any, value: jax.Array, mask: jax.Array | None) -> None:
    """Writes `value` inside of `mask`."""
    plt.store(at, value.astype(at.dtype), mask=mask)


def stream(refs: Inputs, b: jax.Array, n: jax.Array) -> jax.Array:
    """The noise word of query head `n` of batch row `b` of this call."""
    seed, batch, head = refs.words_3[0], refs.words_3[1], refs.words_3[2]
    return noise.stream(seed, b.astype(jnp.uint32) + batch, n.astype(jnp.uint32) + head)


def product(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """Contracts an axis of each; operands in the dtype of `right`, sums in float32."""
    return lax.dot_general(
        left.astype(right.dtype),
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=dispatch.exact_dot(right.dtype),
        preferred_element_type=jnp.float32,
    )
