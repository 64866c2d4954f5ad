"""What the page of an attribution and its terminal say; it measures nothing.

Maps, strongest pairs, sums and their errors; the prose is in `report.html.j2`.
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path

import numpy as np

from lm_jax import report
from lm_jax.console import terminal
from lm_jax.report import Column, Report, Section, cell, section, table
from lm_jax.report.markup import number
from lm_jax.report.page import Part
from lm_jax.report.prose import Prose
from protot_jax.studies.attribution.results import AttributionReport, Pair, Target
from protot_jax.studies.attribution.settings import AttributionConfig

_PROSE = Prose("protot_jax.studies.attribution")
# Largest error of a sum in float32 that is taken for rounding (circuits.md, graph certificates).
BAR = 1e-5
# Name and unit of what a logit is the sum of.
PART = "part of the logit (nats)"
_HEADS = ("prototype", "from", "to", "weight", PART)
# Pairs of a target that the terminal shows.
PRINTED = 5


def build(config: AttributionConfig, summary: AttributionReport, folder: Path) -> Report:
    """The report of an attribution, which holds its prompt itself."""
    del config, folder
    return Report(
        "Which prototypes a logit comes from",
        lambda: [
            *(_section(summary, target) for target in summary.targets),
            section("Model", _PROSE("model", prompt=summary.prompt, model=summary.model)),
            _terms(),
        ],
        lead=[_verdict(summary)],
        lines=[*_opening(summary), *_lines(summary)],
        facts={"model": dataclasses.asdict(summary.model), "prompt": summary.prompt},
    )


def _lines(result: AttributionReport) -> list[str]:
    """The strongest pairs of each target."""
    lines = []
    for target in result.targets:
        lines.append(
            f"{target.token.text!r}: probability {target.probability:.3f}, logit "
            f"{number(target.logit, '+.3f')} nats over the mean; "
            f"{target.pairs_for_90_percent:,} of {target.entries:,} pairs have 90 % of the sum of "
            f"all absolute parts; sums agree to {target.certificate.largest:.1e}"
        )
        rows = _rows(result, target.pairs[:PRINTED])
        numbers = [[*row[:3], f"{row[3]:.3f}", f"{row[4]:+.4f}"] for row in rows]
        lines.append(terminal.format_table(_HEADS, numbers, left=(0, 1, 2)))
    return lines


def answer(result: AttributionReport) -> str:
    """Prompt, first target, and the prototype that carries most to it, in one sentence."""
    target = result.targets[0]
    size_LP = np.abs(target.through.prototypes)
    layer, prototype = map(int, np.unravel_index(np.argmax(size_LP), size_LP.shape))
    part = number(target.through.prototypes[layer][prototype], "+.2f")
    fall = number(-target.measured.prototypes[layer][prototype], "+.2f")
    carried = ""
    for pair in target.pairs:
        if (pair.layer, pair.prototype) == (layer, prototype):
            key, query = result.tokens[pair.key].text, result.tokens[pair.query].text
            carried = f", above all “{key}” to “{query}”"
            break
    return (
        f"After “{result.prompt}”, “{target.token.text}” has a probability of "
        f"{number(100 * target.probability, '.1f')} %; prototype L{layer}P{prototype} carries "
        f"most to it{carried}: {part} of a logit of {number(target.logit, '.2f')} nats, "
        f"which changes by {fall} if it is never read."
    )


def _opening(result: AttributionReport) -> list[str]:
    """The answer and the error of the sums; that of sums which do not agree comes first."""
    largest = max(target.certificate.largest for target in result.targets)
    if largest <= BAR:
        text = f"All parts sum to the logits of the forward pass, to {number(largest)}."
        return [answer(result), text]
    return [
        f"The parts do not sum to the logits: they differ by {number(largest)} of their size.",
        "Rounding explains 1e-5 at most; do not use these numbers, and report the run.",
        answer(result),
    ]


def _verdict(result: AttributionReport) -> Part:
    text, *reasons = _opening(result)
    return report.verdict(text, *reasons, tone="bad" if reasons[1:] else "good")


def _section(result: AttributionReport, target: Target) -> Section:
    logit = number(target.logit, "+.3f")
    outcome = f"Probability {target.probability:.3f}, logit {logit} nats over the mean."
    through, measured = target.through.prototypes, target.measured.prototypes
    ends = _symmetric(through, measured)
    return section(
        f"Next token: {target.token.text}",
        outcome,
        report.grid(
            _by_prototype(through, _PROSE("through"), PART, ends),
            _by_prototype(
                measured,
                _PROSE("measured", target.measured.spearman),
                "fall of the logit (nats)",
                ends,
            ),
        ),
        _pairs(result, target),
        _sources(result, target),
        _by_prototype(target.direct.prototypes, _PROSE("direct"), PART),
        report.details("Sums and their errors", _sums(target)),
    )


def _by_prototype(
    rows: tuple, caption: str, value_label: str, ends: tuple[float, float] | None = None
) -> Part:
    return report.heat_map(
        rows,
        caption=caption,
        x_label="prototype",
        y_label="layer",
        value_label=value_label,
        scale="diverging",
        value_range=ends,
    )


def _symmetric(*maps: tuple) -> tuple[float, float]:
    """One colour scale for maps that are to be compared."""
    largest = max(abs(value) for rows in maps for row in rows for value in row) or 1.0
    return -largest, largest


def _sources(result: AttributionReport, target: Target) -> Part:
    sources = target.sources
    return report.heat_map(
        [sources.tokens, *sources.mlps],
        caption=_PROSE("sources"),
        x_label="token",
        y_label="source",
        value_label=PART,
        row_labels=["embedding", *(f"MLP {layer}" for layer in range(len(sources.mlps)))],
        column_labels=_names(result),
        scale="diverging",
    )


def _rows(result: AttributionReport, pairs: Sequence[Pair]) -> list[tuple]:
    """The pairs under `_HEADS`."""
    names = _names(result)
    return [
        (f"L{one.layer}P{one.prototype}", names[one.key], names[one.query], one.weight, one.share)
        for one in pairs
    ]


def _pairs(result: AttributionReport, target: Target) -> Part:
    return table(
        [*_HEADS[:3], Column(_HEADS[3], ".3f"), Column(_HEADS[4], "+.4f")],
        _rows(result, target.pairs),
        caption=_PROSE("pairs", target.pairs_for_90_percent, target.entries),
        align=["left", "left", "left", "right", "right"],
        n=len(target.pairs),
    )


def _sums(target: Target) -> Part:
    sources, through, direct = target.sources, target.through, target.direct
    rows: list[tuple[object, ...]] = [
        ("sources", _total(sources.tokens), _total(sources.mlps), sources.constant),
        ("direct", _total(direct.prototypes), direct.token + sum(direct.mlps), direct.constant),
    ]
    for layer, own in enumerate(through.prototypes):
        parts = _total(own), through.bypass[layer], through.later[layer]
        rows.append((f"layer {layer}", *parts))
    certificate = target.certificate
    errors = [certificate.sources, certificate.direct, *certificate.layers]
    heads = [
        "sum",
        Column("tokens; prototypes (nats)", "+.4f"),
        Column("MLPs; past the mixer; last token and MLPs (nats)", "+.4f"),
        Column("constant; later (nats)", "+.4f"),
        Column("error, relative", ".1e"),
    ]
    return table(
        heads,
        [
            [*row, cell(error, spec=".1e", tone="none" if error <= BAR else "bad")]
            for row, error in zip(rows, errors, strict=True)
        ],
        caption=_PROSE("certificate"),
    )


def _total(values: tuple) -> float:
    return sum(_total(value) if isinstance(value, tuple) else value for value in values)


def _names(result: AttributionReport) -> list[str]:
    """Tokens of the prompt with their positions, which tell repeated ones apart."""
    return [f"{i} {token.text}" for i, token in enumerate(result.tokens)]


def _terms() -> Section:
    return section("Terms", _PROSE("terms"))
