"""Results of fine-tuning: the dataclasses of `result.json` and `summary.json`, and `rows.parquet`.

They are written by `lm_jax.run.files.write_json` and read by `lm_jax.run.results.load_result`. A
metric is in 0..1 or -1..1, not in percent, and null where it is undefined (`metrics`).
"""

import dataclasses

import pyarrow as pa

from lm_jax.run.results import Count, Real
from lm_jax.statistics import Interval, McNemar
from protot_jax.training.seeds import OverSeeds

# One row for each example of every split that was predicted, and fine-tuning.
ROWS = pa.schema(
    {
        "model": pa.string(),
        "task": pa.string(),
        "split": pa.string(),
        "seed": pa.int64(),
        "learning_rate": pa.float64(),
        "warmup": pa.float64(),
        # Number of the example in its split, from 0.
        "example": pa.int64(),
        # Class index, or score; null where the label is not public.
        "target": pa.float64(),
        "prediction": pa.float64(),
        # Outputs of the head: logits of classes, or the standardised score.
        "outputs": pa.list_(pa.float32()),
    }
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """The settings of one fine-tuning."""

    model: str
    task: str
    learning_rate: float
    warmup: float
    seed: Count

    @property
    def place(self) -> str:
        """The folder of the fine-tuning, relative to the work folder."""
        settings = f"lr_{self.learning_rate:g}_warmup_{self.warmup:g}_seed_{self.seed}"
        return f"{self.model}/{self.task}/{settings}"


@dataclasses.dataclass(frozen=True)
class FineTuneResult(Cell):
    """One fine-tuning: `result.json` in its folder.

    Attributes:
      steps: updates that were made.
      best_step: the updates of the weights that predict, those of the best main metric.
      selection: the main metric on the selection split with these weights.
      truncated: texts of the training split that were cut.
      length: ids of a row.
      inputs: sha256 of the pretrained checkpoint's and of all encoded splits' digests.
      diverged: why it has no predictions, if its loss was no longer finite.
    """

    steps: Count
    best_step: Count
    stopped_early: bool
    selection: Real
    truncated: Count
    length: Count
    inputs: str
    diverged: str | None = None


@dataclasses.dataclass(frozen=True)
class GridPoint:
    """A rate and a warm-up: the main metric on each search task's selection split, and the mean.

    Attributes:
      diverged: search tasks on which the fine-tuning diverged.
    """

    learning_rate: float
    warmup: float
    by_task: dict[str, Real]
    mean: Real
    diverged: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """A pretrained model and the rate and warm-up chosen for it.

    Attributes:
      name: name of the model in this run.
      kind: the model's name in pretraining.
      parameters: number of the model's parameters, without the head.
      step: updates of pretraining.
      sha256: digest of the checkpoint's manifest.
      grid: every rate and warm-up that was tried, empty where there was nothing to choose.
      row_length: the most ids of a row, which are those of attention's context at most; null in
        files of earlier versions.
      cut_texts: texts of the training splits that were longer, of all tasks.
    """

    name: str
    kind: str
    parameters: Count
    context: Count
    step: Count
    sha256: str
    learning_rate: float
    warmup: float
    grid: tuple[GridPoint, ...]
    row_length: Count | None = None
    cut_texts: Count | None = None


@dataclasses.dataclass(frozen=True)
class SplitResult:
    """The predictions of all seeds on one labelled split.

    Attributes:
      metrics: each metric over seeds, the main one first.
      interval: interval of the main metric's mean over seeds, 95 % by a bootstrap over examples.
      constant: each metric of the best constant prediction (the class that has its best value on
        the training split, or the mean score).
      gain: the main metric less the constant prediction's, or for scores the squared error that the
        model saves, as a share of the constant prediction's; paired bootstrap over examples.
      mcnemar: test of each seed's right answers against those of the most frequent class; none for
        scores.
    """

    split: str
    n: Count
    metrics: dict[str, OverSeeds]
    interval: Interval | None
    constant: dict[str, Real]
    gain: Interval | None
    mcnemar: tuple[McNemar, ...]

    @property
    def above(self) -> bool:
        """Whether the gain's interval excludes 0 from above."""
        return self.gain is not None and self.gain.low > 0


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """A model on a task: its fine-tunings, and their results on every labelled split."""

    model: str
    task: str
    steps: tuple[Count, ...]
    best_steps: tuple[Count, ...]
    splits: tuple[SplitResult, ...]


@dataclasses.dataclass(frozen=True)
class TaskSummary:
    """The text of a task.

    Attributes:
      sizes: examples by split.
      shares: share of each class in the training split; empty for scores.
      counts: how the splits came about.
      selected_on_evaluated: whether the main reported split also selects.
      sha256: digest of each split's file.
    """

    task: str
    title: str
    source: str
    main: str
    sizes: dict[str, Count]
    shares: dict[str, float]
    counts: dict[str, Count]
    selected_on_evaluated: bool
    sha256: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Submission:
    """Files for the GLUE server: those written, and those that need tasks that were not run."""

    model: str
    files: tuple[str, ...]
    missing: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Average:
    """Means over the nine tasks of the development splits, in -1..1.

    Attributes:
      of_pairs: accuracy with F1, Pearson with Spearman and the two splits of MNLI are averaged
        first.
      of_main: the mean of main metrics, with the two splits of MNLI averaged.
      without_three: the mean `of_pairs` without MRPC, RTE and WNLI.
    """

    model: str
    of_pairs: float
    of_main: float
    without_three: float


@dataclasses.dataclass(frozen=True)
class DivergedTuning(Cell):
    """A fine-tuning whose loss was no longer finite."""

    reason: str


@dataclasses.dataclass(frozen=True)
class GlueSummary:
    """A run of fine-tuning: `summary.json`.

    Attributes:
      results: results of the seeds that did not diverge; a model has none on a task where all did.
    """

    models: tuple[ModelSummary, ...]
    tasks: tuple[TaskSummary, ...]
    results: tuple[TaskResult, ...]
    averages: tuple[Average, ...]
    submissions: tuple[Submission, ...]
    search_tasks: tuple[str, ...]
    seeds: tuple[Count, ...]
    pooling: str
    batch_size: Count
    epochs: Count
    device: str
    diverged: tuple[DivergedTuning, ...] = ()
