"""The sections of a report on score rows and heads, with softmax as the control of each share.

Each takes the summary, and the rows or heads that its figures draw, and returns a section of the
page; `page.build` puts them together.
"""

from collections.abc import Sequence

from markupsafe import Markup
import numpy as np
import pyarrow as pa

from lm_jax import report
from lm_jax.report import Section, cell, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from polyattn_jax.audit.columns import Columns
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
    lines = []
    for entry in entries:
        middle = entry.median
        rates = [entry.unsafe.get(str(p)) for p in summary.degrees]
        lines.append(
            [
                suite_cell(entry, config),
                stacked(entry.softmax) if entry.softmax else cell(None),
                *(stacked(result) if result else cell(None) for result in rates),
                cell(middle.s_2 if middle else None),
                cell(middle.relative_margin if middle else None, spec=".3f"),
                cell(middle.active if middle else None, spec=",.0f"),
                stacked(entry.dead),
                cell(entry.active_rows, note=f"of {number(entry.rows)}"),
            ]
        )
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
        table(
            [
                "Suite",
                "Softmax, %",
                *(f"p = {p}, %" for p in summary.degrees),
                "Median S₂",
                "Median ρ",
                "Median A",
                "Dead, %",
                "Active",
            ],
            lines,
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


def _of_active(summary: AuditSummary, entries: Sequence[Prevalence]) -> Markup:
    """The shares of active rows alone, which the paper's tables have, folded away."""
    names = [*map(str, summary.degrees)]
    lines = [
        [
            suite_cell(entry, summary.config),
            stacked(entry.softmax_active) if entry.softmax_active else cell(None),
            *(
                stacked(entry.unsafe_active[name]) if name in entry.unsafe_active else cell(None)
                for name in names
            ),
            stacked(entry.dead),
        ]
        for entry in entries
    ]
    return report.details(
        "The same of active rows alone, as in the paper",
        table(
            ["Suite", "Softmax, %", *(f"p = {name}, %" for name in names), "Dead, %"],
            lines,
            caption="Of active rows: dead rows, whose share is in the last column, are left out.",
            n=f"{_prompts(entries)} per line",
        ),
    )


def _by_window(summary: AuditSummary, entries: Sequence[Prevalence]) -> list[Markup]:
    """Unsafe rows of layers with a sliding window apart from those of full ones, if it has both."""
    columns = ["softmax", *map(str, summary.degrees)]
    lines = [
        [
            suite_cell(entry, summary.config),
            {"window": "with a window", "full": "full"}[kind],
            *(stacked(rates[name]) if name in rates else cell(None) for name in columns),
        ]
        for entry in entries
        for kind, rates in entry.by_window.items()
    ]
    if not lines:
        return []
    return [
        table(
            ["Suite", "Layers", "Softmax, %", *(f"p = {p}, %" for p in summary.degrees)],
            lines,
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
    lines = [
        [
            suite_cell(entry, summary.config),
            entry.p,
            stacked(entry.lost),
            stacked(entry.lost_of_concentrated) if entry.lost_of_concentrated else cell(None),
            stacked(entry.sharpened),
            stacked(entry.balance, signed=True),
            stacked(entry.change),
            cell(100 * entry.change_90, spec=",.0f"),
            entry.undecided,
            cell(entry.rows, note=f"{number(entry.concentrated)} conc."),
        ]
        for entry in entries
    ]
    return table(
        [
            "Suite",
            "p",
            "Lost, %",
            "of conc., %",
            "Sharpened, %",
            "Difference, pts",
            "Change, %",
            "90th pct., %",
            "Open",
            "Rows",
        ],
        lines,
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
    lines = [
        [
            suite_cell(entry, summary.config),
            entry.p,
            stacked(entry.agree) if entry.agree else cell(None),
            entry.false_negative,
            entry.false_negative_eps,
            ties[entry.suite, entry.bias_kind].get(str(entry.p), 0),
            entry.false_positive,
            entry.undecided,
            entry.n,
        ]
        for entry in findings.by_suite(entries)
    ]
    return table(
        [
            "Suite",
            "p",
            "Agree, %",
            "False negatives",
            "beyond 10⁻⁶",
            "Ties",
            "False positives",
            "Open",
            "Rows (n)",
        ],
        lines,
        caption=_PROSE("bound_caption"),
    )


def head_types(summary: AuditSummary, by_head: Columns) -> Section | None:
    """What kinds of heads there are, in all and at both ends of the ranking."""
    result, config = summary.head_types, summary.config
    if result is None:
        return None
    size, top, bottom = result.size, result.top, result.bottom
    lines = []
    for kind in TYPES:
        own = by_head["s_2"][by_head["type"] == kind]
        median = cell(float(np.median(own)) if own.size else None)
        lines.append([kind, result.all[kind], top[kind], bottom[kind], median])
    return section(
        "Head types: what kind of heads are unsafe?",
        _PROSE("head_types", diffuse=top["diffuse"], sinks=bottom["sink"], size=size),
        table(
            ["Type", "Heads", f"in the top {size}", f"in the bottom {size}", "Median S₂ of heads"],
            lines,
            caption=_PROSE(
                "head_types_caption",
                prompts=number(int(by_head["prompts"][0])),
                length=number(config.induction_length),
                ranking=suite_label(summary.ranking_suite, config),
            ),
            n=f"{number(len(by_head['type']))} heads",
        ),
    )
