"""Attention by a row map on a Hopper GPU: the forward kernel, by Pallas' Mosaic lowering.

The mathematics and the results of `pallas`, for the calls that training makes most: the centres and
weights of `tile` on the schedule of `iaj_kernels.attention.mosaic_pipeline`.

Runs only where a call names it: it agrees with the reference on an H200 (docs/kernels/gpu.md), but
no GPU has timed it. The kernels of `pallas_vjp` compute the gradients.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from iaj_kernels.attention import mosaic_pipeline
from iaj_kernels.attention.mosaic_pipeline import along
from iaj_kernels.core import dispatch
from iaj_kernels.row_map_attention import pallas_vjp, streaming, tile
from iaj_kernels.row_map_attention.config import Call, Config, Rows
from iaj_kernels.row_map_attention.maps import OP


def unsupported_reason(config: Config, call: Call) -> str:
    """Why the kernel does not run for a call; empty if it does."""
    if reason := dispatch.unsupported_reason(config.target):
        return reason
    if config.soft_cap is not None or call.heads_N is not None:
        return "does not support soft_cap or heads; pass implementation=None"
    return mosaic_pipeline.unsupported_reason(
        config.target, call.q_BTNH, call.k_BSKH, call.visibility
    )


def forward(config: Config, call: Call, visible_BT: jax.Array) -> tuple[jax.Array, Rows]:
    """Computes what `xla.forward` computes."""
    # The schedule counts them where it masks.
    del visible_BT
    operation = mosaic_pipeline.Operation(
        f"{OP}_forward", numbers=len(Rows._fields), stream=functools.partial(_stream, config)
    )
    out_BTNH, numbers = mosaic_pipeline.forward(
        operation,
        config.target,
        (call.bias_N,),
        call.q_BTNH,
        call.k_BSKH,
        call.v_BSKH,
        call.visibility,
    )
    return out_BTNH, Rows(*numbers)


def _stream(config: Config, place: mosaic_pipeline.Place, bias_N) -> mosaic_pipeline.Stream:
    row_map, bias = config.row_map, bias_N[place.head]
    visible_X = place.visible_X.astype(jnp.float32)
    zero_X = jnp.zeros_like(visible_X)

    def absorb(rows, raw_XY: jax.Array, key_Y: jax.Array):
        del key_Y
        return _absorb(config, rows, raw_XY, bias)

    def finish(rows):
        centre_X, total_X = rows
        scale_X, pivot_X, factor_X = tile.closed(row_map, centre_X, total_X, visible_X)
        return scale_X, (pivot_X, factor_X)

    return mosaic_pipeline.Stream((tile.first_centre(row_map, visible_X), zero_X), absorb, finish)


def _absorb(config: Config, rows, raw_XY: jax.Array, bias: jax.Array):
    """The rows (centre and total), the weights of a tile, and the factor of the old sums."""
    row_map, (centre_X, total_X) = config.row_map, rows
    u_XY, _ = tile.logits(row_map, raw_XY, bias, config.scale, None)
    shrink_X = None
    if row_map.normalised:
        old_X, centre_X = centre_X, tile.moved(row_map, centre_X, u_XY.largest(1))
        shrink_X = tile.rescale(row_map, old_X, centre_X)
        total_X = total_X * shrink_X
    pivot_XY = along(tile.pivot(row_map, centre_X), raw_XY.shape, 0)
    weight_XY = tile.weight(row_map, u_XY, pivot_XY, _elementary(config))
    return (centre_X, total_X + weight_XY.sum(1)), weight_XY, shrink_X


def _elementary(config: Config) -> tile.Elementary:
    """The functions of the target."""
    return tile.EXACT if config.target.interpret else _INSTRUCTIONS


_INSTRUCTIONS = dataclasses.replace(
    tile.EXACT,
    log2=functools.partial(mosaic_pipeline.instruction, "lg2.approx.ftz.f32"),
    reciprocal=functools.partial(mosaic_pipeline.instruction, "rcp.approx.ftz.f32"),
    # Saturates to [0, 1], and makes 0 of the NaN of a hidden key.
    share=lambda u, pivot: mosaic_pipeline.instruction("cvt.sat.f32.f32", tile.folded(u, pivot)),
)


run = streaming.differentiable(forward, pallas_vjp.backward)
