"""What a prefix mean carries from one step to the next, and how two stretches are joined.

With N = sum_j beta^(t-j) w_j v_j and D = sum_j beta^(t-j) w_j over the steps j < t, the state
before step t is (N, D); a stretch of L steps that starts from an empty state and ends at (N', D')
turns it into (beta^L N + N', beta^L D + D'). For log gates the state is (N / D, ln D) and the same
holds of means weighted by their masses.
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


class LogState(NamedTuple):
    """float32: the mean itself and the logarithm of its mass, for `log_write`; -inf is empty."""

    mean_BRE: jax.Array
    log_mass_BR: jax.Array


def empty_state(B: int, R: int, E: int, *, log_write: bool = False) -> State | LogState:
    """The state before the first step."""
    zeros_BRE = jnp.zeros((B, R, E), jnp.float32)
    if log_write:
        return LogState(zeros_BRE, jnp.full((B, R), -jnp.inf, jnp.float32))
    return State(zeros_BRE, jnp.zeros((B, R), jnp.float32))


def join(
    first: State | LogState, second: State | LogState, decay_R: jax.Array, steps: jax.Array | int
) -> State | LogState:
    """The state after two stretches, `second` being that of the later one started empty.

    Args:
      steps: the length of the later stretch.

    Raises:
      TypeError: the states are not of one kind.
    """
    log_kept_R = jnp.asarray(steps, jnp.float32) * log_of_decay(decay_R)
    if isinstance(first, State) and isinstance(second, State):
        kept_R = jnp.exp(log_kept_R)
        return State(
            kept_R[None, :, None] * first.total_BRE + second.total_BRE,
            kept_R[None] * first.mass_BR + second.mass_BR,
        )
    if isinstance(first, LogState) and isinstance(second, LogState):
        log_first_BR = first.log_mass_BR + log_kept_R[None]
        log_mass_BR = log_add(log_first_BR, second.log_mass_BR)
        mean_BRE = (
            share(log_first_BR, log_mass_BR)[..., None] * first.mean_BRE
            + share(second.log_mass_BR, log_mass_BR)[..., None] * second.mean_BRE
        )
        return LogState(mean_BRE, log_mass_BR)
    raise TypeError(
        f"prefix_mean: join got a {type(first).__name__} and a {type(second).__name__}; "
        "pass two states of one kind"
    )


def stretch(
    write_BTR: jax.Array, value_BTE: jax.Array, decay_R: jax.Array, *, log_write: bool = False
) -> State | LogState:
    """The state after a stretch that starts empty: one product, no outputs."""
    T = write_BTR.shape[1]
    write_BTR, value_BTE = write_BTR.astype(jnp.float32), value_BTE.astype(jnp.float32)
    steps_left_T = jnp.arange(T, 0, -1, dtype=jnp.float32)
    log_kept_BTR = (steps_left_T[:, None] * log_of_decay(decay_R)[None])[None]
    if log_write:
        log_weight_BTR = write_BTR + log_kept_BTR
        log_mass_BR = log_sum(log_weight_BTR, axis=1)
        weight_BTR = share(log_weight_BTR, log_mass_BR[:, None])
        return LogState(_sum(weight_BTR, value_BTE), log_mass_BR)
    weight_BTR = write_BTR * jnp.exp(log_kept_BTR)
    return State(_sum(weight_BTR, value_BTE), weight_BTR.sum(1))


def _sum(weight_BTR: jax.Array, value_BTE: jax.Array) -> jax.Array:
    return jnp.einsum("BTR,BTE->BRE", weight_BTR, value_BTE, precision="highest")


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


def share(log_part: jax.Array, log_whole: jax.Array) -> jax.Array:
    """exp(part - whole), 0 where the whole is empty."""
    return jnp.exp(log_part - jnp.where(jnp.isneginf(log_whole), 0.0, log_whole))


def log_add(a: jax.Array, b: jax.Array) -> jax.Array:
    """ln(e^a + e^b) of finite numbers and -inf, with a gradient of 0 where both are -inf."""
    empty = jnp.isneginf(jnp.maximum(a, b))
    added = jnp.logaddexp(jnp.where(empty, 0.0, a), jnp.where(empty, 0.0, b))
    return jnp.where(empty, -jnp.inf, added)


def log_sum(x: jax.Array, axis: int) -> jax.Array:
    """ln sum e^x of finite numbers and -inf, with a gradient of 0 where all are -inf."""
    empty = jnp.isneginf(x.max(axis, keepdims=True))
    summed = jax.nn.logsumexp(jnp.where(empty, 0.0, x), axis)
    return jnp.where(empty.squeeze(axis), -jnp.inf, summed)
