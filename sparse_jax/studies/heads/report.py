"""The report of heads: maps of the measures, then the texts on which heads write most."""

from collections.abc import Iterator
from pathlib import Path
import textwrap

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax import report
from lm_jax.console.terminal import format_table
from lm_jax.report import Column, Report, Section, section, table_of
from lm_jax.report.markup import number
from lm_jax.report.page import Part
from sparse_jax.studies.heads.numbers import KINDS, strongest
from sparse_jax.studies.heads.results import TABLE, TEXT, TEXTS, HeadResult, HeadsSummary
from sparse_jax.studies.heads.settings import HeadsConfig

TERMS = {
    "first": "Mean weight on the first token of a text.",
    "previous": "Mean weight on the token before, which for the second token is the first.",
    "self": "Mean weight on the token itself.",
    "duplicate": "Mean weight on earlier places of the token, where there are any.",
    "induction": "Mean weight on what followed those places, in the second of two equal rows of "
    "random tokens. A head that looks as far back as most rows are long has it, too.",
    "entropy": "Entropy of the weights, divided by their sum, over that of equal weights on the "
    "keys that the layer sees.",
    "written": "Norm of what the head adds to the residual stream over the norm of the stream.",
    "copying": "Sum of the eigenvalues of the circuit from tokens through values and outputs to "
    "logits, over the sum of their sizes: 1 where the head raises the tokens that it looks at.",
}
# A head is named for a kind where its weight is so much above that of equal weights.
_ABOVE = 0.2
_FIELDS = {name: "self_" if name == "self" else name for name in TERMS}


def build(config: HeadsConfig, summary: HeadsSummary, folder: Path) -> Report:
    """The report of a summary and of the texts that were read."""
    return Report(
        f"Heads: {Path(summary.model).name}",
        lambda: [*_shown(config, summary, folder), _maps(summary), _all(summary), _terms()],
        lead=[report.verdict(conclusion(summary), _setting(summary))],
        lines=[format_summary(summary)],
    )


def conclusion(summary: HeadsSummary) -> str:
    """The strongest head of some kinds, beside equal weights, in sentences."""
    parts = []
    for field in ("induction", "previous", "first"):
        best = strongest(summary.heads, field, 1)[0]
        value, equal = getattr(best, field), getattr(summary.equal[best.layer], field)
        weights = f"({value:.2f}, equal weights {equal:.2f})"
        kind = f"{KINDS[field]} head"
        if value < equal + _ABOVE:
            parts.append(f"no {kind}, at most {best.name} {weights}")
        else:
            parts.append(f"{best.name} as {'an' if kind[0] == 'i' else 'a'} {kind} {weights}")
    return f"The strongest of {len(summary.heads):,} heads: {'; '.join(parts)}."


def _setting(summary: HeadsSummary) -> str:
    return (
        f"{summary.tokens:,} queries of {summary.texts} texts; induction on {summary.twice:,} "
        f"queries of {summary.repeated} rows of random tokens, each twice. In brackets the mean "
        "weight, and what it would be if the head gave all keys that it sees one weight."
    )


def _chosen(config: HeadsConfig, summary: HeadsSummary) -> list[tuple[HeadResult, str]]:
    """The heads that are shown, and why."""
    by_place = {(each.layer, each.head): each for each in summary.heads}
    if config.heads:
        return [(by_place[place], "") for place in config.places]
    reasons: dict[tuple[int, int], list[str]] = {}
    for field, kind in KINDS.items():
        for each in strongest(summary.heads, field, config.shown):
            reasons.setdefault((each.layer, each.head), []).append(
                f"{kind} {getattr(each, field):.2f}"
            )
    return [(by_place[place], ", ".join(why)) for place, why in reasons.items()]


def _shown(config: HeadsConfig, summary: HeadsSummary, folder: Path) -> Iterator[Section]:
    """A section for each head: the texts on which it writes most."""
    table = pq.read_table(folder / f"{TABLE}.parquet")
    table = table.filter(pc.equal(table["on"], TEXT))
    texts = pq.read_table(folder / f"{TEXTS}.parquet").to_pylist()
    tokens = {row["text"]: row["tokens"] for row in texts if row["on"] == TEXT}
    parts: list[Part] = []
    for each, why in _chosen(config, summary):
        own = pc.and_(pc.equal(table["layer"], each.layer), pc.equal(table["head"], each.head))
        rows = sorted(table.filter(own).to_pylist(), key=lambda row: -row["norm"])
        shown = [_text(row, tokens[row["text"]]) for row in rows[: config.shown]]
        title = f"Head {each.name}" + (f": {why}" if why else "")
        parts.append(report.details(title, *shown))
    yield section(
        "Texts on which heads write most",
        "Each head has the texts at one query of which it writes most, measured against the "
        "stream. Colours are its weights there; tokens after the query are not seen. Below each "
        "text is what the head raises and lowers most by itself.",
        *parts,
    )


def _text(row: dict, tokens: list[str]) -> Part:
    query = row["query"]
    seen = tokens[: query + 1]
    weights = np.array(row["weights"])[: query + 1]
    titles = [f"{token!r}: {number(float(w))}" for token, w in zip(seen, weights, strict=True)]
    titles[query] += ", the query"
    raised, lowered = (", ".join(map(repr, row[name])) for name in ("raised", "lowered"))
    return report.words(
        seen,
        weights,
        caption=f"Query {tokens[query]!r}, the last token shown; it adds {row['norm']:.2f} of the "
        f"stream's norm. Raises {raised}; lowers {lowered}.",
        scale="sequential",
        value_range=(0.0, 1.0),
        titles=titles,
    )


def _maps(summary: HeadsSummary) -> Section:
    L = 1 + max(each.layer for each in summary.heads)
    N = 1 + max(each.head for each in summary.heads)
    maps = []
    for name, field in _FIELDS.items():
        values_LN = np.full((L, N), np.nan)
        for each in summary.heads:
            value = getattr(each, field)
            values_LN[each.layer, each.head] = np.nan if value is None else value
        maps.append(
            report.heat_map(
                values_LN[::-1],
                caption=f"{name.capitalize()} of every head.",
                x_label="head",
                y_label="layer",
                value_label=name,
                row_labels=list(range(L))[::-1],
                column_labels=list(range(N)),
                scale="diverging" if name == "copying" else "sequential",
                n=_count(name, summary),
            )
        )
    return section("All heads", report.grid(*maps))


def _count(name: str, summary: HeadsSummary) -> str:
    """What a measure is the mean of."""
    if name == "copying":
        return "weights alone"
    if name == "induction":
        return f"{number(summary.twice)} queries of random tokens"
    if name == "duplicate":
        return f"{number(summary.again)} queries whose token came before"
    return f"{number(summary.tokens)} queries"


def _all(summary: HeadsSummary) -> Section:
    columns = [
        Column("Head", value=lambda each: each.name),
        *(
            Column(name.capitalize(), ".2f", lambda each, field=field: getattr(each, field))
            for name, field in _FIELDS.items()
        ),
    ]
    own = table_of(list(summary.heads), columns, caption="Measures of every head.")
    return section("Table", report.details("Every head", own))


def _terms() -> Section:
    return section("Terms", report.key_values(TERMS))


def format_summary(summary: HeadsSummary) -> str:
    """The conclusion and the strongest heads as plain text."""
    rows = []
    for field, kind in KINDS.items():
        best = strongest(summary.heads, field, 3)
        shown = [f"{each.name} {getattr(each, field):.2f}" for each in best]
        if shown:
            rows.append((kind, *shown, *[""] * (3 - len(shown))))
    said, setting = (
        textwrap.wrap(text, 80, break_on_hyphens=False)
        for text in (conclusion(summary), _setting(summary))
    )
    lines = [*said, "", *setting, ""]
    heads = ("kind", "first", "second", "third")
    return "\n".join([*lines, format_table(heads, rows)])
