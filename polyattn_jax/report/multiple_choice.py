"""The section of a report on multiple choice: every recipe and softmax on the same questions."""

from lm_jax import report
from lm_jax.evaluate.multiple_choice.results import MetricResult
from lm_jax.report import Column, Section, cell, section, table_of
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.report.findings import in_order
from polyattn_jax.report.recipes import p_value, stacked

_PROSE = Prose("polyattn_jax.report")


def comparison(summary: AuditSummary) -> Section | None:
    """A table for each task: accuracy by both metrics, and its change against softmax."""
    if not summary.choices:
        return None
    parts = []
    for name, task in summary.choices.items():
        cut = max(task.cut.values())
        parts.append(
            table_of(
                in_order(task.metrics["acc"].accuracy),
                [
                    Column("Recipe", value=lambda recipe: recipe),
                    *(
                        column
                        for metric, of_metric in task.metrics.items()
                        for column in _columns(metric, of_metric)
                    ),
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


def _columns(name: str, metric: MetricResult) -> list[Column]:
    """Columns of a metric: accuracy, and the change against softmax of each recipe but itself."""
    paired = metric.paired
    return [
        Column(f"{name}, %", value=lambda recipe: stacked(metric.accuracy[recipe])),
        Column(
            "Change, pts",
            value=lambda recipe: stacked(
                None if recipe == SOFTMAX.name else paired[recipe].change, "+.1f"
            ),
        ),
        Column(
            "p",
            value=lambda recipe: (
                cell(None)
                if recipe == SOFTMAX.name
                else p_value(paired[recipe].p_value, paired[recipe].lost, paired[recipe].gained)
            ),
        ),
    ]
