"""Sequences cut into chunks of nearly equal length, for recurrences that run over chunks."""

import math

import jax
import jax.numpy as jnp

# The logarithm of a decay that leaves nothing: its exponential is 0 in float32, and unlike minus
# infinity it can be added to others and has a gradient.
LOG_ZERO = -200.0


def chunk_length(T: int, longest: int) -> int:
    """C of chunks that are nearly of one length, so that little padding is needed."""
    return math.ceil(T / math.ceil(T / longest))


def split(x_BTNH: jax.Array, C: int) -> jax.Array:
    """`[Z, B, N, C, H]` for Z chunks, the last filled with zeros."""
    B, T, N, H = x_BTNH.shape
    Z = math.ceil(T / C)
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, Z * C - T), (0, 0), (0, 0)))
    return x_BTNH.reshape(B, Z, C, N, H).transpose(1, 0, 3, 2, 4)


def join(x_ZBNCE: jax.Array, T: int) -> jax.Array:
    """The first T steps `[B, T, N, E]` of chunks."""
    Z, B, N, C, E = x_ZBNCE.shape
    return x_ZBNCE.transpose(1, 0, 3, 2, 4).reshape(B, Z * C, N, E)[:, :T]


def decay_since(log_decay: jax.Array) -> jax.Array:
    """What is left at step t of what step s <= t wrote, `[..., C, 1]` logarithms to `[..., C, C]`.

    The exponent is summed from each step on: a difference of sums from the first would cancel.
    Where s > t it is 1.
    """
    C = log_decay.shape[-2]
    steps = jnp.broadcast_to(log_decay, (*log_decay.shape[:-1], C))
    return jnp.exp(jnp.cumsum(jnp.tril(steps, -1), -2))
