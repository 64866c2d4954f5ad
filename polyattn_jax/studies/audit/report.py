"""The report of an audit: one offline HTML page that reads like a paper's supplement.

Every number comes from the summary, and the figures from the rows and heads behind it; nothing is
measured here. The controls come first: all other results depend on them.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax import report
from lm_jax.report import Cell, Column, Report, Section, section, table, table_of
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from polyattn_jax.audit.columns import Columns, columns
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.report import (
    comparability,
    figures,
    findings,
    linear,
    matched,
    multiple_choice,
    paper,
    paper_comparison,
    recipes,
    score_rows,
    suites,
)
from polyattn_jax.report.findings import suite_label
from polyattn_jax.report.recipes import in_line
from polyattn_jax.studies.audit import terminal

_PROSE = Prose("polyattn_jax.studies.audit")


def build(config: AuditConfig, summary: AuditSummary, folder: Path) -> Report:
    """The report of a summary, with the figures of the tables in a work folder."""
    del config

    def parts() -> list[Section]:
        heads = columns(pq.read_table(folder / "heads.parquet"))
        return sections(summary, pq.read_table(folder / "rows.parquet"), heads)

    return compose(summary, parts)


def compose(summary: AuditSummary, parts: Callable[[], Sequence[Section]]) -> Report:
    """The report of a summary, of which `parts` makes the sections."""
    controls_finding, overall_finding = findings.controls(summary), findings.overall(summary)
    remarks = (
        findings.in_part(summary),
        findings.resolution(summary),
        findings.next_step(summary),
        findings.as_linear(summary),
    )
    return Report(
        f"Can polynomial attention replace softmax in {findings.model_name(summary)}?",
        parts,
        lead=[
            report.verdict(controls_finding.text, _intervals(summary), tone=controls_finding.tone),
            report.verdict(
                overall_finding.text,
                *(text for text in remarks if text),
                tone=overall_finding.tone,
            ),
        ],
        lines=terminal.lines(summary),
        facts={
            "config_hash": summary.provenance.config_hash,
            "rows": summary.rows,
            "answers": summary.answers,
        },
    )


def sections(summary: AuditSummary, rows: pa.Table, by_head: Columns) -> list[Section]:
    """The sections of the page.

    Args:
      summary: the content of `summary.json`.
      rows: the table of `rows.parquet`.
      by_head: the columns of `heads.parquet`.
    """
    model = paper.match(summary.model)
    parts = (
        controls(summary),
        calibration(summary),
        # the paper's bars are drawn only where they may be compared with ours
        recipes.substitution(
            summary, model if model and not comparability.needle_obstacles(summary, model) else None
        ),
        linear.cost(summary),
        recipes.own_prompts(summary),
        recipes.own_texts(summary),
        multiple_choice.comparison(summary),
        suites.named_suites(summary),
        recipes.ablation(summary),
        score_rows.unsafe_rows(summary, by_head),
        score_rows.against_softmax(summary, by_head),
        matched.answered_rows(summary),
        score_rows.degrees(summary, rows),
        score_rows.head_types(summary, by_head),
        paper_comparison.paper_comparison(summary, by_head),
        paper_comparison.differences(summary),
        terms(),
    )
    return [part for part in parts if part is not None]


def controls(summary: AuditSummary) -> Section:
    """Softmax with and without the needle, and the loss on the second copy of random tokens."""
    result, config = summary.controls, summary.config
    return section(
        "Controls: does the model do the task at all?",
        _PROSE("controls"),
        report.grid(
            table_of(
                sorted(result.accuracy.items(), key=_control_place),
                [
                    Column("Probe", value=lambda item: suite_label(item[0], config)),
                    Column("Right", value=lambda item: findings.counted(item[1])),
                    Column("Accuracy, % [95 % interval]", value=lambda item: in_line(item[1])),
                ],
                caption="Needle probe with softmax; Wilson intervals.",
                n=_each(entry.n for entry in result.accuracy.values()),
            ),
            table_of(
                [("first", result.first_copy), ("second", result.second_copy)],
                [
                    Column("Copy", value=lambda item: item[0]),
                    Column(
                        "Loss, nats per token",
                        value=lambda item: in_line(item[1].loss, ".2f", scale=1.0),
                    ),
                    Column("Top-1 accuracy, %", value=lambda item: in_line(item[1].top_1)),
                    Column("Tokens (n)", value=lambda item: item[1].tokens),
                ],
                caption="Random tokens written twice; 95 % bootstrap over prompts.",
                n=_each([result.first_copy.loss.n]).removesuffix(" per row"),
            ),
        ),
    )


def _intervals(summary: AuditSummary) -> str:
    accuracy = summary.controls.accuracy
    needle, without = accuracy[summary.config.probe], accuracy.get("control")
    text = f"95 % Wilson intervals: {findings.ends(needle)} with the needle"
    if without is not None:
        text += f", {findings.ends(without)} without"
    return f"{text}. All results below depend on these controls."


def _control_place(item: tuple[str, Interval]) -> tuple[bool, int]:
    suite = item[0]
    return suite == "control", int(suite[5:]) if suite.startswith("niah_") else 0


def calibration(summary: AuditSummary) -> Section:
    """b_auto, the mass below its threshold, and its dependence on length and text."""
    result, config = summary.calibration, summary.config
    lost = f"{result.mass:.4%}".replace("%", " %")
    texts = f"{number(result.texts)} texts"
    return section(
        "Calibration: which scores count as zero?",
        _PROSE("calibration", by_length=findings.b_auto_by_length(result).replace("-", "−")),
        table(
            ["b_auto", "Length", "Mass below −b_auto", "Allowed", "Rows", "Passes"],
            [
                [
                    Cell(findings.b_auto(result).replace("-", "−"), numeric=True),
                    result.length,
                    Cell(lost, numeric=True),
                    Cell(f"{config.budget:.0%}".replace("%", " %"), numeric=True),
                    result.rows,
                    result.passes,
                ]
            ],
            caption=_PROSE("calibration_caption", texts=texts),
            n=texts,
        ),
        figures.calibration_curve(result, n=texts),
    )


def terms() -> Section:
    """Glossary of the report."""
    return section("Terms", _PROSE("terms"))


def _each(counts: Iterable[int]) -> str:
    distinct = sorted(set(counts))
    unit = "prompt" if distinct == [1] else "prompts"
    return f"{' or '.join(number(count) for count in distinct)} {unit} per row"
