"""A baseline of the benchmarks: the prefix mean with all its states in memory.

It writes the `[B, T, R, E]` array of N and reads it back, as the equation is written, and is as
fast as plain JAX makes that: XLA fuses the division into the read.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core.cases import Arrays, Case
from iaj_kernels.prefix_mean.state import MASS_FLOOR, State, empty_state


def materialised(
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    decay_R: jax.Array,
    read_BTR: jax.Array,
    state: State,
    *,
    mass_normalisation: bool = True,
) -> tuple[jax.Array, State]:
    """Computes `reference.run`: the recurrence stacks every state, and one product reads them."""
    write_TBR, value_TBE = (x.astype(jnp.float32).swapaxes(0, 1) for x in (write_BTR, value_BTE))

    def step(carry: State, written: Any) -> tuple[State, State]:
        write_BR, value_BE = written
        added_BRE = write_BR[..., None] * value_BE[:, None, :]
        total_BRE = decay_R[None, :, None] * (carry.total_BRE + added_BRE)
        return State(total_BRE, decay_R[None] * (carry.mass_BR + write_BR)), carry

    state, before = lax.scan(step, state, (write_TBR, value_TBE))
    out_TBE = _read(read_BTR.swapaxes(0, 1), before, mass_normalisation)
    return out_TBE.swapaxes(0, 1), state


def materialised_call(case: Case, arrays: Arrays) -> dict[str, jax.Array]:
    """`materialised` on a case of the suite, as `cases.call`."""
    B, _, R, E = (case.sizes[letter] for letter in "BTRE")
    state = empty_state(B, R, E)
    if "total" in arrays:
        state = State(arrays["total"], arrays["mass"])
    out_BTE, state = materialised(
        arrays["write"],
        arrays["value"],
        arrays["decay"],
        arrays["read"],
        State(*state),
        mass_normalisation=case.options.get("mass_normalisation", True),
    )
    return {
        "out": out_BTE.astype(arrays["value"].dtype),
        "total": state.total_BRE,
        "mass": state.mass_BR,
    }


def _read(read: jax.Array, before: State, mass_normalisation: bool) -> jax.Array:
    """Reads all steps in one product; the two leading axes are B and T in either order."""
    memory, mass = before
    if mass_normalisation:
        memory = memory / jnp.where(mass > MASS_FLOOR, mass, jnp.inf)[..., None]
    return jnp.einsum("...R,...RE->...E", read.astype(jnp.float32), memory, precision="highest")
