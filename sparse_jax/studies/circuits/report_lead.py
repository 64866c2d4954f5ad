"""The answer on top of the page of the circuit study, and cells that its tables share."""

from collections.abc import Sequence
import itertools

from lm_jax import report
from lm_jax.report import Cell, cell, table
from lm_jax.report.markup import Markup
from lm_jax.report.tables import interval_text
from lm_jax.statistics import Interval
from sparse_jax.studies.circuits.report_text import (
    COMPONENT,
    answer,
    curve,
    format_count,
    format_random,
    format_size,
    prompt_count,
    unsolved,
)
from sparse_jax.studies.circuits.results import CircuitSummary, Ranking, Ratio

_RANKINGS: dict[Ranking, str] = {
    "signed": "effect",
    "absolute": "absolute effect",
    "random": "random order",
}
# What the answer says of a size by each ranking.
_SAID: dict[Ranking, str] = {
    "signed": "",
    "absolute": " by absolute effect",
    "random": " in random order",
}


def lead(summary: CircuitSummary, tasks: Sequence[str]) -> list[Markup]:
    """Sizes of the circuits in a sentence and a table, each prompt ranked by itself.

    A model that does not solve a task has no size there: its effect is a share of next to nothing.
    """
    config = summary.config
    roles = [model.role for model in summary.models]
    results = {(each.task, each.model): each for each in summary.results}
    ratios = {
        (each.task, each.component, each.ranking, each.reference): each
        for each in summary.ratios
        if each.model == "sparse"
        and each.scope == "prompt"
        and each.ablation == config.ablations_of(each.component)[0]
    }
    explained = f"{100 * config.fraction:g}\u00a0%"
    references = [role for role in roles if role != "sparse" and "sparse" in roles]

    def size(task: str, kind: str, ranking: Ranking, role: str) -> Interval | None:
        own = curve(results[task, role], kind, config.ablations_of(kind)[0], ranking)
        return own.crossing if own else None

    def row(task: str, kind: str, ranking: Ranking) -> list[object]:
        return [
            task,
            COMPONENT[kind],
            _RANKINGS[ranking],
            *(
                format_size(size(task, kind, ranking, role))
                if results[task, role].solved
                else cell("–", note="not solved")
                for role in roles
            ),
            *(
                None if ranking == "random" else ratio_cell(ratios.get((task, kind, ranking, role)))
                for role in references
            ),
        ]

    component = "token_edges" if "token_edges" in config.components else config.components[0]
    parts = []
    for task in tasks:
        needed = {
            role: ", ".join(
                f"{_count(size(task, component, ranking, role))}{said}"
                for ranking, said in _SAID.items()
            )
            for role in roles
            if results[task, role].solved
        }
        of = f"of {results[task, roles[0]].components[component]:,}"
        if not needed:
            parts.append(f"{task} is solved by no model")
        elif len(roles) == 1:
            parts.append(f"{needed[roles[0]]} {of} on {task}")
        else:
            counts = "; ".join(f"{role} {count}" for role, count in needed.items())
            parts.append(f"{task}: {counts}; {of}")
    what = f"{COMPONENT[component].capitalize()} that explain {explained} of a prompt's metric"
    reasons = [text for task in tasks for text in unsolved(summary, task)]
    fewer = ", and how many times fewer the sparse model needs" if references else ""
    of_tasks = (each for task in tasks for each in summary.results if each.task == task)
    named = [text for each in of_tasks if (text := answer(summary, each))]
    first, *others = [*named, f"{what}: {'; '.join(parts)}.", *reasons]
    return [
        report.verdict(
            first,
            *(text.replace(" %", "\u00a0%") for text in others),
            tone="warn" if reasons else "none",
        ),
        table(
            ["Task", "Components", "Ranked by", *roles, *(f"{r} : sparse" for r in references)],
            list(itertools.starmap(row, itertools.product(tasks, config.components, _RANKINGS))),
            caption=f"Components that explain {explained} of a prompt's metric, each prompt ranked "
            f"by itself{fewer}. 95\u00a0% intervals over prompts, of one pair of models.",
            n=", ".join(f"{prompt_count(summary, task)} of {task}" for task in tasks),
        ),
    ]


def _count(interval: Interval | None) -> str:
    return "–" if interval is None else format_count(interval.estimate)


def ratio_cell(ratio: Ratio | None) -> Cell:
    """A ratio with its interval and that of random orders, or why there is none."""
    if ratio is None:
        return cell("–")
    chance = f"random order {format_random(ratio)}"
    if ratio.ratio is None:
        return cell("–", note=f"{ratio.why}; {chance}")
    return cell(interval_text(ratio.ratio, ".2f"), note=chance)
