"""Attention by a row map on an NVIDIA GPU, backward: one kernel by queries and one by keys.

With w the pattern, g = d_out v, delta = d_out out = sum w g, and the derivative of a map's weight
written as slope times a number of the row (`tile`), the gradient by a score is

    ds = slope row_slope (g - delta)    normalised maps: delta is of the denominator
    ds = slope row_slope g              the others

    dq_i = scale sum_j ds_ij k_j        d_bias = sum_ij ds_ij       one program per tile of queries
    dk_j = scale sum_i ds_ij q_i        dv_j = sum_i w_ij d_out_i   one program per tile of keys

and ds is further multiplied by the slope of a soft cap for dq and dk. The programs by keys go over
the query heads of their key head in turn, so that no sum needs atomics, and hold their tiles
as keys by queries: both sums are then products with a left operand from registers.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.row_map_attention import pallas_plan, tile
from iaj_kernels.row_map_attention.config import Call, Config, Rows
from iaj_kernels.row_map_attention.maps import OP, SOFTMAX, RowMap
from iaj_kernels.row_map_attention.pallas_plan import Inputs, Plan


class _QueryInputs(NamedTuple):
    """Inputs of the kernel by queries besides `Inputs`: arrays, specs or references."""

    d_out_BTNH: Any
    out_BTNH: Any
    pivot_BNT: Any
    factor_BNT: Any


class _QueryOutputs(NamedTuple):
    """Outputs of the kernel by queries: two gradients, and two numbers of a row for the other."""

    dq_BTNH: Any
    d_bias_BNT: Any
    delta_BNT: Any
    slope_BNT: Any


class _KeyInputs(NamedTuple):
    """Inputs of the kernel by keys besides `Inputs`: of the queries of a key head."""

    d_out_BTNH: Any
    pivot_BNT: Any
    factor_BNT: Any
    delta_BNT: Any
    slope_BNT: Any


def backward(
    config: Config, call: Call, rows: Rows, out_BTNH: jax.Array, d_out_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes what `xla.backward` computes."""
    inputs, B = pallas_plan.inputs(call), call.q_BTNH.shape[0]
    plan = pallas_plan.plan(config, call, "dq")
    layout = tiles.query_major(plan, B)
    row = jax.ShapeDtypeStruct(rows.pivot_BNT.shape, jnp.float32)
    own = _QueryInputs(d_out_BTNH, out_BTNH, *rows)
    out_shape = _QueryOutputs(_like(call.q_BTNH), row, row, row)
    by_query = plan.call(
        _dq_kernel,
        f"{OP}_dq",
        grid=layout.grid,
        in_specs=(layout.specs(inputs), layout.specs(own)),
        out_specs=layout.specs(out_shape),
        out_shape=out_shape,
    )(inputs, own)

    plan = pallas_plan.plan(config, call, "dkv")
    layout = tiles.key_major(plan, B)
    own = _KeyInputs(d_out_BTNH, *rows, by_query.delta_BNT, by_query.slope_BNT)
    dk_BSKH, dv_BSKH = plan.call(
        _dkv_kernel,
        f"{OP}_dkv",
        grid=layout.grid,
        in_specs=(layout.specs(inputs), layout.specs(own)),
        out_specs=(layout.blocks["BSKH"],) * 2,
        out_shape=(_like(call.k_BSKH), _like(call.v_BSKH)),
    )(inputs, own)
    return by_query.dq_BTNH, dk_BSKH, dv_BSKH, by_query.d_bias_BNT.sum((0, 2))


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _dq_kernel(plan: Plan, refs: Inputs, own: _QueryInputs, *outputs: Any) -> None:
    row, out = tiles.first_query(plan), _QueryOutputs(*outputs)
    head = None if refs.heads_N is None else refs.heads_N[0]
    run = functools.partial(_dq_program, plan, refs, own, out, row)
    pallas_plan.by_map(plan.config, head, run)


def _dq_program(
    plan: Plan, refs: Inputs, own: _QueryInputs, out: _QueryOutputs, row: Any, row_map: RowMap
) -> None:
    config, X, Y = plan.config, plan.X, plan.Y
    functions = pallas_plan.elementary(plan, 0)
    real_X = tiles.inside(row, X, plan.T)
    real_XH = tiles.matrix_inside(plan, real_X, X)
    q_XH = tiles.load(refs.q_BTNH.at[...], real_XH)
    d_out_XH = tiles.load(own.d_out_BTNH.at[...], real_XH)
    pivot_X = tiles.load(own.pivot_BNT.at[...], real_X, 1)
    delta_X = jnp.zeros((X,), jnp.float32)
    if row_map.normalised:
        # By the same product as g: where one key has all the weight the two are then equal, and the
        # slope of a small score amplifies no rounding error.
        out_XH = tiles.load(own.out_BTNH.at[...], real_XH)
        delta_X = pallas_plan.diagonal(tiles.product(d_out_XH, out_XH, 1, 1))
    first, bias = refs.start_B[0] + row, refs.bias_N[0]
    segments_X1 = tiles.segments_along(refs.query_segments_BT, ..., real_X, 0)

    def body(j: jax.Array, sums: Any, hidden: bool) -> Any:
        dq_XH, for_bias = sums
        at = pl.ds(j * Y, Y)
        real_Y = tiles.inside(j * Y, Y, plan.S) if hidden else None
        real_YH = tiles.matrix_inside(plan, real_Y, Y)
        k_YH = tiles.load(refs.k_BSKH.at[at, :], real_YH)
        v_YH = tiles.load(refs.v_BSKH.at[at, :], real_YH)
        dot_XY = tiles.product(q_XH, k_YH, 1, 1)
        g_XY = tiles.product(d_out_XH, v_YH, 1, 1)
        u_XY, cap_slope_XY = tile.logits(row_map, dot_XY, bias, config.scale, config.soft_cap)
        if hidden:
            segments_1Y = tiles.segments_along(refs.key_segments_BS, at, real_Y, 1)
            query_X1 = refs.start_B[0] + tiles.entries(row, X, 0)
            key_1Y = tiles.entries(j * Y, Y, 1)
            mask = tiles.visible_mask(plan, refs, query_X1, key_1Y, (segments_X1, segments_1Y))
            u_XY = u_XY.hidden(mask)
        weights = tile.weight_and_slope(row_map, u_XY, pivot_X[:, None], functions)
        if row_map.normalised:
            g_XY -= delta_X[:, None]
        ds_XY = weights.slope * g_XY
        if for_bias:
            terms = tile.bias_terms(row_map, weights, g_XY, ds_XY, functions)
            for_bias = tuple(
                total_X + jnp.sum(x_XY, 1) for total_X, x_XY in zip(for_bias, terms, strict=True)
            )
        if cap_slope_XY is not None:
            ds_XY *= cap_slope_XY
        return dq_XH + tiles.product(ds_XY, k_YH, 1, 0), for_bias

    zero_X = jnp.zeros((X,), jnp.float32)
    moves = config.bias_moves and row_map.biased
    sums = (
        jnp.zeros((X, plan.H), jnp.float32),
        (zero_X,) * (tile.sums_for_bias(row_map) if moves else 0),
    )
    dq_XH, for_bias = tiles.walk(tiles.key_ranges(plan, refs, first), body, sums)
    factor_X = tiles.load(own.factor_BNT.at[...], real_X)
    slope_X = tile.row_slope(row_map, pivot_X, factor_X)
    tiles.store(out.dq_BTNH.at[...], dq_XH * (slope_X * config.scale)[:, None], real_XH)
    d_bias_X = tile.bias_gradient(*for_bias) if moves else zero_X
    tiles.store(out.d_bias_BNT.at[...], d_bias_X * slope_X, real_X)
    tiles.store(out.delta_BNT.at[...], delta_X, real_X)
    tiles.store(out.slope_BNT.at[...], slope_X, real_X)


def _dkv_kernel(plan: Plan, refs: Inputs, own: _KeyInputs, dk_ref: Any, dv_ref: Any) -> None:
    Y, row_map = plan.Y, plan.config.row_map
    column = pl.program_id(1) * Y
    real_YH = tiles.matrix_inside(plan, tiles.inside(column, Y, plan.S), Y)
    k_YH = tiles.load(refs.k_BSKH.at[...], real_YH)
    v_YH = tiles.load(refs.v_BSKH.at[...], real_YH)

    def head(g: jax.Array, sums: Any) -> Any:
        run = functools.partial(_dkv_head, plan, refs, own, k_YH, v_YH, column, g)
        if refs.heads_N is None:
            return run(sums, row_map)
        return lax.cond(
            refs.heads_N[g] != 0, lambda s: run(s, row_map), lambda s: run(s, SOFTMAX), sums
        )

    zero_YH = jnp.zeros((Y, plan.H), jnp.float32)
    dk_YH, dv_YH = lax.fori_loop(0, plan.G, head, (zero_YH, zero_YH))
    tiles.store(dk_ref.at[...], dk_YH * plan.config.scale, real_YH)
    tiles.store(dv_ref.at[...], dv_YH, real_YH)


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
    """The sums after query head n of the group."""
    config, X, Y = plan.config, plan.X, plan.Y
    functions = pallas_plan.elementary(plan, 1)
    key_Y1 = tiles.entries(column, Y, 0)
    real_Y = tiles.inside(column, Y, plan.S)
    segments_Y1 = tiles.segments_along(refs.key_segments_BS, ..., real_Y, 0)
    bias = refs.bias_N[n]

    def body(i: jax.Array, sums: Any, hidden: bool) -> Any:
        dk_YH, dv_YH = sums
        at = pl.ds(i * X, X)
        real_X = tiles.inside(i * X, X, plan.T) if hidden else None
        real_XH = tiles.matrix_inside(plan, real_X, X)

        def per_row(ref: Any, other: float = 0.0) -> jax.Array:
            return tiles.load_along(ref.at[n, at], real_X, 1, other)

        q_XH = tiles.load(refs.q_BTNH.at[at, n, :], real_XH)
        d_out_XH = tiles.load(own.d_out_BTNH.at[at, n, :], real_XH)
        dot_YX = tiles.product(k_YH, q_XH, 1, 1)
        g_YX = tiles.product(v_YH, d_out_XH, 1, 1)
        u_YX, cap_slope_YX = tile.logits(row_map, dot_YX, bias, config.scale, config.soft_cap)
        if hidden:
            segments_1X = tiles.segments_along(refs.query_segments_BT, at, real_X, 1)
            query_1X = tiles.entries(refs.start_B[0] + i * X, X, 1)
            # Numbers read past the end of the rows must enter no sum.
            mask = tiles.visible_mask(
                plan, refs, query_1X, key_Y1, (segments_1X, segments_Y1), tail=True
            )
            u_YX = u_YX.hidden(mask)
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
        dv_YH += tiles.product(w_YX, d_out_XH, 1, 0)
        return dk_YH + tiles.product(ds_YX, q_XH, 1, 0), dv_YH

    return tiles.walk(tiles.query_ranges(plan, refs, column, tail=True), body, sums)
