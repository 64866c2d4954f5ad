"""The delta rule of DeltaNet: a linear memory that overwrites what it holds under a key.

Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight Programmers"; the chunked
form is that of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule
over Sequence Length". With the state as a matrix S_t in R^{H x E} that maps keys to values,

    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

With a decay alpha_t in (0, 1] before each step it is the gated delta rule (Yang, Kautz and
Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", Eq. 10),

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T

It serves DeltaNet, a baseline of the Prototype Transformer paper, and Gated DeltaNet.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.core import dispatch, shapes, triton_calls
from iaj_kernels.delta_rule import reference, tile, xla
from iaj_kernels.delta_rule.config import WIDEST_KEY, Call, Config

OP = "delta_rule"

_triton = dispatch.lazy_module("iaj_kernels.delta_rule.triton")

# In order of preference.
IMPLEMENTATIONS: Mapping[str, Callable[[Config, Call], Any]] = {
    "triton": lambda config, call: _triton().run(config, call),
    "xla": xla.run,
    "reference": reference.run,
}


def delta_rule(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTNE: jax.Array,
    beta_BTN: jax.Array,
    *,
    log_decay: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    implementation: str | None = None,
) -> Any:
    """Writes and reads the memory of every head over T steps, or over one step of decoding.

    Args:
      q_BTNH: `[B, T, N, H]` queries, float32 or bfloat16.
      k_BTNH: `[B, T, N, H]` keys, normalised by the caller. With keys of length one and beta in
        [0, 2] no step enlarges what the memory holds; longer keys may make it grow without bound.
      v_BTNE: `[B, T, N, E]` values; E may differ from H.
      beta_BTN: `[B, T, N]` writing strengths: 0 leaves the memory, 1 replaces the value under the
        key, 2 reflects it.
      log_decay: `[B, T, N]` logarithms, at most 0 and finite, of the share of the memory that each
        step leaves before it writes; None leaves all.
      scale: factor of the output; None is `H ** -0.5`.
      initial_state: `[B, N, H, E]` float32 memory before the first step, the transpose of the
        paper's S; None is zero. Differentiable.
      return_state: whether the memory after the last step is also returned, for decoding or the
        next chunk of a prompt.
      implementation: "reference", "xla", "triton", or None for the best that runs here. "triton"
        needs an NVIDIA GPU, jax-triton, and keys of at most 256 numbers.

    Returns:
      `out_BTNE` in the dtype of `v_BTNE`; with `return_state`, also the float32 `state_BNHE`.
      Arithmetic is float32 whatever the inputs, in "triton" with products of bfloat16 inputs to
      about 2^-21. "triton" has first derivatives in reverse mode alone.

    Raises:
      ValueError: shapes that do not fit, or T = 0.
      TypeError: an unsupported dtype.
    """
    size = shapes.sizes(
        OP,
        q_BTNH=q_BTNH,
        k_BTNH=k_BTNH,
        v_BTNE=v_BTNE,
        beta_BTN=beta_BTN,
        log_decay_BTN=log_decay,
        initial_state_BNHE=initial_state,
    )
    shapes.floating(OP, q=q_BTNH, k=k_BTNH, v=v_BTNE, beta=beta_BTN, log_decay=log_decay)
    shapes.floating(OP, (jnp.float32,), initial_state=initial_state)
    if size["T"] == 0:
        raise ValueError(f"{OP}: q has T = 0 steps; pass at least one")
    state_BNHE = initial_state
    if state_BNHE is None:
        state_BNHE = jnp.zeros([size[letter] for letter in "BNHE"], jnp.float32)
    scale = size["H"] ** -0.5 if scale is None else scale

    reasons = {
        "triton": _unsupported_reason(size["H"]),
        "xla": "",
        "reference": "",
    }
    run = IMPLEMENTATIONS[dispatch.choose(OP, implementation, reasons)]
    config = Config(tile.default_tiles(size, v_BTNE.dtype)["longest_chunk"])
    call = Call(q_BTNH, k_BTNH, v_BTNE, beta_BTN, state_BNHE, log_decay)
    out_BTNE, state_BNHE = run(config, call)
    out_BTNE = (scale * out_BTNE).astype(v_BTNE.dtype)
    return (out_BTNE, state_BNHE) if return_state else out_BTNE


def _unsupported_reason(H: int) -> str:
    """Why the Triton kernels cannot run; empty if they can."""
    if H > WIDEST_KEY:
        return f"takes keys of at most {WIDEST_KEY} numbers, not {H}"
    return triton_calls.unsupported_reason(dispatch.target())
