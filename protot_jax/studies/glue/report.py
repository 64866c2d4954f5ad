"""The page of fine-tuning: results beside constant predictions, the paper's tables, the text.

Every number is from `summary.json` (the paper's from `published/protot.toml`), the prose from
`report.html.j2`. Metrics are printed in percent, as in the paper.
"""

from collections.abc import Sequence
import math
from pathlib import Path
from typing import Any

from lm_jax import report
from lm_jax.console import terminal
from lm_jax.report import Bar, Cell, Column, Report, Section, cell, section, table, table_of
from lm_jax.report.prose import Prose
from protot_jax.studies.glue import paper_comparison
from protot_jax.studies.glue.report_text import (
    ALL_DIVERGED,
    NAMES,
    divergence,
    each_split,
    over_examples,
    over_seeds,
    percent,
    rate_and_warmup,
    result_rows,
    without_result,
)
from protot_jax.studies.glue.results import GlueSummary, ModelSummary, SplitResult, TaskSummary
from protot_jax.studies.glue.settings import GlueConfig

_PROSE = Prose("protot_jax.studies.glue")


def build(config: GlueConfig, result: GlueSummary, folder: Path) -> Report:
    """The report of a summary, which holds what it needs of the settings."""
    del config, folder
    heads, *rows = result_rows(result)
    return Report(
        "Fine-tuning on sentence tasks",
        lambda: [
            results(result),
            diverged(result),
            all_metrics(result),
            settings(result),
            paper_comparison.tables(result),
            paper_comparison.embedded(result),
            text(result),
            submissions(result),
            section("Terms", _PROSE("terms")),
        ],
        lead=[_verdict(result)],
        lines=[
            _answer(result),
            terminal.format_table(heads, rows, left=range(4)),
            *map(divergence, result.diverged),
        ],
    )


def _place(task: TaskSummary, split: SplitResult, metric: str) -> Cell:
    """A task with the split and the metric under it."""
    return cell(task.title, note=f"{split.split}, {NAMES[metric]}")


def _gain(split: SplitResult) -> str:
    if split.gain is None:
        return "undefined"
    low, high = percent(split.gain.low), percent(split.gain.high)
    return f"{100 * split.gain.estimate:+.1f} [{low}, {high}]".replace("-", "−")


def _tests(split: SplitResult) -> str:
    return ", ".join(f"{test.p_value:.2g}" for test in split.mcnemar) or "–"


def _answer(result: GlueSummary) -> str:
    pairs = list(each_split(result))
    if not pairs:
        return "There is no result."
    above = sum(split.above for *_, split in pairs)
    return f"{above} of {len(pairs)} results are above the best prediction that ignores the text."


def _verdict(result: GlueSummary) -> Any:
    pairs = list(each_split(result))
    above = sum(split.above for *_, split in pairs)
    lost, lines = without_result(result), []
    for one, task, split in pairs:
        words = "above" if split.above else "not above"
        lines.append(
            f"{one.model} on {task.title}, {split.split} (n = {split.n:,}): {NAMES[task.main]} "
            f"{over_examples(split, task.main)}, constant prediction "
            f"{percent(split.constant[task.main])}; {words} it."
        )
    every = len(result.models) * len(result.tasks)
    missing = f"{len(lost)} of {every} pairs of model and task have no result: {ALL_DIVERGED}."
    return report.verdict(
        _answer(result),
        *([missing] if lost else []),
        *lines[:_LINES],
        *([f"{len(lines) - _LINES} more are in the first table."] if lines[_LINES:] else []),
        tone="good" if pairs and above == len(pairs) and not lost else "warn",
    )


_LINES = 8


def results(result: GlueSummary) -> Section:
    """The main metric of every model, task and split, beside the constant prediction."""
    rows: list[list[object]] = []
    bars = []
    for one, task, split in each_split(result):
        main = task.main
        mean = split.metrics[main].mean
        rows.append(
            [
                one.model,
                _place(task, split, main),
                cell(over_examples(split, main), note=over_seeds(split.metrics[main])),
                percent(split.constant[main]),
                cell(_gain(split), tone="good" if split.above else "warn"),
                _tests(split),
                split.n,
            ]
        )
        if not math.isnan(mean):
            ends = split.interval
            constant = split.constant[main]
            bars.append(
                Bar(
                    f"{one.model}, {one.task}" + (f", {split.split}" if one.splits[1:] else ""),
                    100 * mean,
                    None if ends is None else 100 * ends.low,
                    None if ends is None else 100 * ends.high,
                    None if math.isnan(constant) else 100 * constant,
                )
            )
    for model, task in without_result(result):
        rows.append([model, task.title, ALL_DIVERGED, *[None] * 4])
    heads = [
        *("Model", "Task", "Ours, % [95 %]", "Constant, %"),
        *("Gain, points [95 %]", "McNemar p", "n"),
    ]
    chart = report.bars(
        bars,
        caption="Main metric by model and task, with 95 % intervals over examples.",
        x_label="main metric (%)",
        reference_label="constant prediction",
    )
    return section(
        "Results",
        _PROSE("results", seeds=len(result.seeds)),
        table(heads, rows, caption="Means over seeds, intervals over examples."),
        *([chart] if bars else []),
    )


def diverged(result: GlueSummary) -> Section | None:
    """The fine-tunings whose loss was no longer finite."""
    if not result.diverged:
        return None
    rows = [
        [
            *(one.model, one.task, rate_and_warmup(one.learning_rate, one.warmup)),
            *(one.seed, one.reason),
        ]
        for one in result.diverged
    ]
    return section(
        "Diverged",
        _PROSE("diverged"),
        table(
            ["Model", "Task", "Rate, warm-up", "Seed", "Reason"],
            rows,
            caption="Fine-tunings that diverged.",
        ),
    )


def all_metrics(result: GlueSummary) -> Section:
    """Every metric, and the steps of the weights that predict."""
    rows = [
        [
            one.model,
            _place(task, split, name),
            cell(percent(values.mean), note=over_seeds(values)),
            percent(split.constant[name]),
            ", ".join(map(str, one.best_steps)),
            ", ".join(map(str, one.steps)),
        ]
        for one, task, split in each_split(result)
        for name, values in split.metrics.items()
    ]
    return section(
        "All metrics",
        _PROSE("all_metrics"),
        report.details(
            "Every metric and the steps of every seed",
            table(
                ["Model", "Task", "Ours, %", "Constant, %", "Best step", "Steps"],
                rows,
                caption="Each metric over seeds; the step of the weights that predict, by seed.",
            ),
        ),
    )


def settings(result: GlueSummary) -> Section:
    """The pretrained models, and the learning rate and warm-up chosen for each."""
    chosen = table_of(
        result.models,
        [
            Column("Model", value=lambda model: model.name),
            Column("Kind", value=lambda model: model.kind),
            Column("Parameters", value=lambda model: model.parameters),
            Column("Context", value=lambda model: model.context),
            Column("Most ids of a row", value=lambda model: model.row_length),
            Column("Texts cut", value=lambda model: model.cut_texts),
            Column("Step of pretraining", value=lambda model: model.step),
            Column("Rate, warm-up", value=_chosen),
            Column("Paper's", value=lambda model: paper_comparison.chosen(model.kind)),
        ],
        caption="Models and chosen settings.",
    )
    grids = [_grid(model, result.search_tasks) for model in result.models if model.grid]
    return section(
        "Models and settings",
        _PROSE(
            "settings",
            result=result,
            searched=any(model.grid for model in result.models),
            unequal=len({model.row_length for model in result.models}) > 1,
        ),
        chosen,
        *grids,
    )


def _chosen(model: ModelSummary) -> Cell:
    tried = f"best of {len(model.grid)}" if model.grid else "given"
    return cell(rate_and_warmup(model.learning_rate, model.warmup), note=tried)


def _grid(model: ModelSummary, tasks: Sequence[str]) -> Any:
    rows = [
        [
            f"{point.learning_rate:g}",
            f"{100 * point.warmup:g} %",
            *(
                "diverged" if task in point.diverged else percent(point.by_task[task])
                for task in tasks
            ),
            cell(
                percent(point.mean),
                tone="good"
                if (point.learning_rate, point.warmup) == (model.learning_rate, model.warmup)
                else "none",
            ),
        ]
        for point in model.grid
    ]
    return table(
        ["Learning rate", "Warm-up", *tasks, "Mean"],
        rows,
        caption=f"{model.name}: main metric on the selection split, in percent, one run each.",
    )


def text(result: GlueSummary) -> Section:
    """The text of each task: source, sizes, classes, and what was left out."""
    rows = [
        [
            task.title,
            "; ".join(f"{split} {size:,}" for split, size in task.sizes.items()),
            ", ".join(f"{label} {percent(share)} %" for label, share in task.shares.items())
            or "scores",
            "the reported split" if task.selected_on_evaluated else "held-out training text",
        ]
        for task in result.tasks
    ]
    sources = [
        _PROSE("source", title=task.title, source=task.source, counts=task.counts)
        for task in result.tasks
    ]
    return section(
        "The text",
        *sources,
        table(
            ["Task", "Examples", "Training classes", "Selected on"],
            rows,
            caption="Splits of each task.",
        ),
    )


def submissions(result: GlueSummary) -> Section | None:
    """The files for the GLUE server."""
    if not result.submissions:
        return None
    rows = [
        [one.model, ", ".join(one.files), ", ".join(one.missing) or "none"]
        for one in result.submissions
    ]
    return section(
        "Submission files",
        _PROSE("submissions"),
        table(["Model", "Written", "Missing"], rows, caption="Official files by model."),
    )
