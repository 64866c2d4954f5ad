"""The delta rule over chunks: C steps at once by matrix products.

Yang et al. 2024, section 3: a product of Householder-like steps has a compact (WY) form. Within a
chunk that starts with the memory S and has the rows k_t, v_t, q_t of K, V, Q:

1. Each step adds k_t c_t^T to the memory, where the change is c_t = beta_t (v_t - S_{t-1}^T k_t)
   and S_{t-1} = S + sum_{s<t} k_s c_s^T. For all steps together that is the triangular system

       (I + L) Changes = diag(beta) (V - K S),        L = tril(diag(beta) K K^T, -1)

   The paper forms T = (I + L)^{-1} diag(beta), W = T K, U = T V and Changes = U - W S. Solving for
   the changes themselves is the same algebra for E columns instead of H + E.
2. Out = Q S + tril(Q K^T) Changes.
3. The next chunk starts with S + K^T Changes.

With a decay (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", section 3.3) a row that is
read at step t has decayed since it was written: S by exp(g_t), with g the running sum of the
logarithms within the chunk, and the change of step s by exp(g_t - g_s). So Q K^T and K K^T are
multiplied by the latter, entry by entry. No exponent is above zero, however long the chunk.

The system is solved by `core.triangular`. A last chunk that is short is filled with zeros, which
write nothing.

Differentiation goes through the chunk; `jax.checkpoint` keeps its start alone, so T / C memories
are stored, and derivatives of every order exist.
"""

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core import chunks
from iaj_kernels.core.triangular import unit_lower_inverse
from iaj_kernels.delta_rule import reference
from iaj_kernels.delta_rule.config import Call, Config

_einsum = functools.partial(jnp.einsum, precision="highest")


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """Computes what `reference.run` computes, and calls it for T = 1."""
    T = call.q_BTNH.shape[1]
    if T == 1:
        return reference.run(config, call)
    C = chunks.chunk_length(T, config.longest_chunk)
    log_decay_BTN1 = None if call.log_decay_BTN is None else call.log_decay_BTN[..., None]
    inputs = (*call[:3], call.beta_BTN[..., None], log_decay_BTN1)
    inputs = jax.tree.map(lambda x: chunks.split(x, C), inputs)
    state_BNHE, out_ZBNCE = lax.scan(jax.checkpoint(_chunk), call.state_BNHE, inputs)
    return chunks.join(out_ZBNCE, T), state_BNHE


def _chunk(S_BNHE: jax.Array, inputs: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """The memory after a chunk, and the chunk's output before its scale."""
    # Cast here, so that no whole bfloat16 sequence is copied to float32.
    q_BNCH, k_BNCH, v_BNCE, beta_BNC1, log_decay_BNC1 = jax.tree.map(
        lambda x: x.astype(jnp.float32), inputs
    )
    similar_BNCC = beta_BNC1 * _einsum("BNCH,BNDH->BNCD", k_BNCH, k_BNCH)
    weight_BNCC = jnp.tril(_einsum("BNCH,BNDH->BNCD", q_BNCH, k_BNCH))
    last_BNCH, kept_BNHE = k_BNCH, S_BNHE
    if log_decay_BNC1 is not None:
        since_BNCC = chunks.decay_since(log_decay_BNC1)
        similar_BNCC, weight_BNCC = similar_BNCC * since_BNCC, weight_BNCC * since_BNCC
        last_BNCH = since_BNCC[:, :, -1, :, None] * k_BNCH
        decay_BNC1 = jnp.exp(jnp.cumsum(log_decay_BNC1, 2))
        q_BNCH, k_BNCH = decay_BNC1 * q_BNCH, decay_BNC1 * k_BNCH
        kept_BNHE = decay_BNC1[:, :, -1:] * S_BNHE
    unexpected_BNCE = v_BNCE - _einsum("BNCH,BNHE->BNCE", k_BNCH, S_BNHE)
    inverse_BNCC = unit_lower_inverse(similar_BNCC)
    changes_BNCE = _einsum("BNCD,BNDE->BNCE", inverse_BNCC, beta_BNC1 * unexpected_BNCE)
    out_BNCE = _einsum("BNCH,BNHE->BNCE", q_BNCH, S_BNHE)
    out_BNCE += _einsum("BNCD,BNDE->BNCE", weight_BNCC, changes_BNCE)
    return kept_BNHE + _einsum("BNCH,BNCE->BNHE", last_BNCH, changes_BNCE), out_BNCE
