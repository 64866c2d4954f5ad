"""Layers of the charts of a report: axes, reference lines, categories, fields of a row.

`chart` combines the layers. Its description is the caption, and `usermeta` holds what the page
prints besides: n, remarks, the columns of its table. Its title has caption, n and remarks for
notebooks and files; a page, which prints them itself, leaves it out.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import functools
import math
import re
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from lm_jax.report import theme
from lm_jax.report.markup import clean, number
from lm_jax.report.scales import extent, inside, pixels, showable, spread

if TYPE_CHECKING:
    import altair as alt

WIDTH, HEIGHT = 560, 290
NOTHING = "Nothing to show."
DASHES = ([1, 0], [8, 4], [2, 3.5], [9, 3, 2, 3])
SHAPES = ("circle", "triangle-up", "square", "diamond")
# A wheel alone scrolls the page; with a key, as a pinch on a touch pad sends it, it zooms.
ZOOM = "wheel![event.ctrlKey || event.metaKey]"
# pixels of a line of text, of a character, and of the width that a narrow screen leaves to a chart
LINE, CHARACTER, NARROW = 16, 6.5, 330
# pixels of the menu in the upper right corner of a chart
MENU = 24
# characters of a line of a chart's title
_TITLE = 84

Row = dict[str, Any]
# A value at which a line is drawn across a chart, and its name.
Reference = tuple[float, str]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A continuous axis, linear or logarithmic, and the range that it shows first."""

    label: str
    low: float
    high: float
    log: bool = False
    # of counts, which have no ticks between whole numbers
    whole: bool = False

    @classmethod
    def over(
        cls,
        label: str,
        values: Sequence[ArrayLike],
        log: bool = False,
        domain: tuple[float, float] | None = None,
        name: str = "axis",
        *,
        pad: float = 0.04,
        floor: bool = True,
        whole: bool = False,
    ) -> "Axis":
        """An axis over all of the values, or over `domain`, called `name` in errors."""
        low, high = extent(values, log=log, domain=domain, pad=pad, floor=floor, name=name)
        return cls(_titled(clean(label), log), low, high, log, whole)

    def x(self, field: str, ticks: Sequence[float] | None = None) -> "alt.X":
        """The channel that draws a field along this axis."""
        import altair as alt

        options: dict[str, Any] = {} if ticks is None else {"values": list(ticks)}
        if ticks is not None and all(float(tick).is_integer() for tick in ticks):
            options["format"] = ",d"
        axis = self._axis(6, **options)
        return alt.X(
            field=field,
            type="quantitative",
            title=self.label,
            scale=self._scale(),
            axis=axis,
        )

    def y(self, field: str) -> "alt.Y":
        """The channel that draws a field up this axis."""
        import altair as alt

        axis = self._axis(5)
        return alt.Y(
            field=field, type="quantitative", title=self.label, scale=self._scale(), axis=axis
        )

    def json_values(self, values: ArrayLike) -> list[float | None]:
        """Values as JSON holds them: None for what the axis cannot show, whole numbers as such."""
        numbers = np.array(values, dtype=float)
        pairs = zip(numbers.tolist(), showable(numbers, self.log).tolist(), strict=True)
        return [
            None if not visible else int(v) if v.is_integer() and abs(v) < 1e15 else v
            for v, visible in pairs
        ]

    def holds(self, values: ArrayLike) -> np.ndarray:
        """The mask of values in the range that the axis shows first."""
        return inside(values, self.low, self.high)

    def down(self, values: ArrayLike, length: float = HEIGHT) -> np.ndarray:
        """Distances of values from the high end of the axis, in pixels, of `length` in all."""
        return pixels(values, self.low, self.high, length, log=self.log)

    def references(self, lines: Sequence[Reference]) -> tuple[list[Reference], str]:
        """The lines in the range, by clean names, and the remark that names the others."""
        named = [(float(value), clean(name)) for value, name in lines]
        visible = [(value, name) for value, name in named if self.holds(value)]
        lost = [f"{name} ({number(value)})" for value, name in named if not self.holds(value)]
        return visible, f"Not shown: {', '.join(lost)}." if lost else ""

    def _scale(self) -> "alt.Scale":
        import altair as alt

        domain = [self.low, self.high]
        if self.log:
            return alt.Scale(type="log", domain=domain, nice=False)
        return alt.Scale(type="linear", domain=domain, nice=False, zero=False)

    def _axis(self, count: int, **options: Any) -> "alt.Axis":
        import altair as alt

        if self.whole:
            options |= {"format": ",d", "tickMinStep": 1}
        decades = math.log10(self.high / self.low) if self.log else 0
        # fewer ticks than decades are powers of ten alone
        return alt.Axis(tickCount=int(decades) if decades >= 2 else count, **options)


def level_lines(axis: Axis, lines: Sequence[Reference], field: str) -> "list[alt.Chart]":
    """Horizontal lines over the whole width."""
    return [_rule(axis.y(field), lines, field)] if lines else []


def level_labels(axis: Axis, lines: Sequence[Reference], field: str) -> "list[alt.Chart]":
    """The names of horizontal lines at their right ends, kept apart where the lines are not."""
    import altair as alt

    levels = axis.down([value for value, _ in lines])
    # over the line, but under one that runs along the top
    wanted = levels + np.where(levels < LINE, LINE / 2, -LINE / 2)
    placed = spread(wanted.tolist(), LINE, LINE / 2, HEIGHT - LINE / 2)
    drawn = []
    for (value, name), at, level in zip(lines, placed, levels.tolist(), strict=True):
        text = _text([{"name": name, field: value}], dx=-4, dy=round(at - level), align="right")
        drawn += [one.encode(axis.y(field), x=alt.value("width")) for one in text]
    return drawn


def upright_lines(
    axis: Axis, lines: Sequence[Reference], field: str
) -> "tuple[list[alt.Chart], int]":
    """Vertical lines with their names on top, and the pixels that the names take at the top.

    A name that would overlap another, or the menu of the chart, is a line of text lower. Each line
    has a rim that parts it from what is behind it.
    """
    import altair as alt

    drawn: list[alt.Chart] = []
    ends: dict[int, float] = {}
    for value, name in sorted(lines):
        at = NARROW - float(axis.down(value, NARROW))
        width = CHARACTER * len(name) + 8
        # a name begins or ends at the line near an edge, else is over its middle
        align = "left" if at < width / 2 else "right" if at > NARROW - width / 2 else "center"
        start = at - {"left": 0, "right": width, "center": width / 2}[align]
        level = int(start + width > NARROW - MENU)
        while ends.get(level, -math.inf) > start:
            level += 1
        ends[level] = start + width
        below = {"y": alt.value(LINE * (level + 1)), "y2": alt.value("height")}
        drawn += [
            _rule(axis.x(field), [(value, name)], field, style).encode(**below)
            for style in ("rim", "reference")
        ]
        text = _text([{"name": name, field: value}], align=align)
        height = alt.value(LINE // 2 + LINE * level)
        drawn += [one.encode(axis.x(field), y=height) for one in text]
    return drawn, LINE * (1 + max(ends, default=-1))


def boundary_lines(
    walls: Sequence[tuple[str, np.ndarray, np.ndarray]], x: Axis, y: Axis, names: tuple[str, str]
) -> "list[alt.Chart]":
    """Dashed curves; each is `(name, x, y)`."""
    import altair as alt

    fx, fy = names
    rows = [
        {"boundary": name, fx: across, fy: up}
        for name, *parts in walls
        for across, up in zip(x.json_values(parts[0]), y.json_values(parts[1]), strict=True)
    ]
    if not rows:
        return []
    line = alt.Chart(alt.Data(values=rows)).mark_line(style="boundary", clip=True)
    # in the order given, for one may be upright
    order = alt.Order(value=0)
    return [line.encode(x.x(fx), y.y(fy), alt.Detail(field="boundary", type="nominal"), order)]


def boundary_labels(
    walls: Sequence[tuple[str, np.ndarray, np.ndarray]], x: Axis, y: Axis, names: tuple[str, str]
) -> "list[alt.Chart]":
    """The name of each curve where it leaves at the top, each a line lower, or at its end."""
    fx, fy = names
    drawn, leaving = [], 0
    for name, across, up in walls:
        within = np.flatnonzero(x.holds(across) & y.holds(up))
        if not within.size:
            continue
        last = within[-1]
        if last + 1 < len(up) and up[last + 1] > y.high:
            level = 10 + LINE * leaving
            under = within[y.down(up[within]) >= level]
            last, leaving = under[-1] if under.size else within[0], leaving + 1
            place = {"dx": -5, "dy": 0}
        else:
            place = {"dx": -4, "dy": -9}
        row = {"name": name, fx: float(across[last]), fy: float(up[last])}
        drawn += [one.encode(x.x(fx), y.y(fy)) for one in _text([row], align="right", **place)]
    return drawn


def by_category(field: str, names: Sequence[str], *, lines: bool) -> "list[Any]":
    """The channels of categories: colour, and the dash of lines or the shape of points."""
    import altair as alt

    named = [name for name in names if name]
    widest = max(map(len, named), default=0) * CHARACTER + 40
    options: dict[str, Any] = {"columns": max(1, min(len(named), int(NARROW / widest)))}
    if lines:
        options |= {"symbolType": "stroke", "symbolSize": 400, "symbolFillColor": "transparent"}
    legend = alt.Legend(title=None, values=named, **options) if named else None
    cycle = DASHES if lines else SHAPES
    channel: dict[str, Any] = {"field": field, "type": "nominal", "legend": legend}
    # one step further each time that the colours begin again, so that no two look alike
    steps = [i + i // theme.COLOURS for i in range(len(names))]
    own = alt.Scale(domain=names, range=[cycle[step % len(cycle)] for step in steps])
    return [
        alt.Color(**channel, scale=alt.Scale(domain=names)),
        (alt.StrokeDash if lines else alt.Shape)(**channel, scale=own),
    ]


def tooltip(columns: Mapping[str, str], texts: Collection[str] = ()) -> "list[alt.Tooltip]":
    """The tooltip of a row: the columns of the table."""
    import altair as alt

    return [
        alt.Tooltip(field=field, type="nominal", title=clean(title) or "name")
        if field in texts
        else alt.Tooltip(field=field, type="quantitative", title=clean(title), format=",.6~g")
        for field, title in columns.items()
    ]


def zoomed(drawn: "alt.Chart", axes: Sequence[Any] = ("x", "y")) -> "alt.Chart":
    """A layer whose axes pan by dragging, zoom by `ZOOM`, and reset by a double click."""
    import altair as alt

    return drawn.add_params(
        alt.selection_interval(name="view_range", bind="scales", encodings=list(axes), zoom=ZOOM)
    )


def fields(*labels: str, taken: Collection[str] = ()) -> list[str]:
    """Column names from axis titles: without unit, distinct, and free of Vega's path signs."""
    names: list[str] = []
    for label in labels:
        short = re.sub(r"[\\.\[\]'\"]+", " ", re.split(r" ?\(|,", clean(label))[0])
        name = " ".join(short.split())[:60] or "value"
        while name in names or name in taken:
            name += " 2"
        names.append(name)
    return names


def distinct(labels: Sequence[object]) -> list[str]:
    """Labels as clean text; a repeated one gets a number."""
    names: list[str] = []
    for label in labels:
        name, count = clean(str(label)), 1
        while name in names:
            count += 1
            name = f"{clean(str(label))} ({count})"
        names.append(name)
    return names


def omission(count: int, *, log: bool) -> str:
    """The remark about values that a chart cannot show, or nothing."""
    reason = "not finite, or not positive on a log axis" if log else "not finite"
    return f"{number(count)} value{'s' * (count != 1)} not shown ({reason})." if count else ""


def chart(
    drawn: "Sequence[alt.Chart]",
    rows: Sequence[Row],
    *,
    caption: str,
    n: int | str | None,
    columns: Mapping[str, str],
    references: Sequence[Reference] = (),
    remarks: Sequence[str] = (),
    height: float = HEIGHT,
    padding: Mapping[str, float] | None = None,
    matrix: int = 0,
) -> "alt.LayerChart":
    """A chart of layers over the same rows, with the metadata that the page prints.

    `matrix` is the number of columns of a matrix in row-major `rows`, whose table is then a matrix.
    """
    import altair as alt

    metadata = {
        "n": "" if n is None else number(n),
        "remark": " ".join(filter(None, remarks)),
        "columns": {field: clean(title) for field, title in columns.items()},
        "references": [[clean(name), number(value)] for value, name in references],
        "matrix": matrix,
    }
    layered = alt.LayerChart(layer=list(drawn), data=alt.Data(values=list(rows)))
    layered.width, layered.height = WIDTH, height
    layered.description = clean(caption)
    # For notebooks and files.
    notes = [f"n = {metadata['n']}" * bool(metadata["n"]), metadata["remark"]]
    layered.title = alt.TitleParams(
        text=textwrap.wrap(layered.description, _TITLE) or "",
        subtitle=textwrap.wrap(" · ".join(filter(None, notes)), _TITLE) or alt.Undefined,
        anchor="start",
        fontWeight="normal",
        offset=12,
    )
    layered.usermeta = metadata
    layered.config = _config().copy()
    if padding is not None:
        layered.padding = dict(padding)
    return layered


@functools.cache
def _config() -> "alt.Config":
    import altair as alt

    return alt.Config.from_dict(theme.vega_config(theme.LIGHT))


def _titled(label: str, log: bool) -> str:
    """The title of an axis, which says so where it is logarithmic."""
    if not log:
        return label
    return f"{label[:-1]}, log scale)" if label.endswith(")") else f"{label} (log scale)"


def _rule(
    channel: "alt.X | alt.Y", lines: Sequence[Reference], field: str, style: str = "reference"
) -> "alt.Chart":
    import altair as alt

    rows = [{"name": name, field: value} for value, name in lines]
    hover = tooltip({"name": "line", field: field}, {"name"})
    rule = alt.Chart(alt.Data(values=rows)).mark_rule(style=style, clip=True)
    return rule.encode(channel, tooltip=hover)


def _text(rows: Sequence[Row], **mark: Any) -> "list[alt.Chart]":
    """Text over whatever is behind it: twice, first as a rim in the colour of the page."""
    import altair as alt

    base = alt.Chart(alt.Data(values=list(rows))).encode(alt.Text(field="name"))
    return [base.mark_text(style=style, **mark) for style in ("halo", "note")]
