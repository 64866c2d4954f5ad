"""Graph of the attention edges in one sum: a node per token and layer, a line per open edge.

As in Fig. 1 and Fig. 9 of the paper, the problem is at the bottom, layers go upwards, and the
answer is at the top. An edge of layer 0 starts at a token, an edge of layer l at a node of layer
l-1; the larger its attention weight, the wider and darker its line. An arc over the answer is a
carry.
"""

from collections.abc import Iterator
from typing import NamedTuple

from markupsafe import Markup
import numpy as np

from lm_jax.report.markup import element, number
from sparse_jax.studies.addition import problems

STYLE = """
svg .edge { stroke: var(--series); stroke-linecap: round; }
svg .edge:hover { stroke: var(--s1); stroke-opacity: 1; stroke-width: 4px; }
svg .node { fill: var(--axis); }
svg:not(.marks) .token { font-size: 16px; font-weight: 600; }
svg:not(.marks) .wrong { fill: var(--bad); text-decoration: line-through; }
svg .carry { fill: none; stroke: var(--ink); stroke-width: 1.3; }
svg .carry-head { fill: var(--ink); }
"""
NAMES = (
    "tens of the first number",
    "ones of the first number",
    "plus",
    "tens of the second number",
    "ones of the second number",
    "equals",
    "ten thousands of the answer",
    "thousands of the answer",
    "hundreds of the answer",
    "tens of the answer",
    "ones of the answer",
)
_WIDTH, _LEFT, _RIGHT = 560, 84, 20
_TOP, _ROW, _BOTTOM = 66, 66, 30
# A description of more edges than these helps no reader.
_MOST_DESCRIBED = 60


class Edge(NamedTuple):
    """An open edge of a layer, from the position that is read to the one that reads it."""

    layer: int
    source: int
    reader: int
    weight: float


class SumGraph(NamedTuple):
    """Open edges `[L, T, S]`, attention weights and answered ids of one sum in one model."""

    problem: int
    open_LTS: np.ndarray
    pattern_LTS: np.ndarray
    answer_A: np.ndarray


def edges(graph: SumGraph) -> list[Edge]:
    """The open edges of one sum."""
    return [
        Edge(layer, source, reader, float(graph.pattern_LTS[layer, reader, source]))
        for layer, reader, source in np.argwhere(graph.open_LTS).tolist()
    ]


def format_edges(result: list[Edge]) -> list[str]:
    """The edges as text, one sentence per layer and reading position."""
    sentences = []
    for layer, reader in sorted({(edge.layer, edge.reader) for edge in result}):
        read = [
            f"{'itself' if e.source == reader else f'the {NAMES[e.source]}'} ({e.weight:.2f})"
            for e in result
            if (e.layer, e.reader) == (layer, reader)
        ]
        sentences.append(f"Layer {layer}: the {NAMES[reader]} reads {', '.join(read)}.")
    return sentences


def layer_graph(graph: SumGraph, *, title: str) -> Markup:
    """Figure of one sum in one model; its caption opens with `title`."""
    result, answer_A = edges(graph), graph.answer_A
    layers, T = graph.open_LTS.shape[:2]
    row_S = problems.rows(np.array([graph.problem]))[0]
    asked, wanted_A = problems.decode(row_S[:T]), row_S[problems.READ :]
    right = bool((answer_A == wanted_A).all())
    base = _TOP + layers * _ROW
    sentences = (
        format_edges(result)
        if len(result) <= _MOST_DESCRIBED
        else [f"{len(result)} edges, too many to list."]
    )
    verdict = "right" if right else f"wrong, it is {problems.decode(wanted_A)}"
    caption = (
        f"{title}: {problems.format_problem(graph.problem)}{problems.decode(answer_A)} "
        f"({verdict}), {number(len(result))} open edges."
    )
    svg = element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {_WIDTH} {base + _BOTTOM}",
            "role": "img",
            "aria-label": caption,
        },
        element("title", None, caption),
        element("desc", None, " ".join(sentences) or "No edge is open."),
        *(_line(edge, base) for edge in result),
        *(
            element("circle", {"class": "node", "cx": _x(t), "cy": _y(layer, base), "r": 3.2})
            for layer in range(layers)
            for t in range(T)
        ),
        *(
            element(
                "text",
                {"class": "tick", "x": 4, "y": _y(layer, base), "dy": "0.35em"},
                f"Layer {layer}",
            )
            for layer in range(layers)
        ),
        *(_token(_x(t), base + 18, symbol) for t, symbol in enumerate(asked)),
        *_answers(row_S, answer_A),
        *_arcs(graph.problem),
    )
    return element("figure", {"class": "plot"}, svg, element("figcaption", None, caption))


def _x(place: int) -> float:
    return _LEFT + place * (_WIDTH - _LEFT - _RIGHT) / (problems.READ - 1)


def _y(layer: int, base: float) -> float:
    """Height of a layer's nodes; layer -1 is where edges leave the tokens."""
    return base - (layer + 1) * _ROW


def _token(x: float, y: float, text: str, style: str = "token") -> Markup:
    return element("text", {"class": style, "x": x, "y": y, "text-anchor": "middle"}, text)


def _line(edge: Edge, base: float) -> Markup:
    weight = min(edge.weight, 1.0)
    attributes = {
        "class": "edge s0",
        "x1": _x(edge.source),
        "y1": _y(edge.layer - 1, base),
        "x2": _x(edge.reader),
        "y2": _y(edge.layer, base),
        "stroke-width": 0.6 + 3.4 * weight,
        "stroke-opacity": 0.2 + 0.8 * weight,
    }
    text = (
        f"layer {edge.layer}: the {NAMES[edge.reader]} reads the {NAMES[edge.source]}, "
        f"weight {edge.weight:.3f}"
    )
    return element("line", attributes, element("title", None, text))


def _answers(row_S: np.ndarray, answer_A: np.ndarray) -> Iterator[Markup]:
    for place, (digit, right) in enumerate(zip(answer_A, row_S[problems.READ :], strict=True)):
        style = "token" if digit == right else "token wrong"
        x = _x(problems.FIRST_ANSWER + place)
        yield _token(x, _TOP - 14, problems.decode(digit), style)


def _arcs(problem: int) -> Iterator[Markup]:
    """An arrow from each decimal place whose sum is ten or more to the next higher one."""
    for place in np.flatnonzero(problems.carried(np.array([problem]))[0]).tolist():
        start, end = _x(problems.ANSWERS[place - 1]), _x(problems.ANSWERS[place])
        y = _TOP - 32
        arc = f"M{start:.1f} {y}Q{(start + end) / 2:.1f} {y - 22} {end:.1f} {y}"
        yield element("path", {"class": "carry", "d": arc}, element("title", None, "a carry"))
        head = f"M{end:.1f} {y + 2}l-1 -8l6.5 4z"
        yield element("path", {"class": "carry-head", "d": head})
