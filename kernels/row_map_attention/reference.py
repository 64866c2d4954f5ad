"""Attention by a row map over the whole matrix of scores: the definition, and the oracle.

"When Does Polynomial Attention Concentrate?", Eq. 2 and Algorithm 1. Differentiable in both modes
and to any order; stores scores and pattern.
"""

import jax
import jax.numpy as jnp

from kernels.row_map_attention.config import Call, Config
from kernels.row_map_attention.maps import SOFTMAX, RowMap


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """`out_BTNH` and `dead_rows_BN`, computed in float32; see `api.row_map_attention`."""
    q_BTNH, k_BSKH, v_BSKH, bias_N, heads_N, seen = call
    _, T, N, _ = q_BTNH.shape
    _, S, K, _ = k_BSKH.shape
    k_BSNH = jnp.repeat(k_BSKH.astype(jnp.float32), N // K, axis=2)
    v_BSNH = jnp.repeat(v_BSKH.astype(jnp.float32), N // K, axis=2)
    scores_BNTS = config.scale * jnp.einsum(
        "BTNH,BSNH->BNTS", q_BTNH.astype(jnp.float32), k_BSNH, precision="highest"
    )
    if config.soft_cap is not None:
        scores_BNTS = config.soft_cap * jnp.tanh(scores_BNTS / config.soft_cap)
    mask_B1TS = seen.mask_BTS(T, S)[:, None]
    bias_1N11 = bias_N[None, :, None, None]

    pattern_BNTS = weights(config.row_map, scores_BNTS, bias_1N11, mask_B1TS)
    dead_BNT = mask_B1TS.any(-1) & (pattern_BNTS.sum(-1) == 0)
    if heads_N is not None:
        softmax_BNTS = weights(SOFTMAX, scores_BNTS, bias_1N11, mask_B1TS)
        pattern_BNTS = jnp.where(heads_N[None, :, None, None], pattern_BNTS, softmax_BNTS)
        dead_BNT &= heads_N[None, :, None]
    out_BTNH = jnp.einsum("BNTS,BSNH->BTNH", pattern_BNTS, v_BSNH, precision="highest")
    return out_BTNH.astype(v_BSKH.dtype), dead_BNT.sum(-1, dtype=jnp.int32)


def weights(row_map: RowMap, scores: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
    """The rows `[..., S]` of weights of float32 scores; 0 for hidden keys, and in rows of none."""
    u = scores + bias
    # Slope 0 at the threshold; a NaN score stays NaN.
    r = jnp.where(mask & ~(u <= 0), u, 0.0)
    visible = jnp.maximum(mask.sum(-1, keepdims=True), 1).astype(scores.dtype)
    match row_map.kind:
        case "softmax":
            return _normalised_exp(scores, mask)
        case "sigmoid":
            return _normalised_exp(jax.nn.log_sigmoid(u), mask)
        case "relu_power":
            # The map does not depend on the scale of r, so the largest needs no gradient.
            largest = jax.lax.stop_gradient(r.max(-1, keepdims=True))
            w = _power(r / jnp.where(largest == 0, 1.0, largest), row_map.p)
            total = w.sum(-1, keepdims=True)
            return w / jnp.where(total == 0, 1.0, total)
        case "ramapuram_sigmoid":
            shift = jnp.log(visible) if row_map.minus_log_n else 0.0
            return jnp.where(mask, jax.nn.sigmoid(u - shift), 0.0)
        case "relu_over_length":
            return _power(r, row_map.p) / visible**row_map.alpha
        case _:
            raise ValueError(f"no row map of kind {row_map.kind!r}")


def _normalised_exp(x: jax.Array, mask: jax.Array) -> jax.Array:
    largest = jnp.max(x, axis=-1, keepdims=True, where=mask, initial=jnp.finfo(x.dtype).min)
    w = jnp.where(mask, jnp.exp(jnp.where(mask, x - jax.lax.stop_gradient(largest), 0.0)), 0.0)
    total = w.sum(-1, keepdims=True)
    return w / jnp.where(total == 0, 1.0, total)


def _power(x: jax.Array, p: float) -> jax.Array:
    if p == int(p):
        return x ** int(p)
    # The slope of x^p at 0 may be infinite; inactive keys have none.
    return jnp.where(x == 0, 0.0, jnp.where(x == 0, 1.0, x) ** p)
