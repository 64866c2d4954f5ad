"""The section of a report on the suites that a setting names: answers, failures, verdicts."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_jax import report
from lm_jax.report import Cell, Column, Section, cell, section, table_of
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from polyattn_jax.audit.results import AuditSummary, SuiteResult
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.report import figures, findings
from polyattn_jax.report.recipes import answer_columns, stacked

_PROSE = Prose("polyattn_jax.report")


def named_suites(summary: AuditSummary) -> Section | None:
    """Every suite at every length: accuracy of each recipe, and what wrong answers copy."""
    if not summary.suites:
        return None
    parts = []
    for name, entries in by_suite(summary).items():
        rows = [(entry, one) for entry in entries for one in findings.by_recipe(entry.conditions)]
        parts.append(
            report.details(
                f"Answers to {findings.suite_name(name)}",
                table_of(
                    rows,
                    [
                        Column("Recipe", value=lambda row: row[1].recipe),
                        Column("Tokens", value=lambda row: row[0].length),
                        *answer_columns(lambda row: row[1]),
                        Column("Loss, nats", ".2f", lambda row: row[1].loss),
                        Column(
                            "Wrong answers",
                            value=lambda row: wrong_answers(row[0].failures[row[1].cell]),
                        ),
                    ],
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
    cells = {(entry.length, one.cell): one for entry in entries for one in entry.conditions}
    columns = [Column("Recipe", value=lambda one: one.recipe)]
    columns += [
        Column(
            f"{number(entry.length)} tokens, right %",
            value=lambda one, entry=entry: stacked(cells[entry.length, one.cell].accuracy),
        )
        for entry in entries
    ]
    columns += [
        Column(
            f"{number(entry.length)} tokens, safe %",
            value=lambda one, entry=entry: _safe(entry.safe[one.cell], entry.dead[one.cell]),
        )
        for entry in entries
    ]
    rows = findings.by_recipe(entries[0].conditions)
    parts = [table_of(rows, columns, caption=_PROSE("length_caption", suite=name), n=n)]
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
