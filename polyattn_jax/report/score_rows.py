"""The sections of a report on score rows and heads, with softmax as the control of each share.

Each takes the summary, and the rows or heads that its figures draw, and returns a section of the
page; `page.build` puts them together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup
import numpy as np
import pyarrow as pa

from lm_jax import report
from lm_jax.report import Column, Section, cell, section, table_of
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from polyattn_jax.audit.columns import Columns
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.head_types import TYPES
from polyattn_jax.audit.results import AuditSummary, BoundAgreement, Prevalence, SoftmaxComparison
from polyattn_jax.audit.schema import BIASES
from polyattn_jax.report import figures, findings, sharpness
from polyattn_jax.report.findings import suite_label
from polyattn_jax.report.recipes import FEW_PROMPTS, stacked, suite_cell

_PROSE = Prose("polyattn_jax.report")


def unsafe_rows(summary: AuditSummary, by_head: Columns) -> Section:
    """Shares of unsafe rows by suite and bias, and maps of the heads."""
    config, entries = summary.config, findings.by_suite(summary.prevalence)
    few = any(e.n < FEW_PROMPTS for entry in entries for e in entry.unsafe.values())
    suite = suite_label(summary.ranking_suite, config)
    # Softmax has no bias, so its rows are counted once.
    open_rows = sum(
        count
        for entry in entries
        for name, count in entry.undecided.items()
        if name != "softmax" or entry.bias_kind == "zero"
    )
    answers = sorted(
        (entry.argmax_is_answer for entry in entries if entry.argmax_is_answer is not None),
        key=lambda share: share.estimate,
    )
    return section(
        "Unsafe rows: how often is the target outvoted?",
        _PROSE("unsafe_rows", least=_with_ends(answers[0]), most=_with_ends(answers[-1])),
        table_of(
            entries,
            [
                _suites(config),
                *_by_map(summary, lambda e: {"softmax": e.softmax, **e.unsafe}),
                Column("Median S₂", value=lambda e: getattr(e.median, "s_2", None)),
                Column("Median ρ", ".3f", lambda e: getattr(e.median, "relative_margin", None)),
                Column("Median A", ",.0f", lambda e: getattr(e.median, "active", None)),
                Column("Dead, %", value=lambda e: stacked(e.dead)),
                Column("Active", value=lambda e: cell(e.active_rows, note=f"of {number(e.rows)}")),
            ],
            caption=_PROSE(
                "unsafe_caption",
                b_auto=findings.b_auto(summary.calibration),
                resamples=number(config.resamples),
                few=FEW_PROMPTS if few else None,
                undecided=_values_lie(open_rows) if open_rows else None,
            ),
            n=f"{number(sum(e.rows for e in entries))} rows; {_prompts(entries)} per line",
        ),
        _of_active(summary, entries),
        *_by_window(summary, entries),
        report.grid(
            figures.phase_plot(
                by_head,
                caption=f"Each head by the medians of its active rows at b_auto ({suite}). Above a "
                "dashed curve A (1 − ρ)ᵖ exceeds 1, so that degree p is not certified to suffice. "
                "A median of no distractor has no place on the log scale.",
            ),
            figures.head_map(
                by_head,
                (summary.layers, summary.heads),
                caption=f"log₁₀ of the median S₂ per head at b_auto ({suite}). Blue: unsafe (S₂ > "
                "1); orange: safe; pale: near the boundary S₂ = 1. Values beyond ±2 are drawn as "
                "±2; a head without an active row has no value and ranks first.",
            ),
        ),
    )


def _suites(config: AuditConfig) -> Column:
    return Column("Suite", value=lambda entry: suite_cell(entry, config))


def _by_map(
    summary: AuditSummary, shares: Callable[[Any], Mapping[str, Interval | None]]
) -> list[Column]:
    """Columns of a share under softmax and at each degree, by the names of summary.json."""
    names = {"softmax": "Softmax, %"} | {str(p): f"p = {p}, %" for p in summary.degrees}
    return [
        Column(title, value=lambda row, name=name: stacked(shares(row).get(name)))
        for name, title in names.items()
    ]


def _of_active(summary: AuditSummary, entries: Sequence[Prevalence]) -> Markup:
    """The shares of active rows alone, which the paper's tables have, folded away."""
    return report.details(
        "The same of active rows alone, as in the paper",
        table_of(
            entries,
            [
                _suites(summary.config),
                *_by_map(summary, lambda e: {"softmax": e.softmax_active, **e.unsafe_active}),
                Column("Dead, %", value=lambda e: stacked(e.dead)),
            ],
            caption="Of active rows: dead rows, whose share is in the last column, are left out.",
            n=f"{_prompts(entries)} per line",
        ),
    )


def _by_window(summary: AuditSummary, entries: Sequence[Prevalence]) -> list[Markup]:
    """Unsafe rows of layers with a sliding window apart from those of full ones, if it has both."""
    rows = [(entry, *own) for entry in entries for own in entry.by_window.items()]
    if not rows:
        return []
    kinds = {"window": "with a window", "full": "full"}
    return [
        table_of(
            rows,
            [
                Column("Suite", value=lambda row: suite_cell(row[0], summary.config)),
                Column("Layers", value=lambda row: kinds[row[1]]),
                *_by_map(summary, lambda row: row[2]),
            ],
            caption="Unsafe rows of layers with a sliding window and of full ones, dead ones among "
            "them.",
            n=f"{_prompts(entries)} per line",
        )
    ]


def _prompts(entries: Sequence[Prevalence]) -> str:
    return f"{' or '.join(number(n) for n in sorted({e.prompts for e in entries}))} prompts"


def _with_ends(share: Interval) -> str:
    return f"{100 * share.estimate:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _values_lie(count: int) -> str:
    return f"{number(count)} {'value of S lies' if count == 1 else 'values of S lie'}"


def against_softmax(summary: AuditSummary, by_head: Columns) -> Section | None:
    """What r^p loses and sharpens where it replaces softmax, and how much it moves each head."""
    entries, config = findings.by_suite(summary.against_softmax), summary.config
    suite = config.probe
    own = [entry for entry in entries if entry.suite == suite]
    if not own:
        return None
    others = [entry for entry in entries if entry.suite != suite]
    label, ranked = suite_label(suite, config), suite_label(summary.ranking_suite, config)
    return section(
        "Against softmax: which rows does a recipe blur, which does it sharpen?",
        sharpness.sentence(summary),
        _PROSE("against_softmax"),
        report.grid(
            *(
                figures.lost_and_sharpened(
                    [entry for entry in own if entry.bias_kind == kind],
                    where=f"{label}, {findings.bias_label(kind)}",
                    top=max(110 * max(map(_highest, own)), 10.0),
                )
                for kind in BIASES
            )
        ),
        _against_table(summary, own),
        report.details("The same for the other suites", _against_table(summary, others)),
        figures.change_map(
            by_head,
            (summary.layers, summary.heads),
            degree=2,
            caption="How much each head's output changes where r² at b_auto replaces softmax in "
            f"that head alone ({ranked}): norm of the difference over the norm of the softmax "
            "output at the last position, median over prompts. 1 is as if the head wrote nothing; "
            "values above 2 are drawn as 2.",
        ),
    )


def _highest(entry: SoftmaxComparison) -> float:
    """The largest share that the figure of lost and sharpened rows draws for one degree."""
    return max(entry.lost.high, entry.sharpened.high, entry.concentrated / entry.rows)


def _against_table(summary: AuditSummary, entries: Sequence[SoftmaxComparison]) -> Markup:
    return table_of(
        entries,
        [
            _suites(summary.config),
            Column("p", value=lambda e: e.p),
            Column("Lost, %", value=lambda e: stacked(e.lost)),
            Column("of conc., %", value=lambda e: stacked(e.lost_of_concentrated)),
            Column("Sharpened, %", value=lambda e: stacked(e.sharpened)),
            Column("Difference, pts", value=lambda e: stacked(e.balance, "+.1f")),
            Column("Change, %", value=lambda e: stacked(e.change)),
            Column("90th pct., %", ",.0f", lambda e: 100 * e.change_90),
            Column("Open", value=lambda e: e.undecided),
            Column("Rows", value=lambda e: cell(e.rows, note=f"{number(e.concentrated)} conc.")),
        ],
        caption=_PROSE("against_caption"),
        n=f"{number(entries[0].lost.n)} prompts per row" if entries else None,
    )


def degrees(summary: AuditSummary, rows: pa.Table) -> Section:
    """The sufficient degree p*, and how well it predicts what is measured."""
    config, suite = summary.config, summary.ranking_suite
    by_bias = {kind: figures.argmax_rows(rows, suite, kind) for kind in BIASES}
    edges = figures.degree_edges(
        [columns["p_star"] for columns in by_bias.values()], summary.degrees
    )
    where = suite_label(suite, config)
    return section(
        "Sufficient degree: does the bound predict what is measured?",
        _PROSE("sufficient_degree"),
        report.grid(
            *(
                figures.degree_histogram(
                    columns["p_star"],
                    edges,
                    summary.degrees,
                    where=f"{where}, {findings.bias_label(kind)}",
                )
                for kind, columns in by_bias.items()
            )
        ),
        figures.bound_scatter(
            by_bias["auto"], degree=2, seed=config.seed, where=f"{where}, b_auto"
        ),
        _bound_table(summary, [e for e in summary.bound if e.suite == suite]),
        report.details(
            "The same for the other suites",
            _bound_table(summary, [e for e in summary.bound if e.suite != suite]),
        ),
    )


def _bound_table(summary: AuditSummary, entries: Sequence[BoundAgreement]) -> Markup:
    ties = {(e.suite, e.bias_kind): e.ties for e in summary.prevalence}
    return table_of(
        findings.by_suite(entries),
        [
            _suites(summary.config),
            Column("p", value=lambda e: e.p),
            Column("Agree, %", value=lambda e: stacked(e.agree)),
            Column("False negatives", value=lambda e: e.false_negative),
            Column("beyond 10⁻⁶", value=lambda e: e.false_negative_eps),
            Column("Ties", value=lambda e: ties[e.suite, e.bias_kind].get(str(e.p), 0)),
            Column("False positives", value=lambda e: e.false_positive),
            Column("Open", value=lambda e: e.undecided),
            Column("Rows (n)", value=lambda e: e.n),
        ],
        caption=_PROSE("bound_caption"),
    )


def head_types(summary: AuditSummary, by_head: Columns) -> Section | None:
    """What kinds of heads there are, in all and at both ends of the ranking."""
    result, config = summary.head_types, summary.config
    if result is None:
        return None
    size, top, bottom = result.size, result.top, result.bottom

    def median(kind: str) -> float | None:
        own = by_head["s_2"][by_head["type"] == kind]
        return float(np.median(own)) if own.size else None

    return section(
        "Head types: what kind of heads are unsafe?",
        _PROSE("head_types", diffuse=top["diffuse"], sinks=bottom["sink"], size=size),
        table_of(
            TYPES,
            [
                Column("Type", value=lambda kind: kind),
                Column("Heads", value=lambda kind: result.all[kind]),
                Column(f"in the top {size}", value=lambda kind: top[kind]),
                Column(f"in the bottom {size}", value=lambda kind: bottom[kind]),
                Column("Median S₂ of heads", value=median),
            ],
            caption=_PROSE(
                "head_types_caption",
                prompts=number(int(by_head["prompts"][0])),
                length=number(config.induction_length),
                ranking=suite_label(summary.ranking_suite, config),
            ),
            n=f"{number(len(by_head['type']))} heads",
        ),
    )
