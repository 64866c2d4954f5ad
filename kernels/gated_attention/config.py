"""What is static in a call of `gated_attention`: hashable, and captured when the call is traced."""

import dataclasses

from kernels.core import dispatch

# How A is made from the gate logit e: drawn, 1[e > 0], sigma(e), or 1.
MODES = ("sample", "threshold", "expected", "open")


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
