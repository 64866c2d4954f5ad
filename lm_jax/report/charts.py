"""Charts of a report as `altair.Chart`: curves, points, bars, counts; heat maps are in `heat`.

    curves([Series("training", steps, losses)], caption="Loss.", x_label="step", y_label="nats")

shows itself in a notebook, saves itself (`chart.save("loss.svg")`), and is a part of a report's
section. `chart.data.values` are its numbers. Values that it cannot show are counted under it, never
dropped silently: a line breaks at NaN, a log axis counts values that are not positive, a given
range those outside. A chart names no colour, only roles, which `theme.vega_config` maps to colours.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lm_jax.errors import UsageError
from lm_jax.report import layers
from lm_jax.report.layers import Axis, Reference
from lm_jax.report.markup import clean, number
from lm_jax.report.scales import extent, showable

if TYPE_CHECKING:
    import altair as alt

# more points than this make a page that a browser cannot scroll
MOST_POINTS = 20_000
# lines of up to this many points show them, longer ones that under the pointer
FEW_POINTS = 24
# pixels: a row of bars, the longest label beside it, and a letter of one in a wide font
_BAR, _LABEL, _LETTER = 25, 170, 7


class Series(NamedTuple):
    """A line: `x`, `y` and the optional ends of a confidence band, 1-D and of one length."""

    label: str
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None


class Points(NamedTuple):
    """A category of a scatter plot: 1-D `x` and `y`, and an optional name of each point."""

    label: str
    x: ArrayLike
    y: ArrayLike
    titles: Sequence[str] | None = None


class Bar(NamedTuple):
    """A row of a bar plot; `low` and `high` are its interval, `reference` is the paper's value."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    reference: float | None = None


def curves(
    series: Sequence[Series],
    *,
    caption: str,
    x_label: str,
    y_label: str,
    n: int | str | None = None,
    log_x: bool = False,
    log_y: bool = False,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    x_ticks: Sequence[float] | None = None,
    h_lines: Sequence[Reference] = (),
) -> "alt.LayerChart":
    """Returns lines with confidence bands and horizontal reference lines.

    Axis titles carry the unit, and "log scale" is added. More than 20,000 points are refused.
    """
    import altair as alt

    lines = _checked("curves", series)
    ends = [end for one in lines for name, end in one.items() if name != "x"]
    x_values = [one["x"] for one in lines]
    # room for the half of a point that would lie beyond the end
    x = Axis.over(x_label, x_values, log_x, x_range, "x_range", pad=0.02, floor=False)
    y = Axis.over(y_label, [*ends, [value for value, _ in h_lines]], log_y, y_range, "y_range")
    fx, fy, fl, fh = layers.fields(x_label, y_label, "low", "high", taken=("series",))
    names, rows = layers.distinct([one.label for one in series]), []
    for name, one in zip(names, lines, strict=True):
        parts = {fx: x.json_values(one["x"]), fy: y.json_values(one["y"])}
        if "low" in one:
            parts |= {fl: y.json_values(one["low"]), fh: y.json_values(one["high"])}
        values = zip(*parts.values(), strict=True)
        rows += [{"series": name, **dict(zip(parts, each, strict=True))} for each in values]
    banded = any("low" in one for one in lines)
    columns = {"series": "series", fx: x_label, fy: y_label}
    columns |= {fl: "low", fh: "high"} if banded else {}
    colour, dash = layers.by_category("series", names, lines=True)
    base = alt.Chart().encode(x.x(fx, x_ticks), y.y(fy), colour)
    band = alt.Chart().mark_area(style="band", clip=True)
    inside, lost = y.references(h_lines)
    few = all(len(one["x"]) <= FEW_POINTS for one in lines)
    under = alt.selection_point(name="under_pointer", on="pointerover", clear="pointerout")
    opacity = alt.value(1) if few else alt.condition(under, alt.value(1), alt.value(0), empty=False)
    dots = base.mark_point(style="dot", filled=True, clip=True, size=60 if few else 110)
    dots = dots.encode(opacity=opacity, tooltip=layers.tooltip(columns, {"series"}))
    return layers.chart(
        [
            *([band.encode(x.x(fx, x_ticks), y.y(fl), alt.Y2(field=fh), colour)] if banded else []),
            *layers.level_lines(y, inside, fy),
            layers.zoomed(base.mark_line(style="curve", clip=True).encode(dash)),
            dots if few else dots.add_params(under),
            *layers.level_labels(y, inside, fy),
        ],
        rows,
        caption=caption,
        n=n,
        columns=columns,
        references=h_lines,
        remarks=[*_hidden(lines, x, y), lost],
    )


def scatter(
    groups: Sequence[Points],
    *,
    caption: str,
    x_label: str,
    y_label: str,
    n: int | str | None = None,
    boundaries: Sequence[Series] = (),
    log_x: bool = False,
    log_y: bool = False,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> "alt.LayerChart":
    """Returns points by category over labelled boundary curves.

    A boundary runs from left to right in small steps; its label is where it leaves the plot.
    The range follows the points, not the boundaries. More than 20,000 points are refused.
    """
    import altair as alt

    dots = _checked("scatter", groups)
    walls = [
        (clean(wall.label), one["x"], one["y"])
        for wall, one in zip(boundaries, _checked("scatter", boundaries), strict=True)
    ]
    x_values = [one["x"] for one in dots]
    # room for the half of a point that would lie beyond the end
    x = Axis.over(x_label, x_values, log_x, x_range, "x_range", pad=0.02, floor=False)
    y = Axis.over(y_label, [one["y"] for one in dots], log_y, y_range, "y_range")
    fx, fy = layers.fields(x_label, y_label, taken=("group", "point"))
    names, rows = layers.distinct([one.label for one in groups]), []
    for name, group, one in zip(names, groups, dots, strict=True):
        titles = group.titles if group.titles is None else [clean(each) for each in group.titles]
        for i, (across, up) in enumerate(
            zip(x.json_values(one["x"]), y.json_values(one["y"]), strict=True)
        ):
            if across is not None and up is not None:
                point = {} if titles is None else {"point": titles[i]}
                rows.append({"group": name, fx: across, fy: up, **point})
    columns = {"group": "group", fx: x_label, fy: y_label}
    columns |= {"point": "point"} if any("point" in row for row in rows) else {}
    colour, shape = layers.by_category("group", names, lines=False)
    points = alt.Chart().mark_point(style="dot", filled=True, clip=True, size=42)
    return layers.chart(
        [
            *layers.boundary_lines(walls, x, y, (fx, fy)),
            layers.zoomed(
                points.encode(
                    x.x(fx),
                    y.y(fy),
                    colour,
                    shape,
                    tooltip=layers.tooltip(columns, {"group", "point"}),
                )
            ),
            *layers.boundary_labels(walls, x, y, (fx, fy)),
        ],
        rows,
        caption=caption,
        n=n,
        columns=columns,
        remarks=_hidden(dots, x, y),
    )


def histogram(
    values: ArrayLike,
    *,
    caption: str,
    x_label: str,
    y_label: str = "rows (count)",
    bins: int | Sequence[float] = 30,
    log_x: bool = False,
    markers: Sequence[Reference] = (),
    n: int | str | None = None,
) -> "alt.LayerChart":
    """Returns counts per bin with labelled vertical markers; `n` defaults to the drawn values.

    `bins` is a number of equal bins (equal in log10 on a log axis) or their increasing edges;
    values outside given edges are counted under the figure.
    """
    import altair as alt

    values = np.asarray(values, dtype=float).ravel()
    kept = values[showable(values, log_x)]
    edges = _edges(kept, bins, log_x)
    counts = np.histogram(kept, edges)[0]
    x = Axis.over(x_label, [edges, [value for value, _ in markers]], log_x, pad=0.02)
    start, end, count = layers.fields("from", "to", "count")
    inside, lost = x.references(markers)
    upright, names = layers.upright_lines(x, inside, start)
    # the names of the markers are above the highest bar, which keeps half of the height
    room = layers.HEIGHT - min(names, layers.HEIGHT / 2)
    top = max(int(counts.max()), 1) * layers.HEIGHT / room
    y = Axis.over(y_label, [[0, top]], whole=True)
    bounds = [x.json_values(edges[:-1]), x.json_values(edges[1:]), counts.tolist()]
    rows = [dict(zip((start, end, count), each, strict=True)) for each in zip(*bounds, strict=True)]
    columns = {start: f"{x_label}: from", end: "to", count: y_label}
    boxes = alt.Chart().mark_bar(style="count", clip=True, orient="vertical")
    outside = kept.size - int(counts.sum())
    return layers.chart(
        [
            layers.zoomed(
                boxes.encode(
                    x.x(start),
                    y.y(count),
                    alt.X2(field=end),
                    alt.Y2(datum=0),
                    tooltip=layers.tooltip(columns),
                ),
                ["x"],
            ),
            *upright,
        ],
        rows,
        caption=caption,
        n=int(counts.sum()) if n is None else n,
        columns=columns,
        references=markers,
        remarks=[
            layers.omission(values.size - kept.size, log=log_x),
            f"{number(outside)} outside the bins." if outside else "",
            lost,
            "" if kept.size else layers.NOTHING,
        ],
    )


def bars(
    rows: Sequence[Bar],
    *,
    caption: str,
    x_label: str,
    n: int | str | None = None,
    x_range: tuple[float, float] | None = None,
    reference_label: str = "paper",
    spec: str = ".1f",
) -> "alt.LayerChart":
    """Returns horizontal bars from zero with interval whiskers and a mark at the paper's value.

    Rows keep their order, and their value is at the right in format `spec`.
    """
    import altair as alt

    ends = [np.array([end for end in row[1:] if end is not None], float) for row in rows]
    x = Axis.over(x_label, [[0.0], *ends], False, x_range, "x_range")
    names = layers.distinct([row.label for row in rows])
    value, low, high, reference = layers.fields(x_label, "low", "high", "reference", taken=("row",))
    fields = (value, low, high, reference)
    data = [
        {"row": name, **dict(zip(fields, x.json_values(np.array(row[1:], float)), strict=True))}
        for name, row in zip(names, rows, strict=True)
    ]
    titles = {value: x_label, low: "low", high: "high", reference: reference_label}
    held = {field: any(row[field] is not None for row in data) for field in fields}
    columns = {"row": ""} | {f: t for f, t in titles.items() if held[f] or f == value}
    y = alt.Y(
        field="row",
        type="nominal",
        scale=alt.Scale(domain=names),
        # A picture is laid out with one font and may be shown with a wider one: room for that.
        axis=alt.Axis(
            title=None,
            labelLimit=_LABEL,
            minExtent=min(_LABEL, _LETTER * max(map(len, names), default=0)),
        ),
    )
    base = alt.Chart().encode(y, tooltip=layers.tooltip(columns, {"row"}))
    drawn = [base.mark_bar(style="count", clip=True).encode(x.x(value))]
    if held[low]:
        drawn.append(base.mark_rule(style="whisker").encode(x.x(low), alt.X2(field=high)))
        caps = base.mark_tick(style="whisker", size=9, thickness=1.3)
        drawn += [caps.encode(x.x(end)) for end in (low, high)]
    if held[reference]:
        mark = base.mark_point(style="paper", shape="diamond", filled=False, size=80)
        drawn.append(mark.encode(x.x(reference)))
    beside = base.mark_text(style="note", align="left", dx=6)
    text = alt.Text(field=value, type="quantitative", format=spec)
    return layers.chart(
        [*drawn, beside.encode(text, x=alt.value("width"))],
        data,
        caption=caption,
        n=n,
        columns=columns,
        height=_BAR * max(len(rows), 1),
        # the values at the right
        padding={"left": 4, "top": 4, "right": 52, "bottom": 4},
        remarks=[
            f"Diamonds: {clean(reference_label)}." if held[reference] else "",
            layers.omission(sum(not showable(row.value) for row in rows), log=False),
            "" if rows else layers.NOTHING,
        ],
    )


def _checked(where: str, groups: Sequence[Series | Points]) -> list[dict[str, np.ndarray]]:
    """The columns of each, as numbers and of one length."""
    checked = []
    for one in groups:
        columns = {"x": one.x, "y": one.y}
        if isinstance(one, Series):
            if (one.low is None) != (one.high is None):
                raise UsageError(f"{where}: {one.label!r} has one end of a band; give low and high")
            if one.low is not None and one.high is not None:
                columns |= {"low": one.low, "high": one.high}
        arrays = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
        lengths = {name: values.shape for name, values in arrays.items()}
        if isinstance(one, Points) and one.titles is not None:
            lengths["titles"] = (len(one.titles),)
        if arrays["x"].ndim != 1 or len(set(lengths.values())) > 1:
            raise UsageError(f"{where}: {one.label!r} has {lengths}; need 1-D fields of one length")
        checked.append(arrays)
    total = sum(len(one["x"]) for one in checked)
    if total > MOST_POINTS:
        raise UsageError(
            f"{where}: {total:,} points are too many for a page; plot medians or a sample of at "
            f"most {MOST_POINTS:,}"
        )
    return checked


def _hidden(groups: Sequence[Mapping[str, np.ndarray]], x: Axis, y: Axis) -> list[str]:
    """Remarks on the points that the axes cannot show, and on those outside their ranges."""
    hidden, outside, drawn = 0, 0, 0
    for one in groups:
        can = showable(one["x"], x.log) & showable(one["y"], y.log)
        within = x.holds(one["x"]) & y.holds(one["y"])
        hidden += int((~can).sum())
        outside += int((can & ~within).sum())
        drawn += int(within.sum())
    return [
        layers.omission(hidden, log=x.log or y.log),
        f"{number(outside)} outside the axes." if outside else "",
        "" if drawn else layers.NOTHING,
    ]


def _edges(kept: np.ndarray, bins: int | Sequence[float], log_x: bool) -> np.ndarray:
    if isinstance(bins, int):
        if bins < 1:
            raise UsageError(f"histogram: bins={bins}; need 1 or more")
        low, high = extent([kept], log=log_x, pad=0.0)
        edges = (np.geomspace if log_x else np.linspace)(low, high, bins + 1)
        # rounding of the logarithm must not push the extremes out of their bins
        edges[0], edges[-1] = kept.min(initial=edges[0]), kept.max(initial=edges[-1])
        return edges
    edges = np.asarray(bins, dtype=float)
    finite = showable(edges, log_x).all()
    if edges.ndim != 1 or edges.size < 2 or not finite or not (np.diff(edges) > 0).all():
        raise UsageError("histogram: bins must be increasing finite edges, positive on a log axis")
    return edges
