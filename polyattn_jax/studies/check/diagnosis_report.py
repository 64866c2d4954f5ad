"""The rows of texts as a page and as text for a terminal."""

from collections.abc import Iterator, Sequence
from pathlib import Path
import textwrap
from typing import NamedTuple

from lm_jax import report
from lm_jax.console.terminal import format_table
from lm_jax.report import Report, section
from lm_jax.report.markup import Markup
from lm_jax.statistics import Interval
from polyattn_jax.audit.results import Prevalence
from polyattn_jax.recipes.row_maps import DISTANCE, parse_recipe
from polyattn_jax.report import findings
from polyattn_jax.studies.check.results import DiagnosisResult, HeadRows

SHOWN_HEADS = 10


class _Table(NamedTuple):
    """A table that the page and the terminal show alike; `title` stands above it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def build(result: DiagnosisResult) -> Report:
    """The report of a diagnosis."""
    return Report(
        f"Score rows of {Path(result.model).name} on texts: {result.recipe}",
        lambda: [
            section("Rows by bias", *map(_drawn, _bias_tables(result))),
            section("Heads", _drawn(_head_table(result)), f"{_free_heads(result)}."),
            section("Terms", *_remarks(result)),
        ],
        lead=[report.verdict(answer(result), f"{_head(result)}.")],
        lines=[format_diagnosis(result)],
        facts={"config_hash": result.provenance.config_hash},
    )


def _drawn(shown: _Table) -> Markup:
    return report.table(shown.columns, shown.rows, caption=f"{shown.title}.")


def format_diagnosis(result: DiagnosisResult) -> str:
    """The result as plain text of at most 80 columns."""
    lines = [*textwrap.wrap(answer(result), 80), "", *textwrap.wrap(_head(result), 80)]
    for shown in _bias_tables(result):
        lines += ["", shown.title, format_table(shown.columns, shown.rows)]
    heads = _head_table(result)
    lines += ["", heads.title, format_table(heads.columns, heads.rows), _free_heads(result), ""]
    for remark in _remarks(result):
        lines += textwrap.wrap(remark, 80)
    return "\n".join(lines)


def answer(result: DiagnosisResult) -> str:
    """Which head loses most rows of those that softmax concentrates, and how many lose none."""
    p, heads = _chosen(result)
    free = sum(head.lost[p] == 0 for head in heads)
    start = f"At p = {p}, {free} of {len(heads)} heads of {Path(result.model).name} lose no row"
    if free == len(heads):
        return f"{start}."
    most = max(heads, key=lambda head: head.lost[p])
    return (
        f"{start}; head {most.layer}.{most.head} loses most, {most.lost[p]:,} of the "
        f"{most.concentrated:,} rows that softmax concentrates."
    )


def _head(result: DiagnosisResult) -> str:
    texts = f"{result.texts:,} text{'s' * (result.texts != 1)}"
    if result.documents == 1:
        texts = f"one text, read in {result.texts:,} windows"
    return f"{result.model}: score rows of {texts}, {result.tokens:,} tokens"


def _bias_tables(result: DiagnosisResult) -> Iterator[_Table]:
    """Unsafe, lost and sharpened rows by degree, a table for each bias."""
    for entry in result.prevalence:
        lost = {str(e.p): e for e in result.against_softmax if e.bias_kind == entry.bias_kind}
        rows = [("softmax", _percent(entry.softmax), "", "", "", "")]
        for p in map(str, result.degrees):
            own = lost.get(p)
            rows.append(
                (
                    f"p = {p}",
                    _percent(entry.unsafe.get(p)),
                    _percent(entry.unsafe_active.get(p)),
                    _percent(own.lost if own else None),
                    _percent(own.sharpened if own else None),
                    f"{100 * own.change.estimate:.0f}" if own else "-",
                )
            )
        dead = f"{_percent(entry.dead)} % of them dead"
        yield _Table(
            f"{_bias(entry, result)}, {entry.rows:,} rows, {dead}",
            ("% of rows", "unsafe", "of active", "lost", "sharpened", "change"),
            rows,
        )


def _remarks(result: DiagnosisResult) -> Iterator[str]:
    text = (
        "Unsafe: the other keys together outweigh the best one, or the row is dead: every weight "
        "is 0. Lost: only softmax concentrates the row; sharpened: only r^p does. Change: of the "
        "head's output, median. "
    )
    one = result.documents == 1
    yield text + ("One text, no interval." if one else "Brackets: 95 % over texts.")
    recipe = parse_recipe(result.recipe)
    if recipe.option == DISTANCE:
        yield f"{result.recipe} reads no scores, so it has no S_p: rows are read at b = 0 alone."
    elif recipe.tabled:
        yield (
            f"{result.recipe} has a bias of each head, at which no S_p is measured: rows are read "
            "at b = 0 alone. Give one bias, --recipe=relu:p=4,b=auto."
        )


def _bias(entry: Prevalence, result: DiagnosisResult) -> str:
    """The bias at which the rows are read, and the length at which it was calibrated."""
    label, calibration = findings.bias_label(entry.bias_kind), result.calibration
    if entry.bias_kind != "auto" or calibration is None:
        return label
    return f"{label} = {entry.bias:.3g} of {calibration.length:,} tokens"


def _chosen(result: DiagnosisResult) -> tuple[str, list[HeadRows]]:
    """The recipe's degree, else the lowest one, and all heads at the last bias."""
    p = str(min(result.degrees))
    if result.degree is not None:
        p = next(str(each) for each in result.degrees if each == result.degree)
    kind = result.prevalence[-1].bias_kind
    return p, [head for head in result.heads if head.bias_kind == kind]


def _head_table(result: DiagnosisResult) -> _Table:
    """The heads that lose most rows."""
    p, heads = _chosen(result)
    most = sorted(heads, key=lambda head: (-head.lost[p], head.layer, head.head))[:SHOWN_HEADS]
    label = findings.bias_label(result.prevalence[-1].bias_kind)
    rows = [
        (
            f"{h.layer}.{h.head}",
            f"{h.s_softmax:.3g}",
            f"{h.s[p]:.3g}",
            f"{h.lost[p]} of {h.concentrated}",
            f"{h.rows}",
        )
        for h in most
    ]
    return _Table(
        f"heads that lose most rows at p = {p}, {label}; medians over rows",
        ("layer.head", "S softmax", f"S_{p}", "lost of concentrated", "rows"),
        rows,
    )


def _free_heads(result: DiagnosisResult) -> str:
    p, heads = _chosen(result)
    return f"{sum(head.lost[p] == 0 for head in heads)} of {len(heads)} heads lose no row there"


def _percent(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if findings.unknown_ends(interval):
        return f"{100 * interval.estimate:.1f}"
    return f"{100 * interval.estimate:.1f} [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"
