"""Comparison of several concepts: their effects, with p corrected by Holm's method.

Of four concepts without any effect, at least one has p below 0.05 in one of five experiments.
Holm's method (Scandinavian Journal of Statistics, 1979) limits that probability to 0.05 under any
dependence: the smallest p is multiplied by the number of concepts, the next by one less, and so on.
"""

from collections.abc import Sequence
import dataclasses

from lm_jax import report
from lm_jax.console import terminal
from lm_jax.report import Report, cell, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import holm
from protot_jax.studies.interventions import numbers, report_text, results
from protot_jax.studies.interventions.results import ComparedConcept, Comparison, InterventionReport

_PROSE = Prose("protot_jax.studies.interventions")


def compare(result: Sequence[InterventionReport]) -> Comparison:
    """The comparison of concepts, from the summary of each.

    A concept without kept sentences or without controls has no p and counts as not tested.
    """
    rows: list[ComparedConcept] = []
    for one in result:
        seed = one.seeds[0]
        ablation = report_text.by_mode(seed)[numbers.ABLATION]
        control = ablation.control
        rows.append(
            ComparedConcept(
                concept=str(one.settings.concept),
                layer=seed.layer,
                prototype=seed.prototype,
                effect=ablation.effect,
                p=None if control is None else control.p,
                least_p=None if control is None else min(1.0, 2 / (control.n + 1)),
                p_holm=None,
                specific=None,
            )
        )
    corrected = iter(holm([row.p for row in rows if row.p is not None]))
    for i, row in enumerate(rows):
        if row.p is not None:
            p = next(corrected)
            verdict = numbers.specific(row.effect, p)
            rows[i] = dataclasses.replace(row, p_holm=p, specific=verdict)
    return Comparison(results.COMPARISON_NAME, results.VERSION, tuple(rows))


def format_rows(result: Comparison) -> list[list[str]]:
    """Header and rows of the table, as text."""
    heads = ["Concept", "Prototype", "Targets [95 %]", "Sentences", "p", "p, Holm", "Specific"]
    rows = [
        [
            one.concept,
            report_text.name(one),
            report_text.percent(one.effect),
            report_text.cases(one.effect),
            *(number(p, ".3f") for p in (one.p, one.p_holm)),
            {True: "yes", False: "no", None: "–" if one.p is None else "undecided"}[one.specific],
        ]
        for one in result.concepts
    ]
    return [heads, *rows]


def report_of(result: Comparison) -> Report:
    """The report of a comparison."""
    heads, *rows = format_rows(result)
    tested = sum(one.p is not None for one in result.concepts)
    specific = [one.concept for one in result.concepts if one.specific]
    undecided = sum(one.specific is None and one.p is not None for one in result.concepts)
    if not tested:
        answer = "Either no target is probable enough, or the other prototypes were not measured."
    elif specific:
        answer = f"Specific among them: {', '.join(specific)}."
    elif undecided == tested:
        answer = "None could be decided."
    elif undecided:
        answer = "None of those that were decided is specific."
    else:
        answer = "None is specific."
    if undecided:
        answer += (
            f" {undecided} undecided, on fewer than {numbers.LEAST_TEXTS} texts or without a "
            "finite interval."
        )
    least_p = [one.least_p for one in result.concepts if one.least_p is not None]
    least = tested * min(least_p, default=0.0)
    if least > numbers.LEVEL:
        answer += (
            " None could be: with so few prototypes, the smallest Holm's p is at least "
            f"{least:.2g}."
        )
    tone = "good" if specific else "warn"
    return Report(
        "Effects of single prototypes on several concepts",
        lambda: [
            section(
                "Effects with the write gate zeroed",
                _PROSE("comparison"),
                table(
                    heads,
                    [[cell(value) for value in row] for row in rows],
                    caption="Mean relative change of the targets' probability, with 95 % intervals "
                    "over the sentences' texts.",
                    n=f"{tested} concepts with a test",
                ),
            )
        ],
        lead=[
            report.verdict(f"{report_text.count(tested, 'concept')} tested. {answer}", tone=tone)
        ],
        lines=[terminal.format_table(heads, rows, left=range(len(heads)))],
    )
