"""Settings of a comparison of scores: the frozen dataclass that its config file becomes."""

import dataclasses
from typing import Annotated

from lm_jax.run.settings import Flag, at_least
from lm_jax.study import Settings


@dataclasses.dataclass(frozen=True)
class ScoresConfig(Settings):
    """The reports, and how their difference is tested.

    Attributes:
      report: concept reports with labels of a judge, each PATH or NAME=PATH.
      seed: random seed of bootstrap samples and permutations.
      permutations: how often the labels of two groups are permuted for a p.
    """

    report: Annotated[tuple[str, ...], Flag(repeated=True, required=True)] = ()
    seed: Annotated[int, Flag(), at_least(0)] = 0
    permutations: Annotated[int, Flag(), at_least(99)] = 9_999


def smoke(config: ScoresConfig) -> ScoresConfig:
    """The same with the fewest permutations."""
    return dataclasses.replace(config, permutations=99)
