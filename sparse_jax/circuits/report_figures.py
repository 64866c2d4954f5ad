"""Drawings of the circuits of one prompt: patterns of heads, and the graph of token edges."""

import json
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lm_jax.report import layers
from lm_jax.report.layers import Axis
from lm_jax.report.markup import clean, element, number
from sparse_jax.circuits.results import DrawnPrompt, HeadPattern

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
_KINDS = ("own token", "first token", "previous token", "another token")
# Squares of less weight are not seen.
_LEAST = 0.02
_ROW, _TALLEST = 24, 620
_ALL = "all"


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
    boxes = []
    for head in drawn.heads:
        squares = [
            element(
                "rect",
                {"x": key, "y": query, "width": 1, "height": 1, "fill-opacity": weight},
                element("title", None, f"{_token(drawn, query)} ← {_token(drawn, key)}: {weight}"),
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
            "reads": _token(drawn, query),
            "token": _token(drawn, key),
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
        height=max(160, min(len(places) * _ROW, _TALLEST)),
    )


def edge_graph(drawn: DrawnPrompt, num_layers: int) -> "alt.LayerChart":
    """The needed token edges: tokens as columns, layers as rows, a line per edge.

    The reader filters by layer, head and rank, moves by dragging, and zooms.
    """
    import altair as alt

    rows: list[dict[str, Any]] = [
        {
            "rank": rank,
            "layer": edge.layer,
            "head": edge.head,
            "from": edge.key,
            "to": edge.query,
            "below": edge.layer,
            "above": edge.layer + 1,
            "token": _token(drawn, edge.key),
            "reader": _token(drawn, edge.query),
            "weight": round(edge.weight, 3),
            "importance": round(edge.importance, 5),
            "kind": _kind(edge.query, edge.key),
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
    T = len(drawn.tokens)
    x = Axis("token", -0.6, T - 0.4)
    y = Axis("layer", -0.4, num_layers + 0.4, whole=True)
    across = x.x("from").axis(_names_axis(drawn, list(range(T))))
    colour, _ = layers.by_category("kind", _KINDS, lines=True)
    thickness = alt.Size(
        field="importance",
        type="quantitative",
        scale=alt.Scale(type="sqrt", range=[0.6, 5]),
        legend=None,
    )
    lines = (
        alt.Chart()
        .mark_rule(clip=True, opacity=0.75)
        .encode(
            across,
            y.y("below"),
            alt.X2(field="to"),
            alt.Y2(field="above"),
            colour,
            thickness,
            tooltip=layers.tooltip(columns, {"token", "reader"}),
        )
    )
    params = []
    for field in ("layer", "head"):
        found = sorted({row[field] for row in rows})
        bind = alt.binding_select(
            options=[_ALL, *found], name=f"{field.title()} ", labels=[_ALL, *map(str, found)]
        )
        params.append(alt.param(name=f"{field}_shown", value=_ALL, bind=bind))
        test = f"{field}_shown == '{_ALL}' || datum.{field} == {field}_shown"
        lines = lines.transform_filter(test)
    slider = alt.binding_range(min=1, max=max(len(rows), 2), step=1, name="Edges ")
    params.append(alt.param(name="edges_shown", value=min(len(rows), 150), bind=slider))
    lines = lines.transform_filter("datum.rank <= edges_shown").add_params(*params)
    count = len(rows)
    drawn_of = f"the first {number(count)} of " if count < drawn.edges_needed else ""
    return layers.chart(
        [layers.zoomed(lines)],
        rows,
        caption=f"{drawn.model}, {drawn.task}: {drawn_of}{number(drawn.edges_needed)} token edges. "
        "The wider a line, the more important its edge.",
        n=None,
        columns=columns,
        height=max(220, min(_ROW * (num_layers + 1), _TALLEST)),
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
        axis=_names_axis(drawn, None, angle),
    )


def _names_axis(drawn: DrawnPrompt, values: list[int] | None, angle: float = -90) -> "alt.Axis":
    """An axis of positions that writes their tokens."""
    import altair as alt

    texts = json.dumps([clean(text.strip() or text) for text in drawn.tokens])
    return alt.Axis(
        labelExpr=f"{texts}[datum.value]",
        labelAngle=angle,
        labelLimit=90,
        labelOverlap=True,
        domain=False,
        ticks=False,
        values=alt.Undefined if values is None else values,
    )


def _token(drawn: DrawnPrompt, place: int) -> str:
    return f"{clean(drawn.tokens[place])} ({place})"


def _kind(query: int, key: int) -> str:
    if query == key:
        return _KINDS[0]
    if key == 0:
        return _KINDS[1]
    return _KINDS[2] if key == query - 1 else _KINDS[3]
