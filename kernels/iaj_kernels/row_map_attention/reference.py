"""Attention by a row map over the whole matrix of scores: definition and test oracle.

"When Does Polynomial Attention Concentrate?", Eq. 2 and Algorithm 1. Differentiable in both modes
and to any order; stores scores and pattern.
"""

import jax
import jax.numpy as jnp

from iaj_kernels.row_map_attention.config import Call, Config
from iaj_kernels.row_map_attention.maps import SOFTMAX


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """`out_BTNH` and `dead_rows_BN`, computed in float32; see `api.row_map_attention`."""
    q_BTNH, k_BSKH, v_BSKH, bias_N, heads_N, visibility = call
    _, T, N, _ = q_BTNH.shape
    _, S, K, _ = k_BSKH.shape
    k_BSNH = jnp.repeat(k_BSKH.astype(jnp.float32), N // K, axis=2)
    v_BSNH = jnp.repeat(v_BSKH.astype(jnp.float32), N // K, axis=2)
    scores_BNTS = config.scale * jnp.einsum(
        "BTNH,BSNH->BNTS", q_BTNH.astype(jnp.float32), k_BSNH, precision="highest"
    )
    if config.soft_cap is not None:
        scores_BNTS = config.soft_cap * jnp.tanh(scores_BNTS / config.soft_cap)
    mask_B1TS = visibility.mask_BTS(T, S)[:, None]
    scores_BNTS = jnp.where(mask_B1TS, scores_BNTS, -jnp.inf)
    pattern_BNTS = config.row_map(scores_BNTS, bias_N[None, :, None, None])
    dead_BNT = mask_B1TS.any(-1) & (pattern_BNTS.sum(-1) == 0)
    if heads_N is not None:
        pattern_BNTS = jnp.where(heads_N[None, :, None, None], pattern_BNTS, SOFTMAX(scores_BNTS))
        dead_BNT &= heads_N[None, :, None]
    out_BTNH = jnp.einsum("BNTS,BSNH->BTNH", pattern_BNTS, v_BSNH, precision="highest")
    return out_BTNH.astype(v_BSKH.dtype), dead_BNT.sum(-1, dtype=jnp.int32)
