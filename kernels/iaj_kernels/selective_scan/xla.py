"""The selective scan over chunks, with a backward pass that recomputes the states of one chunk.

Gu & Dao 2023, section 3.3.2, keep the states out of the GPU's main memory and recompute them in the
backward pass. Here the same idea bounds the memory of plain JAX:

1. The sequence is cut into Z chunks of C steps, with C near the square root of T. A last chunk that
   is short is filled with delta = 0, which leaves the state as it is.
2. Forward, a scan over chunks of a scan over steps. Only the state at each chunk's start is kept.
3. Backward, chunks in reverse. A chunk's states are computed again from its start, then with
   a_t = exp(delta_t A), x_t = delta_t u_t and g_t the cotangent of h_t,

       g_t = a_{t+1} g_{t+1} + C_t dy_t          p_t = g_t a_t h_{t-1}
       dC_tj = sum_i h_tij dy_ti                 dB_tj = sum_i g_tij x_ti
       dx_ti = sum_j g_tij B_tj                  dA_ij = sum_{b,t} p_tij delta_ti
       du_ti = dx_ti delta_ti                    ddelta_ti = dx_ti u_ti + sum_j p_tij A_ij

So Z + C states are alive at once, of the order of the square root of T, and never T of them. Decays
are multiplied one step at a time and never divided by.

The layout of a state is [B, J, I]: the long axis is innermost, and a sum over J is a matrix-vector
product.
"""

import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core import dispatch
from iaj_kernels.selective_scan import reference
from iaj_kernels.selective_scan.config import Call, Config

# Dots, for on a CPU the sum of a product over J takes several times as long.
_over_J = functools.partial(jnp.einsum, "BJI,BJ->BI", precision="highest")
_over_I = functools.partial(jnp.einsum, "BJI,BI->BJ", precision="highest")


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """Computes what `reference.run` computes, and calls it for T = 1."""
    T = call.u_BTI.shape[1]
    if T == 1:
        return reference.run(config, call)
    arrays = (call.u_BTI, call.delta_BTI, call.B_BTJ, call.C_BTJ)
    chunks = tuple(_chunks(x, config.chunk) for x in arrays)
    y_ZCBI, state_BJI = _scan(config, chunks, call.A_IJ.T, call.state_BIJ.swapaxes(1, 2))
    y_TBI = y_ZCBI.reshape(-1, *y_ZCBI.shape[2:])[:T]
    return y_TBI.swapaxes(0, 1), state_BJI.swapaxes(1, 2)


def _chunks(x_BTI: jax.Array, C: int) -> jax.Array:
    """`[Z, C, B, I]`, filled with zeros."""
    B, T, width = x_BTI.shape
    Z = math.ceil(T / C)
    x_BTI = jnp.pad(x_BTI, ((0, 0), (0, Z * C - T), (0, 0)))
    return x_BTI.swapaxes(0, 1).reshape(Z, C, B, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(
    config: Config, chunks: tuple[jax.Array, ...], A_JI: jax.Array, state_BJI: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`y_ZCBI` and the state after the last step, from chunks of (u, delta, B, C)."""
    return _forward(config, chunks, A_JI, state_BJI)[0]


def _forward(config: Config, chunks: tuple[jax.Array, ...], A_JI: jax.Array, state_BJI: jax.Array):
    def step(h_BJI, inputs):
        *drive, C_BJ = inputs
        h_BJI = _next(h_BJI, A_JI, *drive)
        return h_BJI, _over_J(h_BJI, C_BJ)

    def chunk(start_BJI, inputs):
        end_BJI, y_CBI = lax.scan(step, start_BJI, _float32(inputs), unroll=config.unroll)
        return end_BJI, (y_CBI, start_BJI)

    state_BJI, (y_ZCBI, starts_ZBJI) = lax.scan(chunk, state_BJI, chunks)
    return (y_ZCBI, state_BJI), (chunks, A_JI, starts_ZBJI)


def _backward(config: Config, residuals: Any, cotangents: Any):
    residuals, cotangents = dispatch.first_order("selective_scan", (residuals, cotangents))
    chunks, A_JI, starts_ZBJI = residuals
    dy_ZCBI, dstate_BJI = cotangents
    # A CPU sums rows faster by a product with ones than by a sum.
    ones_J = jnp.ones(A_JI.shape[:1])

    def again(h_BJI, inputs):
        *drive, dy_BI = inputs
        following_BJI = _next(h_BJI, A_JI, *drive)
        return following_BJI, (h_BJI, _over_I(following_BJI, dy_BI))

    def step(carry, inputs):
        g_BJI, dA_BJI = carry
        u_BI, delta_BI, B_BJ, C_BJ, dy_BI, before_BJI = inputs
        g_BJI += C_BJ[:, :, None] * dy_BI[:, None, :]
        dx_BI = _over_J(g_BJI, B_BJ)
        dB_BJ = _over_I(g_BJI, delta_BI * u_BI)
        g_BJI *= _decay(delta_BI, A_JI)
        p_BJI = g_BJI * before_BJI
        pA_BI = jnp.einsum("BJI,J->BI", p_BJI * A_JI[None], ones_J, precision="highest")
        dA_BJI += p_BJI * delta_BI[:, None, :]
        return (g_BJI, dA_BJI), (dx_BI * delta_BI, dx_BI * u_BI + pA_BI, dB_BJ)

    def chunk(carry, inputs):
        own, dy_CBI, start_BJI = inputs
        u_CBI, delta_CBI, B_CBJ, C_CBJ = _float32(own)
        _, (before_CBJI, dC_CBJ) = lax.scan(
            again, start_BJI, (u_CBI, delta_CBI, B_CBJ, dy_CBI), unroll=config.unroll
        )
        carry, (du_CBI, ddelta_CBI, dB_CBJ) = lax.scan(
            step,
            carry,
            (u_CBI, delta_CBI, B_CBJ, C_CBJ, dy_CBI, before_CBJI),
            reverse=True,
            unroll=config.unroll,
        )
        gradients = (du_CBI, ddelta_CBI, dB_CBJ, dC_CBJ)
        return carry, tuple(d.astype(x.dtype) for d, x in zip(gradients, own, strict=True))

    carry = (dstate_BJI, jnp.zeros_like(dstate_BJI))
    (dstart_BJI, dA_BJI), dchunks = lax.scan(
        chunk, carry, (chunks, dy_ZCBI, starts_ZBJI), reverse=True
    )
    return dchunks, dA_BJI.sum(0), dstart_BJI


_scan.defvjp(_forward, _backward)


def _next(
    h_BJI: jax.Array, A_JI: jax.Array, u_BI: jax.Array, delta_BI: jax.Array, B_BJ: jax.Array
) -> jax.Array:
    return _decay(delta_BI, A_JI) * h_BJI + (delta_BI * u_BI)[:, None, :] * B_BJ[:, :, None]


def _decay(delta_BI: jax.Array, A_JI: jax.Array) -> jax.Array:
    return jnp.exp(delta_BI[:, None, :] * A_JI[None])


def _float32(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Casts the arrays of one chunk, so that no whole bfloat16 sequence is copied to float32."""
    return tuple(x.astype(jnp.float32) for x in arrays)
