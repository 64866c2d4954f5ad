"""The report of lenses."""

from collections.abc import Iterator
from pathlib import Path
import textwrap
from typing import Any

import pyarrow.parquet as pq

from lm_jax import report
from lm_jax.console.terminal import format_table
from lm_jax.report import Column, Report, Section, section, table, table_of
from lm_jax.report.markup import number
from lm_jax.report.tables import cell
from sparse_jax.studies.lens import numbers
from sparse_jax.studies.lens.results import JACOBIAN, LENSES, LOGIT, READOUTS, SPLIT, LensSummary
from sparse_jax.studies.lens.settings import LensConfig

# Heads of a readout that are shown.
_HEADS = 10
# A lens says the model's next token where it agrees at so many tokens.
_SHARE = 0.5
TERMS = {
    LOGIT: "The last norm and the unembedding read the output of a layer as it is.",
    JACOBIAN: "They read that output times the layer's averaged Jacobian: what it will have become "
    "at the last layer.",
    "divergence": "KL of the model's next-token distribution from that of the lens, in nats, mean "
    "over tokens.",
    "agreement": "Tokens at which the lens' most probable token is the model's.",
    "error": "Relative standard error of the layer's Jacobian, from two halves of the texts.",
    "change": "Norm of the Jacobian less the identity, over the norm of the Jacobian.",
    "readout": "How far the stream at the end of the prompt, put into held-out texts at all tokens "
    "that the lens counts, becomes the token there, by the derivative: the logit that it adds, "
    "without the divisor of the last norm.",
    "share": "What passes a head of the readout, by the values that it moves and by the weights "
    "that change; in every layer shares and what passes attention by sum to the readout, so that "
    "shares of heads in different layers may overlap.",
}


def build(config: LensConfig, summary: LensSummary, folder: Path) -> Report:
    """The report of a summary and of the prompts that were read."""
    return Report(
        f"Lenses: {Path(summary.model).name}",
        lambda: [
            _compared(summary),
            *_readouts(summary, folder),
            *([_splits(summary, folder)] if config.split else []),
            _terms(),
        ],
        lead=[report.verdict(conclusion(summary), _setting(summary))],
        lines=[format_summary(summary)],
    )


def conclusion(summary: LensSummary) -> str:
    """The layer from which on each lens says what the model will say, in a sentence."""
    last = summary.layers[-1].layer
    parts = []
    for lens in LENSES:
        first = numbers.first_layer(summary.layers, lens, _SHARE)
        where = f"from layer {first} of {last} on" if first is not None else "in no layer"
        parts.append(f"{where} by the {lens}")
    return (
        "At half of the tokens or more the model's own next token comes first "
        f"{' and '.join(parts)}."
    )


def _setting(summary: LensSummary) -> str:
    return (
        f"{summary.prompts} texts of the fit, {summary.rows} rows each; compared on "
        f"{summary.tokens:,} tokens of {summary.texts} others."
    )


def _compared(summary: LensSummary) -> Section:
    layers = [each.layer for each in summary.layers]

    def chart(name: str, field: str, caption: str):
        values = [
            report.Series(lens, layers, [getattr(each, field)[lens] for each in summary.layers])
            for lens in LENSES
        ]
        return report.curves(
            values,
            caption=caption,
            x_label="layer whose output is read",
            y_label=name,
            n=f"{number(summary.tokens)} tokens",
        )

    return section(
        "What each layer says",
        report.grid(
            chart("agreement, share of tokens", "agreeing", "Agreement with the model."),
            chart("divergence, nats", "divergence", "Divergence from the model."),
        ),
        table_of(
            list(summary.layers),
            [
                Column("Layer", ",d", lambda each: each.layer),
                *(
                    Column(f"Agreement, {lens}", ".3f", lambda each, lens=lens: each.agreeing[lens])
                    for lens in LENSES
                ),
                *(
                    Column(
                        f"Divergence, {lens}", ".2f", lambda each, lens=lens: each.divergence[lens]
                    )
                    for lens in LENSES
                ),
                Column("Error", ".3f", lambda each: each.spread),
                Column("Change", ".3f", lambda each: each.change),
            ],
            caption="Both lenses by layer, on held-out texts.",
        ),
    )


def _readouts(summary: LensSummary, folder: Path) -> Iterator[Section]:
    """A section of each prompt: layers down, positions across."""
    if not summary.readouts:
        return
    rows = pq.read_table(folder / f"{READOUTS}.parquet").to_pylist()
    for prompt, text in enumerate(summary.readouts):
        own = [row for row in rows if row["prompt"] == prompt]
        tables = []
        for lens in LENSES[::-1]:
            cells = {(row["layer"], row["position"]): row for row in own if row["lens"] == lens}
            layers, positions = (sorted({key[i] for key in cells}) for i in (0, 1))
            heads = ["Layer", *(repr(cells[layers[0], p]["token"]) for p in positions)]
            body = [
                [
                    layer,
                    *(
                        cell(
                            repr(cells[layer, p]["read"]),
                            note=f"{100 * cells[layer, p]['probability']:.0f} %",
                        )
                        for p in positions
                    ),
                ]
                for layer in reversed(layers)
            ]
            tables.append(
                table(heads, body, caption=f"Most probable token by the {lens}, last layer first.")
            )
        yield section(f"Read: {textwrap.shorten(text, 60)}", *tables)


def _splits(summary: LensSummary, folder: Path) -> Section:
    """The heads that carry each readout."""
    rows = pq.read_table(folder / f"{SPLIT}.parquet").to_pylist()
    keys = dict.fromkeys((row["prompt"], row["layer"]) for row in rows)
    body = []
    for prompt, layer in sorted(keys):
        own = [row for row in rows if (row["prompt"], row["layer"]) == (prompt, layer)]
        own.sort(key=lambda row: -abs(row["share"]))
        body.append(
            [
                textwrap.shorten(summary.readouts[prompt], 60),
                layer,
                repr(own[0]["token"]),
                *(own[0]["total"], own[0]["edges"]),
                ", ".join(_share(row) for row in own[:_HEADS]),
            ]
        )
    columns = ["Prompt", "Layer", "Reads", Column("Readout", "+.2f"), Column("Edges", ",.0f")]
    return section(
        "Which heads carry a readout?",
        table(
            [*columns, "Heads with the largest shares"],
            body,
            caption="Readouts at the end of each prompt by the Jacobian lens, split by the heads "
            "above that layer, with standard errors in brackets, and how many edges from a key to "
            "a query carry 90 % of a text's absolute shares; means over "
            f"{number(summary.texts)} held-out texts.",
        ),
    )


def _share(row: dict[str, Any]) -> str:
    return f"{row['at']}.{row['head']} {row['share']:+.2f} ({row['error']:.2f})"


def _terms() -> Section:
    return section("Terms", report.key_values(TERMS))


def format_summary(summary: LensSummary) -> str:
    """The conclusion and the table as plain text."""
    rows = [
        (
            str(each.layer),
            *(f"{each.agreeing[lens]:.3f}" for lens in LENSES),
            *(f"{each.divergence[lens]:.2f}" for lens in LENSES),
            "–" if each.spread is None else f"{each.spread:.3f}",
        )
        for each in summary.layers
    ]
    heads = ("layer", "agree, logit", "Jacobian", "KL, logit", "Jacobian", "error")
    lines = [*textwrap.wrap(conclusion(summary), 80), "", _setting(summary), ""]
    return "\n".join([*lines, format_table(heads, rows)])
