"""Line and scatter plots as inline SVG, each with a caption, axis titles and an n.

What cannot be drawn is counted under the figure, never dropped silently: a line breaks at NaN,
a log axis counts what is not positive, a fixed range counts what lies outside. A mark tells its
values when the pointer rests on it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup
import numpy as np
from numpy.typing import ArrayLike

from lm_jax.errors import UsageError
from lm_jax.report import canvas as surface
from lm_jax.report import marks
from lm_jax.report.canvas import Canvas
from lm_jax.report.markup import number
from lm_jax.report.scales import spread

# more points than this make a page that a browser cannot scroll
MOST_POINTS = 20_000
# lines of up to this many points get markers unless told otherwise
FEW_POINTS = 24
LINE_HEIGHT = 18


class Series(NamedTuple):
    """A line: `x`, `y` and the optional ends of a confidence band, 1-D and of one length."""

    label: str
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None


class Points(NamedTuple):
    """A category of a scatter plot: 1-D `x` and `y`, and optional hover text per point."""

    label: str
    x: ArrayLike
    y: ArrayLike
    titles: Sequence[str] | None = None


class _Trace(NamedTuple):
    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None
    titles: Sequence[str] | None


class Note(NamedTuple):
    """Text at a point of a plot, in data units."""

    x: float
    y: float
    text: str


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
    markers: bool | None = None,
    h_lines: Sequence[tuple[float, str]] = (),
    annotations: Sequence[Note] = (),
) -> Markup:
    """Returns lines with confidence bands, horizontal reference lines and notes.

    Axis titles carry the unit. `markers=None` marks the points where no line has more than 24.
    """
    lines = [_checked("curves", one) for one in series]
    ends = [end for one in lines for end in (one.low, one.high) if end is not None]
    area = surface.canvas(
        [one.x for one in lines],
        [*(one.y for one in lines), *ends, [value for value, _ in h_lines]],
        log_x=log_x,
        log_y=log_y,
        x_range=x_range,
        y_range=y_range,
    )
    if markers is None:
        markers = all(len(one.x) <= FEW_POINTS for one in lines)
    bands, strokes, dots, keys = [], [], [], []
    for i, one in enumerate(lines):
        x, style = area.x(one.x), f"line {marks.dash(i)} {marks.colour(i)}"
        if one.low is not None and one.high is not None:
            bands += marks.band(x, area.y(one.low), area.y(one.high), f"band {marks.colour(i)}")
        strokes += marks.stroke(x, area.y(one.y), style)
        dots += _dots(area, one, i, _readings(one)) if markers else []
        sample = [marks.line(1, 7, 25, 7, style), *([marks.marker(i, 13, 7)] * markers)]
        keys.append((one.label, sample))
    seen, unseen = surface.within(area.y, h_lines)
    levels = [area.y.at(value) for value, _ in seen]
    rules = [marks.line(area.x.start, y, area.x.end, y, "rule") for y in levels]
    return surface.figure(
        *area.y_axis(),
        *area.x_axis(x_ticks),
        area.clipped(*bands, *rules, *strokes),
        *dots,
        *_rule_labels(area, seen),
        *_nothing(area, lines),
        *_notes(area, annotations),
        caption=caption,
        x_label=x_label,
        y_label=y_label,
        n=n,
        legend=surface.legend(keys),
        omitted=_omitted(area, lines, annotations, unseen),
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
    annotations: Sequence[Note] = (),
) -> Markup:
    """Returns points by category over labelled boundary curves.

    A boundary runs from left to right in small steps; its label stands where it leaves the plot.
    The range follows the points, not the boundaries. More than 20,000 points are refused.
    """
    traces = [_checked("scatter", group) for group in groups]
    walls = [_checked("scatter", wall) for wall in boundaries]
    total = sum(len(group.x) for group in traces)
    if total > MOST_POINTS:
        raise UsageError(
            f"scatter: {total:,} points are too many for a page; plot medians or a sample of at "
            f"most {MOST_POINTS:,}"
        )
    area = surface.canvas(
        [group.x for group in traces],
        [group.y for group in traces],
        log_x=log_x,
        log_y=log_y,
        x_range=x_range,
        y_range=y_range,
        top=surface.TOP_LABELLED if walls else surface.TOP,
    )
    limits = [m for one in walls for m in marks.stroke(area.x(one.x), area.y(one.y), "boundary")]
    dots = []
    for i, group in enumerate(traces):
        titles = _readings(group) if group.titles is None else group.titles
        dots += _dots(area, group, i, titles, size=3.4)
    return surface.figure(
        *area.y_axis(),
        *area.x_axis(),
        area.clipped(*limits),
        *dots,
        *_wall_labels(area, walls),
        *_nothing(area, traces),
        *_notes(area, annotations),
        caption=caption,
        x_label=x_label,
        y_label=y_label,
        n=n,
        legend=surface.legend(
            (group.label, [marks.marker(i, 13, 7)]) for i, group in enumerate(traces)
        ),
        omitted=_omitted(area, traces, annotations),
    )


def _checked(where: str, given: Series | Points) -> _Trace:
    x, y = np.asarray(given.x, dtype=float), np.asarray(given.y, dtype=float)
    low, high, titles = None, None, None
    if isinstance(given, Points):
        titles = given.titles
    elif (given.low is None) != (given.high is None):
        raise UsageError(f"{where}: {given.label!r} has one end of a band; give low and high")
    elif given.low is not None and given.high is not None:
        low, high = np.asarray(given.low, dtype=float), np.asarray(given.high, dtype=float)
    fields = {"x": x, "y": y, "low": low, "high": high, "titles": titles}
    lengths = {name: np.shape(value) for name, value in fields.items() if value is not None}
    if x.ndim != 1 or len(set(lengths.values())) > 1:
        raise UsageError(f"{where}: {given.label!r} has {lengths}; need 1-D fields of one length")
    return _Trace(given.label, x, y, low, high, titles)


def _readings(trace: _Trace) -> list[str]:
    texts = [f"{number(x)}, {number(y)}" for x, y in zip(trace.x, trace.y, strict=True)]
    if trace.low is not None and trace.high is not None:
        bounds = zip(texts, trace.low, trace.high, strict=True)
        texts = [f"{text} [{number(low)}, {number(high)}]" for text, low, high in bounds]
    return [f"{trace.label}: {text}" if trace.label else text for text in texts]


def _dots(
    area: Canvas, trace: _Trace, index: int, titles: Sequence[str], size: float = 4
) -> list[Markup]:
    x, y, seen = area.x(trace.x), area.y(trace.y), area.inside(trace.x, trace.y)
    return [
        marks.marker(index, x[i], y[i], size=size, title=titles[i])
        for i in np.nonzero(seen)[0].tolist()
    ]


def _omitted(area: Canvas, traces: Sequence[_Trace], notes: Sequence[Note], *remarks: str) -> str:
    log_x, log_y = area.x.log, area.y.log
    hidden = sum(surface.hidden(one.x, one.y, log_x=log_x, log_y=log_y) for one in traces)
    outside = sum(int((~area.inside(one.x, one.y)).sum()) for one in traces) - hidden
    beyond = f"{number(outside)} outside the axes." if outside else ""
    lost = [note.text for note in notes if not area.inside(note.x, note.y)]
    unread = f"Notes outside the axes: {', '.join(lost)}." if lost else ""
    text = surface.omission(hidden, log=log_x or log_y), beyond, *remarks, unread
    return " ".join(filter(None, text))


def _nothing(area: Canvas, traces: Sequence[_Trace]) -> list[Markup]:
    if any(area.inside(one.x, one.y).any() for one in traces):
        return []
    return [area.centred("nothing to show")]


def _rule_labels(area: Canvas, h_lines: Sequence[tuple[float, str]]) -> list[Markup]:
    wanted = [area.y.at(value) - 5 for value, _ in h_lines]
    placed = spread(wanted, LINE_HEIGHT, area.y.end + 4, area.y.start - 5)
    return [
        marks.label(area.x.end - 4, at, text, anchor="end", style="note")
        for at, (_, text) in zip(placed, h_lines, strict=True)
    ]


def _wall_labels(area: Canvas, walls: Sequence[_Trace]) -> list[Markup]:
    top, side = [], []
    for wall in walls:
        within = np.nonzero(area.inside(wall.x, wall.y))[0]
        if not within.size:
            continue
        last = within[-1]
        leaves = last + 1 < len(wall.x) and wall.y[last + 1] > area.y.high
        (top if leaves else side).append(
            (area.x.at(wall.x[last]), area.y.at(wall.y[last]), wall.label)
        )
    beside = [marks.label(x - 4, y - 6, text, anchor="end", style="note") for x, y, text in side]
    return area.top_labels([x for x, _, _ in top], [text for _, _, text in top]) + beside


def _notes(area: Canvas, notes: Sequence[Note]) -> list[Markup]:
    drawn = []
    for note in notes:
        if not area.inside(note.x, note.y):
            continue
        x, y = area.x.at(note.x), area.y.at(note.y)
        # text grows towards the middle of the plot, so that it ends inside
        anchor = "end" if x > (area.x.start + area.x.end) / 2 else "start"
        away = 1 if y < area.y.end + 2.5 * LINE_HEIGHT else -1
        drawn += [
            marks.line(x, y + 4 * away, x, y + 20 * away, "axis"),
            marks.label(x, y + 29 * away, note.text, anchor=anchor, middle=True, style="note"),
        ]
    return drawn
