"""How logits of prototypes become gates, and which prototypes take part.

The paper's gates are a softmax over all prototypes. The alternatives are options of its released
code that it keeps off; their definitions here are the usual ones:

    top_k       softmax over the k largest logits, zero elsewhere (Shazeer et al. 2017)
    sparsemax   the nearest point of the simplex (Martins and Astudillo 2016, Algorithm 1)
"""

from typing import Literal

import jax
import jax.numpy as jnp

from lm_jax.model.layers import Dropout
from protot_jax.mixers.slots import among_largest

Routing = Literal["softmax", "top_k", "sparsemax"]


def gates(logits_BTR: jax.Array, routing: Routing, *, heads: int = 1, top_k: int = 0) -> jax.Array:
    """Gates `[B, T, R]`, float32, which sum to 1 over the prototypes of each head.

    Args:
      logits_BTR: `[B, T, R]`, head by head; minus infinity hides a prototype.
      routing: the map of a head's logits.
      heads: number of heads, which divides R.
      top_k: the number of prototypes of a head with a gate above zero, for "top_k".
    """
    B, T, R = logits_BTR.shape
    logits_BTNR = logits_BTR.reshape(B, T, heads, R // heads)
    if routing == "sparsemax":
        gates_BTNR = sparsemax(logits_BTNR)
    else:
        if routing == "top_k":
            largest_BTNR = among_largest(logits_BTNR, top_k)
            logits_BTNR = jnp.where(largest_BTNR, logits_BTNR, -jnp.inf)
        gates_BTNR = jax.nn.softmax(logits_BTNR, axis=-1)
    return gates_BTNR.reshape(B, T, R)


def sparsemax(x: jax.Array) -> jax.Array:
    """The point of the probability simplex nearest to `x`, over the last axis.

    With x sorted from its largest, the first k entries are in the support, k the largest with
    1 + k x_(k) > sum of the first k; they give up an equal part of their excess over 1.
    """
    sorted_XR = -jnp.sort(-x, axis=-1)
    count_R = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    # An entry that is hidden, at minus infinity, adds nothing and is in no support.
    finite_XR = jnp.isfinite(sorted_XR)
    sums_XR = jnp.cumsum(jnp.where(finite_XR, sorted_XR, 0.0), axis=-1)
    count_XR = jnp.broadcast_to(count_R, x.shape)
    support_XR = finite_XR & (1.0 + count_XR * sorted_XR > sums_XR)
    size_X1 = jnp.sum(support_XR, axis=-1, keepdims=True)
    total_X1 = jnp.sum(jnp.where(support_XR, sorted_XR, 0.0), axis=-1, keepdims=True)
    return jnp.maximum(x - (total_X1 - 1.0) / size_X1, 0.0)


def hide(logits_BTR: jax.Array, rate: float, rng: jax.Array | None, *, heads: int = 1) -> jax.Array:
    """Logits with a share `rate` of the prototypes of each row hidden; as they are without a key.

    The gates of the others then sum to 1 by themselves. Calls with one key hide the same ones. A
    head that would lose all of its prototypes in a row keeps them.
    """
    dropout = Dropout(rate, rng)
    if not dropout.active:
        return logits_BTR
    B, _, R = logits_BTR.shape
    kept_BNR = dropout(jnp.ones((B, heads, R // heads)), "prototypes") > 0
    kept_BNR |= ~jnp.any(kept_BNR, axis=-1, keepdims=True)
    return jnp.where(kept_BNR.reshape(B, 1, R), logits_BTR, -jnp.inf)
