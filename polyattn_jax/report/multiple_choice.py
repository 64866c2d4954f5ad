"""The section of a report on multiple choice: every recipe and softmax on the same questions."""

from lm_jax import report
from lm_jax.evaluate.multiple_choice.results import MetricResult
from lm_jax.report import Cell, Section, cell, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.report.findings import in_order
from polyattn_jax.report.recipes import stacked

_PROSE = Prose("polyattn_jax.report")


def comparison(summary: AuditSummary) -> Section | None:
    """A table for each task: accuracy by both metrics, and its change against softmax."""
    if not summary.choices:
        return None
    parts = []
    for name, task in summary.choices.items():
        cut = max(task.cut.values())
        parts.append(
            table(
                ["Recipe", "acc, %", "Change, pts", "p", "acc_norm, %", "Change, pts", "p"],
                [
                    [
                        recipe,
                        *(
                            one
                            for metric in task.metrics.values()
                            for one in _cells(metric, recipe)
                        ),
                    ]
                    for recipe in in_order(task.metrics["acc"].accuracy)
                ],
                caption=_PROSE(
                    "choices_caption",
                    task=name,
                    chance=f"{100 * task.chance:.1f}",
                    cut=number(cut) if cut else None,
                ),
                n=f"{number(task.n)} questions",
            )
        )
    return section(
        "Multiple choice: does the model still know what it knew?",
        _PROSE("choices", tasks=number(len(summary.choices))),
        report.grid(*parts),
    )


def _cells(metric: MetricResult, recipe: str) -> tuple[Cell, Cell, Cell]:
    accuracy = stacked(metric.accuracy[recipe])
    if recipe == SOFTMAX.name:
        return accuracy, cell(None), cell(None)
    paired = metric.paired[recipe]
    note = f"{number(paired.lost)} lost, {number(paired.gained)} won"
    return (
        accuracy,
        stacked(paired.change, signed=True),
        cell(paired.p_value, spec=".2g", note=note),
    )
