"""What a prefix mean carries from one step to the next, and how two stretches are joined.

With N = sum_j beta^(t-j) w_j v_j and D = sum_j beta^(t-j) w_j over the steps j < t, the state
before step t is (N, D); a stretch of L steps that starts from an empty state and ends at (N', D')
turns it into (beta^L N + N', beta^L D + D').
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# A mass below this is read as zero, and the mean of an empty past is zero. It stands a little above
# the smallest normal float32, under which a GPU may flush to zero.
MASS_FLOOR = 1e-37


class State(NamedTuple):
    """float32: the discounted sum of written values, and of the writes."""

    total_BRE: jax.Array
    mass_BR: jax.Array


class LogState(NamedTuple):
    """float32: the mean itself and the logarithm of its mass, for `log_write`; -inf is empty."""

    mean_BRE: jax.Array
    log_mass_BR: jax.Array


def empty_state(B: int, R: int, E: int, *, log_write: bool = False) -> State | LogState:
    """The state before the first step."""
    if log_write:
        return LogState(jnp.zeros((B, R, E)), jnp.full((B, R), -jnp.inf))
    return State(jnp.zeros((B, R, E)), jnp.zeros((B, R)))


def join(first: State, second: State, decay_R: jax.Array, steps: jax.Array | int) -> State:
    """The state after two stretches, `second` being that of the later one started empty.

    Args:
      steps: the length of the later stretch.
    """
    kept_R = jnp.exp(jnp.asarray(steps, jnp.float32) * log_of_decay(decay_R))
    return State(
        kept_R[None, :, None] * first.total_BRE + second.total_BRE,
        kept_R[None] * first.mass_BR + second.mass_BR,
    )


def log_of_decay(decay_R: jax.Array) -> jax.Array:
    """ln beta to the last bit or so, also next to 1, where a half-life of 10,000 steps lies."""
    decay_R = jnp.maximum(decay_R.astype(jnp.float32), jnp.finfo(jnp.float32).tiny)
    near_one = decay_R > 0.5
    # decay - 1 is exact above 1/2; each branch is given a harmless input where it is not taken.
    return jnp.where(
        near_one,
        jnp.log1p(jnp.where(near_one, decay_R, 1.0) - 1.0),
        jnp.log(jnp.where(near_one, 0.5, decay_R)),
    )
