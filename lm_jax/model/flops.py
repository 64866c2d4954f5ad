"""Floating-point operations of a decoder's forward pass, by where they are spent.

A multiplication counts one and an addition counts one. Counted are products with weights, scores
and weighted sums of attention, convolutions, recurrences and logits. Left out, as small beside
these, are embedding lookups, norms, softmax, activations, rotations, gates and residual additions.

Two conventions for causal attention are in use, and both are offered by name:

    square      every query meets all T keys, though the mask hides about half of them: what PaLM
                (Chowdhery et al. 2022, appendix B) and most reports of utilisation count
    triangle    a query meets the keys that it may see alone: itself and those before it, within its
                window; what a kernel that skips hidden keys computes
"""

import dataclasses
from typing import Literal

from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import Mixer

Causal = Literal["square", "triangle"]
CONVENTIONS: tuple[Causal, ...] = ("square", "triangle")


@dataclasses.dataclass(frozen=True)
class Flops:
    """Forward FLOPs of one sequence.

    Attributes:
      projections: products of the mixers with weights.
      mixing: the mixers' other operations: scores and weighted sums, or a recurrence.
      mlp: the MLPs, and what follows them in a block.
      logits: the product with the unembedding.
    """

    projections: int
    mixing: int
    mlp: int
    logits: int

    @property
    def mixer(self) -> int:
        """FLOPs of all mixers."""
        return self.projections + self.mixing

    @property
    def weights(self) -> int:
        """FLOPs of all products with weights."""
        return self.projections + self.mlp + self.logits

    @property
    def total(self) -> int:
        """All FLOPs."""
        return self.weights + self.mixing


def forward_flops(
    cfg: DecoderConfig, mixer: Mixer, tokens: int, *, causal: Causal = "square"
) -> Flops:
    """Forward FLOPs of one sequence of `tokens`."""
    of_stacks = [mixer.flops(stack.cfg, tokens, causal) for stack in cfg.stacks]
    matrices = 3 if cfg.gated_mlp else 2
    units = sum(stack.cfg.num_layers * stack.cfg.mlp_size for stack in cfg.stacks)
    # An input of the layer's own is projected, gated and projected back.
    ends = 3 * cfg.num_layers * (cfg.block_end.input_size if cfg.block_end else 0)
    return Flops(
        projections=sum(projections for projections, _ in of_stacks),
        mixing=sum(mixing for _, mixing in of_stacks),
        mlp=tokens * 2 * (matrices * units + ends) * cfg.hidden_size,
        logits=tokens * 2 * cfg.hidden_size * cfg.vocab_size,
    )
