"""Settings of the two-hop study: the frozen dataclass that its config file becomes."""

import dataclasses
from typing import get_args

from lm_jax.errors import UsageError, out_of_range
from lm_jax.train.config import TrainConfig
from sparse_jax.transcoders.two_hop_model import SecondHop


@dataclasses.dataclass(frozen=True)
class TwoHopConfig:
    """All settings of the study.

    Attributes:
      second_hops: second hops of the models, relay or and
        (`sparse_jax.transcoders.two_hop_model`); one model each.
      groups: number of groups of four bits in an input.
      probability: probability that a bit is 1.
      features: number F of features of each layer.
      sparsities: coefficients of the sparsity penalty (`Penalties.sparsity`); one transcoder each.
      windows: how far features write (`TranscoderTraining.window`): 0 for cross-layer, 1 for
        per-layer transcoders.
      bandwidth: width of the window around a threshold in which JumpReLU gives it a gradient.
      batch_size: inputs of one update.
      steps: number of updates of a training.
      learning_rate: peak of the learning rate; a cosine to a tenth follows.
      seeds: random seeds of the initial weights and the inputs.
    """

    second_hops: tuple[str, ...] = ("relay", "and")
    groups: int = 2
    probability: float = 0.6
    features: int = 32
    sparsities: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    windows: tuple[int, ...] = (0, 1)
    bandwidth: float = 0.5
    batch_size: int = 256
    steps: int = 2_000
    learning_rate: float = 3e-3
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        wanted = {
            "second_hops": (
                bool(self.second_hops) and set(self.second_hops) <= set(get_args(SecondHop)),
                f"one or more of {', '.join(get_args(SecondHop))}",
            ),
            "groups": (1 <= self.groups <= 3, "from 1 to 3"),
            "probability": (0 < self.probability < 1, "between 0 and 1"),
            "features": (self.features >= 1, "at least 1"),
            "sparsities": (
                bool(self.sparsities) and all(each > 0 for each in self.sparsities),
                "numbers above 0, one or more",
            ),
            "windows": (
                bool(self.windows) and set(self.windows) <= {0, 1},
                "0 (cross-layer), 1 (per-layer), or both",
            ),
            "bandwidth": (self.bandwidth > 0, "above 0"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "seeds": (
                bool(self.seeds) and len(set(self.seeds)) == len(self.seeds),
                "different numbers, one or more",
            ),
        }
        problems = out_of_range(self, wanted, prefix="config.")
        if problems:
            raise UsageError("; ".join(problems))
        _ = self.train

    @property
    def train(self) -> TrainConfig:
        """The settings of the optimizer."""
        return TrainConfig(
            steps=self.steps,
            learning_rate=self.learning_rate,
            weight_decay=0.0,
            warmup=0.05,
            clip_norm=1.0,
            early_stop=False,
        )


def smoke(config: TwoHopConfig) -> TwoHopConfig:
    """The same study in seconds."""
    return dataclasses.replace(config, sparsities=config.sparsities[-1:], seeds=(0,), steps=20)
