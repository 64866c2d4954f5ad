"""Results of multiple choice: the dataclass of `summary.json`."""

import dataclasses

from lm_jax.evaluate.multiple_choice.results import ChoiceTask
from lm_jax.run.results import Share


@dataclasses.dataclass(frozen=True)
class ChoiceSummary:
    """Multiple choice by a dense model and by sparse ones: `summary.json`.

    Attributes:
      models: sha256 of the weights by model.
      edges: share of open edges by sparse model, as its model card states it.
      confidence: level of all intervals.
      tasks: results of each task.
    """

    models: dict[str, str]
    edges: dict[str, str]
    device: str
    confidence: Share
    tasks: dict[str, ChoiceTask]
