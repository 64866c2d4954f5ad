"""Settings of the addition study: the frozen dataclass that its config file becomes."""

import dataclasses
import math
from typing import Annotated, Literal

from lm_jax.errors import out_of_range
from lm_jax.model.mixers import ATTENTION, AttentionMixer, BidirectionalAttention
from lm_jax.run.settings import (
    SEED,
    Bound,
    Finite,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    different,
)
from lm_jax.study import Training
from lm_jax.train.config import TrainConfig, train_config
from sparse_jax.gates.geco import GecoConfig
from sparse_jax.studies.addition.problems import COUNT, number

Attention = Literal["causal", "bidirectional"]
# The lowest strength of the penalty: sums are learned before it closes edges.
LEAST = 1e-4
_LAYERS = Bound("at least 2, because carries need a second layer", lambda count: count >= 2)
_STRENGTH = Bound(f"at least {LEAST:g}", lambda value: LEAST <= value < math.inf)


@dataclasses.dataclass(frozen=True)
class AdditionConfig(Training):
    """All settings of the study.

    The paper states four layers, one head, 13 symbols and a fixed strength, and nothing else.

    Attributes:
      num_layers: number of blocks of both models, each with one head as wide as the model.
      hidden_size: width D of both models.
      mlp_size: number F of hidden units of their MLPs.
      attention: "causal", where a position sees itself and earlier ones, or "bidirectional", where
        it sees the whole row, so that the tens of the answer can read its ones.
      held_out: number of sums that are not trained on.
      drawn: sums whose graphs are drawn; they are held out.
      batch_size: sums of one update; with 64 instead of 256 the dense model did not learn the ones
        of the answer in two of five seeds.
      dense_steps: updates of the dense model.
      sparse_steps: updates of the sparse model.
      begin: initial weights of the sparse model: "dense", those of the trained dense one, or
        "drawn", random ones. From random weights the penalty may close edges before the sums are
        learned that need them, also with bidirectional attention (see `bidirectional`).
      dense_rate: peak of the dense model's learning rate; 2 % of the steps warm up, then a cosine
        to a tenth.
      sparse_rate: peak of the sparse model's learning rate, with the same schedule.
      dense_decay: weight decay of the dense model's matrices; a large one pulls scores to 0, where
        a gate with a positive bias is open.
      sparse_decay: weight decay of the sparse model's matrices.
      clip_norm: largest norm of the gradient.
      strength: factor of the penalty, the expected share of open edges summed over layers.
      bound: bound of the loss, in nats per token: the strength rises from `LEAST` to at most
        `strength` while the loss is below it, and falls above it (`geco`); 0 keeps the strength
        fixed, as in the paper.
      bias: bias of the gate logits; above 0, most gates are open at first.
      eval_every: steps between evaluations.
      seeds: random seeds of split, weights, order and gates; one study for each.
      allow_fallback: whether to continue from the checkpoint before the newest one where that is
        damaged.
    """

    num_layers: Annotated[int, _LAYERS] = 4
    hidden_size: PositiveInt = 64
    mlp_size: PositiveInt = 128
    attention: Attention = "causal"
    held_out: int = 2000
    drawn: tuple[str, ...] = ("53+21", "36+28", "43+59")
    batch_size: PositiveInt = 256
    dense_steps: PositiveInt = 1500
    sparse_steps: PositiveInt = 2000
    begin: Literal["dense", "drawn"] = "dense"
    dense_rate: PositiveFloat = 3e-3
    sparse_rate: PositiveFloat = 1e-3
    dense_decay: NonNegativeFloat = 0.01
    sparse_decay: NonNegativeFloat = 1e-3
    clip_norm: PositiveFloat = 1.0
    strength: Annotated[float, _STRENGTH] = 0.03
    bound: NonNegativeFloat = 0.0
    bias: Finite = 3.0
    eval_every: PositiveInt = 100
    seeds: Annotated[tuple[int, ...], different(SEED)] = (0,)
    allow_fallback: bool = False

    def problems(self) -> list[str]:
        """What does not fit together."""
        for text in self.drawn:
            number(text)
        least = max(1, len(self.drawn))
        wanted = (
            least <= self.held_out < COUNT,
            f"at least 1 and the number of config.drawn, and below {COUNT}",
        )
        return out_of_range(self, {"held_out": wanted}, prefix="config.")

    @property
    def mixer(self) -> AttentionMixer:
        """The attention of both models."""
        return ATTENTION if self.attention == "causal" else BidirectionalAttention()

    @property
    def dual(self) -> GecoConfig:
        """The rule of the strength: constant, or under a bound on the loss."""
        if not self.bound:
            return GecoConfig.fixed(self.strength)
        return GecoConfig(
            target=self.bound,
            dual_rate=2.0,
            decay=0.9,
            start=LEAST,
            least=LEAST,
            most=self.strength,
        )

    def training(self, steps: int, learning_rate: float, weight_decay: float) -> TrainConfig:
        """Training settings of one of the two models."""
        return train_config(
            self,
            steps=steps,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            early_stop=False,
        )


def bidirectional(config: AdditionConfig) -> AdditionConfig:
    """Bidirectional attention, and a sparse model from random weights under a bound on the loss.

    The paper states a fixed strength. A fixed 0.03 closed edges before the ones and tens were
    learned; under a bound the strength stays low until they are.
    """
    return dataclasses.replace(
        config,
        attention="bidirectional",
        begin="drawn",
        dense_steps=500,
        sparse_steps=2500,
        sparse_rate=3e-3,
        strength=1.0,
        bound=0.02,
    )


def smoke(config: AdditionConfig) -> AdditionConfig:
    """The same study at a size that takes seconds."""
    return dataclasses.replace(
        config,
        hidden_size=16,
        mlp_size=32,
        held_out=60,
        batch_size=16,
        dense_steps=6,
        sparse_steps=6,
        eval_every=3,
    )
