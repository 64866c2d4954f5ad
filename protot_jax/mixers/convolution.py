"""Short causal depthwise convolution of the recurrent mixers."""

from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.model.layers import add_axes
from lm_jax.model.params import Initializer, ParamSpec


def taps_spec(taps: int, shape: tuple[int, ...], axes: str) -> ParamSpec:
    """Spec of a kernel per channel, uniform within 1 / sqrt(taps); the last tap is the present."""
    return ParamSpec((taps, *shape), "C" + axes, uniform(taps**-0.5))


def causal_convolution(
    x_BTE: jax.Array,
    taps_CE: jax.Array,
    previous_BCE: jax.Array,
    document_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`out_t = sum_c taps_c x_(t - C + 1 + c)`, and the last C - 1 inputs.

    E stands for any number of trailing axes. `previous_BCE` are the C - 1 inputs before the first,
    zero at the beginning of a sequence. With the numbers of the documents that are joined in a row,
    inputs of another document count as zero.
    """
    T, C = x_BTE.shape[1], taps_CE.shape[0]
    padded = jnp.concatenate([previous_BCE.astype(x_BTE.dtype), x_BTE], 1)
    taps_CE = taps_CE.astype(x_BTE.dtype)
    out_BTE = jnp.zeros_like(x_BTE)
    if document_BT is not None:
        # What is before the row counts as its first document's.
        document_BT = jnp.pad(document_BT, ((0, 0), (C - 1, 0)), mode="edge")
    for c in range(C):
        term_BTE = add_axes(taps_CE[c], x_BTE.ndim) * padded[:, c : c + T]
        if document_BT is not None:
            same_BT = document_BT[:, c : c + T] == document_BT[:, C - 1 :]
            same_BT = same_BT.reshape(*same_BT.shape, *[1] * (x_BTE.ndim - 2))
            term_BTE = jnp.where(same_BT, term_BTE, 0.0)
        out_BTE += term_BTE
    return out_BTE, padded[:, T:].astype(previous_BCE.dtype)


def uniform(bound: float) -> Initializer:
    """Uniform within `bound` of zero."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

    return init
