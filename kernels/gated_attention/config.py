"""One call of `gated_attention`: its arrays, and what is static and captured when it is traced."""

import dataclasses
from typing import NamedTuple

import jax

from kernels.attention.visibility import Visibility
from kernels.core import dispatch

# How A is made from the gate logit e: drawn, 1[e > 0], sigma(e), or 1.
MODES = ("sample", "threshold", "expected", "open")


class Call(NamedTuple):
    """The arrays of a call. Gradients are those of the first four.

    `seed` is a uint32 scalar, and `origin_2` the global index of the first batch row and query
    head, by which the noise is counted.
    """

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    bias_N: jax.Array
    seed: jax.Array
    origin_2: jax.Array
    visibility: Visibility


@dataclasses.dataclass(frozen=True)
class Config:
    """The static half of a call; `visibility.Visibility.causal` is static too.

    Attributes:
      mode: one of `MODES`.
      scale: multiplies q.k in the softmax.
      target: what the forward pass was traced for; the backward pass runs on the same.
      gate_scale: multiplies q.k in the gate logit; None takes the (capped) softmax score instead.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
      renormalise: divides the output by the sum of the gated weights.
      blocks: (queries, keys) of a tile; None leaves the choice to the implementation.
    """

    mode: str
    scale: float
    target: dispatch.Target
    gate_scale: float | None = None
    soft_cap: float | None = None
    renormalise: bool = False
    blocks: tuple[int, int] | None = None
