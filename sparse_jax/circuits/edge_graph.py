"""Graphs of attention edges as `altair.Chart`: columns are tokens, rows layers, lines edges."""

from collections.abc import Mapping, Sequence
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from lm_jax.errors import UsageError
from lm_jax.report import layers
from lm_jax.report.charts import MOST_POINTS
from lm_jax.report.layers import Axis
from lm_jax.report.markup import clean, number

if TYPE_CHECKING:
    import altair as alt

KINDS = ("own token", "first token", "previous token", "another token")
ALL = "all"
ROW, TALLEST = 24, 620
_MOST_LABELS = 12


def draw_open_edges(
    table: pa.Table,
    tokens: Sequence[str],
    *,
    layer: int | None = None,
    batch: int | None = None,
    caption: str = "Open attention edges.",
) -> "alt.LayerChart":
    """The open edges of one row of tokens; the reader filters by layer and head, and zooms.

    A line leads from the position that is read, below, to the position that reads it, above; it is
    wider the larger its attention weight.

    Args:
      table: the result of `SparseModel.open_edges`.
      tokens: texts of the `T` positions of the row, in order.
      layer: the only layer to draw; None for all.
      batch: row of the table's batch that is drawn; needed where it has several.
      caption: caption of the figure.

    Raises:
      UsageError: a row is not named, an edge has no token, or the edges are too many for a page.
    """
    if "batch" in table.column_names:
        if batch is None:
            raise UsageError("draw_open_edges: the table has several rows; name one by batch=")
        table = table.filter(pc.equal(table["batch"], batch)).drop_columns(["batch"])
    if layer is not None:
        table = table.filter(pc.equal(table["layer"], layer))
    if table.num_rows > MOST_POINTS:
        raise UsageError(
            f"draw_open_edges: {table.num_rows:,} edges are too many for a page of at most "
            f"{MOST_POINTS:,}; name a layer, or filter the table by weight"
        )
    last = max((pc.max(table[name]).as_py() or 0 for name in ("query", "key")), default=0)
    if last >= len(tokens):
        raise UsageError(
            f"draw_open_edges: an edge has position {last}, and tokens has {len(tokens)} texts; "
            "pass one per position of the row"
        )
    shown = sorted(table["layer"].unique().to_pylist())
    rows = [
        {**edge, **placed(edge["layer"], edge["query"], edge["key"], tokens)}
        for edge in table.to_pylist()
    ]
    columns = {
        "layer": "layer",
        "head": "head",
        "query": "query",
        "key": "key",
        "weight": "attention weight",
    }
    return layers.chart(
        [
            layers.zoomed(
                edge_lines(
                    rows,
                    tokens,
                    columns={"token": "token read", "reader": "token that reads"} | columns,
                    between=(min(shown, default=0), max(shown, default=0) + 1),
                    top="output",
                    size="weight",
                )
            )
        ],
        rows,
        caption=caption,
        n=f"{number(len(rows))} edge{'s' * (len(rows) != 1)}",
        columns=columns,
        height=height(len(shown)),
        remarks=[layers.NOTHING * (not rows)],
    )


def edge_lines(
    rows: Sequence[Mapping[str, Any]],
    tokens: Sequence[str],
    *,
    columns: Mapping[str, str],
    between: tuple[int, int],
    top: str,
    size: str,
) -> "alt.Chart":
    """Lines of `placed` rows, coloured by kind of edge, with selections of layer and head.

    A row is the input of its layer. `columns` are those of the tooltip, `between` the ends of the
    axis of layers, the upper one of which is no layer and has the label `top`, and `size` is the
    field that makes a line wide.
    """
    import altair as alt

    low, high = between
    x = Axis("token", -0.6, len(tokens) - 0.4)
    y = Axis("layer", low - 0.4, high + 0.4, whole=True)
    colour, _ = layers.by_category("kind", KINDS, lines=True)
    thickness = alt.Size(
        field=size,
        type="quantitative",
        scale=alt.Scale(type="sqrt", range=[0.6, 5]),
        legend=None,
    )
    lines = (
        alt.Chart()
        .mark_rule(clip=True, opacity=0.75)
        .encode(
            x.x("from").axis(names_axis(tokens, list(range(len(tokens))))),
            y.y("below").axis(_layers_axis(low, high, top)),
            alt.X2(field="to"),
            alt.Y2(field="above"),
            colour,
            thickness,
            tooltip=layers.tooltip(columns, {"token", "reader"}),
        )
    )
    for field in ("layer", "head"):
        values = sorted({row[field] for row in rows})
        bind = alt.binding_select(
            options=[ALL, *values], name=f"{field.title()} ", labels=[ALL, *map(str, values)]
        )
        chosen = alt.param(name=f"{field}_shown", value=ALL, bind=bind)
        test = f"{field}_shown == '{ALL}' || datum.{field} == {field}_shown"
        lines = lines.transform_filter(test).add_params(chosen)
    return lines


def placed(layer: int, query: int, key: int, tokens: Sequence[str]) -> dict[str, Any]:
    """What `edge_lines` reads of an edge besides its layer, head and width."""
    return {
        "from": key,
        "to": query,
        "below": layer,
        "above": layer + 1,
        "token": token_name(tokens, key),
        "reader": token_name(tokens, query),
        "kind": kind(query, key),
    }


def names_axis(tokens: Sequence[str], values: list[int] | None, angle: float = -90) -> "alt.Axis":
    """An axis of positions that writes their tokens."""
    import altair as alt

    texts = json.dumps([clean(text.strip() or text) for text in tokens])
    return alt.Axis(
        labelExpr=f"{texts}[datum.value]",
        labelAngle=angle,
        labelLimit=90,
        labelOverlap=True,
        domain=False,
        ticks=False,
        values=alt.Undefined if values is None else values,
    )


def _layers_axis(low: int, high: int, top: str) -> "alt.Axis":
    """An axis of layers, with the label `top` at `high`."""
    import altair as alt

    step = -(-(high - low) // _MOST_LABELS)
    return alt.Axis(
        values=[*range(low, high, step), high],
        format=",d",
        labelExpr=f"datum.value == {high} ? {json.dumps(top)} : datum.label",
    )


def height(count: int) -> float:
    """The height in pixels of a graph of `count` layers."""
    return max(220, min(ROW * (count + 1), TALLEST))


def token_name(tokens: Sequence[str], place: int) -> str:
    """A token with its position."""
    return f"{clean(tokens[place])} ({place})"


def kind(query: int, key: int) -> str:
    """Which of `KINDS` an edge is."""
    if query == key:
        return KINDS[0]
    if key == 0:
        return KINDS[1]
    return KINDS[2] if key == query - 1 else KINDS[3]
