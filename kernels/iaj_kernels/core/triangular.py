"""Inverses of triangular matrices by matrix products alone.

A unit lower triangular system is solved by substitution in blocks, from blocks of one row on: with
the inverses A^{-1} and B^{-1} of the diagonal blocks, that of [[A, 0], [F, B]] is
[[A^{-1}, 0], [-B^{-1} F A^{-1}, B^{-1}]]. That keeps its accuracy where powers of L, as in a
Neumann series, grow like binomial coefficients, as they do where the keys of a delta rule repeat.
XLA's triangular solve on a CPU (jaxlib 0.10.2) can deadlock waiting for threads of its own pool,
and did on two cores.
"""

import functools

import jax
import jax.numpy as jnp

_einsum = functools.partial(jnp.einsum, precision="highest")


def unit_lower_inverse(system_BNCC: jax.Array) -> jax.Array:
    """The inverse `[B, N, C, C]` of I + L, L the strictly lower triangle of `system_BNCC`.

    Nothing else of the system is read. Arithmetic is in its dtype.
    """
    B, N, C, _ = system_BNCC.shape
    P = 1 << (C - 1).bit_length()
    fill = ((0, 0), (0, 0), (0, P - C), (0, P - C))
    system = jnp.pad(system_BNCC, fill)
    # The inverses of the M diagonal blocks of X rows.
    inverse_BNMXX = jnp.ones((B, N, P, 1, 1), system.dtype)
    size = 1
    while size < P:
        pairs = P // (2 * size)
        blocks = system.reshape(B, N, pairs, 2, size, pairs, 2, size)
        below = jnp.einsum("BNMXMY->BNMXY", blocks[:, :, :, 1, :, :, 0])
        inverse = inverse_BNMXX.reshape(B, N, pairs, 2, size, size)
        first, second = inverse[:, :, :, 0], inverse[:, :, :, 1]
        corner = -_einsum("BNMXY,BNMYZ,BNMZW->BNMXW", second, below, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        inverse_BNMXX = jnp.concatenate([top, jnp.concatenate([corner, second], -1)], -2)
        size *= 2
    return inverse_BNMXX[:, :, 0, :C, :C]
