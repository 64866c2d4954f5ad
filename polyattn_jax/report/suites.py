"""The section of a report on the suites that a setting names: answers, failures, verdicts."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_jax import report
from lm_jax.report import Cell, Column, Section, cell, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from polyattn_jax.audit.results import AuditSummary, ConditionResult, SuiteResult
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.report import figures, findings
from polyattn_jax.report.recipes import stacked, verdict_cell

_PROSE = Prose("polyattn_jax.report")


def named_suites(summary: AuditSummary) -> Section | None:
    """Every suite at every length: accuracy of each recipe, and what wrong answers copy."""
    if not summary.suites:
        return None
    parts = []
    for name, entries in by_suite(summary).items():
        lines = [
            _line(entry, condition)
            for entry in entries
            for condition in findings.by_recipe(entry.conditions)
        ]
        parts.append(
            report.details(
                f"Answers to {findings.suite_name(name)}",
                table(
                    [
                        "Recipe",
                        "Tokens",
                        "Verdict",
                        "Accuracy, %",
                        "Change, pts",
                        "McNemar p",
                        Column("Loss, nats", ".2f"),
                        "Wrong answers",
                    ],
                    lines,
                    caption=_PROSE("suite_caption", suite=findings.suite_name(name)),
                    n=f"{number(summary.config.suite_n)} prompts per row",
                ),
            )
        )
    return section(
        "Other suites: does the verdict carry over?",
        _PROSE("named_suites", points=f"{100 * summary.config.tolerance:g}"),
        *(part for entries in by_suite(summary).values() for part in by_length(entries, summary)),
        *parts,
    )


def by_length(entries: Sequence[SuiteResult], summary: AuditSummary) -> list[Any]:
    """One suite over its lengths: accuracy and safe share of every recipe, and a chart of each.

    The charts need two lengths.
    """
    name = findings.suite_name(entries[0].suite)
    n = f"{number(summary.config.suite_n)} prompts per cell"
    lengths = [number(entry.length) for entry in entries]
    lines = []
    for condition in findings.by_recipe(entries[0].conditions):
        cells = {
            e.length: next(c for c in e.conditions if c.cell == condition.cell) for e in entries
        }
        safe = [(entry.safe[condition.cell], entry.dead[condition.cell]) for entry in entries]
        lines.append(
            [
                condition.recipe,
                *(stacked(cells[entry.length].accuracy) for entry in entries),
                *(_safe(*shares) for shares in safe),
            ]
        )
    columns = ["Recipe", *(f"{length} tokens, right %" for length in lengths)]
    columns += [f"{length} tokens, safe %" for length in lengths]
    parts = [table(columns, lines, caption=_PROSE("length_caption", suite=name), n=n)]
    if len(entries) > 1:
        curves = [figures.accuracy_by_length(entries, name=name, n=n)]
        if all(entry.safe[SOFTMAX.name] for entry in entries):
            curves.append(figures.safe_by_length(entries, name=name, n=n))
        parts.append(report.grid(*curves))
    return parts


def _safe(safe: Interval | None, dead: Interval | None) -> Cell:
    """A share of safe rows, with that of dead rows below it."""
    if safe is None:
        return cell(None)
    if dead is None:
        return stacked(safe)
    low, high = 100 * safe.low, 100 * safe.high
    note = f"[{low:.1f}, {high:.1f}], {100 * dead.estimate:.1f} dead"
    return cell(100 * safe.estimate, spec=".1f", note=note)


def by_suite(summary: AuditSummary) -> dict[str, list[SuiteResult]]:
    """The results of each suite, by ascending length."""
    ordered = sorted(summary.suites, key=lambda entry: entry.length)
    return {
        name: [entry for entry in ordered if entry.suite == name]
        for name in dict.fromkeys(entry.suite for entry in summary.suites)
    }


def wrong_answers(failures: Mapping[str, int]) -> str:
    """Counts of wrong answers, those that copy a needle first: "4 fake, 1 other"."""
    kinds = sorted(failures, key=lambda kind: (kind == "other", kind))
    return ", ".join(f"{number(failures[kind])} {kind}" for kind in kinds)


def _line(entry: SuiteResult, condition: ConditionResult) -> Sequence[object]:
    base = findings.softmax_of(entry.conditions)
    wrong = wrong_answers(entry.failures[condition.cell])
    accuracy = stacked(condition.accuracy)
    if condition is base:
        change = "baseline", accuracy, cell(None), cell(None)
    else:
        note = f"{number(condition.lost)} lost, {number(condition.won)} won"
        change = (
            verdict_cell(condition.verdict),
            accuracy,
            stacked(condition.delta, signed=True),
            cell(condition.p_value, spec=".2g", note=note),
        )
    return [condition.recipe, entry.length, *change, condition.loss, wrong]
