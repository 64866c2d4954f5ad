"""Softmax, and division by the sum, of rows that may have no visible key or no weight."""

import jax
import jax.numpy as jnp


def softmax(scores: jax.Array) -> jax.Array:
    """The softmax of every row; zeros for a row whose keys are all masked, with score -inf."""
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    return over_sum(jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top)))


def over_sum(weights: jax.Array) -> jax.Array:
    """The weights of every row divided by their sum; zeros for a row of zeros."""
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)
