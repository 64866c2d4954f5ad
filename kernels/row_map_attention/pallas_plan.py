"""What the Triton kernels of `row_map_attention` share: inputs, grids, loads, and ranges of tiles.

A program owns one tile of queries of a head, or one tile of keys of a key head, and walks over the
tiles of the other side. Arrays keep their layout and any length: where a tile reaches past the end
of an array, a load reads zero (or `other`) and a store writes nothing. The key head of a query head
is found by block index, so that grouped heads are never copied.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
import jax.numpy as jnp

from kernels import dispatch
from kernels.row_map_attention import tile
from kernels.row_map_attention.config import Call, Config, Tiles
from kernels.visibility import Visibility, key_blocks, query_blocks

WIDTHS = (16, 32, 64, 128, 256)


def lacks(H: int) -> str:
    """Why the kernels do not serve heads of width H; empty if they do."""
    told = ", ".join(map(str, WIDTHS))
    return "" if H in WIDTHS else f"serves head widths {told} and this is {H}; pass 'xla'"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static in one kernel: sizes of the call, and of a tile (X queries, Y keys).

    `exact` tells float32 inputs.
    """

    config: Config
    causal: bool
    T: int
    S: int
    N: int
    K: int
    H: int
    exact: bool
    tiles: Tiles

    @property
    def X(self) -> int:
        """Queries of a tile."""
        return self.tiles.block_q

    @property
    def Y(self) -> int:
        """Keys of a tile."""
        return self.tiles.block_k

    @property
    def G(self) -> int:
        """Query heads to a key head."""
        return self.N // self.K

    @property
    def query_tiles(self) -> int:
        """The last may reach past T."""
        return -(-self.T // self.X)

    @property
    def key_tiles(self) -> int:
        """The last may reach past S."""
        return -(-self.S // self.Y)


class Inputs(NamedTuple):
    """What every kernel reads: arrays, then their block specs, then references to them.

    Window, segments and heads (int32) are None where the call has none.
    """

    start_B: Any
    window_1: Any
    query_segments_BT: Any
    key_segments_BS: Any
    bias_N: Any
    heads_N: Any
    q_BTNH: Any
    k_BSKH: Any
    v_BSKH: Any


def plan(config: Config, tiles: Tiles, call: Call) -> Plan:
    """The plan of a kernel with these tiles."""
    _, T, N, H = call.q_BTNH.shape
    _, S, K, _ = call.k_BSKH.shape
    exact = call.q_BTNH.dtype == jnp.float32
    return Plan(config, call.seen.causal, T, S, N, K, H, exact, tiles)


def inputs(call: Call) -> Inputs:
    """The arrays of a call, as the kernels read them."""
    seen, heads_N = call.seen, call.heads_N
    return Inputs(
        start_B=seen.start_B,
        window_1=None if seen.window is None else seen.window[None],
        query_segments_BT=seen.query_segments_BT,
        key_segments_BS=seen.key_segments_BS,
        bias_N=call.bias_N,
        heads_N=None if heads_N is None else heads_N.astype(jnp.int32),
        q_BTNH=call.q_BTNH,
        k_BSKH=call.k_BSKH,
        v_BSKH=call.v_BSKH,
    )


def query_major(plan: Plan, inputs: Inputs) -> tuple[tuple[int, ...], Inputs, dict[str, Any]]:
    """Grid (N, query tiles, B), specs of the inputs, and specs of what a query tile has.

    Later queries see more keys under a causal mask, and start first: the short ones fill the gaps
    at the end.
    """
    last = plan.query_tiles - 1
    keys = pl.BlockSpec(
        (None, plan.key_tiles * plan.Y, None, plan.H),
        lambda n, i, b: (b, 0, lax.div(n, jnp.int32(plan.G)), 0),
    )
    per_tile = pl.BlockSpec((None, plan.X, None, plan.H), lambda n, i, b: (b, last - i, n, 0))
    specs = Inputs(
        start_B=pl.BlockSpec((1,), lambda n, i, b: (b,)),
        window_1=pl.BlockSpec((1,), lambda n, i, b: (0,)),
        query_segments_BT=pl.BlockSpec((None, plan.X), lambda n, i, b: (b, last - i)),
        key_segments_BS=pl.BlockSpec((None, plan.key_tiles * plan.Y), lambda n, i, b: (b, 0)),
        bias_N=pl.BlockSpec((1,), lambda n, i, b: (n,)),
        heads_N=pl.BlockSpec((1,), lambda n, i, b: (n,)),
        q_BTNH=per_tile,
        k_BSKH=keys,
        v_BSKH=keys,
    )
    own = {
        "BTNH": per_tile,
        "BNT": pl.BlockSpec((None, None, plan.X), lambda n, i, b: (b, n, last - i)),
        "BT": pl.BlockSpec((None, plan.X), lambda n, i, b: (b, last - i)),
    }
    B = inputs.q_BTNH.shape[0]
    return (plan.N, plan.query_tiles, B), _where_given(specs, inputs), own


def key_major(plan: Plan, inputs: Inputs) -> tuple[tuple[int, ...], Inputs, dict[str, Any]]:
    """Grid (K, key tiles, B), specs of the inputs, and of what the queries of its heads have."""
    rows, G = plan.query_tiles * plan.X, plan.G
    keys = pl.BlockSpec((None, plan.Y, None, plan.H), lambda k, j, b: (b, j, k, 0))
    queries = pl.BlockSpec((None, rows, G, plan.H), lambda k, j, b: (b, 0, k, 0))
    specs = Inputs(
        start_B=pl.BlockSpec((1,), lambda k, j, b: (b,)),
        window_1=pl.BlockSpec((1,), lambda k, j, b: (0,)),
        query_segments_BT=pl.BlockSpec((None, rows), lambda k, j, b: (b, 0)),
        key_segments_BS=pl.BlockSpec((None, plan.Y), lambda k, j, b: (b, j)),
        bias_N=pl.BlockSpec((G,), lambda k, j, b: (k,)),
        heads_N=pl.BlockSpec((G,), lambda k, j, b: (k,)),
        q_BTNH=queries,
        k_BSKH=keys,
        v_BSKH=keys,
    )
    own = {"BTNH": queries, "BNT": pl.BlockSpec((None, G, rows), lambda k, j, b: (b, k, 0))}
    B = inputs.q_BTNH.shape[0]
    return (plan.K, plan.key_tiles, B), _where_given(specs, inputs), own


def _where_given(specs: Inputs, inputs: Inputs) -> Inputs:
    pairs = zip(specs, inputs, strict=True)
    return Inputs(*(None if array is None else spec for spec, array in pairs))


def key_ranges(plan: Plan, refs: Inputs, first: jax.Array) -> list[tuple[Any, Any, bool]]:
    """Half-open ranges of the key tiles that queries from position `first` on see.

    The third entry tells whether tiles of the range may hold hidden pairs.
    """
    window = None if refs.window_1 is None else refs.window_1[0]
    low, high = key_blocks(plan.causal, window, first, plan.X, plan.S, plan.Y)
    if refs.key_segments_BS is not None:
        return [(low, high, True)]
    full_low, full_high = low, jnp.int32(plan.S // plan.Y)
    if plan.causal:
        full_high = jnp.minimum(full_high, lax.div(first + 1, jnp.int32(plan.Y)))
    if window is not None:
        # The tile's first key is seen by its last query.
        full_low = _ceiling(first + plan.X - window, plan.Y)
    edge = plan.causal or plan.S % plan.Y != 0
    return _cut(low, full_low, full_high, high, window is not None, edge)


def query_ranges(plan: Plan, refs: Inputs, first: jax.Array) -> list[tuple[Any, Any, bool]]:
    """As `key_ranges`, of the query tiles that see keys from position `first` on."""
    window = None if refs.window_1 is None else refs.window_1[0]
    start = refs.start_B[0]
    low, high = query_blocks(plan.causal, window, start, first, plan.Y, plan.T, plan.X)
    if refs.key_segments_BS is not None:
        return [(low, high, True)]
    full_low, full_high = low, jnp.int32(plan.T // plan.X)
    if plan.causal:
        full_low = _ceiling(first + (plan.Y - 1) - start, plan.X)
    if window is not None:
        past = jnp.maximum(first + window - start, 0)
        full_high = jnp.minimum(full_high, lax.div(past, jnp.int32(plan.X)))
    edge = window is not None or plan.T % plan.X != 0
    return _cut(low, full_low, full_high, high, plan.causal, edge)


def _cut(low, full_low, full_high, high, before: bool, after: bool):
    full_low = jnp.clip(full_low, low, high)
    full_high = jnp.clip(full_high, full_low, high)
    ranges = [(full_low, full_high, False)]
    if before:
        ranges.insert(0, (low, full_low, True))
    if after:
        ranges.append((full_high, high, True))
    return ranges


def _ceiling(x: jax.Array, block: int) -> jax.Array:
    return lax.div(jnp.maximum(x, 0) + (block - 1), jnp.int32(block))


def mask(plan: Plan, refs: Inputs, row: Any, column: Any, axis: int, segments: Any) -> Any:
    """Which keys of a tile its queries see; None if they see all.

    Args:
      row: index of the tile's first query, `column` that of its first key.
      axis: of the queries in the tile.
      segments: of the tile's queries and keys, as vectors; or None.
    """
    query = indices(row, plan.X, axis)
    key = indices(column, plan.Y, 1 - axis)
    window = None if refs.window_1 is None else refs.window_1[0]
    laid = (None, None)
    if segments is not None:
        laid = (along(segments[0], axis), along(segments[1], 1 - axis))
    visibility = Visibility(plan.causal, refs.start_B, window, None, None)
    seen = visibility.tile(refs.start_B[0] + query, key, *laid)
    if plan.S % plan.Y:
        seen = key < plan.S if seen is None else seen & (key < plan.S)
    # What a program by keys has read past the end of a row's numbers must reach no sum.
    if axis == 1 and plan.T % plan.X:
        seen = query < plan.T if seen is None else seen & (query < plan.T)
    return seen


def indices(first: Any, count: int, axis: int) -> jax.Array:
    """`first .. first + count - 1` along `axis` of a tile, whose other axis is 1."""
    return first + lax.broadcasted_iota(jnp.int32, (count, 1) if axis == 0 else (1, count), axis)


def along(x: jax.Array, axis: int) -> jax.Array:
    """A vector laid along `axis` of a tile."""
    return x[:, None] if axis == 0 else x[None, :]


def vector(at: Any, first: Any, count: int, length: int, other: Any = 0) -> jax.Array:
    """The vector that `at` points to, its first entry being number `first` of `length`."""
    if length % count == 0:
        return plt.load(at)
    inside = first + lax.broadcasted_iota(jnp.int32, (count,), 0) < length
    return plt.load(at, mask=inside, other=jnp.asarray(other, at.dtype))


def matrix(at: Any, first: Any, rows: int, width: int, length: int) -> jax.Array:
    """As `vector`, of rows of `width` numbers."""
    if length % rows == 0:
        return plt.load(at)
    inside = jnp.broadcast_to(indices(first, rows, 0) < length, (rows, width))
    return plt.load(at, mask=inside, other=jnp.zeros((), at.dtype))


def put(at: Any, value: jax.Array, first: Any, length: int) -> None:
    """Writes a vector or a matrix to `at`, its first row being number `first` of `length`."""
    value = value.astype(at.dtype)
    if length % value.shape[0] == 0:
        plt.store(at, value)
        return
    shape = (value.shape[0],) + (1,) * (value.ndim - 1)
    inside = first + lax.broadcasted_iota(jnp.int32, shape, 0) < length
    plt.store(at, value, mask=jnp.broadcast_to(inside, value.shape))


def product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Contracts an axis of each; operands in the dtype of y, sums in float32."""
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        (((x_axis,), (y_axis,)), ((), ())),
        precision=dispatch.exact_dot(y.dtype),
        preferred_element_type=jnp.float32,
    )


def diagonal(x: jax.Array) -> jax.Array:
    """The diagonal of a square tile, as a vector along its rows."""
    rows = x.shape[0]
    return jnp.sum(jnp.where(indices(0, rows, 0) == indices(0, rows, 1), x, 0.0), 1)


def elementary(plan: Plan, axis: int) -> tile.Elementary:
    """The functions of the target for tiles with the queries along `axis`."""
    if plan.config.target.interpret:
        return tile.EXACT
    # Row numbers are for a thread few where the rows are queries, and two more of them save an
    # instruction of every score. The rounding that it costs does not fit float32 inputs.
    folded = axis == 0 and not plan.exact
    return _FOLDED if folded else _INSTRUCTIONS


def _instruction(body: str, arguments: int) -> Any:
    """A function of float32 arrays, elementwise by PTX: $0 is the result, $1 .. the arguments."""

    def apply(*args: Any) -> jax.Array:
        shape = jnp.broadcast_shapes(*map(jnp.shape, args))
        (result,) = plt.elementwise_inline_asm(
            body,
            args=[
                jnp.broadcast_to(x, shape) if jnp.ndim(x) else jnp.full(shape, x, jnp.float32)
                for x in args
            ],
            constraints=",".join(["=f"] + ["f"] * arguments),
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        )
        return result

    return apply


_plus = _instruction("fma.rn.f32 $0, $1, $2, $3;", 3)
_plus_saturated = _instruction("fma.rn.sat.f32 $0, $1, $2, $3;", 3)
_times_saturated = _instruction("mul.rn.sat.f32 $0, $1, $2;", 2)

# The first three have relative errors of 2^-22 and less (PTX ISA). Triton makes no multiply-add of
# a product and a sum by itself.
_INSTRUCTIONS = tile.Elementary(
    exp2=_instruction("ex2.approx.ftz.f32 $0, $1;", 1),
    log2=_instruction("lg2.approx.ftz.f32 $0, $1;", 1),
    reciprocal=_instruction("rcp.approx.ftz.f32 $0, $1;", 1),
    plus=_plus,
    share=lambda u, pivot: _times_saturated(_plus(u.z, u.gain, u.offset), pivot),
    less=_instruction("{.reg .f32 x; neg.f32 x, $1; fma.rn.f32 $0, x, $2, $1;}", 2),
)
_FOLDED = dataclasses.replace(
    _INSTRUCTIONS,
    share=lambda u, pivot: _plus_saturated(u.z, u.gain * pivot, u.offset * pivot),
)
