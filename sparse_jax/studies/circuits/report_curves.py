"""Curves of the effect that circuits explain, by the number of components that they keep."""

from typing import Any

from lm_jax import report
from lm_jax.report import Section, Series, section
from lm_jax.report.markup import number
from lm_jax.report.page import Part
from lm_jax.report.prose import Prose
from sparse_jax.studies.circuits.report_text import COMPONENT, SCOPE, curve, prompt_count
from sparse_jax.studies.circuits.results import CircuitSummary, TaskResult

_PROSE = Prose("sparse_jax.studies.circuits")
_EDGE_PART = {"value": "value contribution", "weight": "softmax weight"}


def curves(summary: CircuitSummary, task: str, *, introduced: bool = False) -> Section:
    """Explained effect by number of components kept, for all ablations.

    Args:
      summary: summary of the study.
      task: name of the task.
      introduced: whether a section before it says what is drawn.
    """
    config = summary.config
    results = [each for each in summary.results if each.task == task]
    figures: list[Part] = []
    folded: list[Part] = []
    for component in config.components:
        chosen = config.ablations_of(component)
        for ablation in chosen:
            for scope in ("prompt", "task"):
                figure = chart(summary, results, component, ablation, scope)
                first = ablation == chosen[0] and scope == "prompt"
                (figures if first else folded).append(figure)
    prose = _PROSE(
        "curves",
        config.direction,
        _EDGE_PART[config.edge_part],
        config.rules,
        number(config.random_draws),
    )
    return section(
        f"Explained effect: {task}",
        *[prose] * (not introduced),
        report.grid(*figures),
        report.details("Ranked per task, and other ablations", report.grid(*folded)),
    )


def chart(
    summary: CircuitSummary, results: list[TaskResult], component: str, ablation: str, scope: str
) -> Any:
    """The curves of all models on a task, beside those of random orders."""
    series, random = [], []
    # If a model does not solve the task, its effect is a share of next to nothing: it has no band,
    # and the other models decide the axis.
    any_solved, readable = any(each.solved for each in results), []
    for each in results:
        if own := curve(each, component, ablation, scope=scope):
            x = [point.size for point in own.points]
            y = [point.explained for point in own.points]
            low = [point.explained - point.standard_error for point in own.points]
            high = [point.explained + point.standard_error for point in own.points]
            if each.solved or not any_solved:
                series.append(Series(each.model, x, y, low, high))
                readable += [*low, *high]
            else:
                series.append(Series(each.model, x, y))
        if own := curve(each, component, ablation, "random"):
            x = [point.size for point in own.points]
            y = [point.explained for point in own.points]
            random.append(Series(f"{each.model}, random order", x, y))
    name = COMPONENT[component]
    return report.curves(
        [*series, *random],
        caption=f"Explained effect of the {name} kept, {SCOPE[scope]}; the others: {ablation} "
        "ablation. Bands: one standard error, of models that solve the task.",
        x_label=f"{name} kept",
        y_label="explained effect",
        log_x=True,
        y_range=(min([0.0, *readable]), max([1.0, *readable])),
        h_lines=[(summary.config.fraction, f"{100 * summary.config.fraction:g} %")],
        n=prompt_count(summary, results[0].task),
    )
