"""The sections of the page: tables, curves and graphs; their paragraphs are in `report.html.j2`."""

from collections.abc import Mapping, Sequence

import numpy as np

from lm_jax import report
from lm_jax.report import Cell, Section, Series, cell, rate, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval
from sparse_jax.studies.addition import graph, measures, problems
from sparse_jax.studies.addition.graph import SumGraph
from sparse_jax.studies.addition.models import EXACT, OPEN
from sparse_jax.studies.addition.results import DENSE, SPARSE, CarryAttention, SeedSummary

_PROSE = Prose("sparse_jax.studies.addition")

# Share of exact sums that both models should reach.
GOAL = 0.99
_CARRIES = ("no carry", "one carry", "two carries")


def accuracy(summary: SeedSummary) -> Section:
    """The table of exact sums."""
    rows = [
        [
            name,
            rate(own.accuracy.all, spec=".2f"),
            *(_rate(own.accuracy.by_carries.get(str(count))) for count in range(3)),
        ]
        for name, own in summary.models.items()
    ]
    return section(
        "Do both models add?",
        _PROSE("accuracy", number(problems.COUNT), number(summary.sums.held_out)),
        table(
            ["Model", "Exact sums, %", *(f"With {text}, %" for text in _CARRIES)],
            rows,
            caption="Exact sums among held-out problems. Brackets: 95\u00a0% Wilson intervals.",
        ),
    )


def training(
    evaluations: Mapping[str, Mapping[str, Sequence[float]]], summary: SeedSummary
) -> Section:
    """Exact sums and open edges over the updates."""
    config = summary.config
    held_out = number(summary.sums.held_out)
    return section(
        "Training",
        _PROSE(
            "training",
            config.begin,
            f"{config.strength:g}",
            f"{config.bound:g}" if config.bound else "",
        ),
        report.grid(
            report.curves(
                [
                    Series(name, own["step"], 100 * np.asarray(own[EXACT]))
                    for name, own in evaluations.items()
                ],
                caption="Exact sums among held-out problems.",
                x_label="updates",
                y_label="exact (%)",
                y_range=(0.0, 102.0),
                h_lines=[(100 * GOAL, "goal")],
                n=f"{held_out} sums",
            ),
            report.curves(
                [Series(name, own["step"], own[OPEN]) for name, own in evaluations.items()],
                caption="Open edges of a sum, all layers together.",
                x_label="updates",
                y_label="open edges",
                log_y=True,
                n=f"{held_out} sums",
            ),
        ),
    )


def graphs(by_model: Mapping[str, Sequence[SumGraph]]) -> Section:
    """The attention graphs of both models, one sum after the other."""
    parts = []
    for dense, sparse in zip(by_model[DENSE], by_model[SPARSE], strict=True):
        count = int(problems.carries(np.array([dense.problem]))[0])
        sentences = graph.format_edges(graph.edges(sparse))
        title = problems.format_problem(dense.problem).rstrip("=")
        parts.append(
            report.grid(
                *(
                    graph.layer_graph(each, title=f"{name}, {_CARRIES[count]}")
                    for name, each in (("Dense", dense), ("Sparse", sparse))
                )
            )
        )
        parts.append(
            report.details(f"{title}: the sparse edges in words", *(sentences or ["None."]))
        )
    return section("Attention graphs of single sums", _PROSE("graphs"), *parts)


def edges(summary: SeedSummary) -> Section:
    """Edges per sum, all and by layer."""
    rows = [
        [
            name,
            _mean(own.edges.all),
            cell(100 * own.edges.all.estimate / own.edges.possible, spec=".1f"),
            _mean(own.edges.heavy),
            *(_mean(layer) for layer in own.edges.by_layer),
        ]
        for name, own in summary.models.items()
    ]
    layers = [f"Layer {layer}" for layer in range(summary.config.num_layers)]
    possible = summary.models.dense.edges.possible
    return section(
        "How many edges does a sum take?",
        _PROSE("edges", f"{measures.NEGLIGIBLE:g}"),
        table(
            ["Model", "Open edges", "Of all, %", f"Weight ≥ {measures.NEGLIGIBLE:g}", *layers],
            rows,
            caption=f"Open edges of a held-out sum, out of {number(possible)}: mean, with "
            "95\u00a0% bootstrap intervals over sums.",
            n=f"{number(summary.sums.held_out)} sums",
        ),
    )


def operands(summary: SeedSummary) -> Section:
    """How often a digit of the answer attends to its operands in layer 0."""
    rows = [
        [
            name,
            each.place,
            _with_chance(each.both, each.both_by_chance),
            _with_chance(each.each, each.each_by_chance),
            rate(each.reached),
            cell(each.edges, spec=".2f"),
            cell(100 * each.weight, spec=".1f"),
        ]
        for name, own in summary.models.items()
        for each in own.operands
    ]
    return section(
        "Do the answer's digits attend to the digits to be added?",
        _PROSE("operands"),
        table(
            [
                "Model",
                "Digit",
                "Both operands, %",
                "Each operand, %",
                "By any path, %",
                "Open edges",
                "Weight on operands, %",
            ],
            rows,
            caption="Answer digits that attend to their operands in layer 0, over held-out sums, "
            "with 95\u00a0% Wilson intervals. By any path: both operands are connected to the "
            "position by open edges through any layers and positions. Open edges: mean number from "
            "that position in layer 0; without any, chance is 0. Weight: share of its attention "
            "weight on the two operands.",
        ),
    )


def carries(summary: SeedSummary) -> Section:
    """How often the tens and hundreds attend to a carry, layer by layer."""
    results = {(each.layer, each.place, each.carry): each for each in summary.models.sparse.carry}
    kinds = [(place, carry) for place in measures.PLACES[1:] for carry in (True, False)]
    rows = [
        [f"{layer}", *(_attends(results.get((layer, *kind))) for kind in kinds)]
        for layer in range(summary.config.num_layers)
    ]
    heads = [f"{place.title()}, {'with' if carry else 'no'} carry, %" for place, carry in kinds]
    return section(
        "Do the answer's digits attend to the carry?",
        _PROSE("carries", summary.config.mixer.causal),
        table(
            ["Layer", *heads],
            rows,
            caption="Sparse model: tens and hundreds of the answer that attend to a position from "
            "which the carry can be known, in sums with a carry into that place and in sums "
            "without one. Over held-out sums, with 95\u00a0% Wilson intervals; chance as in the "
            "table above.",
        ),
    )


def needed(summary: SeedSummary) -> Section:
    """Exact sums with the edges of one layer closed."""
    rows = [
        [f"{layer}", *(rate(own.without[layer].exact) for _, own in summary.models.items())]
        for layer in range(summary.config.num_layers)
    ]
    return section(
        "Which layers' edges are needed?",
        _PROSE("needed"),
        table(
            ["Closed layer", *(f"{name}: exact sums, %" for name, _ in summary.models.items())],
            rows,
            caption="Exact sums among held-out problems with all attention edges of one layer "
            "closed, with 95\u00a0% Wilson intervals.",
        ),
    )


def _attends(result: CarryAttention | None) -> Cell:
    return cell(None) if result is None else _with_chance(result.attends, result.by_chance)


def _with_chance(share: Interval, chance: float) -> Cell:
    result = rate(share)
    return result._replace(note=f"by chance {100 * chance:.1f} · {result.note}")


def _mean(interval: Interval) -> Cell:
    note = f"[{interval.low:.2f}, {interval.high:.2f}]" if interval.bounded else "no interval"
    return cell(interval.estimate, note=note, spec=".2f")


def _rate(share: Interval | None) -> Cell:
    return cell(None) if share is None else rate(share, spec=".2f")
