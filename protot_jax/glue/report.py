"""The page of fine-tuning: results beside constant predictions, the paper's tables, the text.

Every number is from `summary.json` (the paper's from `paper.py`), the prose from `report.html.j2`.
Metrics are printed in percent, as in the paper.
"""

from collections.abc import Iterator, Mapping, Sequence
import math
from typing import Any

from lm_jax import report
from lm_jax.report import Bar, Cell, Section, cell, section, table
from lm_jax.report.prose import Prose
from protot_jax.glue import paper
from protot_jax.glue.results import (
    Average,
    GlueSummary,
    ModelSummary,
    SplitResult,
    TaskResult,
    TaskSummary,
)
from protot_jax.glue.tasks import OFFICIAL
from protot_jax.seeds import OverSeeds

_PROSE = Prose("protot_jax.glue")
NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
}


def build(result: GlueSummary, *, provenance: Mapping[str, Any]) -> str:
    """The whole page, from `summary.json` and the run's provenance."""
    sections = [
        results(result),
        all_metrics(result),
        settings(result),
        paper_comparison(result),
        embedded_comparison(result),
        text(result),
        submissions(result),
        section("Terms", _PROSE("terms")),
    ]
    return report.page(
        "Fine-tuning on sentence tasks",
        [one for one in sections if one is not None],
        provenance=report.facts(provenance),
        lead=[_verdict(result)],
    )


def _pairs(result: GlueSummary) -> Iterator[tuple[TaskResult, TaskSummary, SplitResult]]:
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


def over_seeds(values: OverSeeds) -> str:
    """The range over seeds in percent, or that there is one."""
    if values.n == 1:
        return "one run"
    return f"{percent(values.lowest)} to {percent(values.highest)}, n = {values.n}"


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


def result_rows(result: GlueSummary) -> list[tuple[str, ...]]:
    """Heads and rows of the main table as text, for the terminal."""
    rows: list[tuple[str, ...]] = [
        ("model", "task", "split", "metric", "ours [95 %]", "over seeds", "constant", "n")
    ]
    for one, task, split in _pairs(result):
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
    return rows


def _verdict(result: GlueSummary) -> Any:
    pairs = list(_pairs(result))
    above = sum(split.above for *_, split in pairs)
    lines = []
    for one, task, split in pairs:
        words = "above" if split.above else "not above"
        lines.append(
            f"{one.model} on {task.title}, {split.split} (n = {split.n:,}): {NAMES[task.main]} "
            f"{over_examples(split, task.main)}, constant prediction "
            f"{percent(split.constant[task.main])}; {words} it."
        )
    return report.verdict(
        f"{above} of {len(pairs)} results are above what the prediction that ignores the text has.",
        *lines[:_LINES],
        *([f"{len(lines) - _LINES} more are in the first table."] if lines[_LINES:] else []),
        tone="good" if above == len(pairs) else "warn",
    )


_LINES = 8


def results(result: GlueSummary) -> Section:
    """The main metric of every model, task and split, beside the constant prediction."""
    rows: list[list[object]] = []
    bars = []
    for one, task, split in _pairs(result):
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
        table(heads, rows, caption="Means over seeds, intervals over examples.", n=len(rows)),
        *([chart] if bars else []),
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
        for one, task, split in _pairs(result)
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
                n=len(rows),
            ),
        ),
    )


def settings(result: GlueSummary) -> Section:
    """The pretrained models, and the learning rate and warm-up chosen for each."""
    rows = []
    for model in result.models:
        rate, warmup = paper.CHOSEN[paper.MODEL[model.kind]]
        rows.append(
            [
                model.name,
                model.kind,
                model.parameters,
                model.context,
                model.step,
                cell(f"{model.learning_rate:g}, {100 * model.warmup:g} %", note=_tried(model)),
                f"{rate:g}, {100 * warmup:g} %",
            ]
        )
    heads = [
        *("Model", "Kind", "Parameters", "Context", "Step of pretraining"),
        *("Rate, warm-up", "Paper's"),
    ]
    chosen = table(heads, rows, caption="Models and chosen settings.")
    grids = [_grid(model, result.search_tasks) for model in result.models if model.grid]
    return section("Models and settings", _PROSE("settings", result=result), chosen, *grids)


def _tried(model: ModelSummary) -> str:
    return f"best of {len(model.grid)}" if model.grid else "given"


def _grid(model: ModelSummary, tasks: Sequence[str]) -> Any:
    rows = [
        [
            f"{point.learning_rate:g}",
            f"{100 * point.warmup:g} %",
            *(percent(point.by_task[task]) for task in tasks),
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
        n=len(rows),
    )


def _ours(result: GlueSummary, model: ModelSummary) -> dict[str, Cell]:
    """Our cells of the paper's columns."""
    own = {one.task: one for one in result.results if one.model == model.name}
    cells = {}
    for column, (task, place) in paper.SPLITS.items():
        if task in own:
            split = own[task].splits[place]
            main = OFFICIAL[task].main
            ends = over_examples(split, main).removeprefix(percent(split.metrics[main].mean))
            cells[column] = cell(percent(split.metrics[main].mean), note=ends.strip())
    return cells


def paper_comparison(result: GlueSummary) -> Section:
    """The paper's two tables, with ours under the development one."""
    columns = list(paper.COLUMNS)
    ours = [(model, _ours(result, model)) for model in result.models]
    dev: list[list[object]] = [
        [name, *(row[c] for c in columns)] for name, row in paper.DEV.items()
    ]
    dev.append(["constant", *(paper.CONSTANT_DEV.get(c) for c in columns)])
    for model, cells in ours:
        if cells:
            dev.append([f"ours: {model.name}", *(cells.get(c) for c in columns)])
    test: list[list[object]] = [
        [name, *(row[c] for c in columns), paper.TEST_AVERAGE[name]]
        for name, row in paper.TEST.items()
    ]
    test.append(["constant", *(paper.CONSTANT_TEST.get(c) for c in columns), None])
    heads = list(paper.COLUMNS.values())
    return section(
        "The paper's tables",
        _PROSE("paper", compared=any(cells for _, cells in ours)),
        table(["Model", *heads], dev, caption="Table 10: development splits, in percent."),
        table(
            ["Model", *heads, "GLUE"],
            test,
            caption="Table 2: test splits, from the GLUE server, in percent.",
        ),
        *([_averages(result.averages)] if result.averages else []),
    )


def _averages(averages: Sequence[Average]) -> Any:
    rows = [
        [one.model, percent(one.of_pairs), percent(one.of_main), percent(one.without_three)]
        for one in averages
    ]
    return table(
        [
            "Model",
            "Mean of nine, pairs averaged",
            "Mean of nine main metrics",
            "Pairs averaged, without MRPC, RTE, WNLI",
        ],
        rows,
        caption="Averages over development splits, in percent; the two splits of MNLI count once.",
    )


def embedded_comparison(result: GlueSummary) -> Section | None:
    """The embedded tasks beside the column of the paper that each is nearest to."""
    rows = []
    kinds = {model.name: paper.MODEL[model.kind] for model in result.models}
    for one, task, split in _pairs(result):
        if one.task not in paper.NEAREST:
            continue
        column, differs = paper.NEAREST[one.task]
        published = paper.DEV[kinds[one.model]][column]
        rows.append(
            [
                one.model,
                task.title,
                over_examples(split, task.main),
                cell(published, note=f"{kinds[one.model]}, {paper.COLUMNS[column]}", spec=".1f"),
                differs,
            ]
        )
    if not rows:
        return None
    return section(
        "Beside the nearest column of the paper",
        _PROSE("embedded"),
        table(
            ["Model", "Task", "Ours, % [95 %]", "Paper, %", "What differs in the task"],
            rows,
            caption="Embedded tasks, none of which is a GLUE task, and Table 10.",
        ),
    )


def text(result: GlueSummary) -> Section:
    """The text of each task: source, sizes, classes, and what was left out."""
    rows = [
        [
            task.title,
            ", ".join(f"{split} {size:,}" for split, size in task.sizes.items()),
            ", ".join(f"{label} {percent(share)} %" for label, share in task.shares.items())
            or "scores",
            "the reported split" if task.selected_on_evaluated else "held-out training text",
            "; ".join(f"{what} {count:,}" for what, count in task.counts.items()) or "–",
            task.source,
        ]
        for task in result.tasks
    ]
    return section(
        "The text",
        table(
            ["Task", "Examples", "Training classes", "Selected on", "Counts", "Source"],
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
