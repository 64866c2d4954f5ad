"""Results of a comparison of scores: the dataclasses of `summary.json`."""

import dataclasses
from typing import Literal

from lm_jax.run.results import Count
from lm_jax.statistics import Interval
from protot_jax.studies.concepts.scores import Units

NAME: Literal["protot_jax.concepts.scores"] = "protot_jax.concepts.scores"
VERSION: Literal[1] = 1


@dataclasses.dataclass(frozen=True)
class Difference:
    """A group's mean score less that of the first group.

    Attributes:
      p: two-sided, of a permutation of labels between both groups.
      p_holm: p corrected for the number of groups that are compared in this score.
    """

    mean: Interval
    p: float
    p_holm: float


@dataclasses.dataclass(frozen=True)
class Group:
    """The scores of one kind of unit of one model.

    Attributes:
      units: prototypes, heads, features, or random texts.
      model: kind and size, for a reader.
      asked: number that the judge was asked about.
      scores: scores of units with a label, by score.
      means: null for fewer than two labels.
      differences: null in the first group, and for fewer than two labels in either.
    """

    name: str
    units: Units
    model: str
    asked: Count
    scores: dict[str, tuple[float, ...]]
    means: dict[str, Interval | None]
    differences: dict[str, Difference | None]


@dataclasses.dataclass(frozen=True)
class ScoreComparison:
    """`summary.json`: groups in the order of the reports, all labelled by one judge."""

    schema: Literal["protot_jax.concepts.scores"]
    version: Literal[1]
    judge: str
    seed: Count
    groups: tuple[Group, ...]
