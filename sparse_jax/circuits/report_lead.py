"""The answer on top of the page of the circuit study, and cells that its tables share."""

from collections.abc import Sequence
import itertools

from lm_jax import report
from lm_jax.report import Cell, cell, table
from lm_jax.report.markup import Markup
from lm_jax.statistics import Interval
from sparse_jax.circuits.report_text import (
    COMPONENT,
    curve,
    format_count,
    format_interval,
    format_size,
    unsolved,
)
from sparse_jax.circuits.results import CircuitSummary, Ratio


def lead(summary: CircuitSummary, tasks: Sequence[str]) -> list[Markup]:
    """Sizes of the circuits in a sentence and a table, each prompt ranked by itself.

    A model that does not solve a task has no size there: its effect is a share of next to nothing.
    """
    config = summary.config
    roles = [model.role for model in summary.models]
    results = {(each.task, each.model): each for each in summary.results}
    sizes = {
        (task, component, role): each.crossing
        for task, component, role in itertools.product(tasks, config.components, roles)
        if results[task, role].solved
        and (each := curve(results[task, role], component, config.ablations_of(component)[0]))
    }
    ratios = {
        (each.task, each.component, each.reference): each
        for each in summary.ratios
        if each.model == "sparse"
        and (each.ranking, each.scope) == ("signed", "prompt")
        and each.ablation == config.ablations_of(each.component)[0]
    }
    component = "token_edges" if "token_edges" in config.components else config.components[0]
    explained = f"{100 * config.fraction:g}\u00a0%"
    references = [role for role in roles if role != "sparse" and "sparse" in roles]
    rows = [
        [
            task,
            COMPONENT[kind],
            *(
                cell(format_size(sizes[task, kind, role]))
                if results[task, role].solved
                else cell("–", note="not solved")
                for role in roles
            ),
            *(ratio_cell(ratios.get((task, kind, role))) for role in references),
        ]
        for task in tasks
        for kind in config.components
    ]
    reasons = [text for task in tasks for text in unsolved(summary, task)]
    prompts = {task: results[task, roles[0]].clean.n for task in tasks}
    what = f"{COMPONENT[component].capitalize()} that explain {explained} of a prompt's metric"
    parts = []
    for task in tasks:
        needed = {
            role: _count(sizes[task, component, role])
            for role in roles
            if (task, component, role) in sizes
        }
        of = f"of {results[task, roles[0]].components[component]:,}"
        if not needed:
            parts.append(f"{task} is solved by no model")
        elif len(roles) == 1:
            parts.append(f"{needed[roles[0]]} {of} on {task}")
        else:
            counts = ", ".join(f"{role} {count}" for role, count in needed.items())
            parts.append(f"{task} {counts} {of}")
    answer = f"{what}: {'; '.join(parts)}."
    fewer = ", and how many times fewer the sparse model needs" if references else ""
    return [
        report.verdict(
            answer,
            *(text.replace(" %", "\u00a0%") for text in reasons),
            tone="warn" if reasons else "none",
        ),
        table(
            ["Task", "Components", *roles, *(f"{role} : sparse" for role in references)],
            rows,
            caption=f"Components that explain {explained} of a prompt's metric, each prompt ranked "
            f"by itself{fewer}. 95\u00a0% intervals over prompts.",
            n=", ".join(f"{n} prompts of {task}" for task, n in prompts.items()),
        ),
    ]


def _count(interval: Interval | None) -> str:
    return "–" if interval is None else format_count(interval.estimate)


def ratio_cell(ratio: Ratio | None) -> Cell:
    """A ratio with its interval, or why there is none."""
    if ratio is None or ratio.ratio is None:
        return cell("–", note=ratio.why if ratio else "")
    return interval_cell(ratio.ratio, ".2f")


def interval_cell(interval: Interval | None, spec: str = "") -> Cell:
    """An estimate with its interval."""
    return cell(format_interval(interval, spec))
