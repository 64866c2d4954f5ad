"""Drawings of the circuits of one prompt: patterns of heads, and the graph of token edges."""

from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lm_jax.report import layers
from lm_jax.report.markup import element, number
from sparse_jax.circuits.edge_graph import (
    ROW,
    TALLEST,
    edge_lines,
    height,
    names_axis,
    placed,
    token_name,
)
from sparse_jax.studies.circuits.results import DrawnPrompt, HeadPattern

if TYPE_CHECKING:
    import altair as alt

STYLE = """
.thumbnails { display: flex; flex-wrap: wrap; gap: 0.6rem; margin: 0.6rem 0 0; }
.thumbnails div { width: 6.4rem; font-size: 0.78rem; line-height: 1.3; color: var(--soft); }
.thumbnails svg { display: block; width: 100%; height: auto; border: 1px solid var(--hair); }
.thumbnails rect { fill: var(--s0); }
.prompt { max-width: 46rem; padding: 0.5rem 0.8rem; background: var(--panel); font-size: 0.92rem; }
.vega-bindings { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; font-size: 0.88rem; }
.vega-bind { display: inline-flex; align-items: center; gap: 0.4rem; }
.vega-bind label { display: inline-flex; align-items: center; gap: 0.4rem; }
"""
# Squares of less weight are not seen.
_LEAST = 0.02


def prompt_text(drawn: DrawnPrompt) -> Markup:
    """The prompt that is drawn and its answer."""
    text = "".join(drawn.tokens)
    return element(
        "p", {"class": "prompt"}, f"{drawn.task}: {text}", element("strong", None, drawn.answer)
    )


def name(head: HeadPattern) -> str:
    """A head as the paper writes it: L5H1."""
    return f"L{head.layer}H{head.head}"


def thumbnails(drawn: DrawnPrompt) -> Markup:
    """A small square for each needed head, without tokens."""
    T = len(drawn.tokens)
    names = [token_name(drawn.tokens, place) for place in range(T)]
    boxes = []
    for head in drawn.heads:
        squares = [
            element(
                "rect",
                {"x": key, "y": query, "width": 1, "height": 1, "fill-opacity": weight},
                element("title", None, f"{names[query]} ← {names[key]}: {weight}"),
            )
            for query, row in enumerate(head.weights)
            for key, weight in enumerate(row)
            if weight >= _LEAST
        ]
        label = f"{name(head)}, {number(head.importance)}"
        drawing = element(
            "svg", {"viewBox": f"0 0 {T} {T}", "role": "img", "aria-label": label}, *squares
        )
        boxes.append(element("div", None, drawing, label))
    count = len(drawn.heads)
    more = f", the first {count} drawn" if count < drawn.heads_needed else ""
    caption = element(
        "figcaption",
        None,
        f"{drawn.model}: {number(drawn.heads_needed)} heads{more}; each with its layer, head and "
        "importance.",
    )
    grid = element("div", {"class": "thumbnails"}, *boxes)
    return element("figure", {"class": "plot wide"}, grid, caption)


def pattern(drawn: DrawnPrompt) -> "alt.LayerChart":
    """Attention weights of one needed head with its tokens; the reader chooses the head."""
    import altair as alt

    names = [name(head) for head in drawn.heads]
    rows = [
        {
            "head": name(head),
            "query": query,
            "key": key,
            "reads": token_name(drawn.tokens, query),
            "token": token_name(drawn.tokens, key),
            "weight": weight,
        }
        for head in drawn.heads
        for query, weights in enumerate(head.weights)
        for key, weight in enumerate(weights[: query + 1])
        if weight > 0
    ]
    columns = {"head": "head", "reads": "query", "token": "key", "weight": "weight"}
    places = list(range(len(drawn.tokens)))
    x = _token_axis(drawn, "key", "key", alt.X, places, -90)
    y = _token_axis(drawn, "query", "query", alt.Y, places, 0)
    colour = alt.Color(
        field="weight",
        type="quantitative",
        scale=alt.Scale(domain=[0, 1], range="heatmap", interpolate="rgb", clamp=True),
        legend=alt.Legend(title="attention weight"),
    )
    chosen = alt.param(
        name="head_shown", value=names[0], bind=alt.binding_select(options=names, name="Head ")
    )
    squares = (
        alt.Chart()
        .mark_rect(style="square")
        .encode(x, y, colour, tooltip=layers.tooltip(columns, {"head", "reads", "token"}))
        .transform_filter("datum.head == head_shown")
        .add_params(chosen)
    )
    return layers.chart(
        [squares],
        rows,
        caption=f"{drawn.model}, {drawn.task}: attention weights of one needed head.",
        n=None,
        columns=columns,
        height=max(160, min(len(places) * ROW, TALLEST)),
    )


def edge_graph(drawn: DrawnPrompt, num_layers: int) -> "alt.LayerChart":
    """The needed token edges: tokens as columns, inputs of layers as rows, a line per edge.

    The reader filters by layer, head and rank, moves by dragging, and zooms.
    """
    import altair as alt

    rows: list[dict[str, Any]] = [
        {
            "rank": rank,
            "layer": edge.layer,
            "head": edge.head,
            "weight": round(edge.weight, 3),
            "importance": round(edge.importance, 5),
            **placed(edge.layer, edge.query, edge.key, drawn.tokens),
        }
        for rank, edge in enumerate(drawn.edges, 1)
    ]
    columns = {
        "rank": "rank",
        "layer": "layer",
        "head": "head",
        "token": "token read",
        "reader": "token that reads",
        "weight": "weight",
        "importance": "importance",
    }
    lines = edge_lines(
        rows,
        drawn.tokens,
        columns=columns,
        between=(0, num_layers),
        top="logits",
        size="importance",
    )
    slider = alt.binding_range(min=1, max=max(len(rows), 2), step=1, name="Edges ")
    shown = alt.param(name="edges_shown", value=min(len(rows), 150), bind=slider)
    lines = lines.transform_filter("datum.rank <= edges_shown").add_params(shown)
    count = len(rows)
    drawn_of = f"the first {number(count)} of " if count < drawn.edges_needed else ""
    return layers.chart(
        [layers.zoomed(lines)],
        rows,
        caption=f"{drawn.model}, {drawn.task}: {drawn_of}{number(drawn.edges_needed)} token edges. "
        "The wider a line, the more important its edge. A row is the input of its layer, the top "
        "one that of the logits.",
        n=None,
        columns=columns,
        height=height(num_layers),
    )


def _token_axis(
    drawn: DrawnPrompt, field: str, title: str, channel: Any, places: list[int], angle: float
) -> Any:
    import altair as alt

    return channel(
        field=field,
        type="ordinal",
        title=title,
        scale=alt.Scale(domain=places),
        axis=names_axis(drawn.tokens, None, angle),
    )
