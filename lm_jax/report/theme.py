"""Colours of a report: one table for light pages and one for dark ones, as CSS and for charts.

Series are after Okabe and Ito (2008), which colour-blind readers can tell apart, and lightened for
dark pages. Charts repeat the difference by dash and shape, tables by a sign.
"""

from collections.abc import Mapping
from typing import Any

Palette = Mapping[str, str]

LIGHT: Palette = {
    "page": "#ffffff",
    "panel": "#f6f6f3",
    "ink": "#1c1e21",
    "soft": "#5a5f66",
    "hair": "#e2e2dc",
    "axis": "#8b9097",
    "link": "#0b5a92",
    "hot": "0 91 150",
    "cold": "190 74 0",
    "missing": "#d4d4ce",
    "good": "#0a7558",
    "warn": "#8a5a00",
    "bad": "#b3261e",
    "good-wash": "#e5f3ee",
    "warn-wash": "#fbf1dc",
    "bad-wash": "#fbe9e7",
    "s0": "#0072b2",
    "s1": "#d55e00",
    "s2": "#00875f",
    "s3": "#b0578d",
    "s4": "#b07c00",
    "s5": "#3f9fd3",
    "s6": "#6b5fb5",
    "s7": "#6d6d6d",
}
DARK: Palette = {
    "page": "#15181c",
    "panel": "#1d2126",
    "ink": "#e6e6e2",
    "soft": "#a3a9b1",
    "hair": "#2f353c",
    "axis": "#7d858e",
    "link": "#82bdea",
    "hot": "102 186 240",
    "cold": "255 150 84",
    "missing": "#3a4048",
    "good": "#5fd0a8",
    "warn": "#edbb57",
    "bad": "#ff9086",
    "good-wash": "#15302a",
    "warn-wash": "#33290f",
    "bad-wash": "#3a1d1b",
    "s0": "#58b1e6",
    "s1": "#ff8d4a",
    "s2": "#35c596",
    "s3": "#e394c5",
    "s4": "#e6b53c",
    "s5": "#a6d8f5",
    "s6": "#aba0ee",
    "s7": "#b4b4b4",
}
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif'
COLOURS = 8


def css() -> str:
    """The palettes as CSS variables, `--page` and so on, which follow the reader's scheme."""
    light, dark = (
        "".join(f"{indent}--{name}: {value};\n" for name, value in palette.items())
        for palette, indent in ((LIGHT, "  "), (DARK, "    "))
    )
    return (
        f":root {{\n{light}}}\n"
        f"@media screen and (prefers-color-scheme: dark) {{\n  :root {{\n{dark}  }}\n}}\n"
    )


def vega_config(palette: Palette) -> dict[str, Any]:
    """The Vega-Lite config that gives a chart the look of the page.

    Charts name no colour: series take `range.category`, heat maps `range.heatmap` or
    `range.diverging`, other marks a style below. So one specification serves light and dark.
    """
    page, ink, soft = palette["page"], palette["ink"], palette["soft"]
    hot, cold = (f"rgb({', '.join(palette[name].split())})" for name in ("hot", "cold"))
    text = {"labelFont": FONT, "titleFont": FONT, "labelFontSize": 12, "titleFontSize": 12.5}
    note = {"font": FONT, "fontSize": 12}
    return {
        "background": page,
        "font": FONT,
        # A saved figure is legible on any page: it keeps the background.
        "padding": 4,
        "view": {"stroke": None},
        "axis": {
            **text,
            "domainColor": palette["axis"],
            "gridColor": palette["hair"],
            "labelColor": soft,
            "labelSeparation": 6,
            "tickColor": palette["axis"],
            "titleColor": soft,
            "titleFontWeight": "normal",
            "titlePadding": 8,
        },
        # A label nearer to the end of the axis than this, in pixels, is moved inside.
        "axisX": {"grid": False, "labelFlush": 14},
        "axisY": {"domain": False, "ticks": False},
        "legend": {
            **text,
            "labelColor": ink,
            "titleColor": soft,
            "titleFontWeight": "normal",
            "orient": "top",
            "labelLimit": 330,
            "symbolStrokeWidth": 2,
            "symbolSize": 70,
            "gradientLength": 140,
            "gradientThickness": 10,
            "gradientStrokeColor": palette["hair"],
            "offset": 10,
        },
        "range": {
            "category": [palette[f"s{i}"] for i in range(COLOURS)],
            "heatmap": [page, hot],
            "diverging": [cold, page, hot],
        },
        # The tables beside the charts tell the numbers to screen readers, mark by mark.
        "mark": {"aria": False},
        "style": {
            "band": {"fillOpacity": 0.16},
            "boundary": {"color": soft, "strokeWidth": 1.2, "strokeDash": [6, 3]},
            "square": {"stroke": page, "strokeWidth": 0.6},
            "count": {"color": palette["s0"], "fillOpacity": 0.8, "stroke": page},
            "curve": {"strokeWidth": 2, "strokeCap": "round", "strokeJoin": "round"},
            "dot": {"stroke": page, "strokeWidth": 0.8},
            "halo": {**note, "color": page, "stroke": page, "strokeWidth": 4},
            "missing": {"color": palette["missing"], "stroke": page, "strokeWidth": 0.6},
            "note": {**note, "color": ink},
            "paper": {"color": ink, "fill": page, "strokeWidth": 1.5},
            "rim": {"color": page, "strokeWidth": 4, "strokeOpacity": 0.85},
            "reference": {"color": soft, "strokeWidth": 1, "strokeDash": [5, 4]},
            "strong": {**note, "color": page, "fontSize": 10},
            "value": {**note, "color": ink, "fontSize": 10},
            "whisker": {"color": ink, "strokeWidth": 1.3},
        },
    }
