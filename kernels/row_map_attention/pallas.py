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
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from kernels import dispatch
from kernels.row_map_attention import pallas_plan, tile
from kernels.row_map_attention.config import Call, Config, Rows
from kernels.row_map_attention.maps import OP, SOFTMAX, RowMap
from kernels.row_map_attention.pallas_plan import Inputs, Plan


def forward(config: Config, call: Call, visible_BT: jax.Array) -> tuple[jax.Array, Rows]:
    """As `xla.forward`."""
    plan = pallas_plan.plan(config, config.forward, call)
    inputs = pallas_plan.inputs(call)
    grid, specs, own = pallas_plan.query_major(plan, inputs)
    counted = config.row_map.counts_keys
    row_BNT = jax.ShapeDtypeStruct((call.q_BTNH.shape[0], plan.N, plan.T), jnp.float32)
    out_BTNH, pivot_BNT, factor_BNT = dispatch.triton_call(
        functools.partial(_kernel, plan),
        target=config.target,
        name=f"{OP}_forward",
        tile=(plan.X, plan.Y),
        grid=grid,
        in_specs=(specs, own["BT"] if counted else None),
        out_specs=(own["BTNH"], own["BNT"], own["BNT"]),
        out_shape=(jax.ShapeDtypeStruct(call.q_BTNH.shape, call.v_BSKH.dtype), row_BNT, row_BNT),
        num_warps=config.forward.warps,
        num_stages=config.forward.stages,
    )(inputs, visible_BT if counted else None)
    return out_BTNH, Rows(pivot_BNT, factor_BNT)


def _kernel(plan: Plan, refs: Inputs, visible_ref, out_ref, pivot_ref, factor_ref) -> None:
    row = (plan.query_tiles - 1 - pl.program_id(1)) * plan.X
    run = functools.partial(_program, plan, refs, visible_ref, out_ref, pivot_ref, factor_ref, row)
    if refs.heads_N is None:
        run(plan.config.row_map)
        return
    mapped = refs.heads_N[0] != 0
    pl.when(mapped)(lambda: run(plan.config.row_map))
    pl.when(~mapped)(lambda: run(SOFTMAX))


def _program(
    plan: Plan, refs: Inputs, visible_ref, out_ref, pivot_ref, factor_ref, row, row_map: RowMap
) -> None:
    config, X, Y = plan.config, plan.X, plan.Y
    functions = pallas_plan.elementary(plan, 0)
    q_XH = pallas_plan.matrix(refs.q_BTNH, row, X, plan.H, plan.T)
    bias = refs.bias_N[0]
    segments_X = None
    if refs.query_segments_BT is not None:
        segments_X = pallas_plan.vector(refs.query_segments_BT, row, X, plan.T, -1)
    visible_X = jnp.ones((X,), jnp.float32)
    if row_map.counts_keys:
        visible_X = pallas_plan.vector(visible_ref, row, X, plan.T, 1).astype(jnp.float32)
        visible_X = jnp.maximum(visible_X, 1.0)

    def body(j: jax.Array, carry: Any, *, masked: bool) -> Any:
        centre_X, total_X, sum_XH = carry
        at, S = pl.ds(j * Y, Y), plan.S if masked else Y
        k_YH = pallas_plan.matrix(refs.k_BSKH.at[at, :], j * Y, Y, plan.H, S)
        dot_XY = pallas_plan.product(q_XH, k_YH, 1, 1)
        u_XY, _ = tile.logits(row_map, dot_XY, bias, config.scale, config.soft_cap)
        if masked:
            segments = None
            if segments_X is not None:
                of_keys = pallas_plan.vector(refs.key_segments_BS.at[at], j * Y, Y, plan.S, -1)
                segments = (segments_X, of_keys)
            u_XY = u_XY.hidden(pallas_plan.mask(plan, refs, row, j * Y, 0, segments))
        if row_map.normalised:
            old_X, centre_X = centre_X, tile.moved(row_map, centre_X, u_XY.largest(1))
            shrink_X = tile.rescale(row_map, old_X, centre_X)
            total_X, sum_XH = total_X * shrink_X, sum_XH * shrink_X[:, None]
        w_XY = tile.weight(row_map, u_XY, tile.pivot(row_map, centre_X)[:, None], functions)
        v_YH = pallas_plan.matrix(refs.v_BSKH.at[at, :], j * Y, Y, plan.H, S)
        sum_XH += pallas_plan.product(w_XY, v_YH, 1, 0)
        return centre_X, total_X + jnp.sum(w_XY, 1), sum_XH

    zero_X = jnp.zeros((X,), jnp.float32)
    carry = (tile.first_centre(row_map, visible_X), zero_X, jnp.zeros((X, plan.H), jnp.float32))
    for low, high, masked in pallas_plan.key_ranges(plan, refs, refs.start_B[0] + row):
        carry = lax.fori_loop(low, high, functools.partial(body, masked=masked), carry)
    centre_X, total_X, sum_XH = carry
    scale_X, pivot_X, factor_X = tile.closed(row_map, centre_X, total_X, visible_X)
    pallas_plan.put(out_ref, sum_XH * scale_X[:, None], row, plan.T)
    pallas_plan.put(pivot_ref, pivot_X, row, plan.T)
    pallas_plan.put(factor_ref, factor_X, row, plan.T)
