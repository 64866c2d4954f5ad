"""Settings of the two-hop study: the frozen dataclass that its config file becomes."""

import dataclasses
from typing import Annotated, get_args

from lm_jax.run.settings import (
    PositiveFloat,
    PositiveInt,
    above,
    at_least,
    between,
    different,
    names,
    within,
)
from lm_jax.study import Settings
from lm_jax.train.config import TrainConfig, train_config
from sparse_jax.transcoders.two_hop_model import SecondHop


@dataclasses.dataclass(frozen=True)
class TwoHopConfig(Settings):
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

    second_hops: Annotated[tuple[str, ...], names(get_args(SecondHop))] = ("relay", "and")
    groups: Annotated[int, within(1, 3)] = 2
    probability: Annotated[float, between(0, 1)] = 0.6
    features: PositiveInt = 32
    sparsities: Annotated[tuple[float, ...], different(above(0))] = (0.003, 0.01, 0.03, 0.1)
    windows: Annotated[tuple[int, ...], different(within(0, 1))] = (0, 1)
    bandwidth: PositiveFloat = 0.5
    batch_size: PositiveInt = 256
    steps: PositiveInt = 2_000
    learning_rate: PositiveFloat = 3e-3
    seeds: Annotated[tuple[int, ...], different(at_least(0))] = (0, 1, 2)

    @property
    def train(self) -> TrainConfig:
        """The settings of the optimizer."""
        return train_config(self, weight_decay=0.0, warmup=0.05, clip_norm=1.0, early_stop=False)


def smoke(config: TwoHopConfig) -> TwoHopConfig:
    """The same study in seconds."""
    return dataclasses.replace(config, sparsities=config.sparsities[-1:], seeds=(0,), steps=20)
