"""Gated slots over chunks: C steps at once by matrix products.

Zhang et al. 2024, section 3.2: reading through a softmax over slots is two gated linear attentions,
one before the softmax and one after it. Within a chunk that starts with the keys K and values V of
the slots and has the rows q_t, k_t, v_t,

1. A_tsm = (1 - alpha_sm) prod_{s<r<=t} alpha_rm for s <= t is what slot m holds, at step t, of
   what step s wrote, and d_tm = prod_{r<=t} alpha_rm what it holds of its start;
2. scores_tm = d_tm <q_t, K_m> + sum_s A_tsm <q_t, k_s>,  p_t = softmax over m of scale scores_t;
3. out_t = sum_m p_tm d_tm V_m + sum_s (sum_m p_tm A_tsm) v_s;
4. the next chunk starts with d_Cm K_m + sum_s A_Csm k_s, and V alike.

The published form takes A_tsm as a quotient of products from the start of the chunk, which
overflows where a slot forgets much in a chunk. Here it is the exponential of a sum of logarithms
from step s on, C x C numbers for each slot, in short chunks. A slot that is not written, with
alpha = 1 throughout, is kept bit for bit. A reset before step s is alpha_s = 0 in every product,
but not in the write 1 - alpha_s. A last chunk that is short is filled with zeros, which
are logarithms of 1 and write nothing.

Differentiation goes through the chunk; `jax.checkpoint` keeps its start alone.
"""

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core import chunks
from iaj_kernels.gated_slots import reference
from iaj_kernels.gated_slots.config import Call, Config, Slots

_einsum = functools.partial(jnp.einsum, precision="highest")


def run(config: Config, call: Call) -> tuple[jax.Array, Slots]:
    """Computes what `reference.run` computes, and calls it for T = 1."""
    T = call.q_BTNH.shape[1]
    if T == 1:
        return reference.run(config, call)
    C = chunks.chunk_length(T, config.longest_chunk)
    inputs = tuple(chunks.split(x, C) for x in (*call[:3], call.log_decay_BTNM))
    resets_ZBC = None
    if call.resets_BT is not None:
        resets_ZBC = chunks.split(call.resets_BT[..., None, None], C)[:, :, 0, :, 0]
    step = jax.checkpoint(functools.partial(_chunk, config.scale))
    state, out_ZBNCE = lax.scan(step, call.state, (*inputs, resets_ZBC))
    return chunks.join(out_ZBNCE, T), state


def _chunk(scale: float, state: Slots, inputs: tuple[Any, ...]) -> tuple[Slots, jax.Array]:
    """The slots after a chunk, and the chunk's output."""
    # Cast here, so that no whole bfloat16 sequence is copied to float32.
    *arrays, reset_BC = inputs
    q_BNCH, k_BNCH, v_BNCE, log_decay_BNCM = (x.astype(jnp.float32) for x in arrays)
    log_decay_BNMC = log_decay_BNCM.swapaxes(2, 3)
    write_BNM1C = -jnp.expm1(log_decay_BNMC)[..., None, :]
    if reset_BC is not None:
        log_decay_BNMC = jnp.where(reset_BC[:, None, None], chunks.LOG_ZERO, log_decay_BNMC)
    left_BNMCC = jnp.tril(chunks.decay_since(log_decay_BNMC[..., None])) * write_BNM1C
    start_BNMC = jnp.exp(jnp.cumsum(log_decay_BNMC, 3))

    scores_BNMC = start_BNMC * _einsum("BNCH,BNMH->BNMC", q_BNCH, state.keys_BNMH)
    similar_BNCC = _einsum("BNCH,BNDH->BNCD", q_BNCH, k_BNCH)
    scores_BNMC += _einsum("BNMCD,BNCD->BNMC", left_BNMCC, similar_BNCC)
    weights_BNMC = jax.nn.softmax(scale * scores_BNMC, axis=2)
    out_BNCE = _einsum("BNMC,BNME->BNCE", weights_BNMC * start_BNMC, state.values_BNME)
    by_step_BNCC = _einsum("BNMC,BNMCD->BNCD", weights_BNMC, left_BNMCC)
    out_BNCE += _einsum("BNCD,BNDE->BNCE", by_step_BNCC, v_BNCE)

    last_BNM1, left_BNMC = start_BNMC[..., -1:], left_BNMCC[:, :, :, -1]
    keys_BNMH = last_BNM1 * state.keys_BNMH + _einsum("BNMC,BNCH->BNMH", left_BNMC, k_BNCH)
    values_BNME = last_BNM1 * state.values_BNME + _einsum("BNMC,BNCE->BNME", left_BNMC, v_BNCE)
    return Slots(keys_BNMH, values_BNME), out_BNCE
