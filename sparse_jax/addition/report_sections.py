"""The sections of the page: tables, curves and graphs, with a word of guidance for each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm_jax import report
from lm_jax.report import Cell, Section, Series, cell, rate, section, table
from lm_jax.report.markup import number
from sparse_jax.addition import graph, measures, problems
from sparse_jax.addition.graph import Drawn
from sparse_jax.addition.models import DENSE, EXACT, OPEN, SPARSE

Summary = Mapping[str, Any]
# The share of exact sums that both models are to reach.
GOAL = 0.99
_WORDS = ("no carry", "one carry", "two carries")


def accuracy(summary: Summary) -> Section:
    """The table of exact sums."""
    rows = []
    for name, own in summary["models"].items():
        by_carries = own["accuracy"]["by_carries"]
        rows.append(
            [
                name,
                rate(measures.interval(own["accuracy"]["all"]), spec=".2f"),
                *(_rate(by_carries.get(str(times))) for times in range(3)),
            ]
        )
    return section(
        "Do both models add?",
        f"Both read eleven tokens, as 36+28=?????, and answer at the question marks. Of all "
        f"{number(problems.COUNT)} sums {number(summary['sums']['held_out'])} were held out, those "
        "drawn below among them. A sum is exact when all five digits are right; the gates of the "
        "sparse model are open or closed by rule, without chance. The paper says that both models "
        "“are able to correctly predict the sum”, and gives no figure.",
        table(
            ["Model", "Exact sums, %", *(f"With {words}, %" for words in _WORDS)],
            rows,
            caption="Exact sums among held-out problems. Brackets: 95 % Wilson intervals.",
        ),
    )


def training(evaluations: Mapping[str, Mapping[str, Sequence[float]]], summary: Summary) -> Section:
    """The two curves of training."""
    strength = summary["config"]["strength"]
    begin = {
        "dense": "The sparse model begins as the trained dense one; its updates count anew.",
        "drawn": "Both models begin from drawn weights.",
    }[summary["config"]["begin"]]
    held_out = number(summary["sums"]["held_out"])
    return section(
        "How training went",
        f"{begin} To the loss of the sparse one {strength:g} times the expected share of open "
        "edges is added, summed over layers, from its first step to its last.",
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
                y_label="open edges (log scale)",
                log_y=True,
                n=f"{held_out} sums",
            ),
        ),
    )


def graphs(drawn: Mapping[str, Sequence[Drawn]]) -> Section:
    """The layer graphs, dense beside sparse."""
    parts = []
    for dense, sparse in zip(drawn[DENSE], drawn[SPARSE], strict=True):
        times = int(problems.carries(np.array([dense.problem]))[0])
        result = graph.format_edges(graph.edges(sparse))
        title = problems.written(dense.problem).rstrip("=")
        parts.append(
            report.grid(
                *(
                    graph.layer_graph(one, title=f"{name}, {_WORDS[times]}")
                    for name, one in (("Dense", dense), ("Sparse", sparse))
                )
            )
        )
        parts.append(report.details(f"{title}: the sparse edges in words", *(result or ["None."])))
    return section(
        "The graph of a sum",
        "The problem is at the bottom, the answer on top; an arc marks a carry. A line is an open "
        "edge, from the place that is read up to the one that reads, the wider and darker the "
        "heavier its weight. The sums are those of Fig. 9, if the settings name no others.",
        *parts,
    )


def edges(summary: Summary) -> Section:
    """Edges per sum, all and by layer."""
    rows = []
    for name, own in summary["models"].items():
        result = own["edges"]
        rows.append(
            [
                name,
                _mean(result["all"]),
                cell(100 * result["all"]["estimate"] / result["possible"], spec=".1f"),
                _mean(result["heavy"]),
                *(_mean(layer) for layer in result["by_layer"]),
            ]
        )
    layers = [f"Layer {layer}" for layer in range(summary["config"]["num_layers"])]
    possible = summary["models"][DENSE]["edges"]["possible"]
    return section(
        "How many edges does a sum take?",
        "An edge of the dense model is open by definition, so its count says nothing of its own; "
        f"beside it stand the edges whose weight is at least {measures.SLIGHT:g}.",
        table(
            ["Model", "Open edges", "Of all, %", f"Weight ≥ {measures.SLIGHT:g}", *layers],
            rows,
            caption=f"Open edges of a held-out sum, out of {number(possible)}: mean, with 95 % "
            "bootstrap intervals over sums.",
            n=f"{number(summary['sums']['held_out'])} sums",
        ),
    )


def digits(summary: Summary) -> Section:
    """How often a digit of the answer attends to its operands in layer 0."""
    rows = []
    for name, own in summary["models"].items():
        for one in own["operands"]:
            rows.append(
                [
                    name,
                    one["place"],
                    _beside_chance(one["both"], one["both_by_chance"]),
                    _beside_chance(one["each"], one["each_by_chance"]),
                    rate(measures.interval(one["reached"])),
                    cell(one["edges"], spec=".2f"),
                    cell(100 * one["weight"], spec=".1f"),
                ]
            )
    return section(
        "Do the answer's digits attend to the digits to be added?",
        "The paper, of layer 0: “the model first attends to the corresponding digits to be added”. "
        "Counted are the open edges of layer 0 from the place of the answer's ones (or tens) to "
        "the two ones (or tens) of the problem. By chance: as many edges from the same place, led "
        "to places drawn at random among those it sees.",
        table(
            [
                "Model",
                "Digit",
                "Both operands, %",
                "Each operand, %",
                "By any path, %",
                "Its edges",
                "Weight on them, %",
            ],
            rows,
            caption="Answer digits that attend to their operands in layer 0, over held-out sums, "
            "with 95 % Wilson intervals. By any path: both operands reach the place in the end, in "
            "any layers and through any places. Its edges: mean open edges of that place in layer "
            "0; without any, chance is 0. Weight: the share of its attention weight on the two.",
        ),
    )


def carries(summary: Summary) -> Section:
    """How often the tens and hundreds attend to a carry, layer by layer."""
    results = {
        (one["layer"], one["place"], one["carry"]): one
        for one in summary["models"][SPARSE]["carry"]
    }
    kinds = [(place, carry) for place in measures.PLACES[1:] for carry in (True, False)]
    rows = [
        [f"{layer}", *(_attends(results.get((layer, *kind))) for kind in kinds)]
        for layer in range(summary["config"]["num_layers"])
    ]
    heads = [f"{place.title()}, {'a' if carry else 'no'} carry, %" for place, carry in kinds]
    return section(
        "Do they attend to the carry?",
        "The paper, of layer 1: “it attends to the carry bit only if it is needed”. Attention is "
        "causal here and the ones stand last, so the tens cannot see the answer's ones. Counted is "
        "therefore whether the tens (the hundreds) of the answer have an open edge to any other "
        "place that by then holds a digit of the ones (the tens): the operands of that lower place "
        "themselves, and whatever has read them in an earlier layer. The claim is borne out where "
        "the share with a carry is high and the one without is low.",
        table(
            ["Layer", *heads],
            rows,
            caption="The sparse model: tens and hundreds of the answer that attend to a place from "
            "which the carry can be told, by whether one comes in. Over held-out sums, with 95 % "
            "Wilson intervals; chance as in the table above.",
        ),
    )


def needed(summary: Summary) -> Section:
    """Exact sums with one layer's edges closed."""
    rows = [
        [
            f"{layer}",
            *(
                rate(measures.interval(own["without"][layer]["exact"]))
                for own in summary["models"].values()
            ),
        ]
        for layer in range(summary["config"]["num_layers"])
    ]
    return section(
        "Which layers' edges are needed?",
        "What an edge shows is tested by closing it. With all edges of one layer closed, a layer "
        "that matters takes the exact sums with it.",
        table(
            ["Closed layer", *(f"{name}: exact sums, %" for name in summary["models"])],
            rows,
            caption="Exact sums among held-out problems with the attention of one layer switched "
            "off, with 95 % Wilson intervals.",
        ),
    )


def _attends(one: Mapping[str, Any] | None) -> Cell:
    return cell(None) if one is None else _beside_chance(one["attends"], one["by_chance"])


def _beside_chance(given: Mapping[str, Any], chance: float) -> Cell:
    result = rate(measures.interval(given))
    return result._replace(note=f"by chance {100 * chance:.1f} · {result.note}")


def _mean(given: Mapping[str, Any]) -> Cell:
    note = f"[{given['low']:.2f}, {given['high']:.2f}]"
    return cell(given["estimate"], note=note, spec=".2f")


def _rate(given: Mapping[str, Any] | None) -> Cell:
    return cell(None) if given is None else rate(measures.interval(given), spec=".2f")
