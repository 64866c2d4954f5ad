"""Bernoulli-gated attention by its definition: the whole maps `[B, N, T, S]`, and autodiff.

Sparse Attention Post-Training, Eq. 1-3. The straight-through gradient is that of
`hard + (soft - stop_gradient(soft))`, soft being the gate relaxed at temperature 1. Whether a
gate is open is computed by `tile`, so that all implementations agree on it to the bit.
"""

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.attention.rows import over_sum, softmax
from iaj_kernels.core import counts, noise
from iaj_kernels.gated_attention import tile
from iaj_kernels.gated_attention.config import Call, Config


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`out_BTNH`, `expected_BN` and `opened_BN`, computed in float32; see `api.gated_attention`."""
    q_BTNH, k_BSKH, v_BSKH, bias_N, seed, origin_2, visibility = call
    B, T, N, _ = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    k_BSNH, v_BSNH = (jnp.repeat(x.astype(jnp.float32), N // K, axis=2) for x in (k_BSKH, v_BSKH))
    raw_BNTS = jnp.einsum(
        "BTNH,BSNH->BNTS", q_BTNH.astype(jnp.float32), k_BSNH, precision="highest"
    )
    mask_B1TS = visibility.mask_BTS(T, S)[:, None]
    bits_BNTS = bits(B, T, N, S, seed, origin_2, visibility.start_B)
    weight_BNTS, expected_BN, opened_BN = weights(config, raw_BNTS, bias_N, bits_BNTS, mask_B1TS)
    out_BTNH = jnp.einsum("BNTS,BSNH->BTNH", weight_BNTS, v_BSNH, precision="highest")
    return out_BTNH.astype(v_BSKH.dtype), expected_BN, opened_BN


def weights(
    config: Config,
    raw_BNTS: jax.Array,
    bias_N: jax.Array,
    bits_BNTS: jax.Array,
    mask_B1TS: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gated weights A P of every pair, and the `expected_BN` and `opened_BN` edges.

    Args:
      config: the call's settings; `scale`, `gate_scale` and `soft_cap` apply to `raw_BNTS`.
      raw_BNTS: finite products q.k.
      bias_N: the bias of each head's gate logits.
      bits_BNTS: random bits from `bits`; read in mode "sample" alone.
      mask_B1TS: true where a key is visible; broadcasts.
    """
    bias_1N11 = bias_N[None, :, None, None]
    score_BNTS = config.scale * raw_BNTS
    if config.soft_cap is not None:
        score_BNTS = config.soft_cap * jnp.tanh(score_BNTS / config.soft_cap)
    own_BNTS = score_BNTS if config.gate_scale is None else config.gate_scale * raw_BNTS
    logit_BNTS = own_BNTS + bias_1N11
    _, logit_in_bits = tile.logits(config, lax.stop_gradient(raw_BNTS), bias_1N11)
    is_open_BNTS = tile.gate(config, lax.stop_gradient(logit_in_bits), bits_BNTS).is_open

    probability_BNTS = jax.nn.sigmoid(logit_BNTS)
    hard_BNTS = is_open_BNTS.astype(jnp.float32)
    if config.mode == "sample":
        noise_BNTS = noise.logistic(noise.uniform(bits_BNTS))
        gate_BNTS = _straight_through(hard_BNTS, jax.nn.sigmoid(logit_BNTS + noise_BNTS))
    elif config.mode == "threshold":
        gate_BNTS = _straight_through(hard_BNTS, probability_BNTS)
    else:
        gate_BNTS = probability_BNTS if config.mode == "expected" else hard_BNTS

    weight_BNTS = gate_BNTS * softmax(jnp.where(mask_B1TS, score_BNTS, -jnp.inf))
    if config.renormalise:
        weight_BNTS = over_sum(weight_BNTS)
    expected_BN = jnp.where(mask_B1TS, probability_BNTS, 0.0).sum((2, 3))
    opened_BN = counts.total(is_open_BNTS & mask_B1TS, (2, 3))
    return weight_BNTS, expected_BN, opened_BN


def bits(
    B: int, T: int, N: int, S: int, seed: jax.Array, origin_2: jax.Array, start_B: jax.Array
) -> jax.Array:
    """The random bits of every pair, uint32 `[B, N, T, S]`."""
    batch_B111 = origin_2[0] + jnp.arange(B)[:, None, None, None]
    head_1N11 = origin_2[1] + jnp.arange(N)[None, :, None, None]
    query_B1T1 = (start_B[:, None] + jnp.arange(T)[None])[:, None, :, None]
    key_111S = jnp.arange(S)[None, None, None, :]
    return noise.bits(noise.stream(seed, batch_B111, head_1N11), query_B1T1, key_111S)


def _straight_through(hard: jax.Array, soft: jax.Array) -> jax.Array:
    return hard + (soft - lax.stop_gradient(soft))
