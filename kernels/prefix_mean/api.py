"""The strictly past, discounted, mass-normalised mean of each prototype channel, read back.

Prototype Transformer, section 3 and Eq. 2. For prototype r with decay beta, at step i,

    N_ir = sum_{j<i} beta^(i-j) w_jr v_j        D_ir = sum_{j<i} beta^(i-j) w_jr
    out_i = sum_r read_ir N_ir / D_ir

Every implementation forms powers of beta with exponents >= 0 alone, so no decay overflows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels.core import dispatch, shapes
from kernels.prefix_mean import pallas, reference, sharded, xla
from kernels.prefix_mean.config import Config
from kernels.prefix_mean.state import LogState, State, empty_state

OP = "prefix_mean"
_RUN = {
    "pallas": pallas.prefix_mean,
    "xla": xla.prefix_mean,
    "reference": reference.prefix_mean,
}


def prefix_mean(
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    decay_R: jax.Array,
    read_BTR: jax.Array,
    *,
    initial_state: State | LogState | None = None,
    return_state: bool = False,
    mass_normalisation: bool = True,
    log_write: bool = False,
    axis_name: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Reads, at every step, the discounted mean of what was written before it.

    The first step of an empty state reads zero. A prototype whose mass D is not above 1e-30 has no
    past that float32 can hold, and reads zero; with `log_write` the mass is carried as a logarithm
    and does not underflow.

    Args:
      write_BTR: `[B, T, R]` write gates >= 0, float32 or bfloat16; their logarithms with
        `log_write`.
      value_BTE: `[B, T, E]` values, in the dtype of the gates.
      decay_R: `[R]` float32 in (0, 1], the decay beta of one step; half-life -ln 2 / ln beta.
      read_BTR: `[B, T, R]` read gates.
      initial_state: what came before; a `LogState` with `log_write`. Differentiable.
      return_state: also returns the state after the last step: for decoding, for the next chunk of
        a prompt, for the next device of a sharded sequence (`state.join`).
      mass_normalisation: false reads N in place of N / D.
      log_write: `write_BTR` holds log gates, -inf for none.
      axis_name: inside `jax.shard_map`, the mesh axis over which the T steps are split in order.
        The initial state is then the one before the whole sequence, the same on every device, and
        the returned one stands after this device's steps.
      implementation: "reference", "xla", "pallas", or None for the best that runs here.

    Returns:
      `out_BTE` in the dtype of `value_BTE`; with `return_state`, also the float32 state. Sums,
      masses and states are float32 whatever the inputs.

    Raises:
      ValueError: shapes that do not fit, T = 0, or a state of the wrong kind.
      TypeError: a dtype other than float32 and bfloat16.
      dispatch.UnavailableError: a named implementation that does not run here.
    """
    size = shapes.sizes(
        OP, write_BTR=write_BTR, value_BTE=value_BTE, decay_R=decay_R, read_BTR=read_BTR
    )
    shapes.floating(OP, write=write_BTR, value=value_BTE, read=read_BTR)
    shapes.floating(OP, (jnp.float32,), decay=decay_R)
    if size["T"] == 0:
        raise ValueError(f"{OP}: write has T = 0 steps; pass at least one")
    if log_write and not mass_normalisation:
        raise ValueError(f"{OP}: log_write has no un-normalised form; pass mass_normalisation=True")
    state = initial_state
    if state is None:
        state = empty_state(size["B"], size["R"], size["E"], log_write=log_write)
    kind = LogState if log_write else State
    if not isinstance(state, kind):
        raise ValueError(
            f"{OP}: initial_state is a {type(state).__name__}; log_write={log_write} needs a "
            f"{kind.__name__}"
        )
    shapes.sizes(OP, write_BTR=write_BTR, value_BTE=value_BTE, state_BRE=state[0], mass_BR=state[1])
    shapes.floating(OP, (jnp.float32,), state=state[0], mass=state[1])

    if axis_name is not None:
        state = sharded.state_before(
            axis_name, write_BTR, value_BTE, decay_R, state, log_write=log_write
        )
    config = Config(mass_normalisation, log_write, dispatch.target())
    reasons = {
        "pallas": dispatch.unsupported_reason(config.target)
        or pallas.unsupported_reason(config, size, value_BTE.dtype),
        "xla": "",
        "reference": "",
    }
    run = _RUN[dispatch.choose(OP, implementation, reasons)]
    out_BTE, state = run(config, write_BTR, value_BTE, decay_R, read_BTR, state)
    out_BTE = out_BTE.astype(value_BTE.dtype)
    return (out_BTE, state) if return_state else out_BTE
