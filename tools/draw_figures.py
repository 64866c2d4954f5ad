"""Draws the figures of `docs/` from the data beside them: `python -m tools.draw_figures`.

A figure is one SVG file that stands alone: Markdown pages show it as an image, on light and dark
pages, without this package's style sheet.
"""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
from typing import Any

from markupsafe import Markup
import numpy as np

from lm_jax.report import canvas, marks
from lm_jax.report.canvas import HEIGHT, WIDTH, Canvas
from lm_jax.report.markup import element
from lm_jax.run.files import write_bytes

DOCS = Path(__file__).parents[1] / "docs"
# Errors below this are drawn here: float32 holds 1 to within 6e-8, and zero has no logarithm.
SMALLEST = 1e-8
# Room above a panel for its title, and under both for the axis title.
TITLE, FOOT, LEGEND = 30, 26, 24

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c1e21; }
.title { font-weight: 600; }
.page { fill: #ffffff; }
.gridline { stroke: #e2e2dc; }
.axis { stroke: #8b9097; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.grey { stroke: #5a5f66; }
.s0 { stroke: #0072b2; }
.s1 { stroke: #d55e00; }
.d1 { stroke-dasharray: 8 4; }
.d2 { stroke-dasharray: 2 3.5; }
"""


def decay_error(data: Mapping[str, Any]) -> Markup:
    """The released code's arithmetic of the prefix mean against ours, as one SVG.

    Left the relative error of a discount over one half-life, right the mean of values that are all
    one, by how many half-lives into the sequence they are read. Curves are broken where the
    released arithmetic gives no write any weight.
    """
    position = np.array(data["position_in_half_lives"], float)
    forms = {name: data["curves"][name] for name in ("ours", "released")}
    errors = {
        name: [_clipped(each["discount_error"]) for each in curves]
        for name, curves in forms.items()
    }
    ones = {
        name: [np.array(each["mean_of_ones"], float) for each in curves]
        for name, curves in forms.items()
    }
    left = canvas.canvas([position], [[SMALLEST, 2.0]], log_y=True, y_range=(SMALLEST / 2, 3.0))
    right = canvas.canvas([position], [[0.0, 1.0]], y_range=(-0.03, 1.08))
    width, height = 2 * WIDTH, TITLE + HEIGHT + FOOT + LEGEND
    return element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "role": "img",
            "aria-label": "Error of the discount and mean of ones, released arithmetic and ours",
        },
        element("style", None, Markup(STYLE)),
        element("rect", {"class": "page", "width": width, "height": height}),
        _panel(0, "Relative error of the discount over one half-life", left, position, errors),
        _panel(WIDTH, "Mean of values that are all 1", right, position, ones),
        *_legend(data["half_lives"], height - 8),
    )


def _clipped(errors: Sequence[float | None]) -> np.ndarray:
    return np.maximum(np.abs(np.array(errors, float)), SMALLEST)


def _panel(
    at: float,
    title: str,
    area: Canvas,
    x: np.ndarray,
    curves: Mapping[str, Sequence[np.ndarray]],
) -> Markup:
    strokes = [
        path
        for colour, lines in enumerate(curves.values())
        for dash, y in enumerate(lines)
        for path in marks.stroke(area.x(x), area.y(y), f"line s{colour} d{dash}")
    ]
    below = "half-lives into the sequence"
    return element(
        "g",
        {"transform": f"translate({at} {TITLE})"},
        marks.label(area.x.start, -10, title, style="title"),
        *area.y_axis(),
        *area.x_axis(),
        area.clipped(*strokes),
        marks.label(area.x.end, HEIGHT + 14, below, anchor="end"),
    )


def _legend(half_lives: Sequence[float], y: float) -> list[Markup]:
    """Colours tell the arithmetic, dashes the half-life."""
    keys = [("s0 d0", "ours"), ("s1 d0", "released arithmetic")]
    keys += [(f"grey d{i}", f"half-life {each:g}") for i, each in enumerate(half_lives)]
    drawn, x = [], 51.0
    for style, text in keys:
        sample = marks.line(x, y - 4, x + 28, y - 4, f"line {style}")
        drawn += [sample, marks.label(x + 34, y, text)]
        x += 70 + 6.8 * len(text)
    return drawn


def main() -> None:
    """The command."""
    data = json.loads((DOCS / "data" / "released_decay_error.json").read_text("utf-8"))
    path = DOCS / "figures" / "released_decay_error.svg"
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, f"{decay_error(data)}\n".encode())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
