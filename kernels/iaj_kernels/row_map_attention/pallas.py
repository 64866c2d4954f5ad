"""Attention by a row map on an NVIDIA GPU, forward: Pallas' Triton lowering.

FlashAttention-2 (Dao, 2023) with the centres and weights of `tile` in place of softmax's. For each
tile of queries of a head:

1. over the key tiles that it sees, those that it sees whole without a mask: u, the moved centre,
   the weights, and their sums with and without the values;
2. the row is closed: the output, and the two numbers of it that the backward pass needs.

Where the heads that have the map are data, the kernel holds this program twice, once with softmax,
and runs one of the two. The backward kernels are in `pallas_vjp`.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.row_map_attention import pallas_plan, pallas_vjp, streaming, tile
from iaj_kernels.row_map_attention.config import Call, Config, Rows
from iaj_kernels.row_map_attention.maps import OP, RowMap
from iaj_kernels.row_map_attention.pallas_plan import Inputs, Plan


def forward(config: Config, call: Call, visible_BT: jax.Array) -> tuple[jax.Array, Rows]:
    """Computes what `xla.forward` computes."""
    plan = pallas_plan.plan(config, call, "forward")
    inputs = pallas_plan.inputs(call)
    B = call.q_BTNH.shape[0]
    layout = tiles.query_major(plan, B)
    of_rows = layout.blocks["BNT"]
    counted = config.row_map.counts_keys
    row_BNT = jax.ShapeDtypeStruct((B, plan.N, plan.T), jnp.float32)
    out_BTNH, pivot_BNT, factor_BNT = plan.call(
        _kernel,
        f"{OP}_forward",
        grid=layout.grid,
        in_specs=(layout.specs(inputs), layout.blocks["BT"] if counted else None),
        out_specs=(layout.blocks["BTNH"], of_rows, of_rows),
        out_shape=(jax.ShapeDtypeStruct(call.q_BTNH.shape, call.v_BSKH.dtype), row_BNT, row_BNT),
    )(inputs, visible_BT if counted else None)
    return out_BTNH, Rows(pivot_BNT, factor_BNT)


def _kernel(plan: Plan, refs: Inputs, visible_ref, out_ref, pivot_ref, factor_ref) -> None:
    row = tiles.first_query(plan)
    run = functools.partial(_program, plan, refs, visible_ref, out_ref, pivot_ref, factor_ref, row)
    head = None if refs.heads_N is None else refs.heads_N[0]
    pallas_plan.by_map(plan.config, head, run)


def _program(
    plan: Plan, refs: Inputs, visible_ref, out_ref, pivot_ref, factor_ref, row, row_map: RowMap
) -> None:
    config, X, Y = plan.config, plan.X, plan.Y
    functions = pallas_plan.elementary(plan, 0)
    real_X = tiles.inside(row, X, plan.T)
    real_XH = tiles.matrix_inside(plan, real_X, X)
    q_XH = tiles.load(refs.q_BTNH.at[...], real_XH)
    first, bias = refs.start_B[0] + row, refs.bias_N[0]
    segments_X1 = tiles.segments_along(refs.query_segments_BT, ..., real_X, 0)
    visible_X = jnp.ones((X,), jnp.float32)
    if row_map.counts_keys:
        visible_X = tiles.load(visible_ref.at[...], real_X, 1).astype(jnp.float32)
        visible_X = jnp.maximum(visible_X, 1.0)

    def body(j: jax.Array, carry: Any, hidden: bool) -> Any:
        centre_X, total_X, sum_XH = carry
        at = pl.ds(j * Y, Y)
        real_Y = tiles.inside(j * Y, Y, plan.S) if hidden else None
        real_YH = tiles.matrix_inside(plan, real_Y, Y)
        dot_XY = tiles.product(q_XH, tiles.load(refs.k_BSKH.at[at, :], real_YH), 1, 1)
        u_XY, _ = tile.logits(row_map, dot_XY, bias, config.scale, config.soft_cap)
        if hidden:
            segments_1Y = tiles.segments_along(refs.key_segments_BS, at, real_Y, 1)
            query_X1 = refs.start_B[0] + tiles.entries(row, X, 0)
            key_1Y = tiles.entries(j * Y, Y, 1)
            mask = tiles.visible_mask(plan, refs, query_X1, key_1Y, (segments_X1, segments_1Y))
            u_XY = u_XY.hidden(mask)
        if row_map.normalised:
            old_X, centre_X = centre_X, tile.moved(row_map, centre_X, u_XY.largest(1))
            shrink_X = tile.rescale(row_map, old_X, centre_X)
            total_X, sum_XH = total_X * shrink_X, sum_XH * shrink_X[:, None]
        w_XY = tile.weight(row_map, u_XY, tile.pivot(row_map, centre_X)[:, None], functions)
        sum_XH += tiles.product(w_XY, tiles.load(refs.v_BSKH.at[at, :], real_YH), 1, 0)
        return centre_X, total_X + jnp.sum(w_XY, 1), sum_XH

    zero_X = jnp.zeros((X,), jnp.float32)
    carry = (tile.first_centre(row_map, visible_X), zero_X, jnp.zeros((X, plan.H), jnp.float32))
    centre_X, total_X, sum_XH = tiles.walk(tiles.key_ranges(plan, refs, first), body, carry)
    scale_X, pivot_X, factor_X = tile.closed(row_map, centre_X, total_X, visible_X)
    tiles.store(out_ref.at[...], sum_XH * scale_X[:, None], real_XH)
    tiles.store(pivot_ref.at[...], pivot_X, real_X)
    tiles.store(factor_ref.at[...], factor_X, real_X)


run = streaming.differentiable(forward, pallas_vjp.backward)
