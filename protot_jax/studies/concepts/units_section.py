"""The section of the concept report on units of other models: metrics by layer, and their texts.

After the paper's Figs. 8 and 9 (metrics of write gates and of LLaMA's heads over depth). Scores of
a judge are with those of the prototypes (`report_sections.labels`).
"""

from collections.abc import Iterator
import math

from markupsafe import Markup
import numpy as np

from lm_jax import report
from lm_jax.report import Cell, Column, Section, Series, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from protot_jax.studies.concepts.report_sections import bounded
from protot_jax.studies.concepts.results import ConceptReport, Layer, Text
from protot_jax.studies.concepts.scores import UNITS
from protot_jax.studies.concepts.unit_results import Unit, UnitComparison

_PROSE = Prose("protot_jax.studies.concepts")
# Of the top texts of a unit, those that are shown.
_SHOWN = 5
_UNIT = {"heads": "head", "sae": "feature"}


def compared_units(result: ConceptReport) -> Section | None:
    """Metrics of prototypes and other units, and the units one by one; None without others."""
    if not result.comparisons:
        return None
    depth = [one.layer for one in result.layers]
    by_depth = [one for one in result.comparisons if len(one.layers) > 1]
    # As a share of the most that so many units can have, because their numbers differ.
    drawn = [
        ("L1 ratio over the number of units", "l1_ratio", lambda units: units),
        ("Entropy over its maximum", "entropy", math.log),
    ]
    charts = [
        report.curves(
            [
                Series(
                    "prototypes, write",
                    depth,
                    [
                        getattr(one.write, field) / most(result.model.prototypes)
                        for one in result.layers
                    ],
                ),
                *(
                    Series(
                        _name(own),
                        [one.layer for one in own.layers],
                        [getattr(one, field).estimate / most(one.units) for one in own.layers],
                    )
                    for own in by_depth
                ),
            ],
            caption=f"{title}, by layer.",
            x_label="layer",
            y_label="share",
            x_ticks=depth,
            n=f"{number(result.settings.tokens)} tokens",
        )
        for title, field, most in drawn
        if by_depth and result.model.prototypes > 1
    ]
    return section(
        "Units of other models on the same texts",
        _PROSE("compared_units", result.model, result.comparisons),
        report.grid(*charts),
        table(
            [
                *("Units", "Layer", "Number", "L1 ratio", "Gini", "Entropy, nats"),
                *(Column("MI, nats", ".3f"), Column("by chance", ".3f")),
                Column("Repetition", ".3f"),
                "Dead",
            ],
            [*_prototypes(result), *(row for one in result.comparisons for row in _rows(one))],
            caption=_PROSE("compared_metrics"),
            n=f"{number(result.settings.tokens)} tokens",
        ),
        *(_one_by_one(one, result.texts) for one in result.comparisons),
    )


def _name(one: UnitComparison) -> str:
    return f"{UNITS[one.kind]} of {one.run}"


def _prototypes(result: ConceptReport) -> Iterator[list[object]]:
    for one in result.layers:
        own = [p.repetition for p in result.prototypes if p.layer == one.layer]
        known = [value for value in own if value is not None]
        yield [
            *("prototypes, write", one.layer, result.model.prototypes),
            *(_gate(one, field) for field in ("l1_ratio", "gini", "entropy")),
            *(one.write.mutual_information, one.write.mutual_information_by_chance),
            *(float(np.mean(known)) if known else None, one.write.dead),
        ]


def _gate(one: Layer, field: str) -> Cell:
    return bounded(getattr(one.write, field), getattr(one.write.intervals, field))


def _rows(one: UnitComparison) -> Iterator[list[object]]:
    for own in one.layers:
        repeated = [unit.repetition for unit in one.units if unit.layer == own.layer]
        yield [
            *(_name(one), own.layer, own.units),
            *(bounded(x.estimate, (x.low, x.high)) for x in (own.l1_ratio, own.gini, own.entropy)),
            *(own.mutual_information, own.mutual_information_by_chance),
            *(float(np.mean(repeated)), own.dead),
        ]


def _one_by_one(one: UnitComparison, texts: tuple[Text, ...]) -> Markup:
    return report.details(
        f"Texts of the {number(len(one.units))} {_name(one)}",
        *(_unit(one.kind, unit, texts) for unit in one.units),
    )


def _unit(kind: str, unit: Unit, texts: tuple[Text, ...]) -> Markup:
    """Top tokens, and the first top texts as running text, a line each."""
    words: list[str] = []
    values: list[float] = []
    for top in unit.top_texts[:_SHOWN]:
        text = texts[top.text]
        sums = np.bincount(text.word_of, weights=top.activation)
        words += [*text.words[:-1], f"{text.words[-1]}\n"]
        values += (sums / np.bincount(text.word_of)).tolist()
    theme = "" if unit.label is None else f" Theme: {unit.label.theme}."
    tokens = ", ".join(token.token for token in unit.top_tokens)
    return report.words(
        words,
        values,
        caption=f"Layer {unit.layer}, {_UNIT[kind]} {unit.unit}. Top tokens: {tokens}.{theme}",
        scale="sequential",
        # Norms are far from 0, so that only their differences are coloured.
        value_range=(min(values), unit.max) if min(values) < unit.max else (0.0, 1.0),
        unit="word",
    )
