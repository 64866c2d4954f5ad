"""The prefix mean by its recurrence, one step at a time: the definition, and the oracle.

Prototype Transformer, Eq. 2. The carry of a prototype is N, the discounted sum of written values,
and D, its mass:

1. The output gains read * N / D, the mean of the steps before this one; nothing without mass.
2. N becomes N + write * value, and D becomes D + write.
3. Both decay.

A step with a reset first empties N and D.

Without normalisation the output reads N itself. Differentiating stores a carry of size R E for
every step.
"""

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.prefix_mean.config import Call, Config
from iaj_kernels.prefix_mean.state import MASS_FLOOR, State, emptied


def run(config: Config, call: Call) -> tuple[jax.Array, State]:
    """`out_BTE` and the state after the last step, in float32; see `api.prefix_mean`."""
    arrays = (call.write_BTR, call.value_BTE, call.read_BTR)
    steps = tuple(x.astype(jnp.float32).swapaxes(0, 1) for x in arrays)
    resets_TB = None if call.resets_BT is None else call.resets_BT.T
    step = functools.partial(_step, config, call.decay_R)
    state, out_TBE = lax.scan(step, call.state, (*steps, resets_TB))
    return out_TBE.swapaxes(0, 1), state


def _step(config: Config, decay_R: jax.Array, state: State, written: Any):
    write_BR, value_BE, read_BR, reset_B = written
    if reset_B is not None:
        state = emptied(state, reset_B)
    memory_BRE = state.total_BRE
    if config.mass_normalisation:
        held_BR = state.mass_BR > MASS_FLOOR
        mass_BR = jnp.where(held_BR, state.mass_BR, jnp.inf)
        memory_BRE = _ratio(memory_BRE, mass_BR[..., None])
    total_BRE = state.total_BRE + write_BR[..., None] * value_BE[:, None, :]
    mass_BR = state.mass_BR + write_BR
    state = State(decay_R[None, :, None] * total_BRE, decay_R[None] * mass_BR)
    return state, _read(read_BR, memory_BRE)


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
