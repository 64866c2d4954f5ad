"""Bernoulli-gated attention on an NVIDIA GPU: the forward kernel, by Pallas' Triton lowering.

FlashAttention-2 (Dao, 2023) with the gates of `tile`, after appendix B of Sparse Attention
Post-Training. For each tile of queries:

1. the key tiles that every query of the tile sees whole, where nothing is masked for causality;
2. then those on the causal diagonal and at the end of the keys, masked;
3. each through `tile.absorb`: gates are drawn from counters, edges are counted as they are drawn;
4. the output, the log-sum-exp of each row, and the edges of the tile, summed outside.

With mode "threshold" a tile without an open gate reads no values and multiplies nothing. The
backward kernels are in `pallas_vjp`.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.core import counts, noise
from iaj_kernels.gated_attention import instructions, pallas_plan, pallas_vjp, tile
from iaj_kernels.gated_attention.config import Call, Config
from iaj_kernels.gated_attention.pallas_plan import Inputs, Plan


def _forward(
    config: Config, call: Call
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    plan = pallas_plan.plan(config, call, "forward")
    inputs = pallas_plan.inputs(call)
    B, T, N, _ = call.q_BTNH.shape
    layout = tiles.query_major(plan, B)
    rows_BTNH, rows_BNT = layout.blocks["BTNH"], layout.blocks["BNT"]
    tiles_BNI = pl.BlockSpec((None, None, 1), lambda n, i, b: (b, n, i))
    out_BTNH, lse_BNT, expected_BNI, opened_BNI = plan.call(
        _kernel,
        "gated_attention_forward",
        grid=layout.grid,
        in_specs=(layout.specs(inputs),),
        out_specs=(rows_BTNH, rows_BNT, tiles_BNI, tiles_BNI),
        out_shape=(
            jax.ShapeDtypeStruct(call.q_BTNH.shape, call.v_BSKH.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
            jax.ShapeDtypeStruct((B, N, plan.query_tiles), jnp.float32),
            jax.ShapeDtypeStruct((B, N, plan.query_tiles), jnp.int32),
        ),
    )(inputs)
    return (out_BTNH, expected_BNI.sum(-1), counts.total(opened_BNI, -1)), lse_BNT


def _kernel(plan: Plan, refs: Inputs, out_ref, lse_ref, expected_ref, opened_ref) -> None:
    config, X, Y = plan.config, plan.X, plan.Y
    functions = instructions.functions(config)
    n, b = pl.program_id(0), pl.program_id(2)
    row = tiles.first_query(plan)
    first = refs.start_B[0] + row
    stream, bias = pallas_plan.stream(refs, b, n), refs.bias_N[0]
    query_X1 = tiles.entries(first, X, 0)
    real_X = tiles.inside(row, X, plan.T)
    real_XH = tiles.matrix_inside(plan, real_X, X)
    q_XH = tiles.load(refs.q_BTNH.at[...], real_XH)
    segments_X1 = tiles.segments_along(refs.query_segments_BT, ..., real_X, 0)

    def body(j: jax.Array, carry: Any, hidden: bool) -> Any:
        rows, sum_XH = carry
        at = pl.ds(j * Y, Y)
        key_1Y = tiles.entries(j * Y, Y, 1)
        real_Y = tiles.inside(j * Y, Y, plan.S) if hidden else None
        real_YH = tiles.matrix_inside(plan, real_Y, Y)
        raw = tiles.product(q_XH, tiles.load(refs.k_BSKH.at[at, :], real_YH), 1, 1)
        bits = noise.bits(stream, query_X1, key_1Y) if config.mode == "sample" else None
        mask = None
        if hidden:
            segments_1Y = tiles.segments_along(refs.key_segments_BS, at, real_Y, 1)
            mask = tiles.visible_mask(plan, refs, query_X1, key_1Y, (segments_X1, segments_1Y))
        before = rows.opened
        rows, weight, decay = tile.absorb(config, rows, raw, bias, bits, mask, functions)
        sum_XH *= decay[:, None]

        def add(sum_XH: jax.Array) -> jax.Array:
            v_YH = tiles.load(refs.v_BSKH.at[at, :], real_YH)
            return sum_XH + tiles.product(weight, v_YH, 1, 0)

        if config.mode == "threshold":
            some = jnp.sum(rows.opened - before) > 0.0
            return rows, lax.cond(some, add, lambda same: same, sum_XH)
        return rows, add(sum_XH)

    empty = (tile.no_rows((X,)), jnp.zeros((X, plan.width), jnp.float32))
    rows, sum_XH = tiles.walk(tiles.key_ranges(plan, refs, first, tiles.capped_clip), body, empty)
    out_XH, lse_X = tile.finish(rows, sum_XH)
    tiles.store(out_ref.at[...], out_XH, real_XH)
    tiles.store(lse_ref.at[...], lse_X, real_X)
    expected_X, opened_X = rows.expected, rows.opened
    if real_X is not None:
        expected_X, opened_X = (jnp.where(real_X, x, 0.0) for x in (expected_X, opened_X))
    expected_ref[0] = jnp.sum(expected_X)
    opened_ref[0] = jnp.sum(opened_X.astype(jnp.int32))


run = pallas_vjp.differentiable(_forward)
