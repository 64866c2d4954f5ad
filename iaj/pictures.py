"""Small drawings of reports for the index page of `iaj quickstart`, from their stored numbers.

Each function reads the files of one work folder and returns an SVG whose colours are the page's, or
None where the run has not what it draws.
"""

from collections.abc import Iterable, Mapping, Sequence
import math
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lm_jax.report.markup import element
from lm_jax.run.files import read_json

WIDTH, HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 12, 24


def graph(folder: Path) -> Markup | None:
    """Tokens at the bottom, layers above them, and the strongest edges of an attribution graph."""
    files = sorted((folder / "graph").glob("*.json"))
    graphs = [read_json(file) for file in files if file.name != "graph-metadata.json"]
    stored = next((each for each in graphs if "nodes" in each), None)
    if stored is None:
        return None
    layers = sorted({_level(node) for node in stored["nodes"]})
    longest = max(node["ctx_idx"] for node in stored["nodes"]) or 1
    at = {
        node["node_id"]: (
            _across(node["ctx_idx"] / longest),
            _up(layers.index(_level(node)) / max(1, len(layers) - 1)),
        )
        for node in stored["nodes"]
    }
    most = max((abs(link["weight"]) for link in stored["links"]), default=1.0)
    lines = [
        _line(
            at[link["source"]],
            at[link["target"]],
            "s0" if link["weight"] > 0 else "s1",
            0.5 + 2.5 * abs(link["weight"]) / most,
        )
        for link in stored["links"]
    ]
    dots = [
        element("circle", {"cx": x, "cy": y, "r": 3, "style": "fill: var(--ink)"})
        for x, y in at.values()
    ]
    names = ["tokens", *(f"L{level}" for level in layers[1:-1]), "next"]
    marks = [
        _text(_LEFT - 4, _up(i / max(1, len(layers) - 1)) + 4, name, "end")
        for i, name in enumerate(names)
    ]
    return _drawing("Tokens, features and the next token, with edges.", lines, dots, marks)


def _level(node: Mapping[str, Any]) -> int:
    return -1 if node["layer"] == "E" else int(node["layer"])


def prototypes(folder: Path) -> Markup | None:
    """A square for each prototype, darker where its half-life is longer."""
    found = read_json(folder / "summary.json")["prototypes"]
    lives = [each["half_life"] for each in found if each["half_life"]]
    if not lives:
        return None
    low, high = math.log(min(lives)), math.log(max(lives))
    layers = 1 + max(each["layer"] for each in found)
    across = 1 + max(each["prototype"] for each in found)
    wide = (WIDTH - _LEFT - _RIGHT) / across
    tall = min(wide * 1.6, (HEIGHT - _TOP - _BOTTOM) / layers)
    squares = [
        element(
            "rect",
            {
                "x": _LEFT + wide * each["prototype"],
                "y": _TOP + tall * each["layer"],
                "width": wide - 1,
                "height": tall - 1,
                "style": "fill: var(--s0)",
                "fill-opacity": 0.08
                + 0.92 * (math.log(each["half_life"]) - low) / ((high - low) or 1.0)
                if each["half_life"]
                else 1.0,
            },
        )
        for each in found
    ]
    marks = [_text(_LEFT - 4, _TOP + tall * (i + 0.75), f"L{i}", "end") for i in range(layers)]
    below = _TOP + tall * layers + 16
    marks.append(_text(_LEFT, below, f"half-life {min(lives):.1f} (light) to {max(lives):.0f}"))
    return _drawing("Half-life of every prototype, by layer.", squares, marks, height=below + 8)


def circuits(folder: Path) -> Markup | None:
    """Share of the effect that the first token edges explain, for each model."""
    results = read_json(folder / "summary.json")["results"]
    first = [each for each in results if each["task"] == results[0]["task"]]
    curves = {
        each["model"]: curve["points"]
        for each in first
        for curve in each["curves"]
        if (curve["component"], curve["ranking"], curve["scope"])
        == ("token_edges", "absolute", "prompt")
    }
    if not curves:
        return None
    longest = math.log(max(point["size"] for points in curves.values() for point in points))
    drawn = []
    for i, (model, points) in enumerate(curves.items()):
        at = [
            (_across(math.log(max(1, each["size"])) / longest), _up(_clip(each["explained"])))
            for each in points
        ]
        shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        style = f"fill: none; stroke: var(--s{i}); stroke-width: 2"
        drawn.append(element("polyline", {"points": shown, "style": style}))
        y = HEIGHT - _BOTTOM - 8 - 16 * (len(curves) - 1 - i)
        drawn.append(_text(WIDTH - _RIGHT, y, model, "end", f"var(--s{i})"))
    marks = [_text(_LEFT - 4, _up(share) + 4, f"{share:.0%}", "end") for share in (0.0, 0.5, 1.0)]
    marks += [
        _axis(),
        _text(_LEFT, HEIGHT - 6, "1 token edge"),
        _text(WIDTH - _RIGHT, HEIGHT - 6, "all", "end"),
    ]
    return _drawing("Effect explained by the strongest token edges.", drawn, marks)


def recipes(folder: Path) -> Markup | None:
    """Accuracy with softmax and with each recipe in its place."""
    rows = read_json(folder / "summary.json")["sweep"]
    if not rows:
        return None
    name, right = 116, 42
    step = min(28.0, (HEIGHT - _TOP) / len(rows))
    wide = WIDTH - name - right
    drawn = []
    for i, row in enumerate(rows):
        y, share = _TOP + step * i, row["accuracy"]["estimate"]
        drawn += [
            _text(name - 6, y + step * 0.62, row["recipe"], "end"),
            _bar(name, y, wide, step, "var(--hair)"),
            _bar(name, y, wide * share, step, "var(--s0)"),
            _text(name + wide + 6, y + step * 0.62, f"{share:.0%}"),
        ]
    title = "Needle prompts answered rightly with softmax and with each recipe."
    return _drawing(title, drawn, height=_TOP + step * len(rows) + 6)


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))


def _across(share: float) -> float:
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _up(share: float) -> float:
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _axis() -> Markup:
    return _line((_LEFT, _up(0)), (WIDTH - _RIGHT, _up(0)), "axis", 1.0)


def _line(
    start: tuple[float, float], end: tuple[float, float], colour: str, width: float
) -> Markup:
    places = {"x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1]}
    style = f"stroke: var(--{colour}); stroke-width: {width:.2f}; stroke-opacity: 0.6"
    return element("line", {**places, "style": style})


def _bar(x: float, y: float, width: float, step: float, colour: str) -> Markup:
    places = {"x": x, "y": y + 0.15 * step, "width": width, "height": 0.7 * step}
    return element("rect", {**places, "style": f"fill: {colour}"})


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = "var(--soft)"
) -> Markup:
    style = f"fill: {colour}; font-size: 11px"
    return element("text", {"x": x, "y": y, "text-anchor": anchor, "style": style}, text)


def _drawing(
    title: str, *parts: Sequence[Markup] | Iterable[Markup], height: float = HEIGHT
) -> Markup:
    return element(
        "svg",
        {"viewBox": f"0 0 {WIDTH} {height:.0f}", "role": "img", "aria-label": title},
        *(each for part in parts for each in part),
    )
