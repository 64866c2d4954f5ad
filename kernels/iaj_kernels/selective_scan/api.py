"""The selective scan of Mamba-1: a diagonal linear recurrence whose coefficients follow the input.

Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", Eq. 2 and
Algorithm 2. For channel i with state of size J,

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t        y_t = C_t h_t + D u_t

The decay is discretised by zero-order hold and the input by an Euler step, as in the released
Mamba; Eq. 4 of the paper has zero-order hold for both. It serves the Mamba baseline of the
Prototype Transformer paper.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.core import dispatch, shapes, triton_calls
from iaj_kernels.selective_scan import reference, xla
from iaj_kernels.selective_scan.config import LARGEST_STATE, Call, Config, config_for

OP = "selective_scan"

_triton = dispatch.lazy_module("iaj_kernels.selective_scan.triton")

# In order of preference.
IMPLEMENTATIONS: Mapping[str, Callable[[Config, Call], Any]] = {
    "triton": lambda config, call: _triton().run(config, call),
    "xla": xla.run,
    "reference": reference.run,
}


def selective_scan(
    u_BTI: jax.Array,
    delta_BTI: jax.Array,
    A_IJ: jax.Array,
    B_BTJ: jax.Array,
    C_BTJ: jax.Array,
    D_I: jax.Array | None = None,
    *,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    implementation: str | None = None,
) -> Any:
    """Runs the recurrence over T steps, or over one step of decoding.

    Two letters are the operation's own: `I` is the inner width (expand times the model width), and
    `J` the size of a channel's state. The arguments A, B, C and D keep the paper's names.

    Args:
      u_BTI: `[B, T, I]` input, float32 or bfloat16.
      delta_BTI: `[B, T, I]` step sizes, after the caller's softplus, float32 or bfloat16.
      A_IJ: `[I, J]` float32 rates, below zero in Mamba. Any decay is exact, for nothing is divided
        by a product of decays; delta A above 88 overflows.
      B_BTJ: `[B, T, J]` input projection of each step, float32 or bfloat16.
      C_BTJ: `[B, T, J]` output projection of each step, float32 or bfloat16.
      D_I: `[I]` float32 skip, or None for none.
      initial_state: `[B, I, J]` float32 state before the first step; None is zero. Differentiable.
      return_state: whether the state after the last step is also returned, for decoding or the next
        chunk of a prompt.
      implementation: "reference", "xla", "triton", or None for the best that runs here. "triton"
        needs an NVIDIA GPU, jax-triton, and states of at most 32 numbers.

    Returns:
      `y_BTI` in the dtype of `u_BTI`; with `return_state`, also the float32 `state_BIJ`. Arithmetic
      is float32 whatever the inputs. "xla" and "triton" have first derivatives in reverse mode
      alone.

    Raises:
      ValueError: shapes that do not fit, or T = 0.
      TypeError: an unsupported dtype.
    """
    size = shapes.sizes(
        OP,
        u_BTI=u_BTI,
        delta_BTI=delta_BTI,
        A_IJ=A_IJ,
        B_BTJ=B_BTJ,
        C_BTJ=C_BTJ,
        D_I=D_I,
        initial_state_BIJ=initial_state,
    )
    shapes.floating(OP, u=u_BTI, delta=delta_BTI, B=B_BTJ, C=C_BTJ)
    shapes.floating(OP, (jnp.float32,), A=A_IJ, D=D_I, initial_state=initial_state)
    if size["T"] == 0:
        raise ValueError(f"{OP}: u has T = 0 steps; pass at least one")
    state_BIJ = initial_state
    if state_BIJ is None:
        state_BIJ = jnp.zeros((size["B"], size["I"], size["J"]), jnp.float32)

    reasons = {"triton": _unsupported_reason(size["J"]), "xla": "", "reference": ""}
    run = IMPLEMENTATIONS[dispatch.choose(OP, implementation, reasons)]
    # One cast for both uses: the gradient by u is then rounded to its dtype once.
    wide_BTI = u_BTI.astype(jnp.float32)
    config = config_for(size, u_BTI.dtype, dispatch.target())
    y_BTI, state_BIJ = run(config, Call(wide_BTI, delta_BTI, A_IJ, B_BTJ, C_BTJ, state_BIJ))
    if D_I is not None:
        y_BTI += D_I[None, None] * wide_BTI
    y_BTI = y_BTI.astype(u_BTI.dtype)
    return (y_BTI, state_BIJ) if return_state else y_BTI


def _unsupported_reason(J: int) -> str:
    """Why the Triton kernels cannot run; empty if they can."""
    if J > LARGEST_STATE:
        return f"takes states of at most {LARGEST_STATE} numbers, not {J}"
    return triton_calls.unsupported_reason(dispatch.target())
