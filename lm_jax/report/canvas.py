"""The drawing surface of the plots: scales, axes, legend, and the figure around an SVG.

One SVG is 560 units wide and scales with its box. Axis titles, legend and caption are HTML around
it, so that they wrap on a narrow screen instead of shrinking; only ticks and marks are drawn.
"""

from collections.abc import Iterable, Sequence
import dataclasses

from markupsafe import Markup
import numpy as np
from numpy.typing import ArrayLike

from lm_jax.report import marks
from lm_jax.report.markup import ENVIRONMENT, element, number
from lm_jax.report.scales import Scale, extent, showable, spread, tick_labels

WIDTH = 560
HEIGHT = 330
# room under the plot area for tick labels, and right of it for half a tick label
BOTTOM, RIGHT = 28, 24
# room above the plot area, without and with labels there
TOP, TOP_LABELLED = 12, 28

_FIGURE = ENVIRONMENT.from_string("""\
<figure class="plot">
{% if legend %}
<div class="legend">{{ legend }}</div>
{% endif %}
{% if y_label %}
<div class="y-label {{ direction }}">{{ y_label }}</div>
{% endif %}
{{ svg }}
{% if x_label %}
<div class="x-label">{{ x_label }}</div>
{% endif %}
<figcaption>{{ caption }}
{% if n %}
<span class="n">n = {{ n }}</span>
{% endif %}
{% if omitted %}
<span class="omitted">{{ omitted }}</span>
{% endif %}
</figcaption>
</figure>
""")


@dataclasses.dataclass(frozen=True)
class Canvas:
    """The two scales of a plot, from data to drawing units."""

    x: Scale
    y: Scale

    def x_axis(self, ticks: Sequence[float] | None = None, *, grid: bool = False) -> list[Markup]:
        """Returns tick labels under the plot area, and marks or grid lines."""
        values = self.x.ticks(6) if ticks is None else np.asarray(ticks, dtype=float)
        values = values[(values >= self.x.low) & (values <= self.x.high)]
        base = self.y.start
        end, style = (self.y.end, "gridline") if grid else (base + 4, "axis")
        drawn = []
        for at, text in zip(self.x(values), tick_labels(values), strict=True):
            drawn += [
                marks.line(at, base, at, end, style),
                marks.label(at, base + 19, text, anchor="middle"),
            ]
        return drawn

    def y_axis(self) -> list[Markup]:
        """Returns grid lines with tick labels, and the base line."""
        values = self.y.ticks(5)
        drawn = []
        for at, text in zip(self.y(values), tick_labels(values), strict=True):
            drawn += [
                marks.line(self.x.start, at, self.x.end, at, "gridline"),
                marks.label(self.x.start - 7, at, text, anchor="end", middle=True),
            ]
        base = marks.line(self.x.start, self.y.start, self.x.end, self.y.start, "axis")
        return [*drawn, base]

    def clipped(self, *drawn: Markup) -> Markup:
        """Returns marks cut at the plot area; a nested SVG clips without needing an id."""
        place = {
            "x": self.x.start,
            "y": self.y.end,
            "width": self.x.end - self.x.start,
            "height": self.y.start - self.y.end,
        }
        view = " ".join(f"{value:.2f}" for value in place.values())
        return element("svg", {**place, "viewBox": view}, *drawn)

    def inside(self, x: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Returns the mask of points that lie in the plot area."""
        x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
        across = (x >= self.x.low) & (x <= self.x.high)
        return across & (y >= self.y.low) & (y <= self.y.high)

    def centred(self, text: str) -> Markup:
        """Returns text in the middle of the plot area."""
        x, y = (self.x.start + self.x.end) / 2, (self.y.start + self.y.end) / 2
        return marks.label(x, y, text, anchor="middle", middle=True, style="note")

    def top_labels(self, positions: Sequence[float], texts: Sequence[str]) -> list[Markup]:
        """Returns labels above the plot area near `positions` (drawing units), kept apart."""
        widest = max([0.0, *(marks.text_width(text) for text in texts)])
        ends = self.x.start + widest / 2, max(self.x.end, self.x.start + widest)
        placed = spread(positions, widest + 4, *ends)
        return [
            marks.label(at, self.y.end - 8, text, anchor="middle", style="note")
            for at, text in zip(placed, texts, strict=True)
        ]


def canvas(
    xs: Iterable[ArrayLike],
    ys: Iterable[ArrayLike],
    *,
    log_x: bool = False,
    log_y: bool = False,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    top: float = TOP,
) -> Canvas:
    """Returns a canvas for all showable values, with room on the left for the tick labels."""
    low, high = extent(ys, log=log_y, given=y_range)
    y = Scale(low, high, HEIGHT - BOTTOM, top, log_y)
    widths = [marks.text_width(text) for text in tick_labels(y.ticks(5))]
    low, high = extent(xs, log=log_x, given=x_range, pad=0.02)
    return Canvas(Scale(low, high, max(widths, default=0) + 12, WIDTH - RIGHT, log_x), y)


def figure(
    *drawn: Markup,
    caption: str,
    x_label: str = "",
    y_label: str = "",
    n: int | str | None = None,
    legend: Markup | None = None,
    omitted: str = "",
    downwards: bool = False,
    height: float = HEIGHT,
) -> Markup:
    """Returns the SVG of `drawn` with axis titles, legend and caption around it.

    `n` is the count that the figure rests on: a number, or words such as "200 prompts".
    `downwards` says that the first row is on top.
    """
    attributes = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {WIDTH} {height:.0f}",
        "role": "img",
        "aria-label": ". ".join(part for part in (caption, x_label, y_label) if part),
    }
    return Markup(
        _FIGURE.render(
            svg=element("svg", attributes, *drawn),
            caption=caption,
            x_label=x_label,
            y_label=y_label,
            direction="down" if downwards else "up",
            n="" if n is None else number(n),
            legend=legend,
            omitted=omitted,
        )
    )


def legend(entries: Iterable[tuple[str, Sequence[Markup]]]) -> Markup:
    """Returns labels with a sample of their marks; entries with an empty label are left out."""
    view = {"class": "swatch", "viewBox": "0 0 26 14", "aria-hidden": "true"}
    keys = [
        element("span", {"class": "key"}, element("svg", view, *sample), element("bdi", None, text))
        for text, sample in entries
        if text
    ]
    return Markup("").join(keys)


def omission(count: int, *, log: bool) -> str:
    """Returns the remark about values that a plot cannot show, or nothing."""
    reason = "not finite, or not positive on a log axis" if log else "not finite"
    return f"{number(count)} value{'s' * (count != 1)} not shown ({reason})." if count else ""


def within(scale: Scale, lines: Sequence[tuple[float, str]]) -> tuple[list[tuple[float, str]], str]:
    """Returns the reference lines that a scale can show, and the remark that names the others."""
    seen = [(value, text) for value, text in lines if scale.low <= value <= scale.high]
    lost = [f"{text} ({number(value)})" for value, text in lines if (value, text) not in seen]
    return seen, f"Not shown: {', '.join(lost)}." if lost else ""


def hidden(x: ArrayLike, y: ArrayLike, *, log_x: bool, log_y: bool) -> int:
    """Returns how many points an axis cannot show."""
    return int((~(showable(x, log_x) & showable(y, log_y))).sum())
