"""Results of the pair: the dataclasses of its JSON files.

dense/result.json    DenseTraining
summary.json         PairSummary
"""

import dataclasses

from lm_jax.run.results import Count
from lm_jax.statistics import Interval
from sparse_jax.studies.posttrain.results import BoundSummary, ComparedRun, ControlResult


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of pretraining.

    Attributes:
      steps: updates.
      tokens: tokens predicted in training.
      seconds: spent in updates.
      loss: held out, in nats per token, after the last update.
    """

    steps: Count
    tokens: Count
    seconds: float
    loss: float


@dataclasses.dataclass(frozen=True)
class DenseTraining:
    """Pretraining of the dense model.

    Attributes:
      reached_plateau: whether the first phase ended by the rule and not by its greatest length.
    """

    parameters: Count
    context: Count
    vocab_size: Count
    batches_per_epoch: Count
    plateau: Phase
    reached_plateau: bool
    cooldown: Phase


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """Post-training of one variant.

    Attributes:
      variant: name in `settings.VARIANTS`.
      bounds: results of each bound over all seeds.
    """

    variant: str
    bounds: tuple[BoundSummary, ...]
    runs: tuple[ComparedRun, ...]


@dataclasses.dataclass(frozen=True)
class ScoredModel:
    """A model of the pair.

    Attributes:
      role: "dense", "control", or the variant of a sparse model.
      folder: folder of the exported model, in the work folder.
      seed: null for the dense model, which all seeds share.
      bound: index of the run's bound in `VariantResult.bounds`; null unless it is sparse.
    """

    role: str
    folder: str
    seed: Count | None = None
    bound: Count | None = None


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """One model on prompts of one task that it was not trained on.

    Attributes:
      metric: name in `sparse_jax.circuits.metrics.METRICS`.
      accuracy: share of clean prompts that are answered right (`metrics.answers_right`); its `n`
        counts prompts.
      change: mean of the metric on the clean prompt less that on the corrupt one.
    """

    task: str
    model: ScoredModel
    metric: str
    accuracy: Interval
    change: Interval


@dataclasses.dataclass(frozen=True)
class UnscoredTask:
    """A task that was left out, and why."""

    task: str
    reason: str


@dataclasses.dataclass(frozen=True)
class PairSummary:
    """The dense model, its controls and its sparse versions: `summary.json`.

    Attributes:
      dense_loss: loss of the dense model on the held-out text of post-training, in nats per token.
      controls: one per seed.
      variants: results of the variants, in the order of the config.
      scores: every model on every task.
      unscored: tasks of which no score could be made.
    """

    dense: DenseTraining
    dense_loss: float
    validation_tokens: Count
    controls: tuple[ControlResult, ...]
    variants: tuple[VariantResult, ...]
    scores: tuple[TaskScore, ...]
    unscored: tuple[UnscoredTask, ...]
    device: str
