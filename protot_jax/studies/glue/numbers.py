"""Summary of stored predictions: metrics over seeds, intervals, and constant predictions.

A score says little alone: on MRPC the most frequent class has an F1 of 81.2 on the development
split, and the paper's models 81.4 to 84.9. So every number is set beside the prediction that
ignores the text (`metrics.constant_prediction`), on the same examples.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_jax.statistics import Interval, clustered_bootstrap, mcnemar
from protot_jax.studies.glue import metrics
from protot_jax.studies.glue.readers import TaskData
from protot_jax.studies.glue.results import (
    Average,
    SplitResult,
    Submission,
    TaskResult,
    TaskSummary,
)
from protot_jax.studies.glue.submission import write_submission
from protot_jax.studies.glue.tasks import OFFICIAL, Metric, Task
from protot_jax.training.seeds import over_seeds

# In these every model of the paper is near the constant prediction.
WITHOUT_SIGNAL = ("mrpc", "rte", "wnli")


def summarise_task(name: str, task: Task, data: TaskData) -> TaskSummary:
    """What the text of a task is."""
    splits = {"train": data.train}
    if not data.selected_on_evaluated:
        splits["selection"] = data.selection
    splits |= data.predicted
    targets = np.asarray(data.train.targets)
    shares = {label: float((targets == index).mean()) for index, label in enumerate(task.labels)}
    return TaskSummary(
        task=name,
        title=task.title,
        source=data.source,
        main=task.main,
        sizes={split: len(examples) for split, examples in splits.items()},
        shares=shares,
        counts=dict(data.counts),
        selected_on_evaluated=data.selected_on_evaluated,
        sha256={split: examples.sha256 for split, examples in splits.items()},
    )


def predicted(rows: pa.Table, model: str, task: str, split: str) -> dict[int, pa.Table]:
    """The rows of a model on a split, by seed, in the order of the examples."""
    chosen = rows.filter(
        (pc.field("model") == model) & (pc.field("task") == task) & (pc.field("split") == split)
    )
    seeds = dict.fromkeys(chosen["seed"].to_pylist())
    return {seed: chosen.filter(pc.field("seed") == seed).sort_by("example") for seed in seeds}


def summarise_result(
    rows: pa.Table,
    model: str,
    name: str,
    task: Task,
    data: TaskData,
    *,
    steps: Sequence[int],
    best_steps: Sequence[int],
    resamples: int,
) -> TaskResult:
    """The results of a model on every labelled split of a task.

    Args:
      rows: `results.ROWS` of the run.
      model: name of the model.
      name: name of the task.
      task: classes and metrics of the task.
      data: splits of the task.
      steps, best_steps: steps of each fine-tuning, by seed.
      resamples: bootstrap samples.
    """
    constants = metrics.constant_predictions(task, np.asarray(data.train.targets))
    splits = []
    for split in data.evaluated:
        by_seed = predicted(rows, model, name, split)
        tables = list(by_seed.values())
        targets_n = tables[0]["target"].to_numpy()
        predictions_Sn = np.stack([table["prediction"].to_numpy() for table in tables])
        splits.append(
            split_result(
                split, task, targets_n, predictions_Sn, constants=constants, resamples=resamples
            )
        )
    return TaskResult(model, name, tuple(steps), tuple(best_steps), tuple(splits))


def split_result(
    split: str,
    task: Task,
    targets_n: np.ndarray,
    predictions_Sn: np.ndarray,
    *,
    constants: Mapping[Metric, float],
    resamples: int,
) -> SplitResult:
    """Metrics over seeds and examples, beside constant predictions.

    Args:
      split: name of the split.
      task: classes and metrics of the task.
      targets_n: classes or scores of n examples.
      predictions_Sn: predictions of S seeds.
      constants: the constant prediction by metric (`metrics.constant_predictions`).
      resamples: bootstrap samples.
    """
    constant_n = np.full_like(targets_n, constants[task.main])
    by_seed = [metrics.scores(task, targets_n, own) for own in predictions_Sn]
    reached: dict[str, float] = {
        name: metrics.score(name, targets_n, np.full_like(targets_n, constants[name]), task.outputs)
        for name in task.metrics
    }
    rows_nX = np.column_stack([targets_n, constant_n, *predictions_Sn])

    def mean_main(rows: np.ndarray) -> float:
        values = [_main(task, rows[:, 0], rows[:, i]) for i in range(2, rows.shape[1])]
        return float(np.mean(values))

    def gain(rows: np.ndarray) -> float:
        if task.labels:
            return mean_main(rows) - _main(task, rows[:, 0], rows[:, 1])
        errors_X = ((rows[:, 1:] - rows[:, :1]) ** 2).mean(0)
        return float(1.0 - errors_X[1:].mean() / errors_X[0]) if errors_X[0] else math.nan

    tests = []
    if task.labels:
        right_n = targets_n == constants["accuracy"]
        tests = [mcnemar(right_n, own == targets_n) for own in predictions_Sn]
    return SplitResult(
        split=split,
        n=len(targets_n),
        metrics={name: over_seeds([one[name] for one in by_seed]) for name in task.metrics},
        interval=_bootstrap(rows_nX, mean_main, resamples),
        constant=reached,
        gain=_bootstrap(rows_nX, gain, resamples),
        mcnemar=tuple(tests),
    )


def _main(task: Task, targets: np.ndarray, predictions: np.ndarray) -> float:
    return metrics.score(task.main, targets, predictions, task.outputs)


def _bootstrap(
    rows: np.ndarray, statistic: Callable[[np.ndarray], float], resamples: int
) -> Interval | None:
    """The interval over examples; None where the statistic is undefined on some sample."""
    if len(rows) < 2 or math.isnan(statistic(rows)):
        return None
    interval = clustered_bootstrap(
        rows, np.arange(len(rows)), statistic, resamples=resamples, seed=0
    )
    return None if math.isnan(interval.low + interval.high) else interval


def average(model: str, results: Sequence[TaskResult]) -> Average | None:
    """The means over the nine tasks of a model; None unless all are there and defined."""
    own = {result.task: result for result in results if result.model == model}
    if not own.keys() >= OFFICIAL.keys():
        return None
    pairs, mains = {}, {}
    for name, task in OFFICIAL.items():
        splits = own[name].splits
        mains[name] = float(np.mean([split.metrics[task.main].mean for split in splits]))
        every = [split.metrics[metric].mean for split in splits for metric in task.metrics]
        pairs[name] = float(np.mean(every))
    if any(map(math.isnan, [*pairs.values(), *mains.values()])):
        return None
    kept = [value for name, value in pairs.items() if name not in WITHOUT_SIGNAL]
    return Average(
        model,
        of_pairs=float(np.mean(list(pairs.values()))),
        of_main=float(np.mean(list(mains.values()))),
        without_three=float(np.mean(kept)),
    )


def submit(
    folder: Path,
    model: str,
    rows: pa.Table,
    data: Mapping[str, TaskData],
    best_seeds: Mapping[str, int],
) -> Submission | None:
    """Writes the submission files of a model from its seed of the best selection metric.

    Returns None where no task has a test split.

    Args:
      folder: folder of the files.
      model: name of the model.
      rows: `results.ROWS` of the run.
      data: the tasks by name.
      best_seeds: seed to submit, by task.

    Raises:
      StorageError: a file cannot be written.
    """
    files = {}
    for name, own in data.items():
        for file in own.submitted:
            table = predicted(rows, model, name, file)[best_seeds[name]]
            files[file] = (OFFICIAL[name], table["prediction"].to_numpy())
    return Submission(model, *write_submission(folder, files)) if files else None
