"""Words and numbers of the fine-tuning report: metrics in percent, with their intervals."""

from collections.abc import Iterator
import itertools
import math

from protot_jax.studies.glue.results import (
    DivergedTuning,
    GlueSummary,
    SplitResult,
    TaskResult,
    TaskSummary,
)
from protot_jax.training.seeds import OverSeeds

NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
}


def each_split(result: GlueSummary) -> Iterator[tuple[TaskResult, TaskSummary, SplitResult]]:
    """Every result with its task, once for each reported split."""
    tasks = {task.task: task for task in result.tasks}
    for one in result.results:
        for split in one.splits:
            yield one, tasks[one.task], split


def percent(value: float) -> str:
    """A metric in percent; the word "undefined" where it has no value."""
    return "undefined" if math.isnan(value) else f"{100 * value:.1f}".replace("-", "−")


def over_examples(split: SplitResult, main: str) -> str:
    """The mean over seeds with its interval over examples, in percent."""
    mean = percent(split.metrics[main].mean)
    if split.interval is None:
        return mean
    return f"{mean} [{percent(split.interval.low)}, {percent(split.interval.high)}]"


def rate_and_warmup(learning_rate: float, warmup: float) -> str:
    """A learning rate and the share of the steps in which it rises."""
    return f"{learning_rate:g}, {100 * warmup:g} %"


def over_seeds(values: OverSeeds) -> str:
    """The range over seeds in percent, or that there is one."""
    if values.n == 1:
        return "one run"
    return f"{percent(values.lowest)} to {percent(values.highest)}, n = {values.n}"


def result_rows(result: GlueSummary) -> list[tuple[str, ...]]:
    """Heads and rows of the main table as text, for the terminal."""
    rows: list[tuple[str, ...]] = [
        ("model", "task", "split", "metric", "ours [95 %]", "over seeds", "constant", "n")
    ]
    for one, task, split in each_split(result):
        rows.append(
            (
                one.model,
                one.task,
                split.split,
                NAMES[task.main],
                over_examples(split, task.main),
                over_seeds(split.metrics[task.main]),
                percent(split.constant[task.main]),
                str(split.n),
            )
        )
    for model, task in without_result(result):
        rows.append((model, task.task, "", NAMES[task.main], ALL_DIVERGED, "", "", ""))
    return rows


ALL_DIVERGED = "diverged with every seed"


def without_result(result: GlueSummary) -> list[tuple[str, TaskSummary]]:
    """The models and tasks whose fine-tunings all diverged."""
    known = {(one.model, one.task) for one in result.results}
    pairs = itertools.product(result.models, result.tasks)
    return [(model.name, task) for model, task in pairs if (model.name, task.task) not in known]


def divergence(one: DivergedTuning) -> str:
    """A fine-tuning that diverged, in a line."""
    return (
        f"{one.model} on {one.task} diverged at a rate of {one.learning_rate:g}, warm-up "
        f"{100 * one.warmup:g} %, seed {one.seed}: {one.reason}"
    )
