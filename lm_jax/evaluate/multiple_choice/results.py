"""Results of multiple choice: the dataclasses that `comparison.compare` fills, for JSON files."""

import dataclasses

from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval


@dataclasses.dataclass(frozen=True)
class PairedChange:
    """Accuracy of a model against the first one, or a control, on the same questions.

    Attributes:
      change: the difference in accuracy, with Tango's interval.
      lost: questions that only the first model, or the control, answers correctly.
      gained: questions that only this model answers correctly.
      p_value: p of the exact McNemar test, two-sided, of this comparison alone.
    """

    change: Interval
    lost: Count
    gained: Count
    p_value: Share


@dataclasses.dataclass(frozen=True)
class MetricResult:
    """Accuracies by model, with Wilson intervals, and the changes of all but the first.

    Attributes:
      accuracy: accuracy of each model.
      paired: the change from the first model, by model.
      over_controls: the changes from each control, by control and model.
    """

    accuracy: dict[str, Interval]
    paired: dict[str, PairedChange]
    over_controls: dict[str, dict[str, PairedChange]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ChoiceTask:
    """Results on one multiple-choice task.

    Attributes:
      n: questions.
      chance: accuracy of guessing.
      sha256: sha256 of the questions.
      cut: questions with a prompt that was too long and lost its beginning, by model.
      metrics: results by metric, `acc` and `acc_norm`.
    """

    n: Count
    chance: Share
    sha256: str
    cut: dict[str, Count]
    metrics: dict[str, MetricResult]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Models on the same questions.

    Attributes:
      confidence: level of all intervals.
      tasks: results by task.
    """

    confidence: Share
    tasks: dict[str, ChoiceTask]
