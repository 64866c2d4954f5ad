"""Bernoulli-gated attention on a Hopper GPU: the forward kernel, by Pallas' Mosaic lowering.

The mathematics and the results of `pallas`, for the calls that training makes most, on the schedule
of `iaj_kernels.attention.mosaic_pipeline`: a warpgroup may multiply while another draws and counts
gates.

The gate takes one comparison. With m in [1, 2) the number whose mantissa is the noise, u is
m - (1 - 2^-24), so the gate is open, u > 1 - sigma, where m + sigma > 2 - 2^-24. That bound is half
way between two neighbouring float32 numbers, 2 - 2^-23 and 2: the sum, rounded, is below 2 exactly
where the sum, not rounded, is below the bound.

Runs only where a call names it: it agrees with the reference on an H200 (docs/kernels/gpu.md), but
no GPU has timed it. The kernels of `pallas_vjp` compute the gradients.
"""

import functools

import jax
import jax.numpy as jnp

from iaj_kernels.attention import mosaic_pipeline
from iaj_kernels.attention.mosaic_pipeline import along
from iaj_kernels.core import counts, dispatch, noise
from iaj_kernels.gated_attention import pallas_plan, pallas_vjp, tile
from iaj_kernels.gated_attention.config import Call, Config
from iaj_kernels.gated_attention.pallas_plan import OP


def unsupported_reason(config: Config, call: Call) -> str:
    """Why the kernel does not run for a call; empty if it does."""
    if reason := dispatch.unsupported_reason(config.target):
        return reason
    if config.gate_scale is not None or config.soft_cap is not None or config.renormalise:
        return "does not support gate_scale, soft_cap or renormalise; pass implementation=None"
    return mosaic_pipeline.unsupported_reason(
        config.target, call.q_BTNH, call.k_BSKH, call.visibility
    )


def _forward(
    config: Config, call: Call
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    operation = mosaic_pipeline.Operation(
        f"{OP}_forward", numbers=3, stream=functools.partial(_stream, config)
    )
    out_BTNH, (lse_BNT, expected_BNT, opened_BNT) = mosaic_pipeline.forward(
        operation,
        config.target,
        (pallas_plan.words(call), call.bias_N),
        call.q_BTNH,
        call.k_BSKH,
        call.v_BSKH,
        call.visibility,
    )
    opened_BN = counts.total(opened_BNT.astype(jnp.int32), -1)
    return (out_BTNH, expected_BNT.sum(-1), opened_BN), lse_BNT


def _stream(
    config: Config, place: mosaic_pipeline.Place, words_3, bias_N
) -> mosaic_pipeline.Stream:
    bias = bias_N[place.head]
    batch = place.batch.astype(jnp.uint32) + words_3[1]
    head = place.head.astype(jnp.uint32) + words_3[2]
    word_X = noise.row(noise.stream(words_3[0], batch, head), place.query_X)

    def absorb(rows: tile.Rows, raw_XY: jax.Array, key_Y: jax.Array):
        return _absorb(config, rows, raw_XY, bias, word_X, key_Y)

    return mosaic_pipeline.Stream(tile.no_rows(place.query_X.shape), absorb, _finish)


def _finish(rows: tile.Rows) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    empty = rows.total == 0.0
    total = jnp.where(empty, 1.0, rows.total)
    lse = jnp.where(empty, 0.0, rows.top + jnp.log2(total))
    return 1.0 / total, (lse, rows.expected, rows.opened)


def _absorb(
    config: Config,
    rows: tile.Rows,
    raw_XY: jax.Array,
    bias: jax.Array,
    word_X: jax.Array,
    key_Y: jax.Array,
) -> tuple[tile.Rows, jax.Array, jax.Array]:
    """`tile.absorb` in the layouts of a warpgroup, with gates of one comparison.

    Args:
      raw_XY: -inf where the key is hidden: the odds are then infinite, and no such gate opens.
      word_X: `noise.row` of the queries.
    """
    shape = raw_XY.shape
    base_XY, logit_XY = tile.logits(config, raw_XY, bias)
    probability_XY = _reciprocal(config, 1.0 + jnp.exp2(-logit_XY))
    if config.mode == "sample":
        bits_XY = noise.bits_of_row(along(word_X, shape, 0), along(key_Y, shape, 1))
        is_open_XY = noise.from_one(bits_XY) + probability_XY >= 2.0
    else:
        is_open_XY = logit_XY > (-jnp.inf if config.mode == "open" else 0.0)
    times = tile.factor(config)
    top_X = jnp.maximum(rows.top, base_XY.max(1) * times)
    decay_X = jnp.exp2(rows.top - top_X)
    p_XY = jnp.exp2(base_XY * times - along(top_X, shape, 0))
    # Adding and multiplying the gate as a number takes fewer instructions than selecting by it.
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
    return mosaic_pipeline.instruction("rcp.approx.ftz.f32", x_XY)


run = pallas_vjp.differentiable(_forward)
