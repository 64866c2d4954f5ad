"""The report of multiple choice; every number comes from the summary."""

from collections.abc import Sequence
from pathlib import Path

from lm_jax import report
from lm_jax.evaluate import multiple_choice
from lm_jax.evaluate.multiple_choice.results import PairedChange
from lm_jax.report import Column, Report, section, table
from lm_jax.report.markup import number
from lm_jax.run.files import to_jsonable
from sparse_jax.studies.multiple_choice.results import ChoiceSummary
from sparse_jax.studies.multiple_choice.settings import MultipleChoiceConfig


def build(config: MultipleChoiceConfig, summary: ChoiceSummary, folder: Path) -> Report:
    """The report: accuracies, and changes from the dense model and from controls."""
    del config, folder
    shown = _short_names(list(summary.models))
    rows: list[Sequence[object]] = []
    for task, of_task in summary.tasks.items():
        for metric, of_metric in of_task.metrics.items():
            for name, accuracy in of_metric.accuracy.items():
                paired = _change(of_metric.paired.get(name))
                chance = 100 * of_task.chance
                rows.append([task, metric, shown[name], report.rate(accuracy), chance, *paired])
    over_controls = [
        [task, metric, shown[control], shown[name], *_change(paired)]
        for task, of_task in summary.tasks.items()
        for metric, of_metric in of_task.metrics.items()
        for control, of_control in of_metric.over_controls.items()
        for name, paired in of_control.items()
    ]
    counts = ", ".join(f"{task}: {each.n}" for task, each in summary.tasks.items())
    columns = [
        "Task",
        "Metric",
        "Model",
        "Right, %",
        Column("Chance, %", ".1f"),
        "Change, points",
        Column("p", ".2g"),
    ]
    parts = [
        section(
            "Accuracies",
            "By “acc” the answer is the choice of the highest log-likelihood, by “acc_norm” that "
            "of the highest log-likelihood per character. Intervals are at "
            f"{summary.confidence:.0%}. The p value is that of the exact McNemar test of each "
            "comparison alone, not corrected for their number.",
            table(columns, rows, caption="Models on the same questions.", n=counts),
        ),
        *[
            section(
                "Against the control",
                "A control was trained as long with every gate open, so that the change from it is "
                "what closing edges costs.",
                table(
                    ["Task", "Metric", "Control", *columns[2:3], *columns[-2:]],
                    over_controls,
                    caption="Changes from the controls.",
                    n=counts,
                ),
            )
        ]
        * bool(over_controls),
        *[section("Open edges", report.key_values(summary.edges))] * bool(summary.edges),
    ]
    answers = answer(summary)
    lines = [*answers, multiple_choice.table(to_jsonable(summary))]
    return Report("Multiple choice", lambda: parts, lead=[report.verdict(*answers)], lines=lines)


def answer(summary: ChoiceSummary) -> list[str]:
    """How many questions of each task every model answers, in a sentence for each task.

    Of the two metrics it is the accuracy by the whole choice, `acc`, where it was measured.
    """
    shown = _short_names(list(summary.models))
    sentences = []
    for task, of_task in summary.tasks.items():
        metric = "acc" if "acc" in of_task.metrics else next(iter(of_task.metrics))
        of_metric = of_task.metrics[metric]
        parts = []
        for name, accuracy in of_metric.accuracy.items():
            part = f"{shown[name]} {report.rate(accuracy).text} %"
            if (paired := of_metric.paired.get(name)) is not None:
                change, p = _change(paired)
                part += f" (change {change} points, p = {number(p, '.2g')})"
            parts.append(part)
        sentences.append(
            f"Right on {task} ({metric}, n = {number(of_task.n)}, chance "
            f"{number(100 * of_task.chance, '.1f')} %): {'; '.join(parts)}."
        )
    return sentences


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """The last three parts of each path; all of it where two models have the same ones."""
    short = {name: str(Path(*Path(name).parts[-3:])) for name in names}
    return short if len(set(short.values())) == len(names) else {name: name for name in names}


def _change(paired: PairedChange | None) -> tuple[str, object]:
    """Cells of the change and of its p value; empty for the dense model."""
    if paired is None:
        return "", ""
    change = paired.change
    low, middle, high = (100 * each for each in (change.low, change.estimate, change.high))
    middle, low, high = (number(each, "+.1f") for each in (middle, low, high))
    return f"{middle} [{low}, {high}]", paired.p_value
