"""Bernoulli-gated attention on an NVIDIA GPU: the backward kernels, by Pallas' Triton lowering.

P is recomputed from the saved log-sum-exp, and the gates from their counters, so nothing of size
T x S is kept. Two kernels, so that every sum stays in registers and no two programs add to one
array:

1. `_queries_kernel`, a program per tile of queries: the gradients of q and, by row, of the bias.
2. `_keys_kernel`, a program per tile of keys: the gradients of k and v, summed over the query heads
   that share the key head. Its tiles are transposed, `[keys, queries]`, so that the weights are
   the left operand of its products as they come.

delta_i = dout_i . out_i is one pass of XLA before them.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.core import dispatch, noise
from iaj_kernels.gated_attention import instructions, pallas_plan, tile
from iaj_kernels.gated_attention.config import Call, Config
from iaj_kernels.gated_attention.pallas_plan import OP, Inputs, Plan


class Saved(NamedTuple):
    """Inputs of the backward kernels besides `Inputs`: arrays, specs or references."""

    d_out_BTNH: Any
    lse_BNT: Any
    delta_BNT: Any
    words_BNT: Any
    d_expected_BN: Any


def differentiable(forward: Callable[[Config, Call], Any]) -> Callable[[Config, Call], Any]:
    """`run(config, call)` of a forward kernel, with the gradients of the kernels below.

    Args:
      forward: `(config, call) -> ((out_BTNH, expected_BN, opened_BN), lse_BNT)`.

    Returns:
      a function of that result without its log-sum-exp; see `api.gated_attention`.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(config: Config, call: Call) -> Any:
        return forward(config, call)[0]

    def run_forward(config: Config, call: Call) -> Any:
        # A second derivative meets the forward kernel first.
        call = Call._make((*dispatch.first_order(OP, call[:4]), *call[4:]))
        outputs, lse_BNT = forward(config, call)
        return outputs, (call, outputs[0], lse_BNT)

    def run_backward(config: Config, residuals: Any, cotangents: Any) -> tuple[Call]:
        call, *rows = residuals
        floats, rows, cotangents = dispatch.first_order(OP, (call[:4], rows, cotangents[:2]))
        gradients = _backward(config, Call._make((*floats, *call[4:])), *rows, *cotangents)
        # None: no gradient.
        return (Call._make((*gradients, *(None for _ in call[4:]))),)

    run.defvjp(run_forward, run_backward)
    return run


def _backward(
    config: Config,
    call: Call,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    d_out_BTNH: jax.Array,
    d_expected_BN: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k, v and the bias."""
    delta_BNT = jnp.einsum(
        "BTNH,BTNH->BNT", d_out_BTNH.astype(jnp.float32), out_BTNH.astype(jnp.float32)
    )
    inputs, words_BNT = pallas_plan.inputs(call), _words(config, call, lse_BNT.shape)
    d_out_BTNH = d_out_BTNH.astype(call.v_BSKH.dtype)
    saved = Saved(d_out_BTNH, lse_BNT, delta_BNT, words_BNT, d_expected_BN)
    d_q_BTNH, d_bias_BNT = _queries(pallas_plan.plan(config, call, "queries"), inputs, saved)
    d_k_BSKH, d_v_BSKH = _keys(pallas_plan.plan(config, call, "keys"), inputs, saved)
    return d_q_BTNH, d_k_BSKH, d_v_BSKH, d_bias_BNT.sum((0, 2))


def _words(config: Config, call: Call, shape: tuple[int, ...]) -> jax.Array | None:
    """Noise words of the queries; a transposed tile would compute one per column."""
    if config.mode != "sample":
        return None
    b, n, t = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
    stream_BNT = noise.stream(call.seed, b + call.origin_2[0], n + call.origin_2[1])
    return noise.row(stream_BNT, call.visibility.start_B[:, None, None] + t)


def _queries(plan: Plan, inputs: Inputs, saved: Saved) -> Any:
    layout = tiles.query_major(plan, inputs.q_BTNH.shape[0])
    q_BTNH, lse_BNT = inputs.q_BTNH, saved.lse_BNT
    return plan.call(
        _queries_kernel,
        "gated_attention_backward_queries",
        grid=layout.grid,
        in_specs=(layout.specs(inputs), layout.specs(saved)),
        out_specs=(layout.blocks["BTNH"], layout.blocks["BNT"]),
        out_shape=(
            jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype),
            jax.ShapeDtypeStruct(lse_BNT.shape, jnp.float32),
        ),
    )(inputs, saved)


def _queries_kernel(plan: Plan, refs: Inputs, saved: Saved, d_q_ref, d_bias_ref) -> None:
    config, X, Y = plan.config, plan.X, plan.Y
    functions = instructions.functions(config)
    n, b = pl.program_id(0), pl.program_id(2)
    row = tiles.first_query(plan)
    first = refs.start_B[0] + row
    stream, bias = pallas_plan.stream(refs, b, n), refs.bias_N[0]
    d_expected = saved.d_expected_BN[0]
    query_X1 = tiles.entries(first, X, 0)
    real_X = tiles.inside(row, X, plan.T)
    real_XH = tiles.matrix_inside(plan, real_X, X)
    q_XH = tiles.load(refs.q_BTNH.at[...], real_XH)
    d_out_XH = tiles.load(saved.d_out_BTNH.at[...], real_XH)
    lse_X1 = tiles.load_along(saved.lse_BNT.at[...], real_X, 0)
    delta_X1 = tiles.load_along(saved.delta_BNT.at[...], real_X, 0)
    segments_X1 = tiles.segments_along(refs.query_segments_BT, ..., real_X, 0)

    def body(j: jax.Array, carry: Any, hidden: bool) -> Any:
        d_q_XH, d_bias_X = carry
        at = pl.ds(j * Y, Y)
        key_1Y = tiles.entries(j * Y, Y, 1)
        real_Y = tiles.inside(j * Y, Y, plan.S) if hidden else None
        real_YH = tiles.matrix_inside(plan, real_Y, Y)
        k_YH = tiles.load(refs.k_BSKH.at[at, :], real_YH)
        v_YH = tiles.load(refs.v_BSKH.at[at, :], real_YH)
        bits = noise.bits(stream, query_X1, key_1Y) if config.mode == "sample" else None
        mask = None
        if hidden:
            segments_1Y = tiles.segments_along(refs.key_segments_BS, at, real_Y, 1)
            mask = tiles.visible_mask(plan, refs, query_X1, key_1Y, (segments_X1, segments_1Y))
        raw = tiles.product(q_XH, k_YH, 1, 1)
        g = tiles.product(d_out_XH, v_YH, 1, 1)
        _, d_gate, d_raw = tile.backward(
            config, raw, bias, bits, mask, lse_X1, g, delta_X1, d_expected, functions
        )
        return d_q_XH + tiles.product(d_raw, k_YH, 1, 0), d_bias_X + jnp.sum(d_gate, 1)

    empty = (jnp.zeros((X, plan.width), jnp.float32), jnp.zeros((X,), jnp.float32))
    d_q_XH, d_bias_X = tiles.walk(
        tiles.key_ranges(plan, refs, first, tiles.capped_clip), body, empty
    )
    tiles.store(d_q_ref.at[...], config.scale * d_q_XH, real_XH)
    tiles.store(d_bias_ref.at[...], d_bias_X, real_X)


def _keys(plan: Plan, inputs: Inputs, saved: Saved) -> Any:
    layout = tiles.key_major(plan, inputs.q_BTNH.shape[0])
    of_keys = (inputs.k_BSKH, inputs.v_BSKH)
    return plan.call(
        _keys_kernel,
        "gated_attention_backward_keys",
        grid=layout.grid,
        in_specs=(layout.specs(inputs), layout.specs(saved)),
        out_specs=(layout.blocks["BSKH"],) * 2,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of_keys),
    )(inputs, saved)


def _keys_kernel(plan: Plan, refs: Inputs, saved: Saved, d_k_ref, d_v_ref) -> None:
    config, X, Y = plan.config, plan.X, plan.Y
    functions = instructions.functions(config)
    column = pl.program_id(1) * Y
    key_Y1 = tiles.entries(column, Y, 0)
    real_Y = tiles.inside(column, Y, plan.S)
    real_YH = tiles.matrix_inside(plan, real_Y, Y)
    k_YH = tiles.load(refs.k_BSKH.at[...], real_YH)
    v_YH = tiles.load(refs.v_BSKH.at[...], real_YH)
    segments_Y1 = tiles.segments_along(refs.key_segments_BS, ..., real_Y, 0)
    ranges = tiles.query_ranges(plan, refs, column, tail=False)

    def head(h: jax.Array, carry: Any) -> Any:
        bias, d_expected = refs.bias_N[h], saved.d_expected_BN[h]

        def body(i: jax.Array, carry: Any, hidden: bool) -> Any:
            d_k_YH, d_v_YH = carry
            at = pl.ds(i * X, X)
            real_X = tiles.inside(i * X, X, plan.T)
            real_XH = tiles.matrix_inside(plan, real_X, X)
            q_XH = tiles.load(refs.q_BTNH.at[at, h, :], real_XH)
            d_out_XH = tiles.load(saved.d_out_BTNH.at[at, h, :], real_XH)
            lse_1X = tiles.load_along(saved.lse_BNT.at[h, at], real_X, 1)
            delta_1X = tiles.load_along(saved.delta_BNT.at[h, at], real_X, 1)
            bits = None
            if config.mode == "sample":
                words_1X = tiles.load_along(saved.words_BNT.at[h, at], real_X, 1)
                bits = noise.bits_of_row(words_1X, key_Y1)
            mask = None
            if hidden:
                segments_1X = tiles.segments_along(refs.query_segments_BT, at, real_X, 1)
                query_1X = tiles.entries(refs.start_B[0] + i * X, X, 1)
                mask = tiles.visible_mask(plan, refs, query_1X, key_Y1, (segments_1X, segments_Y1))
            raw = tiles.product(k_YH, q_XH, 1, 1)
            g = tiles.product(v_YH, d_out_XH, 1, 1)
            weight, _, d_raw = tile.backward(
                config, raw, bias, bits, mask, lse_1X, g, delta_1X, d_expected, functions
            )

            def add(d_v_YH: jax.Array) -> jax.Array:
                return d_v_YH + tiles.product(weight, d_out_XH, 1, 0)

            if config.mode == "threshold":
                d_v_YH = lax.cond(jnp.max(weight) > 0.0, add, lambda same: same, d_v_YH)
            else:
                d_v_YH = add(d_v_YH)
            return d_k_YH + tiles.product(d_raw, q_XH, 1, 0), d_v_YH

        return tiles.walk(ranges, body, carry)

    zeros = jnp.zeros((Y, plan.width), jnp.float32)
    d_k_YH, d_v_YH = lax.fori_loop(0, plan.G, head, (zeros, zeros))
    tiles.store(d_k_ref.at[...], config.scale * d_k_YH, real_YH)
    tiles.store(d_v_ref.at[...], d_v_YH, real_YH)
