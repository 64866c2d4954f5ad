"""A heat map as `altair.Chart`: a matrix as coloured cells."""

from collections.abc import Sequence
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from lm_jax.errors import UsageError
from lm_jax.report import layers
from lm_jax.report.layers import WIDTH, Row
from lm_jax.report.markup import clean
from lm_jax.report.scales import colour_scale, showable

if TYPE_CHECKING:
    import altair as alt

_TALLEST, _SHORTEST = 30.0, 11.0
# beyond this strength of its colour a cell needs the light text
_STRONG = 0.55


def heat_map(
    matrix: ArrayLike,
    *,
    caption: str,
    x_label: str,
    y_label: str,
    value_label: str = "value",
    row_labels: Sequence[object] | None = None,
    column_labels: Sequence[object] | None = None,
    scale: str | None = None,
    value_range: tuple[float, float] | None = None,
    titles: Sequence[Sequence[str]] | None = None,
    show_values: bool = False,
    spec: str = "",
    n: int | str | None = None,
) -> "alt.LayerChart":
    """Returns a matrix as cells, first row on top; labels default to indices from 0.

    `scale` is "sequential" or "diverging"; None is diverging where signs differ. Values that are
    not finite are grey, never coloured. `titles` adds a text to the tooltip.
    """
    import altair as alt

    matrix = np.asarray(matrix, dtype=float)
    if matrix.ndim != 2:
        raise UsageError(f"heat_map: matrix has shape {matrix.shape}; pass rows by columns")
    across = _labels("row_labels", row_labels, matrix.shape[0])
    down = _labels("column_labels", column_labels, matrix.shape[1])
    if titles is not None and [len(row) for row in titles] != [len(down)] * len(across):
        raise UsageError(f"heat_map: titles must have the shape of the matrix, {matrix.shape}")
    low, high, diverging = colour_scale("heat_map", matrix, scale, value_range)
    fy, fx, fv, cell = layers.fields(y_label, x_label, value_label, "cell")
    at_y = fy if row_labels is None else f"{fy} place"
    at_x = fx if column_labels is None else f"{fx} place"
    rows: list[Row] = []
    for i, j in np.ndindex(matrix.shape):
        value = float(matrix[i, j]) if showable(matrix[i, j]) else None
        row = {at_y: i, at_x: j, fy: across[i], fx: down[j], fv: value}
        rows.append(row | ({cell: clean(titles[i][j])} if titles else {}))
    columns = {fy: y_label, fx: x_label, fv: value_label} | ({cell: "cell"} if titles else {})
    wide = WIDTH / max(len(down), 1)
    y = alt.Y(field=at_y, type="ordinal", title=y_label, axis=_names(row_labels, across, 0))
    turned = -90 if max(map(len, map(str, down)), default=0) > 3 else 0
    x = alt.X(field=at_x, type="ordinal", title=x_label, axis=_names(column_labels, down, turned))
    base = alt.Chart().encode(x, y)
    colour = alt.Color(
        field=fv,
        type="quantitative",
        scale=alt.Scale(
            domain=[low, 0, high] if diverging else [low, high],
            range="diverging" if diverging else "heatmap",
            interpolate="rgb",
            clamp=True,
        ),
        legend=alt.Legend(title=clean(value_label)),
    )
    hidden = int((~showable(matrix)).sum())
    texts = {cell, *([fy] if row_labels else []), *([fx] if column_labels else [])}
    drawn = [base.mark_rect(style="square").encode(colour, tooltip=layers.tooltip(columns, texts))]
    if hidden:
        invalid = alt.FieldValidPredicate(field=fv, valid=False)
        drawn.append(base.mark_rect(style="missing").transform_filter(invalid))
    if show_values:
        text = base.encode(alt.Text(field=fv, type="quantitative", format=spec))
        # dark on pale cells, light on strong ones
        end = _STRONG * high if diverging else low + _STRONG * (high - low)
        strong: list[Any] = [alt.FieldGTPredicate(field=fv, gt=end)]
        strong += [alt.FieldLTPredicate(field=fv, lt=-end)] if diverging else []
        either = alt.LogicalOrPredicate(**{"or": strong})
        pale = alt.LogicalNotPredicate(**{"not": either})
        valid = alt.FieldValidPredicate(field=fv, valid=True)
        for style, cells in (("value", pale), ("strong", either)):
            known = alt.LogicalAndPredicate(**{"and": [valid, cells]})
            drawn.append(text.mark_text(style=style).transform_filter(known))
    return layers.chart(
        drawn,
        rows,
        caption=caption,
        n=n,
        columns=columns,
        height=round(min(_TALLEST, max(_SHORTEST, wide)) * max(len(across), 1)),
        matrix=len(down),
        remarks=[layers.omission(hidden, log=False)],
    )


def _labels(field: str, labels: Sequence[object] | None, count: int) -> list[Any]:
    if labels is None:
        return list(range(count))
    if len(labels) != count:
        raise UsageError(f"heat_map: {field} has {len(labels)} names for {count}; pass one each")
    return [clean(str(name)) for name in labels]


def _names(labels: Sequence[object] | None, names: Sequence[Any], angle: float) -> "alt.Axis":
    """An axis of places, which may share a name."""
    import altair as alt

    expression = alt.Undefined if labels is None else f"{json.dumps(list(names))}[datum.value]"
    return alt.Axis(
        labelExpr=expression,
        labelAngle=angle,
        labelLimit=90,
        labelOverlap=True,
        domain=False,
        ticks=False,
    )
