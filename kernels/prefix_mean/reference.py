"""The prefix mean by its recurrence, one step at a time: the definition, and the oracle.

Prototype Transformer, Eq. 2. The carry of a prototype is its mean m = N / D and its mass D:

1. The output gains read * m, the mean of the steps before this one.
2. The mass becomes D + w, and the mean moves to the new value by the share w / (D + w).
3. The mass decays; a mean of things that all decay alike stays what it is.

A carried mean keeps the gradient exact where one write holds nearly all of the mass, where the two
terms of d(N / D) cancel. Without normalisation the carry is N itself. Differentiating stores a
carry of size R E for every step.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from kernels.prefix_mean.config import Config
from kernels.prefix_mean.state import MASS_FLOOR, LogState, State, log_add, log_of_decay, share


def prefix_mean(
    config: Config,
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    decay_R: jax.Array,
    read_BTR: jax.Array,
    state: Any,
) -> tuple[jax.Array, Any]:
    """`out_BTE` and the state after the last step, in float32; see `api.prefix_mean`."""
    arrays = (write_BTR, value_BTE, read_BTR)
    steps = tuple(x.astype(jnp.float32).swapaxes(0, 1) for x in arrays)
    if config.log_write:
        state, out_TBE = lax.scan(lambda *step: _log_mean(decay_R, *step), state, steps)
    elif config.mass_normalisation:
        total_BRE, mass_BR = state
        held_BR = jnp.where(mass_BR > MASS_FLOOR, mass_BR, jnp.inf)
        mean_BRE = _ratio(total_BRE, held_BR[..., None])
        carry, out_TBE = lax.scan(lambda *step: _mean(decay_R, *step), (mean_BRE, mass_BR), steps)
        state = State(carry[0] * carry[1][..., None], carry[1])
    else:
        state, out_TBE = lax.scan(lambda *step: _total(decay_R, *step), state, steps)
    return out_TBE.swapaxes(0, 1), state


def _mean(decay_R, carry, step):
    write_BR, value_BE, read_BR = step
    mean_BRE, mass_BR = carry
    held_BR = mass_BR > MASS_FLOOR
    out_BE = _read(read_BR, jnp.where(held_BR[..., None], mean_BRE, 0.0))
    sum_BR = mass_BR + write_BR
    share_BR = _ratio(write_BR, jnp.where(sum_BR > MASS_FLOOR, sum_BR, jnp.inf))
    mean_BRE += share_BR[..., None] * (value_BE[:, None, :] - mean_BRE)
    return (mean_BRE, decay_R[None] * sum_BR), out_BE


def _log_mean(decay_R, carry, step):
    log_write_BR, value_BE, read_BR = step
    mean_BRE, log_mass_BR = carry
    out_BE = _read(read_BR, mean_BRE)
    log_sum_BR = log_add(log_mass_BR, log_write_BR)
    share_BR = share(log_write_BR, log_sum_BR)
    mean_BRE += share_BR[..., None] * (value_BE[:, None, :] - mean_BRE)
    return LogState(mean_BRE, log_sum_BR + log_of_decay(decay_R)[None]), out_BE


def _total(decay_R, carry, step):
    write_BR, value_BE, read_BR = step
    total_BRE, mass_BR = carry
    out_BE = _read(read_BR, total_BRE)
    total_BRE += write_BR[..., None] * value_BE[:, None, :]
    return State(decay_R[None, :, None] * total_BRE, decay_R[None] * (mass_BR + write_BR)), out_BE


def _read(read_BR: jax.Array, memory_BRE: jax.Array) -> jax.Array:
    return jnp.einsum("BR,BRE->BE", read_BR, memory_BRE, precision="highest")


@jax.custom_jvp
def _ratio(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y, differentiated without the 1 / y^2 that overflows for a y below 1e-19."""
    return x / y


@_ratio.defjvp
def _ratio_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    ratio = x / y
    return ratio, (dx - ratio * dy) / y
