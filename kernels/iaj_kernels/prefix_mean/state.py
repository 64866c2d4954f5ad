"""State that a prefix mean carries from one step to the next.

With N = sum_j beta^(t-j) w_j v_j and D = sum_j beta^(t-j) w_j over the steps j < t, the state
before step t is (N, D).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# A mass not above this is read as zero, and the mean of an empty past is zero. A gradient holds
# 1 / D and must stay finite, and N = D * mean must stay above the smallest normal float32, 1e-38.
MASS_FLOOR = 1e-30


class State(NamedTuple):
    """float32: the discounted sum of written values, and of the writes."""

    total_BRE: jax.Array
    mass_BR: jax.Array


def empty_state(B: int, R: int, E: int) -> State:
    """The state before the first step."""
    return State(jnp.zeros((B, R, E), jnp.float32), jnp.zeros((B, R), jnp.float32))


def emptied(state: State, reset_B: jax.Array) -> State:
    """The state with nothing in the batch rows of `reset_B`."""
    return State(
        jnp.where(reset_B[:, None, None], 0.0, state.total_BRE),
        jnp.where(reset_B[:, None], 0.0, state.mass_BR),
    )


def log_of_decay(decay_R: jax.Array) -> jax.Array:
    """ln beta to about the last bit, also near 1, as for a half-life of 10,000 steps."""
    decay_R = jnp.maximum(decay_R.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
    near_one = decay_R > 0.5
    # decay - 1 is exact above 1/2; each branch has a harmless input where it is not selected.
    return jnp.where(
        near_one,
        jnp.log1p(jnp.where(near_one, decay_R, 1.0) - 1.0),
        jnp.log(jnp.where(near_one, 0.5, decay_R)),
    )
