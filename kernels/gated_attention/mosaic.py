"""Bernoulli-gated attention on a Hopper GPU: the forward kernel, by Pallas' Mosaic lowering.

The mathematics and the results of `pallas`, for the calls that training makes most, after the
schedule of FlashAttention-3 (Shah et al., 2024, section 3.1): warpgroups with different work.

1. A producer warpgroup copies tiles of keys and values into a ring in shared memory, and waits for
   a slot of the ring to be free.
2. Two consumer warpgroups own 64 queries each. For a tile of keys they multiply, absorb the scores
   into the online softmax, draw and count gates, multiply by the values, and free the slot. One
   may multiply while the other draws; no barrier makes them take turns.
3. Both walk over the same tiles: those before the diagonal, then those on it, masked.

The gate takes one comparison. With m in [1, 2) the number whose mantissa is the noise, u is
m - (1 - 2^-24), so the gate is open, u > 1 - sigma, where m + sigma > 2 - 2^-24. That bound is half
way between two neighbouring float32 numbers, 2 - 2^-23 and 2: the sum, rounded, is below 2 exactly
where the sum, not rounded, is below the bound.

Never chosen by itself: its interpreted results and its machine code are tested, and no GPU has run
it. The gradients are made by the kernels of `pallas_vjp`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kernels import dispatch, noise
from kernels.gated_attention import pallas_vjp, tile
from kernels.gated_attention.config import Config
from kernels.gated_attention.pallas_plan import OP
from kernels.visibility import Visibility

_CONSUMERS = 2
_PRODUCER = _CONSUMERS
# Queries of a consumer: the rows that a warpgroup's tensor-core instruction multiplies.
_X = 64
_Y = 128
_WIDTHS = (64, 128)
_STAGES = 2
# Of a thread; 128 threads of each warpgroup share the 65536 registers of a multiprocessor.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24
# The GPUs with these instructions, by what their names hold.
_HOPPER = ("H100", "H200", "H20", "H800", "GH200")

# That of jax 0.11 loses count of the barriers.
_INTERPRETER = (
    getattr(plgpu, "InterpretGPUParams", None) if jax.__version_info__ >= (0, 12) else None
)

_MATRIX = plgpu.Layout.WGMMA
_ROWS = _MATRIX.reduce(1)
_COLUMNS = _MATRIX.reduce(0)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static sizes of a call, and X queries by Y keys of a consumer's tile."""

    config: Config
    T: int
    N: int
    K: int
    H: int
    X: int = _X
    Y: int = _Y
    stages: int = _STAGES

    @property
    def queries(self) -> int:
        """Of a program."""
        return _CONSUMERS * self.X

    @property
    def programs(self) -> int:
        """Along the queries."""
        return self.T // self.queries


class _Ring(NamedTuple):
    """Tiles `[stages, Y, H]` in shared memory, and for each a barrier when it is full, and free."""

    tiles: Any
    full: Any
    free: Any


def lacks(config: Config, q_BTNH: jax.Array, k_BSKH: jax.Array, visibility: Visibility) -> str:
    """Why the kernel does not serve a call; empty if it does."""
    _, T, _, H = q_BTNH.shape
    target, rows = config.target, max(_CONSUMERS * _X, _Y)
    if target.interpret and _INTERPRETER is None:
        return f"is interpreted by jax 0.12 and later, and this is {jax.__version__}"
    if not target.interpret and not any(name in target.device_kind for name in _HOPPER):
        return f"needs a Hopper GPU and this is {target.device_kind}; pass implementation=None"
    if config.gate_scale is not None or config.soft_cap is not None or config.renormalise:
        return "has no gate_scale, soft_cap or renormalise; pass implementation=None"
    if not visibility.causal or visibility.window is not None:
        return "serves causal attention without a window; pass implementation=None"
    if visibility.query_segments_BT is not None:
        return "has no segment_ids; pass implementation=None"
    if k_BSKH.shape[1] != T or visibility.first != 0:
        return "serves as many queries as keys, from position 0 on; pass implementation=None"
    if T % rows:
        return f"serves T a multiple of {rows} and this is {T}; pass implementation=None"
    if H not in _WIDTHS:
        return f"serves heads 64 or 128 wide and this is {H}; pass implementation=None"
    if q_BTNH.dtype != jnp.bfloat16:
        return f"serves bfloat16 and this is {q_BTNH.dtype}; pass implementation=None"
    return ""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
    config: Config,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    bias_N: jax.Array,
    seed: jax.Array,
    origin: jax.Array,
    visibility: Visibility,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`out_BTNH`, `expected_BN` and `opened_BN`; see `api.gated_attention`."""
    return _forward(config, q_BTNH, k_BSKH, v_BSKH, bias_N, seed, origin)[0]


def _forward(config, q_BTNH, k_BSKH, v_BSKH, bias_N, seed, origin):
    B, T, N, H = q_BTNH.shape
    plan = _Plan(config, T, N, k_BSKH.shape[2], H)
    words_3 = jnp.stack([jnp.asarray(x).astype(jnp.uint32) for x in (seed, origin[0], origin[1])])
    of_rows = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    out_BTNH, lse_BNT, expected_BNT, opened_BNT = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=(jax.ShapeDtypeStruct(q_BTNH.shape, v_BSKH.dtype), of_rows, of_rows, of_rows),
        grid=(N, plan.programs, B),
        grid_names=("heads", "queries", "batch"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=f"gated_attention_forward_m{plan.queries}_n{plan.Y}",
        interpret=_interpreter(config),
        # What their absence means differs between versions of jax.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(words_3, bias_N, q_BTNH, k_BSKH, v_BSKH)
    opened_BN = opened_BNT.astype(jnp.int32).sum(-1)
    return (out_BTNH, expected_BNT.sum(-1), opened_BN), lse_BNT


def _kernel(plan: _Plan, words_3, bias_N, q_BTNH, k_BSKH, v_BSKH, out_BTNH, *of_rows_BNT) -> None:
    X, Y, H = plan.X, plan.Y, plan.H

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
            _produce(plan, k_BSKH, v_BSKH, keys, values)

        @pl.when(group < _CONSUMERS)
        def _():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            n, b = lax.axis_index("heads"), lax.axis_index("batch")
            first = _first(plan) + group * X
            own_BTN = (b, pl.ds(first, X), n)
            plgpu.copy_gmem_to_smem(q_BTNH.at[own_BTN], q.at[group], q_full.at[group])
            plgpu.barrier_wait(q_full.at[group])
            own_weights = None if weights is None else weights.at[group]
            scalars = words_3, bias_N
            rows, sum_XH = _consume(plan, scalars, first, q.at[group], keys, values, own_weights)
            # Its first key is visible to every query: no total is 0.
            q[group] = (sum_XH * _along(1.0 / rows.total, (X, H), 0)).astype(q.dtype)
            of_rows[group, 0] = rows.top + jnp.log2(rows.total)
            of_rows[group, 1] = rows.expected
            of_rows[group, 2] = rows.opened
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q.at[group], out_BTNH.at[own_BTN])
            for i, ref in enumerate(of_rows_BNT):
                plgpu.copy_smem_to_gmem(of_rows.at[group, i], ref.at[b, n, pl.ds(first, X)])
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        body,
        matrices(_CONSUMERS, X, H),
        plgpu.Barrier(num_barriers=_CONSUMERS),
        ring(),
        ring(),
        plgpu.SMEM((_CONSUMERS, len(of_rows_BNT), X), jnp.float32),
        matrices(_CONSUMERS, X, Y) if plan.config.target.interpret else None,
        collective_axes="warpgroup",
    )


def _first(plan: _Plan) -> jax.Array:
    """The first query of a program; the last queries see the most keys, and start first."""
    return (plan.programs - 1 - lax.axis_index("queries")) * plan.queries


def _tiles(plan: _Plan) -> tuple[jax.Array, jax.Array]:
    """How many tiles of keys every query of a program sees whole, and how many any one sees."""
    first, Y = _first(plan), jnp.int32(plan.Y)
    return lax.div(first, Y), lax.div(first + (plan.queries + plan.Y - 1), Y)


def _produce(plan: _Plan, k_BSKH, v_BSKH, keys: _Ring, values: _Ring) -> None:
    """Fills the rings with the tiles that the program reads, in their order."""
    head = lax.div(lax.axis_index("heads"), jnp.int32(plan.N // plan.K))
    _, count = _tiles(plan)

    @pl.loop(jnp.int32(0), count)
    def _(j):
        slot = lax.rem(j, jnp.int32(plan.stages))
        at_BSK = (lax.axis_index("batch"), pl.ds(j * plan.Y, plan.Y), head)
        for ref, ring in ((k_BSKH, keys), (v_BSKH, values)):
            free = ring.free.at[slot]
            pl.when(j >= plan.stages)(functools.partial(plgpu.barrier_wait, free))
            plgpu.copy_gmem_to_smem(ref.at[at_BSK], ring.tiles.at[slot], ring.full.at[slot])


def _consume(
    plan: _Plan, scalars: Any, first: jax.Array, q_XH, keys: _Ring, values: _Ring, weights_XY
) -> tuple[tile.Rows, jax.Array]:
    """The rows of the X queries from `first` on, and their sums of gated weights times values.

    Args:
      weights_XY: shared memory for the interpreter, which multiplies nothing that is in registers;
        None on a GPU.
    """
    X, Y, H = plan.X, plan.Y, plan.H
    n, b = lax.axis_index("heads"), lax.axis_index("batch")
    words_3, bias_N = scalars
    bias = bias_N[n]
    batch, head = b.astype(jnp.uint32) + words_3[1], n.astype(jnp.uint32) + words_3[2]
    query_X = first + plgpu.broadcasted_iota(jnp.int32, (X,), 0, layout=_ROWS)
    word_X = noise.row(noise.stream(words_3[0], batch, head), query_X)

    def step(j: jax.Array, carry: Any, hidden: bool) -> Any:
        rows, sum_XH = carry
        slot = lax.rem(j, jnp.int32(plan.stages))
        plgpu.barrier_wait(keys.full.at[slot])

        def products(ref):
            plgpu.wgmma(ref, q_XH, keys.tiles.at[slot].transpose((1, 0)))
            return ref[...]

        raw_XY = pl.run_scoped(products, plgpu.ACC((X, Y), jnp.float32))
        plgpu.barrier_arrive(keys.free.at[slot])
        key_Y = j * Y + plgpu.broadcasted_iota(jnp.int32, (Y,), 0, layout=_COLUMNS)
        rows, weight_XY, decay_X = _absorb(
            plan.config, rows, raw_XY, bias, word_X, query_X, key_Y, hidden
        )
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
        return rows, sum_XH * _along(decay_X, (X, H), 0) + add_XH

    rows = jax.tree.map(lambda x: plgpu.layout_cast(x, _ROWS), tile.no_rows((X,)))
    sum_XH = plgpu.layout_cast(jnp.zeros((X, H), jnp.float32), _MATRIX)
    whole, count = _tiles(plan)
    carry = lax.fori_loop(0, whole, functools.partial(step, hidden=False), (rows, sum_XH))
    return lax.fori_loop(whole, count, functools.partial(step, hidden=True), carry)


def _interpreter(config: Config) -> Any:
    """Raises at a race between warpgroups or copies, and fills new memory with NaN."""
    if _INTERPRETER is None or not config.target.interpret:
        return None
    return _INTERPRETER(detect_races=True)


def _along(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """The vector `x` along an axis of a matrix, in one step: no layout has axes of size 1."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def _absorb(
    config: Config,
    rows: tile.Rows,
    raw_XY: jax.Array,
    bias: jax.Array,
    word_X: jax.Array,
    query_X: jax.Array,
    key_Y: jax.Array,
    hidden: bool,
) -> tuple[tile.Rows, jax.Array, jax.Array]:
    """`tile.absorb` in the layouts of a warpgroup, with gates of one comparison.

    Args:
      word_X: `noise.row` of the queries.
      hidden: whether keys of the tile may be after queries.
    """
    shape = raw_XY.shape
    if hidden:
        # Odds are infinite at a score of -inf, so no such gate opens.
        raw_XY = jnp.where(_along(key_Y, shape, 1) <= _along(query_X, shape, 0), raw_XY, -jnp.inf)
    base_XY, logit_XY = tile.logits(config, raw_XY, bias)
    probability_XY = _reciprocal(config, 1.0 + jnp.exp2(-logit_XY))
    if config.mode == "sample":
        bits_XY = noise.bits_of_row(_along(word_X, shape, 0), _along(key_Y, shape, 1))
        is_open_XY = noise.from_one(bits_XY) + probability_XY >= 2.0
    else:
        is_open_XY = logit_XY > (-jnp.inf if config.mode == "open" else 0.0)
    times = tile.factor(config)
    top_X = jnp.maximum(rows.top, base_XY.max(1) * times)
    decay_X = jnp.exp2(rows.top - top_X)
    p_XY = jnp.exp2(base_XY * times - _along(top_X, shape, 0))
    # The gate as a number is added and multiplied in fewer instructions than it selects and counts.
    open_XY = jnp.where(is_open_XY, jnp.float32(1.0), jnp.float32(0.0))
    rows = tile.Rows(
        top=top_X,
        total=rows.total * decay_X + p_XY.sum(1),
        expected=rows.expected + probability_XY.sum(1),
        opened=rows.opened + open_XY.sum(1),
    )
    return rows, p_XY * (probability_XY if config.mode == "expected" else open_XY), decay_X


def _reciprocal(config: Config, x_XY: jax.Array) -> jax.Array:
    """1 / x by the instruction for it: Mosaic divides exactly, in many."""
    if config.target.interpret:
        return 1.0 / x_XY

    @plgpu.inline_mgpu(
        arg_types=(_MATRIX,),
        return_type=plgpu.ShapeDtypeStruct(x_XY.shape, x_XY.dtype, layout=_MATRIX),
    )
    def instruction(_, x):
        return x._pointwise(x._lift_fast_instr("rcp.approx.ftz.f32"))

    return instruction(x_XY)


def _run_forward(config, q, k, v, bias_N, seed, origin, visibility):
    # A second derivative meets the forward kernel first.
    q, k, v, bias_N = dispatch.first_order(OP, (q, k, v, bias_N))
    outputs, lse_BNT = _forward(config, q, k, v, bias_N, seed, origin)
    return outputs, ((q, k, v, bias_N, outputs[0], lse_BNT), (seed, origin, visibility))


def _run_backward(config, residuals, cotangents):
    floats, integers = residuals
    floats, cotangents = dispatch.first_order(OP, (floats, cotangents[:2]))
    return (*pallas_vjp.backward(config, *floats, *integers, *cotangents), None, None, None)


run.defvjp(_run_forward, _run_backward)
