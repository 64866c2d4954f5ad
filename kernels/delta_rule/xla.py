"""The delta rule over chunks: matrix products and one triangular solve for C steps at once.

Yang et al. 2024, section 3: a product of Householder-like steps has a compact (WY) form. Within a
chunk that starts with the memory S and has the rows k_t, v_t, q_t of K, V, Q:

1. Each step adds k_t c_t^T to the memory, where the change is c_t = beta_t (v_t - S_{t-1}^T k_t)
   and S_{t-1} = S + sum_{s<t} k_s c_s^T. For all steps together that is the triangular system

       (I + L) Changes = diag(beta) (V - K S),        L = tril(diag(beta) K K^T, -1)

   The paper forms T = (I + L)^{-1} diag(beta), W = T K, U = T V and Changes = U - W S. Solving for
   the changes themselves is the same algebra with one solve of E columns instead of H + E, and
   without an inverse.
2. Out = Q S + tril(Q K^T) Changes.
3. The next chunk starts with S + K^T Changes.

Substitution keeps its accuracy when keys repeat, where powers of L, as in a Neumann series, grow
like binomial coefficients. A last chunk that is short is filled with zeros, which write nothing.

Differentiation goes through the chunk; `jax.checkpoint` keeps its start alone, so T / C memories
are stored, and derivatives of every order exist.
"""

import functools
import math

import jax
from jax import lax
import jax.numpy as jnp

from kernels.delta_rule import reference

LONGEST_CHUNK = 64

_einsum = functools.partial(jnp.einsum, precision="highest")


def delta_rule(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTNE: jax.Array,
    beta_BTN: jax.Array,
    state_BNHE: jax.Array,
    longest_chunk: int = LONGEST_CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.delta_rule`, which runs where T = 1 leaves nothing to solve."""
    T = q_BTNH.shape[1]
    if T == 1:
        return reference.delta_rule(q_BTNH, k_BTNH, v_BTNE, beta_BTN, state_BNHE)
    # All chunks but equally long, so that little is filled.
    C = math.ceil(T / math.ceil(T / longest_chunk))
    chunks = tuple(_chunks(x, C) for x in (q_BTNH, k_BTNH, v_BTNE, beta_BTN[..., None]))
    state_BNHE, out_ZBNCE = lax.scan(jax.checkpoint(_chunk), state_BNHE, chunks)
    Z, B, N, C, E = out_ZBNCE.shape
    out_BTNE = out_ZBNCE.transpose(1, 0, 3, 2, 4).reshape(B, Z * C, N, E)[:, :T]
    return out_BTNE, state_BNHE


def _chunks(x_BTNH: jax.Array, C: int) -> jax.Array:
    """`[Z, B, N, C, H]` for Z chunks, filled with zeros."""
    B, T, N, H = x_BTNH.shape
    Z = math.ceil(T / C)
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, Z * C - T), (0, 0), (0, 0)))
    return x_BTNH.reshape(B, Z, C, N, H).transpose(1, 0, 3, 2, 4)


def _chunk(S_BNHE: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """The memory after a chunk, and the chunk's output before its scale."""
    # Cast here, so that no float32 copy of a whole bfloat16 sequence is made.
    q_BNCH, k_BNCH, v_BNCE, beta_BNC1 = (x.astype(jnp.float32) for x in inputs)
    # The solve reads the strictly lower triangle alone, and takes the diagonal as ones.
    system_BNCC = beta_BNC1 * _einsum("BNCH,BNDH->BNCD", k_BNCH, k_BNCH)
    unexpected_BNCE = v_BNCE - _einsum("BNCH,BNHE->BNCE", k_BNCH, S_BNHE)
    changes_BNCE = jax.scipy.linalg.solve_triangular(
        system_BNCC, beta_BNC1 * unexpected_BNCE, lower=True, unit_diagonal=True
    )
    seen_BNCC = jnp.tril(_einsum("BNCH,BNDH->BNCD", q_BNCH, k_BNCH))
    out_BNCE = _einsum("BNCH,BNHE->BNCE", q_BNCH, S_BNHE)
    out_BNCE += _einsum("BNCD,BNDE->BNCE", seen_BNCC, changes_BNCE)
    S_BNHE += _einsum("BNCH,BNCE->BNHE", k_BNCH, changes_BNCE)
    return S_BNHE, out_BNCE
