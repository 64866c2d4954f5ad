"""The page of the recall suite, and its tables for a terminal.

Every number comes from the summary. Paragraphs are in `report.html.j2`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_jax import report
from lm_jax.console import terminal
from lm_jax.report import Cell, Column, Report, Section, Series, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from protot_jax.analysis.recall import Task
from protot_jax.studies.recall.results import (
    ConditionResult,
    DivergedTraining,
    ModelSize,
    RecallSummary,
)
from protot_jax.studies.recall.settings import RecallConfig

_PROSE = Prose("protot_jax.studies.recall")
_TITLES: Mapping[Task, str] = {
    "mqar": "Multi-query associative recall",
    "induction": "Induction",
    "needle": "A needle in noise",
}


def build(config: RecallConfig, summary: RecallSummary, folder: Path) -> Report:
    """The report of a summary, which holds its settings itself."""
    del config, folder
    tasks = dict.fromkeys(each.task for each in summary.results)
    return Report(
        "Recall of mixers with equal memory",
        lambda: [
            sizes(summary),
            *(recall(summary, task) for task in tasks),
            diverged(summary),
            settings(summary),
        ],
        lead=[report.verdict(*findings(summary))],
        lines=[*findings(summary), format_tables(summary)],
    )


def findings(summary: RecallSummary) -> list[str]:
    """A sentence for each task, the models at the trained length, the best first; and which of
    them did not learn it."""
    lines = []
    for task in dict.fromkeys(each.task for each in summary.results):
        hardest = _hardest(summary, task)
        if not hardest:
            continue
        ranked = sorted(hardest, key=lambda each: -each.over_seeds.mean)
        shares = ", ".join(f"{each.model} {percent(each)}" for each in ranked)
        lines.append(f"{_TITLES[task]}, {describe(ranked[0])}: {shares}.")
        if lost := [each.model for each in ranked if not _is_learned(each)]:
            lines.append(
                f"{' and '.join(lost)} did not learn it: a guess among what may be asked for is "
                f"right in {100 * ranked[0].chance:.1f} %, and no seed is above that by its "
                "interval. Their numbers say nothing of their memory; more updates or another "
                "learning rate may."
            )
    if not summary.results:
        return ["Every training diverged."]
    return lines or ["No condition has the trained length."]


def _is_learned(result: ConditionResult) -> bool:
    """Whether a seed is better than a guess, by its interval over sequences."""
    return any(each.accuracy.low > result.chance for each in result.by_seed)


def _hardest(summary: RecallSummary, task: Task) -> list[ConditionResult]:
    """The results of all models at the longest length not longer than trained, most pairs."""
    known = [each for each in summary.results if each.task == task and not each.longer]
    last = max(((each.length, each.pairs or 0) for each in known), default=None)
    return [each for each in known if (each.length, each.pairs or 0) == last]


def describe(result: ConditionResult) -> str:
    """A condition in words."""
    pairs = "" if result.pairs is None else f", {number(result.pairs)} pairs"
    return f"{number(result.length)} tokens{pairs}"


def percent(result: ConditionResult) -> str:
    """Mean accuracy over seeds, with the range of the seeds."""
    own = result.over_seeds
    if own.n == 1:
        return f"{100 * own.mean:.1f} % (one run)"
    return f"{100 * own.mean:.1f} % ({100 * own.lowest:.1f} to {100 * own.highest:.1f})"


def sizes(summary: RecallSummary) -> Section:
    """A row per model: its state and its parameters."""
    return section(
        "State",
        _PROSE("state", summary.config.memory),
        table(
            ["Model", "Memory, floats", "Other state, floats", "Parameters"],
            [[each.model, memory(each), each.other, each.parameters] for each in summary.sizes],
            caption="State of one layer and one sequence, and parameters of the model.",
        ),
    )


def memory(size: ModelSize) -> str:
    """The memory of a model in words."""
    if size.memory is None:
        return f"{number(size.memory_per_token)} for each token"
    return number(size.memory)


def recall(summary: RecallSummary, task: Task) -> Section:
    """The curves by length and a table of all conditions of a task."""
    results = [each for each in summary.results if each.task == task]
    charts = [
        _chart([each for each in results if each.pairs == pairs], pairs, summary)
        for pairs in dict.fromkeys(each.pairs for each in results)
    ]
    return section(
        _TITLES[task],
        _PROSE(task),
        report.grid(*charts) if len(charts) > 1 else charts[0],
        table(
            [
                "Model",
                Column("Tokens"),
                Column("Pairs"),
                "Accuracy, %",
                Column("Guess, %", ".1f"),
                "Rate",
                "Trained on",
            ],
            [
                [
                    each.model,
                    each.length,
                    "–" if each.pairs is None else each.pairs,
                    accuracy(each),
                    100 * each.chance,
                    f"{each.learning_rate:g}",
                    "no, longer" if each.longer else "yes" if _trained(each, summary) else "no",
                ]
                for each in results
            ],
            caption=f"Accuracy in every condition of the task {task}.",
        ),
    )


def _trained(result: ConditionResult, summary: RecallSummary) -> bool:
    return result.length == summary.config.train_length


def accuracy(result: ConditionResult) -> Cell:
    """Mean over seeds with Student's interval; of one or two runs, the intervals of each."""
    own = result.over_seeds
    if own.low is not None and own.high is not None:
        text = f"{100 * own.mean:.1f} [{100 * own.low:.1f}, {100 * own.high:.1f}]"
        return Cell(text, f"n = {own.n} seeds", numeric=True)
    runs = "; ".join(
        f"seed {each.seed} [{100 * each.accuracy.low:.1f}, {100 * each.accuracy.high:.1f}], "
        f"n = {each.accuracy.n} sequences"
        for each in result.by_seed
    )
    return Cell(f"{100 * own.mean:.1f}", runs + (", one run" if own.n == 1 else ""), numeric=True)


def _chart(results: Sequence[ConditionResult], pairs: int | None, summary: RecallSummary) -> Any:
    lines = []
    for model in dict.fromkeys(each.model for each in results):
        own = [each for each in results if each.model == model]
        means = [each.over_seeds for each in own]
        lines.append(
            Series(
                model,
                [each.length for each in own],
                [100 * each.mean for each in means],
                [100 * each.lowest for each in means],
                [100 * each.highest for each in means],
            )
        )
    of = "" if pairs is None else f" with {number(pairs)} pairs"
    return report.curves(
        lines,
        caption=f"Accuracy by length{of}: mean and range over seeds. Trained at "
        f"{number(summary.config.train_length)} tokens.",
        x_label="tokens",
        y_label="accuracy (%)",
        n=f"{len(summary.config.seeds)} seeds, {summary.config.sequences} sequences",
        log_x=True,
        y_range=(0, 100),
    )


def diverged(summary: RecallSummary) -> Section | None:
    """The trainings whose loss was no longer finite, and the models that have no result for it."""
    if not summary.diverged:
        return None
    return section(
        "Diverged",
        _PROSE("diverged"),
        table(
            ["Model", "Task", "Rate", "Seed", "Shown above", "Reason"],
            [
                [
                    *(one.model, one.task, f"{one.learning_rate:g}", one.seed),
                    "at another rate"
                    if _has_result(summary, one)
                    else "no: diverged at every rate",
                    one.reason,
                ]
                for one in summary.diverged
            ],
            caption="Trainings that diverged.",
        ),
    )


def _has_result(summary: RecallSummary, one: DivergedTraining) -> bool:
    return any((each.model, each.task) == (one.model, one.task) for each in summary.results)


def settings(summary: RecallSummary) -> Section:
    """The training of all models."""
    config = summary.config
    return section(
        "Training",
        _PROSE("training", len(config.learning_rates)),
        report.key_values(
            {
                "Models": f"{config.num_layers} layers of width {config.hidden_size}, vocabulary "
                f"{number(config.vocab_size)}",
                "Updates": f"{number(config.steps)} of {config.batch_size} sequences of "
                f"{number(config.train_length)} tokens",
                "Peak learning rates": ", ".join(f"{rate:g}" for rate in config.learning_rates),
                "Seeds": ", ".join(map(str, config.seeds)),
                "Device": summary.device,
            }
        ),
    )


def format_tables(summary: RecallSummary) -> str:
    """The state of every model, and mean accuracies by condition, for a terminal."""
    rows = [
        [each.model, memory(each), number(each.other), number(each.parameters)]
        for each in summary.sizes
    ]
    parts = [terminal.format_table(["model", "memory, floats", "other", "parameters"], rows)]
    for task in dict.fromkeys(each.task for each in summary.results):
        results = [each for each in summary.results if each.task == task]
        models = list(dict.fromkeys(each.model for each in results))
        by_condition: dict[str, list[str]] = {}
        for each in results:
            cells = by_condition.setdefault(describe(each), [])
            cells.append(percent(each))
        lines = [[condition, *cells] for condition, cells in by_condition.items()]
        parts += ["", terminal.format_table([task, *models], lines)]
    lost = [
        f"{one.model} on {one.task} diverged at a rate of {one.learning_rate:g}, seed {one.seed}"
        f"{'' if _has_result(summary, one) else ', as at every rate'}: {one.reason}"
        for one in summary.diverged
    ]
    parts += ["", *lost] if lost else []
    parts += ["", *findings(summary)]
    return "\n".join(parts)
