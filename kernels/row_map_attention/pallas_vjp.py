"""Attention by a row map on an NVIDIA GPU, backward: one kernel by queries and one by keys.

With w the pattern, g = d_out v, delta = d_out out = sum w g, and the derivative of a map's weight
written as slope times a number of the row (`tile`), the gradient by a score is

    ds = slope row_slope (g - delta)    normalised maps: delta comes of the denominator
    ds = slope row_slope g              the others

    dq_i = scale sum_j ds_ij k_j        d_bias = sum_ij ds_ij       one program per tile of queries
    dk_j = scale sum_i ds_ij q_i        dv_j = sum_i w_ij d_out_i   one program per tile of keys

and ds is further multiplied by the slope of a soft cap for dq and dk. The programs by keys go over
the query heads of their key head in turn, so that nothing is added by atomics, and hold their tiles
as keys by queries: both sums are then products with a left operand from registers.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from kernels import dispatch
from kernels.row_map_attention import pallas_plan, tile
from kernels.row_map_attention.config import Call, Config, Rows
from kernels.row_map_attention.maps import OP, SOFTMAX, RowMap
from kernels.row_map_attention.pallas_plan import Inputs, Plan


class _QueryInputs(NamedTuple):
    """Of a tile of queries, besides `Inputs`; arrays, specs or references."""

    d_out_BTNH: Any
    out_BTNH: Any
    pivot_BNT: Any
    factor_BNT: Any


class _QueryOutputs(NamedTuple):
    """What its program writes: two gradients, and two numbers of a row for the programs by keys."""

    dq_BTNH: Any
    d_bias_BNT: Any
    delta_BNT: Any
    slope_BNT: Any


class _KeyInputs(NamedTuple):
    """Of the queries of a key head, besides `Inputs`."""

    d_out_BTNH: Any
    pivot_BNT: Any
    factor_BNT: Any
    delta_BNT: Any
    slope_BNT: Any


def backward(
    config: Config, call: Call, rows: Rows, out_BTNH: jax.Array, d_out_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As `xla.backward`."""
    inputs = pallas_plan.inputs(call)
    plan = pallas_plan.plan(config, config.dq, call)
    grid, specs, own = pallas_plan.query_major(plan, inputs)
    vector, matrix = own["BNT"], own["BTNH"]
    row = jax.ShapeDtypeStruct(rows.pivot_BNT.shape, jnp.float32)
    by_query = _call(
        _dq_kernel,
        "dq",
        plan,
        grid=grid,
        in_specs=(specs, _QueryInputs(matrix, matrix, vector, vector)),
        out_specs=_QueryOutputs(matrix, vector, vector, vector),
        out_shape=_QueryOutputs(_like(call.q_BTNH), row, row, row),
    )(inputs, _QueryInputs(d_out_BTNH, out_BTNH, *rows))

    plan = pallas_plan.plan(config, config.dkv, call)
    grid, specs, own = pallas_plan.key_major(plan, inputs)
    vector, matrix = own["BNT"], own["BTNH"]
    dk_BSKH, dv_BSKH = _call(
        _dkv_kernel,
        "dkv",
        plan,
        grid=grid,
        in_specs=(specs, _KeyInputs(matrix, vector, vector, vector, vector)),
        out_specs=(specs.k_BSKH, specs.v_BSKH),
        out_shape=(_like(call.k_BSKH), _like(call.v_BSKH)),
    )(inputs, _KeyInputs(d_out_BTNH, *rows, by_query.delta_BNT, by_query.slope_BNT))
    return by_query.dq_BTNH, dk_BSKH, dv_BSKH, by_query.d_bias_BNT.sum((0, 2))


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(kernel: Any, name: str, plan: Plan, **specs: Any) -> Any:
    return dispatch.triton_call(
        functools.partial(kernel, plan),
        target=plan.config.target,
        name=f"{OP}_{name}",
        tile=(plan.X, plan.Y),
        num_warps=plan.tiles.warps,
        num_stages=plan.tiles.stages,
        **specs,
    )


def _dq_kernel(plan: Plan, refs: Inputs, own: _QueryInputs, *outputs: Any) -> None:
    row = (plan.query_tiles - 1 - pl.program_id(1)) * plan.X
    run = functools.partial(_dq_program, plan, refs, own, _QueryOutputs(*outputs), row)
    if refs.heads_N is None:
        run(plan.config.row_map)
        return
    mapped = refs.heads_N[0] != 0
    pl.when(mapped)(lambda: run(plan.config.row_map))
    pl.when(~mapped)(lambda: run(SOFTMAX))


def _dq_program(
    plan: Plan, refs: Inputs, own: _QueryInputs, out: _QueryOutputs, row: Any, row_map: RowMap
) -> None:
    config, X, Y = plan.config, plan.X, plan.Y
    functions = pallas_plan.elementary(plan, 0)
    q_XH = pallas_plan.matrix(refs.q_BTNH, row, X, plan.H, plan.T)
    d_out_XH = pallas_plan.matrix(own.d_out_BTNH, row, X, plan.H, plan.T)
    pivot_X = pallas_plan.vector(own.pivot_BNT, row, X, plan.T, 1)
    delta_X = jnp.zeros((X,), jnp.float32)
    if row_map.normalised:
        # By the product that also makes g: where one key has all the weight the two are then equal,
        # and no rounding is left over for the slope of a small score to blow up.
        out_XH = pallas_plan.matrix(own.out_BTNH, row, X, plan.H, plan.T)
        delta_X = pallas_plan.diagonal(pallas_plan.product(d_out_XH, out_XH, 1, 1))
    segments_X = None
    if refs.query_segments_BT is not None:
        segments_X = pallas_plan.vector(refs.query_segments_BT, row, X, plan.T, -1)
    bias = refs.bias_N[0]

    def body(j: jax.Array, sums: Any, *, masked: bool) -> Any:
        dq_XH, d_bias_X = sums
        at, S = pl.ds(j * Y, Y), plan.S if masked else Y
        k_YH = pallas_plan.matrix(refs.k_BSKH.at[at, :], j * Y, Y, plan.H, S)
        v_YH = pallas_plan.matrix(refs.v_BSKH.at[at, :], j * Y, Y, plan.H, S)
        dot_XY = pallas_plan.product(q_XH, k_YH, 1, 1)
        g_XY = pallas_plan.product(d_out_XH, v_YH, 1, 1)
        u_XY, cap_slope_XY = tile.logits(row_map, dot_XY, bias, config.scale, config.soft_cap)
        if masked:
            segments = None
            if segments_X is not None:
                of_keys = pallas_plan.vector(refs.key_segments_BS.at[at], j * Y, Y, plan.S, -1)
                segments = (segments_X, of_keys)
            u_XY = u_XY.hidden(pallas_plan.mask(plan, refs, row, j * Y, 0, segments))
        weights = tile.weight_and_slope(row_map, u_XY, pivot_X[:, None], functions)
        ds_XY = weights.slope * (g_XY - delta_X[:, None] if row_map.normalised else g_XY)
        if config.bias_moves and row_map.biased:
            d_bias_X += jnp.sum(tile.bias_gradient(weights, ds_XY, functions), 1)
        if cap_slope_XY is not None:
            ds_XY *= cap_slope_XY
        return dq_XH + pallas_plan.product(ds_XY, k_YH, 1, 0), d_bias_X

    sums = (jnp.zeros((X, plan.H), jnp.float32), jnp.zeros((X,), jnp.float32))
    for low, high, masked in pallas_plan.key_ranges(plan, refs, refs.start_B[0] + row):
        sums = lax.fori_loop(low, high, functools.partial(body, masked=masked), sums)
    dq_XH, d_bias_X = sums
    factor_X = pallas_plan.vector(own.factor_BNT, row, X, plan.T)
    slope_X = tile.row_slope(row_map, pivot_X, factor_X)
    pallas_plan.put(out.dq_BTNH, dq_XH * (slope_X * config.scale)[:, None], row, plan.T)
    pallas_plan.put(out.d_bias_BNT, d_bias_X * slope_X, row, plan.T)
    pallas_plan.put(out.delta_BNT, delta_X, row, plan.T)
    pallas_plan.put(out.slope_BNT, slope_X, row, plan.T)


def _dkv_kernel(plan: Plan, refs: Inputs, own: _KeyInputs, dk_ref: Any, dv_ref: Any) -> None:
    Y, row_map = plan.Y, plan.config.row_map
    column = pl.program_id(1) * Y
    k_YH = pallas_plan.matrix(refs.k_BSKH, column, Y, plan.H, plan.S)
    v_YH = pallas_plan.matrix(refs.v_BSKH, column, Y, plan.H, plan.S)

    def head(g: jax.Array, sums: Any) -> Any:
        run = functools.partial(_dkv_head, plan, refs, own, k_YH, v_YH, column, g)
        if refs.heads_N is None:
            return run(sums, row_map)
        return lax.cond(
            refs.heads_N[g] != 0, lambda s: run(s, row_map), lambda s: run(s, SOFTMAX), sums
        )

    zero_YH = jnp.zeros((Y, plan.H), jnp.float32)
    dk_YH, dv_YH = lax.fori_loop(0, plan.G, head, (zero_YH, zero_YH))
    pallas_plan.put(dk_ref, dk_YH * plan.config.scale, column, plan.S)
    pallas_plan.put(dv_ref, dv_YH, column, plan.S)


def _dkv_head(
    plan: Plan,
    refs: Inputs,
    own: _KeyInputs,
    k_YH: jax.Array,
    v_YH: jax.Array,
    column: Any,
    n: Any,
    sums: Any,
    row_map: RowMap,
) -> Any:
    """The sums with what query head n of the group adds to them."""
    config, X, Y = plan.config, plan.X, plan.Y
    functions = pallas_plan.elementary(plan, 1)
    segments_Y = None
    if refs.key_segments_BS is not None:
        segments_Y = pallas_plan.vector(refs.key_segments_BS, column, Y, plan.S, -1)
    bias = refs.bias_N[n]

    def body(i: jax.Array, sums: Any, *, masked: bool) -> Any:
        dk_YH, dv_YH = sums
        row = i * X
        at, T = pl.ds(row, X), plan.T if masked else X

        def per_row(ref: Any, other: float = 0.0) -> jax.Array:
            return pallas_plan.vector(ref.at[n, at], row, X, T, other)[None, :]

        q_XH = pallas_plan.matrix(refs.q_BTNH.at[at, n, :], row, X, plan.H, T)
        d_out_XH = pallas_plan.matrix(own.d_out_BTNH.at[at, n, :], row, X, plan.H, T)
        dot_YX = pallas_plan.product(k_YH, q_XH, 1, 1)
        g_YX = pallas_plan.product(v_YH, d_out_XH, 1, 1)
        u_YX, cap_slope_YX = tile.logits(row_map, dot_YX, bias, config.scale, config.soft_cap)
        if masked:
            segments = None
            if segments_Y is not None:
                of_queries = pallas_plan.vector(refs.query_segments_BT.at[at], row, X, plan.T, -1)
                segments = (of_queries, segments_Y)
            u_YX = u_YX.hidden(pallas_plan.mask(plan, refs, row, column, 1, segments))
        weights = tile.weight_and_slope(row_map, u_YX, per_row(own.pivot_BNT, 1.0), functions)
        w_YX = weights.weight
        if row_map.normalised:
            g_YX -= per_row(own.delta_BNT)
        if row_map.relu:
            # The other maps have factor and slope 1, or no weight at all.
            g_YX *= per_row(own.slope_BNT)
            w_YX *= per_row(own.factor_BNT)
        ds_YX = weights.slope * g_YX
        if cap_slope_YX is not None:
            ds_YX *= cap_slope_YX
        dv_YH += pallas_plan.product(w_YX, d_out_XH, 1, 0)
        return dk_YH + pallas_plan.product(ds_YX, q_XH, 1, 0), dv_YH

    for low, high, masked in pallas_plan.query_ranges(plan, refs, column):
        sums = lax.fori_loop(low, high, functools.partial(body, masked=masked), sums)
    return sums
