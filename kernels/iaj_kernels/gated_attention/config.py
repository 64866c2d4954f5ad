"""Arrays and static configuration of one call of `gated_attention`."""

import dataclasses
from typing import NamedTuple

import jax

from iaj_kernels.attention.visibility import Visibility
from iaj_kernels.core import dispatch

# The gate A from the gate logit e: drawn, 1[e > 0], sigma(e), or 1.
MODES = ("sample", "threshold", "expected", "open")


class Call(NamedTuple):
    """The arrays of a call; the first four have gradients.

    `seed` is a uint32 scalar, and `origin_2` the global index of the first batch row and query
    head, from which the noise is computed.
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
      scale: factor of q.k in the softmax.
      target: what the forward pass was traced for; the backward pass runs on the same.
      gate_scale: factor of q.k in the gate logit; None takes the (capped) softmax score instead.
      soft_cap: cap of the scores, which become `soft_cap * tanh(score / soft_cap)`.
      renormalise: whether the output is divided by the sum of the gated weights.
      blocks: (queries, keys) of a tile; None leaves the choice to the implementation.
    """

    mode: str
    scale: float
    target: dispatch.Target
    gate_scale: float | None = None
    soft_cap: float | None = None
    renormalise: bool = False
    blocks: tuple[int, int] | None = None
