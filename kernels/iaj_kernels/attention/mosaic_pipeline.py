"""Warp-specialised attention forward pass on a Hopper GPU, by Pallas' Mosaic lowering.

After FlashAttention-3 (Shah et al., 2024, section 3.1): warpgroups with different work.

1. A producer warpgroup copies tiles of keys and values into a ring in shared memory, and waits for
   a slot of the ring to be free.
2. Two consumer warpgroups own 64 queries each. For a tile of keys they compute the scores, update
   their row statistics, multiply the weights by the values, and free the slot. One may multiply
   while the other updates; no barrier makes them take turns.
3. Both walk over the same tiles, in order: those that the window cuts, those that every query sees
   whole, and those on the diagonal. Only the first and the last are masked.
4. At the end a consumer scales its output, and stores a few numbers of each row.

The operation supplies the map from scores to weights: the functions of `Stream`, on arrays in the
layouts of a warpgroup. A layout has no axes of size 1, so `along` broadcasts a vector to a matrix.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from iaj_kernels.attention.visibility import Visibility
from iaj_kernels.core import dispatch

_CONSUMERS = 2
_PRODUCER = _CONSUMERS
# Queries of a consumer: the rows that a warpgroup's tensor-core instruction multiplies.
_X = 64
_Y = 128
_WIDTHS = (64, 128)
_STAGES = 2
# Registers of a thread; the warpgroups, of 128 threads each, share the 65536 of a multiprocessor.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24
# Parts of the device names of GPUs with these instructions.
_HOPPER = ("H100", "H200", "H20", "H800", "GH200")

# The interpreter of jax 0.11 miscounts barriers.
_INTERPRETER = (
    getattr(plgpu, "InterpretGPUParams", None) if jax.__version_info__ >= (0, 12) else None
)

_MATRIX = plgpu.Layout.WGMMA
_ROWS = _MATRIX.reduce(1)
_COLUMNS = _MATRIX.reduce(0)


class Place(NamedTuple):
    """Batch row, head and queries of the rows that a consumer owns.

    Attributes:
      batch: index of the batch row, a scalar; `head` likewise.
      query_X: the positions of its queries.
      visible_X: how many keys each of them sees, at least 1.
    """

    batch: jax.Array
    head: jax.Array
    query_X: jax.Array
    visible_X: jax.Array


class Stream(NamedTuple):
    """Online update of the rows of one consumer by tiles of scores; all float32.

    Attributes:
      rows: statistics of each row before its first tile, a tree of `[X]`.
      absorb: function of the rows, the products q.k `[X, Y]`, -inf where the key is hidden, and the
        positions `[Y]` of the keys. Returns the rows, the weights `[X, Y]` and the factor `[X]`
        that rescales the running sum of weights times values; None where it is 1.
      finish: function of the rows. Returns the factor `[X]` of the output, and the numbers that are
        stored for each row.
    """

    rows: Any
    absorb: Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array, jax.Array | None]]
    finish: Callable[[Any], tuple[jax.Array, tuple[jax.Array, ...]]]


class Operation(NamedTuple):
    """What an operation supplies to the schedule.

    Attributes:
      name: `<op>_<pass>`, as a profile shows it.
      numbers: how many numbers `Stream.finish` stores for a row.
      stream: the `Stream` of a place, from references to the operation's own arrays.
    """

    name: str
    numbers: int
    stream: Callable[..., Stream]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static sizes of a call, and X queries by Y keys of a consumer's tile."""

    operation: Operation
    interpret: bool
    causal: bool
    windowed: bool
    T: int
    N: int
    K: int
    H: int
    X: int = _X
    Y: int = _Y
    stages: int = _STAGES

    @property
    def queries(self) -> int:
        """Queries of a program."""
        return _CONSUMERS * self.X

    @property
    def programs(self) -> int:
        """Programs along the query axis."""
        return self.T // self.queries


class _Ring(NamedTuple):
    """Tiles `[stages, Y, H]` in shared memory, each with a barrier for full and one for free."""

    tiles: Any
    full: Any
    free: Any


def unsupported_reason(
    target: dispatch.Target, q_BTNH: jax.Array, k_BSKH: jax.Array, visibility: Visibility
) -> str:
    """Why the schedule does not support a call, whatever the operation; empty if it does."""
    _, T, _, H = q_BTNH.shape
    rows = max(_CONSUMERS * _X, _Y)
    if target.interpret and _INTERPRETER is None:
        return f"needs jax 0.12 or later to be interpreted, and this is {jax.__version__}"
    if not target.interpret and not any(name in target.device_kind for name in _HOPPER):
        return f"needs a Hopper GPU and this is {target.device_kind}; pass implementation=None"
    if visibility.query_segments_BT is not None:
        return "does not support segment_ids; pass implementation=None"
    if k_BSKH.shape[1] != T or visibility.first != 0:
        return "needs as many queries as keys, from position 0 on; pass implementation=None"
    if T % rows:
        return f"needs T to be a multiple of {rows}, and T = {T}; pass implementation=None"
    if H not in _WIDTHS:
        return f"needs a head width of 64 or 128, and H = {H}; pass implementation=None"
    if q_BTNH.dtype != jnp.bfloat16:
        return f"needs bfloat16 arrays, and q is {q_BTNH.dtype}; pass implementation=None"
    return ""


def forward(
    operation: Operation,
    target: dispatch.Target,
    own: tuple[jax.Array, ...],
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    visibility: Visibility,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Attention output `out_BTNH`, and the stored numbers of each row, float32 `[B, N, T]`.

    Args:
      own: the arrays that `operation.stream` reads.
    """
    B, T, N, H = q_BTNH.shape
    causal, window = visibility.causal, visibility.window
    plan = _Plan(operation, target.interpret, causal, window is not None, T, N, k_BSKH.shape[2], H)
    window_1 = () if window is None else (window[None],)
    number_BNT = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    out_BTNH, *numbers_BNT = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=(
            jax.ShapeDtypeStruct(q_BTNH.shape, v_BSKH.dtype),
            *[number_BNT] * operation.numbers,
        ),
        grid=(N, plan.programs, B),
        grid_names=("heads", "queries", "batch"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=f"{operation.name}_m{plan.queries}_n{plan.Y}",
        interpret=_interpreter(target),
        # What their absence means differs between versions of jax.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(q_BTNH, k_BSKH, v_BSKH, *window_1, *own)
    return out_BTNH, tuple(numbers_BNT)


def _interpreter(target: dispatch.Target) -> Any:
    """Interpreter that raises at a race of warpgroups or copies, and fills new memory with NaN."""
    if _INTERPRETER is None or not target.interpret:
        return None
    return _INTERPRETER(detect_races=True)


def along(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """The vector `x` along an axis of a matrix, in one step: no layout has axes of size 1."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def instruction(name: str, x_XY: jax.Array) -> jax.Array:
    """`x_XY`, a tile of scores, by the PTX instruction of this name, which has one operand.

    Not interpreted.
    """

    @plgpu.inline_mgpu(
        arg_types=(_MATRIX,),
        return_type=plgpu.ShapeDtypeStruct(x_XY.shape, x_XY.dtype, layout=_MATRIX),
    )
    def apply(_, x):
        return x._pointwise(x._lift_fast_instr(name))

    return apply(x_XY)


def _kernel(plan: _Plan, q_BTNH, k_BSKH, v_BSKH, *others) -> None:
    X, Y, H, numbers = plan.X, plan.Y, plan.H, plan.operation.numbers
    first_own, first_output = int(plan.windowed), len(others) - 1 - numbers
    own, (out_BTNH, *numbers_BNT) = others[first_own:first_output], others[first_output:]
    window = others[0][0] if plan.windowed else None

    def matrices(count: int, rows: int, columns: int) -> Any:
        # As the tensor cores read them: rows of 128 bytes, swizzled.
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((count, rows, columns), jnp.bfloat16, transforms=transforms)

    def ring() -> _Ring:
        full = plgpu.Barrier(num_barriers=plan.stages)
        free = plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=plan.stages)
        return _Ring(matrices(plan.stages, Y, H), full, free)

    def body(q, q_full, keys: _Ring, values: _Ring, of_rows, weights) -> None:
        group = lax.axis_index("warpgroup")

        @pl.when(group == _PRODUCER)
        def _():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            _produce(plan, window, k_BSKH, v_BSKH, keys, values)

        @pl.when(group < _CONSUMERS)
        def _():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            n, b = lax.axis_index("heads"), lax.axis_index("batch")
            first = _first(plan) + group * X
            own_BTN = (b, pl.ds(first, X), n)
            plgpu.copy_gmem_to_smem(q_BTNH.at[own_BTN], q.at[group], q_full.at[group])
            plgpu.barrier_wait(q_full.at[group])
            query_X = first + plgpu.broadcasted_iota(jnp.int32, (X,), 0, layout=_ROWS)
            place = Place(b, n, query_X, _visible(plan, window, query_X))
            stream = plan.operation.stream(place, *own)
            own_weights = None if weights is None else weights.at[group]
            rows, sum_XH = _consume(
                plan, window, place, stream, q.at[group], keys, values, own_weights
            )
            scale_X, numbers_X = stream.finish(rows)
            q[group] = (sum_XH * along(scale_X, (X, H), 0)).astype(q.dtype)
            for i, number_X in enumerate(numbers_X):
                of_rows[group, i] = number_X
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q.at[group], out_BTNH.at[own_BTN])
            for i, ref in enumerate(numbers_BNT):
                plgpu.copy_smem_to_gmem(of_rows.at[group, i], ref.at[b, n, pl.ds(first, X)])
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        body,
        matrices(_CONSUMERS, X, H),
        plgpu.Barrier(num_barriers=_CONSUMERS),
        ring(),
        ring(),
        plgpu.SMEM((_CONSUMERS, numbers, X), jnp.float32),
        matrices(_CONSUMERS, X, Y) if plan.interpret else None,
        collective_axes="warpgroup",
    )


def _first(plan: _Plan) -> jax.Array:
    """The first query of a program; the last queries see the most keys, and start first."""
    return (plan.programs - 1 - lax.axis_index("queries")) * plan.queries


def _ranges(plan: _Plan, window: jax.Array | None) -> list[tuple[Any, Any, bool]]:
    """Half-open ranges of the tiles of keys that a program reads, each beginning where one ends.

    The third entry tells whether a query of the program may not see a key of the range.
    """
    first, Y = _first(plan), jnp.int32(plan.Y)
    whole = end = jnp.int32(plan.T // plan.Y)
    if plan.causal:
        whole, end = lax.div(first, Y), lax.div(first + (plan.queries + plan.Y - 1), Y)
    ranges = [(jnp.int32(0), whole, False)]
    if window is not None:
        # Keys before `low` no query sees; from `cut` on even the last query sees all.
        low = lax.div(jnp.maximum(first - window + 1, 0), Y)
        cut = lax.div(jnp.maximum(first + plan.queries - window, 0) + (plan.Y - 1), Y)
        cut = jnp.minimum(cut, whole)
        ranges = [(jnp.minimum(low, cut), cut, True), (cut, whole, False)]
    return [*ranges, (whole, end, True)] if plan.causal else ranges


def _visible(plan: _Plan, window: jax.Array | None, query_X: jax.Array) -> jax.Array:
    """`Visibility.counts_BT` of these queries, at least 1."""
    last_X = query_X if plan.causal else jnp.full_like(query_X, plan.T - 1)
    if window is None:
        return last_X + 1
    return jnp.maximum(last_X + 1 - jnp.maximum(query_X - window + 1, 0), 1)


def _mask(
    plan: _Plan, window: jax.Array | None, query_X: jax.Array, key_Y: jax.Array
) -> jax.Array | None:
    """Visibility mask of a tile; None if every query sees every key."""
    shape = (plan.X, plan.Y)
    visibility = Visibility(plan.causal, jnp.int32(0), window, None, None)
    return visibility.tile(along(query_X, shape, 0), along(key_Y, shape, 1))


def _produce(plan: _Plan, window, k_BSKH, v_BSKH, keys: _Ring, values: _Ring) -> None:
    """Fills the rings with the tiles that the program reads, in their order."""
    head = lax.div(lax.axis_index("heads"), jnp.int32(plan.N // plan.K))
    ranges = _ranges(plan, window)
    low, high = ranges[0][0], ranges[-1][1]

    @pl.loop(low, high)
    def _(j):
        slot = lax.rem(j, jnp.int32(plan.stages))
        at_BSK = (lax.axis_index("batch"), pl.ds(j * plan.Y, plan.Y), head)
        for ref, ring in ((k_BSKH, keys), (v_BSKH, values)):
            free = ring.free.at[slot]
            pl.when(j - low >= plan.stages)(functools.partial(plgpu.barrier_wait, free))
            plgpu.copy_gmem_to_smem(ref.at[at_BSK], ring.tiles.at[slot], ring.full.at[slot])


def _consume(
    plan: _Plan,
    window: jax.Array | None,
    place: Place,
    stream: Stream,
    q_XH: Any,
    keys: _Ring,
    values: _Ring,
    weights_XY: Any,
) -> tuple[Any, jax.Array]:
    """The rows after every tile, and their sums of weights times values.

    Args:
      weights_XY: shared memory for the interpreter, which cannot multiply from registers; None on a
        GPU.
    """
    X, Y, H = plan.X, plan.Y, plan.H

    def step(j: jax.Array, carry: Any, masked: bool) -> Any:
        rows, sum_XH = carry
        slot = lax.rem(j, jnp.int32(plan.stages))
        plgpu.barrier_wait(keys.full.at[slot])

        def products(ref):
            plgpu.wgmma(ref, q_XH, keys.tiles.at[slot].transpose((1, 0)))
            return ref[...]

        raw_XY = pl.run_scoped(products, plgpu.ACC((X, Y), jnp.float32))
        plgpu.barrier_arrive(keys.free.at[slot])
        key_Y = j * Y + plgpu.broadcasted_iota(jnp.int32, (Y,), 0, layout=_COLUMNS)
        mask_XY = _mask(plan, window, place.query_X, key_Y) if masked else None
        if mask_XY is not None:
            raw_XY = jnp.where(mask_XY, raw_XY, -jnp.inf)
        rows, weight_XY, decay_X = stream.absorb(rows, raw_XY, key_Y)
        plgpu.barrier_wait(values.full.at[slot])

        def weighted(ref):
            left = weight_XY.astype(jnp.bfloat16)
            if weights_XY is not None:
                weights_XY[...] = left
                plgpu.commit_smem()
                left = weights_XY
            plgpu.wgmma(ref, left, values.tiles.at[slot])
            return ref[...]

        add_XH = pl.run_scoped(weighted, plgpu.ACC((X, H), jnp.float32))
        plgpu.barrier_arrive(values.free.at[slot])
        if decay_X is not None:
            sum_XH *= along(decay_X, (X, H), 0)
        return rows, sum_XH + add_XH

    rows = jax.tree.map(lambda x: plgpu.layout_cast(x, _ROWS), stream.rows)
    sum_XH = plgpu.layout_cast(jnp.zeros((X, H), jnp.float32), _MATRIX)
    carry = rows, sum_XH
    for low, high, masked in _ranges(plan, window):
        carry = lax.fori_loop(low, high, functools.partial(step, masked=masked), carry)
    return carry
