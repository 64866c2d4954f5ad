"""The prefix mean by its recurrence, one step at a time: the definition, and the oracle.

Prototype Transformer, Eq. 2. Differentiating it stores a state of size R E for every step.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from kernels.prefix_mean.state import MASS_FLOOR, LogState, State, log_of_decay


def prefix_mean(
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    decay_R: jax.Array,
    read_BTR: jax.Array,
    state: State | LogState,
    *,
    mass_normalisation: bool,
) -> tuple[jax.Array, State | LogState]:
    """`out_BTE` and the state after the last step, in float32; see `api.prefix_mean`."""
    arrays = (write_BTR, value_BTE, read_BTR)
    steps = tuple(x.astype(jnp.float32).swapaxes(0, 1) for x in arrays)

    def linear(carry: State, step):
        write_BR, value_BE, read_BR = step
        total_BRE, mass_BR = carry
        memory_BRE = total_BRE
        if mass_normalisation:
            safe_BR = jnp.where(mass_BR > MASS_FLOOR, mass_BR, jnp.inf)
            memory_BRE = total_BRE / safe_BR[..., None]
        out_BE = jnp.einsum("BR,BRE->BE", read_BR, memory_BRE, precision="highest")
        total_BRE = decay_R[None, :, None] * (
            total_BRE + write_BR[..., None] * value_BE[:, None, :]
        )
        return State(total_BRE, decay_R[None] * (mass_BR + write_BR)), out_BE

    def logarithmic(carry: LogState, step):
        log_write_BR, value_BE, read_BR = step
        mean_BRE, log_mass_BR = carry
        out_BE = jnp.einsum("BR,BRE->BE", read_BR, mean_BRE, precision="highest")
        sum_BR = jnp.logaddexp(log_mass_BR, log_write_BR)
        empty_BR = jnp.isneginf(sum_BR)
        gain_BR = jnp.exp(log_write_BR - jnp.where(empty_BR, 0.0, sum_BR))
        mean_BRE += gain_BR[..., None] * (value_BE[:, None, :] - mean_BRE)
        return LogState(mean_BRE, sum_BR + log_of_decay(decay_R)[None]), out_BE

    step: Any = linear if isinstance(state, State) else logarithmic
    state, out_TBE = lax.scan(step, state, steps)
    return out_TBE.swapaxes(0, 1), state
