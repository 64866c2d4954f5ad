"""SVG marks in drawing units: lines, text, markers, boxes, whiskers, and strokes that break at NaN.

Colours are classes that `report.css` resolves for light and dark pages; shapes and dashes repeat
the distinction for readers who do not see the colours.
"""

import unicodedata

from markupsafe import Markup
import numpy as np

from lm_jax.report.markup import clean, element

# width of a character at the tick size that narrow screens use (report.css)
CHARACTER = 9.6
NARROW = frozenset(" .,:;'|!iljtf()[]")
COLOURS = 8
MARKERS = 4
# a stroke of more points than this is thinned to the extremes within each third of a unit
MOST_VERTICES = 4000


def colour(index: int) -> str:
    """Returns the class of the colour of series `index`."""
    return f"s{index % COLOURS}"


def dash(index: int) -> str:
    """Returns the class of the dash pattern of series `index`."""
    return f"d{index % MARKERS}"


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    """Returns a straight line of CSS class `style`."""
    ends = {"x1": float(x1), "y1": float(y1), "x2": float(x2), "y2": float(y2)}
    return element("line", {"class": style, **ends})


def label(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    middle: bool = False,
    style: str = "tick",
) -> Markup:
    """Returns text at a point; `middle` centres it on `y` instead of standing on it."""
    place = {"x": float(x), "y": float(y), "dy": "0.35em" if middle else None}
    return element("text", {"class": style, **place, "text-anchor": anchor}, text)


def marker(
    index: int, x: float, y: float, *, size: float = 4, title: str = "", style: str = ""
) -> Markup:
    """Returns the marker of series `index` (disc, triangle, square, diamond by turns)."""
    r, w = float(size), 1.3 * float(size)
    side = 0.9 * r
    shapes = (
        f"M{x - r:.1f} {y:.1f}a{r:g} {r:g} 0 1 0 {2 * r:g} 0a{r:g} {r:g} 0 1 0 {-2 * r:g} 0z",
        f"M{x:.1f} {y - w:.1f}l{w:.1f} {1.7 * w:.1f}h{-2 * w:.1f}z",
        f"M{x - side:.1f} {y - side:.1f}h{2 * side:.1f}v{2 * side:.1f}h{-2 * side:.1f}z",
        f"M{x:.1f} {y - w:.1f}l{w:.1f} {w:.1f}l{-w:.1f} {w:.1f}l{-w:.1f} {-w:.1f}z",
    )
    attributes = {"class": style or f"dot {colour(index)}", "d": shapes[index % MARKERS]}
    return element("path", attributes, *hover(title))


def box(
    x1: float, y1: float, x2: float, y2: float, style: str, title: str = "", **attributes: object
) -> Markup:
    """Returns a filled box between two corners, given in any order."""
    place = {
        "x": float(min(x1, x2)),
        "y": float(min(y1, y2)),
        "width": float(abs(x2 - x1)),
        "height": float(abs(y2 - y1)),
    }
    return element("rect", {"class": style, **place, **attributes}, *hover(title))


def whisker(x1: float, x2: float, y: float, size: float = 4) -> list[Markup]:
    """Returns a horizontal interval with end caps."""
    caps = [line(x, y - size, x, y + size, "whisker") for x in (x1, x2)]
    return [line(x1, y, x2, y, "whisker"), *caps]


def stroke(x: np.ndarray, y: np.ndarray, style: str) -> list[Markup]:
    """Returns one path per run of finite points; a point alone becomes a dot."""
    drawn = []
    for run in _runs(np.isfinite(x) & np.isfinite(y)):
        points = _polyline(*_thinned(x[run], y[run]))
        # a path without length shows nothing but its caps
        cap = {"stroke-linecap": "round"} if run.stop - run.start == 1 else {}
        closing = "z" if cap else ""
        drawn.append(element("path", {"class": style, "d": f"{points}{closing}", **cap}))
    return drawn


def band(x: np.ndarray, low: np.ndarray, high: np.ndarray, style: str) -> list[Markup]:
    """Returns the areas between `low` and `high`, one per run of finite points."""
    finite = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
    outlines = [
        _polyline(np.r_[x[run], x[run][::-1]], np.r_[low[run], high[run][::-1]])
        for run in _runs(finite)
    ]
    return [element("path", {"class": style, "d": f"{points}z"}) for points in outlines]


def hover(title: str) -> list[Markup]:
    """Returns the child of a mark that shows `title` when the pointer rests on it."""
    return [element("title", None, title)] if title else []


def text_width(text: str) -> float:
    """Returns an upper estimate of the drawn width; wide characters count double."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    narrow = sum(character in NARROW for character in text)
    return CHARACTER * (len(text) + wide - narrow / 2)


def shortened(text: str, width: float) -> str:
    """Returns `text` cut to `width` drawing units, with an ellipsis where it was cut."""
    text = clean(text)
    # no text of more characters than this fits, however long the token is
    kept = text[: int(2 * width / CHARACTER) + 1]
    if kept == text and text_width(text) <= width:
        return text
    while kept and text_width(kept) > width - CHARACTER:
        kept = kept[:-1]
    return kept + "…"


def _runs(mask: np.ndarray) -> list[slice]:
    edges = np.flatnonzero(np.diff(np.r_[False, mask, False].astype(np.int8)))
    return [slice(start, stop) for start, stop in edges.reshape(-1, 2)]


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if x.size <= MOST_VERTICES:
        return x, y
    starts = np.flatnonzero(np.diff(np.floor(3 * x), prepend=np.nan))
    kept = [
        start + place
        for start, part in zip(starts, np.split(y, starts[1:]), strict=True)
        for place in (0, part.argmin(), part.argmax(), part.size - 1)
    ]
    return x[np.unique(kept)], y[np.unique(kept)]


def _polyline(x: np.ndarray, y: np.ndarray) -> str:
    return "M" + " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
