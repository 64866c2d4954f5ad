"""Activation functions of transcoders: ReLU, JumpReLU, TopK and BatchTopK.

    ReLU        max(x, 0)
    JumpReLU    x where x > theta, else 0 (Rajamanoharan et al., 2024)
    TopK        x where it is among the k largest of its token, else 0 (Gao et al., 2024)
    BatchTopK   x where x is among the largest of the batch, else 0 (Bussmann et al., 2024)

`products_of_some` are the inputs of a few units of all layers.

JumpReLU is constant in theta almost everywhere. Its derivative by theta is taken from a step
smoothed over a band of width `bandwidth` around theta, and its derivative by x from the open units
only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def products_of_some(input_LXD: jax.Array, layer_Y: jax.Array, weight_YD: jax.Array) -> jax.Array:
    """Products `[X, Y]` of each vector of weights with the inputs of its layer.

    Of all units of all layers most are not asked for; of a layer all vectors are multiplied, which
    needs no copy of its input for each.
    """

    def add(product_XY: jax.Array, each: Any) -> tuple[jax.Array, None]:
        input_XD, layer = each
        own_XY = jnp.einsum("XD,YD->XY", input_XD, weight_YD)
        return jnp.where((layer_Y == layer)[None], own_XY, product_XY), None

    L, X, _ = input_LXD.shape
    start_XY = jnp.zeros((X, len(layer_Y)), input_LXD.dtype)
    return jax.lax.scan(add, start_XY, (input_LXD, jnp.arange(L)))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def jumprelu(x: jax.Array, theta: jax.Array, bandwidth: float) -> jax.Array:
    """`x` where it is above `theta`, else 0.

    Args:
      x: pre-activations.
      theta: thresholds, above 0; broadcasts against `x`.
      bandwidth: width of the band around theta in which the derivative by theta is
        `-theta / bandwidth`; elsewhere it is 0.
    """
    return jnp.where(x > theta, x, 0.0)


def _forward(
    x: jax.Array, theta: jax.Array, bandwidth: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jumprelu(x, theta, bandwidth), (x, theta)


def _backward(
    bandwidth: float, kept: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, theta = kept
    near = jnp.abs(x - theta) < bandwidth / 2
    g_theta = jnp.where(near, -theta / bandwidth * g, 0.0)
    extra = g_theta.ndim - theta.ndim
    g_theta = g_theta.sum(tuple(range(extra)))
    kept_axes = tuple(i for i, size in enumerate(theta.shape) if size != g_theta.shape[i])
    return jnp.where(x > theta, g, 0.0), g_theta.sum(kept_axes, keepdims=True)


jumprelu.defvjp(_forward, _backward)


def topk(x: jax.Array, k: int, *, rectified: bool) -> jax.Array:
    """The k largest numbers of the last axis, and 0 elsewhere; of equal ones the first.

    Args:
      x: pre-activations `[..., F]`.
      k: number of them that are kept.
      rectified: whether kept ones below 0 become 0.
    """
    value, index = jax.lax.top_k(x, k)
    if rectified:
        value = jax.nn.relu(value)
    return jnp.put_along_axis(jnp.zeros_like(x), index, value, axis=-1, inplace=False)


def largest(x: jax.Array, count: jax.Array | float, *, steps: int = 30) -> jax.Array:
    """A threshold above which about `count` entries of `x` are, and all of them positive.

    By bisection between 0 and the largest entry, in which no entry is sorted: on a CPU a sort of a
    batch takes longer than the transcoder. The number of entries above it is `count` or more, by
    at most those within `2^-steps` of the range.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) / 2
        enough = jnp.sum(x > middle) >= count
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros((), x.dtype)
    return jax.lax.fori_loop(0, steps, halve, (low, jnp.maximum(x.max(), low)))[0]


def batch_topk(x: jax.Array, count: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """The largest `count` entries of `x`, if they are positive, else 0; and their threshold.

    The threshold has no gradient.
    """
    theta = jax.lax.stop_gradient(largest(x, count))
    return jnp.where(x > theta, x, 0.0), theta
