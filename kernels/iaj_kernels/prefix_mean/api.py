"""Discounted, mass-normalised mean of each prototype channel over the strict past.

Prototype Transformer, section 3 and Eq. 2. For prototype r with decay beta, at step i,

    N_ir = sum_{j<i} beta^(i-j) w_jr v_j        D_ir = sum_{j<i} beta^(i-j) w_jr
    out_i = sum_r read_ir N_ir / D_ir

A reset before step s leaves only the steps j >= s in the sums of later ones.

Every implementation forms powers of beta with exponents >= 0 alone, so no decay overflows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.core import dispatch, shapes
from iaj_kernels.prefix_mean import pallas, reference, xla
from iaj_kernels.prefix_mean.config import Call, Config
from iaj_kernels.prefix_mean.state import State, empty_state

OP = "prefix_mean"

# In order of preference.
IMPLEMENTATIONS: Mapping[str, Callable[[Config, Call], Any]] = {
    "pallas": pallas.run,
    "xla": xla.run,
    "reference": reference.run,
}


def prefix_mean(
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    decay_R: jax.Array,
    read_BTR: jax.Array,
    *,
    initial_state: State | None = None,
    return_state: bool = False,
    mass_normalisation: bool = True,
    resets_BT: jax.Array | None = None,
    implementation: str | None = None,
) -> Any:
    """Reads, at every step, the discounted mean of what was written before it.

    The first step of an empty state reads zero. A prototype whose mass D is not above 1e-30 has no
    past that float32 can hold, and reads zero.

    Args:
      write_BTR: `[B, T, R]` write gates >= 0, float32 or bfloat16.
      value_BTE: `[B, T, E]` values, in the dtype of the gates.
      decay_R: `[R]` float32 in (0, 1], the decay beta of one step; half-life -ln 2 / ln beta.
      read_BTR: `[B, T, R]` read gates.
      initial_state: the state before the first step; None is empty. Differentiable.
      return_state: whether the state after the last step is also returned: for decoding, and for
        the next chunk of a prompt.
      mass_normalisation: false reads N in place of N / D.
      resets_BT: `[B, T]` bool, true where the state is emptied before the step, as at the first
        token of a document; None for no reset.
      implementation: "reference", "xla", "pallas", or None for the best that runs here. "pallas"
        has no resets.

    Returns:
      `out_BTE` in the dtype of `value_BTE`; with `return_state`, also the float32 state. Sums,
      masses and states are float32 whatever the inputs.

    Raises:
      ValueError: shapes that do not fit, or T = 0.
      TypeError: a dtype other than float32 and bfloat16, or resets that are not bool.
      dispatch.UnavailableError: a named implementation that does not run here.
    """
    size = shapes.sizes(
        OP,
        write_BTR=write_BTR,
        value_BTE=value_BTE,
        decay_R=decay_R,
        read_BTR=read_BTR,
        resets_BT=resets_BT,
    )
    shapes.floating(OP, write=write_BTR, value=value_BTE, read=read_BTR)
    shapes.floating(OP, (jnp.float32,), decay=decay_R)
    shapes.floating(OP, (jnp.bool_,), resets=resets_BT)
    if size["T"] == 0:
        raise ValueError(f"{OP}: write has T = 0 steps; pass at least one")
    state = initial_state
    if state is None:
        state = empty_state(size["B"], size["R"], size["E"])
    shapes.sizes(OP, write_BTR=write_BTR, value_BTE=value_BTE, state_BRE=state[0], mass_BR=state[1])
    shapes.floating(OP, (jnp.float32,), state=state[0], mass=state[1])

    call = Call(write_BTR, value_BTE, decay_R, read_BTR, State(*state), resets_BT)
    config = Config(mass_normalisation, dispatch.target())
    reasons = {"pallas": pallas.unsupported_reason(config, call), "xla": "", "reference": ""}
    run = IMPLEMENTATIONS[dispatch.choose(OP, implementation, reasons)]
    out_BTE, state = run(config, call)
    out_BTE = out_BTE.astype(value_BTE.dtype)
    return (out_BTE, state) if return_state else out_BTE
