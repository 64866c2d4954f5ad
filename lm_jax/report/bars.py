"""Histograms and bars with interval whiskers as inline SVG."""

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
from lm_jax.report.scales import Scale, extent, showable

_ROW = 25
_REFERENCE = 3


class Bar(NamedTuple):
    """A row of a bar plot; `low` and `high` are its interval, `reference` is the paper's value."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    reference: float | None = None


def histogram(
    values: ArrayLike,
    *,
    caption: str,
    x_label: str,
    y_label: str = "rows (count)",
    bins: int | Sequence[float] = 30,
    log_x: bool = False,
    markers: Sequence[tuple[float, str]] = (),
    n: int | str | None = None,
) -> Markup:
    """Returns counts per bin with labelled vertical markers; `n` defaults to the drawn values.

    `bins` is a number of equal bins (equal in log10 on a log axis) or their increasing edges; what
    lies outside given edges is counted under the figure.
    """
    values = np.asarray(values, dtype=float).ravel()
    shown = values[showable(values, log_x)]
    edges = _edges(shown, bins, log_x)
    counts, _ = np.histogram(shown, edges)
    area = surface.canvas(
        [edges, [value for value, _ in markers]],
        [[0, max(counts.max(), 1)]],
        log_x=log_x,
        top=surface.TOP_LABELLED if markers else surface.TOP,
    )
    boxes = []
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        left, right = area.x.at(low), area.x.at(high)
        # a hairline between the boxes, unless they are hairlines themselves
        gap = 0.8 if right - left > 4 else 0
        title = f"{number(float(low))} to {number(float(high))}: {number(int(count))}"
        style = f"bar {marks.colour(0)}"
        boxes.append(marks.box(left, area.y.at(count), right - gap, area.y.at(0), style, title))
    seen, unseen = surface.within(area.x, markers)
    rules = [area.x.at(value) for value, _ in seen]
    outside = shown.size - int(counts.sum())
    remarks = [
        surface.omission(values.size - shown.size, log=log_x),
        f"{number(outside)} outside the bins." if outside else "",
        unseen,
    ]
    return surface.figure(
        *area.y_axis(),
        *area.x_axis(),
        *boxes,
        *(marks.line(x, area.y.start, x, area.y.end - 4, "rule") for x in rules),
        *area.top_labels(rules, [text for _, text in seen]),
        *([] if shown.size else [area.centred("nothing to show")]),
        caption=caption,
        x_label=x_label,
        y_label=y_label,
        n=int(counts.sum()) if n is None else n,
        omitted=" ".join(filter(None, remarks)),
    )


def bars(
    rows: Sequence[Bar],
    *,
    caption: str,
    x_label: str,
    n: int | str | None = None,
    x_range: tuple[float, float] | None = None,
    value_label: str = "ours",
    reference_label: str = "paper",
    spec: str = ".1f",
    v_lines: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Returns horizontal bars from zero with interval whiskers and a mark at the paper's value.

    Rows keep their order, and their value stands at the right in format `spec`. `v_lines` are
    reference values drawn down the plot.
    """
    ends = [end for row in rows for end in row[1:] if end is not None]
    low, high = extent([[0.0], [value for value, _ in v_lines], ends], given=x_range)
    names = [marks.shortened(row.label, 0.42 * surface.WIDTH) for row in rows]
    texts = [number(row.value, spec) for row in rows]
    left = max([48.0, *map(marks.text_width, names)]) + 12
    right = surface.WIDTH - max([surface.RIGHT, *map(marks.text_width, texts)]) - 16
    top = surface.TOP_LABELLED if v_lines else surface.TOP
    base = top + _ROW * max(len(rows), 1)
    area = Canvas(Scale(low, high, left, right), Scale(0, 1, base, top))
    drawn = []
    for i, (row, name, text) in enumerate(zip(rows, names, texts, strict=True)):
        middle = top + _ROW * (i + 0.5)
        drawn += [
            marks.label(left - 9, middle, name, anchor="end", middle=True),
            *_bar(area, row, middle),
            marks.label(surface.WIDTH - 2, middle, text, anchor="end", middle=True),
        ]
    zero = area.x.at(min(max(0.0, low), high))
    seen, unseen = surface.within(area.x, v_lines)
    rules = [area.x.at(value) for value, _ in seen]
    keys = [(value_label, [marks.box(2, 3, 24, 11, f"bar {marks.colour(0)}")])]
    if any(row.low is not None for row in rows):
        keys.append(("interval", marks.whisker(3, 23, 7)))
    if any(row.reference is not None for row in rows):
        keys.append((reference_label, [_reference(13, 7)]))
    missing = surface.omission(sum(not showable(row.value) for row in rows), log=False)
    return surface.figure(
        *area.x_axis(grid=True),
        marks.line(zero, base, zero, top, "axis"),
        *(drawn or [area.centred("nothing to show")]),
        *(marks.line(x, base, x, top - 4, "rule") for x in rules),
        *area.top_labels(rules, [text for _, text in seen]),
        caption=caption,
        x_label=x_label,
        n=n,
        legend=surface.legend(keys),
        omitted=" ".join(filter(None, [missing, unseen])),
        height=base + surface.BOTTOM,
    )


def _bar(area: Canvas, row: Bar, middle: float) -> list[Markup]:
    reach = _ROW * 0.32
    drawn = []
    if showable(row.value):
        zero, end = area.x(np.clip([0.0, row.value], area.x.low, area.x.high))
        title = f"{row.label}: {number(row.value)}"
        if row.low is not None and row.high is not None:
            title += f" [{number(row.low)}, {number(row.high)}]"
        if row.reference is not None:
            title += f", reference {number(row.reference)}"
        style = f"bar {marks.colour(0)}"
        drawn.append(marks.box(zero, middle - reach, end, middle + reach, style, title))
    if row.low is not None and row.high is not None and showable([row.low, row.high]).all():
        low, high = area.x(np.clip([row.low, row.high], area.x.low, area.x.high)).tolist()
        drawn += marks.whisker(low, high, middle)
    if row.reference is not None and area.inside(row.reference, 0.5):
        drawn.append(_reference(area.x.at(row.reference), middle))
    return drawn


def _reference(x: float, y: float) -> Markup:
    return marks.marker(_REFERENCE, x, y, size=4.6, style="reference")


def _edges(shown: np.ndarray, bins: int | Sequence[float], log_x: bool) -> np.ndarray:
    if isinstance(bins, int):
        if bins < 1:
            raise UsageError(f"histogram: bins={bins}; need 1 or more")
        low, high = extent([shown], log=log_x, pad=0.0)
        edges = (np.geomspace if log_x else np.linspace)(low, high, bins + 1)
        # rounding of the logarithm must not push the extremes out of their bins
        edges[0], edges[-1] = shown.min(initial=edges[0]), shown.max(initial=edges[-1])
        return edges
    edges = np.asarray(bins, dtype=float)
    finite = showable(edges, log_x).all()
    if edges.ndim != 1 or edges.size < 2 or not finite or not (np.diff(edges) > 0).all():
        raise UsageError("histogram: bins must be increasing finite edges, positive on a log axis")
    return edges
