"""A chart holds its numbers, on axes that show all of them, and counts those it cannot show."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from lm_jax import report
from lm_jax.errors import UsageError
from lm_jax.report import theme

LABELS = {"caption": "c", "x_label": "x", "y_label": "y"}


def spec(chart):
    """A chart as JSON, which altair checks against the schema of Vega-Lite."""
    return json.loads(json.dumps(chart.to_dict(), allow_nan=False))


def domain(chart, channel):
    """The one range that all layers of a chart give an axis."""
    matches = [
        layer["encoding"][channel]["scale"]["domain"]
        for layer in spec(chart)["layer"]
        if "scale" in layer["encoding"].get(channel, {})
    ]
    assert matches and all(each == matches[0] for each in matches)
    return matches[0]


def column(chart, field):
    return [row.get(field) for row in chart.data.values]


def marks(chart, kind):
    return [layer for layer in spec(chart)["layer"] if layer["mark"]["type"] == kind]


@pytest.mark.parametrize("log", [False, True])
def test_curves_hold_their_values_and_bands_and_their_axes_show_them(log):
    rng = np.random.default_rng(0)
    x, y = np.arange(1.0, 9), rng.lognormal(size=8)
    chart = report.curves(
        [report.Series("a", x, y, 0.5 * y, 3 * y), report.Series("b", x[:3], y[:3])],
        caption="c",
        x_label="step",
        y_label="loss (nats)",
        log_y=log,
        h_lines=[(40.0, "bound")],
    )
    assert column(chart, "series") == 8 * ["a"] + 3 * ["b"]
    assert column(chart, "step") == [*x, *x[:3]]
    assert column(chart, "loss") == [*y, *y[:3]]
    assert column(chart, "low") == [*(0.5 * y), None, None, None]
    assert column(chart, "high") == [*(3 * y), None, None, None]
    low, high = domain(chart, "y")
    assert low <= 0.5 * y.min() and high >= max(40, 3 * y.max())
    (band,) = marks(chart, "area")
    assert (band["encoding"]["y"]["field"], band["encoding"]["y2"]["field"]) == ("low", "high")
    (rule,) = marks(chart, "rule")
    assert rule["data"]["values"] == [{"name": "bound", "loss": 40.0}]
    kinds = {
        layer["encoding"]["y"]["scale"]["type"] for layer in [*marks(chart, "line"), band, rule]
    }
    assert kinds == {"log" if log else "linear"}


def test_a_line_breaks_at_nan_and_its_count_is_printed():
    y = np.arange(100.0)
    y[[10, 50, 52]] = np.nan, np.inf, np.nan
    chart = report.curves([report.Series("a", np.arange(100), y)], **LABELS)
    assert [i for i, value in enumerate(column(chart, "y")) if value is None] == [10, 50, 52]
    assert "3 values not shown (not finite)" in chart.usermeta["remark"]


def test_points_that_an_axis_cannot_show_are_counted_and_not_among_the_data():
    chart = report.scatter(
        [report.Points("a", [1, 2, 3, 4], [0, -1, np.inf, 5], None)],
        **LABELS,
        log_y=True,
        x_range=(0, 3),
    )
    remark = chart.usermeta["remark"]
    assert "3 values not shown (not finite, or not positive on a log axis)" in remark
    assert "1 outside the axes" in remark and "Nothing to show." in remark
    assert chart.data.values == [{"group": "a", "x": 4, "y": 5}]
    assert domain(chart, "x") == [0, 3]


def test_boundary_names_stand_on_their_curves_each_a_line_lower_than_the_last():
    x = np.linspace(0, 0.999, 2000)
    degrees = (2, 4, 8, 16)
    chart = report.scatter(
        [report.Points("heads", [0.5], [10])],
        **LABELS,
        boundaries=[report.Series(f"p={p}", x, (1 - x) ** -p) for p in degrees],
        log_y=True,
        x_range=(0, 1),
        y_range=(1, 1e4),
    )
    (walls,) = [layer for layer in marks(chart, "line") if layer["mark"]["style"] == "boundary"]
    drawn = [row["y"] for row in walls["data"]["values"] if row["boundary"] == "p=4"]
    np.testing.assert_array_equal(drawn, (1 - x) ** -4)
    texts = [layer for layer in marks(chart, "text") if layer["mark"]["style"] == "note"]
    places = {layer["data"]["values"][0]["name"]: layer["data"]["values"][0] for layer in texts}
    # (1 - x)^-2 reaches 10^4 at 0.99, and all leave the plot at its top.
    for p in degrees:
        at = places[f"p={p}"]
        assert at["y"] == pytest.approx((1 - at["x"]) ** -p)
    heights = [places[f"p={p}"]["y"] for p in degrees]
    assert heights == sorted(heights, reverse=True) and heights[0] > 10**3.5


def test_histogram_rows_are_the_counts():
    values = np.random.default_rng(0).lognormal(size=500)
    chart = report.histogram(
        np.r_[values, np.nan, -1, 0], caption="c", x_label="x", bins=12, log_x=True
    )
    counts, edges = np.histogram(np.log10(values), 12)
    assert column(chart, "count") == counts.tolist()
    np.testing.assert_allclose(np.log10(column(chart, "from")), edges[:-1], atol=1e-12)
    np.testing.assert_allclose(np.log10(column(chart, "to")), edges[1:], atol=1e-12)
    assert chart.usermeta["n"] == "500" and "3 values not shown" in chart.usermeta["remark"]
    (bars,) = marks(chart, "bar")
    assert bars["encoding"]["y2"] == {"datum": 0} and domain(chart, "y")[0] == 0
    outside = report.histogram([0.5, 1.5, 9], caption="c", x_label="x", bins=[0, 1, 2])
    assert "1 outside the bins" in outside.usermeta["remark"]


def test_bars_whiskers_and_references_share_one_scale():
    chart = report.bars(
        [report.Bar("a", 50, 40, 60, 80), report.Bar("b", -25, -30, -20)],
        caption="c",
        x_label="share (%)",
    )
    assert chart.data.values == [
        {"row": "a", "share": 50, "low": 40, "high": 60, "reference": 80},
        {"row": "b", "share": -25, "low": -30, "high": -20, "reference": None},
    ]
    low, high = domain(chart, "x")
    assert low <= -30 and high >= 80
    (whisker,) = marks(chart, "rule")
    assert (whisker["encoding"]["x"]["field"], whisker["encoding"]["x2"]["field"]) == (
        "low",
        "high",
    )
    (paper,) = marks(chart, "point")
    assert paper["encoding"]["x"]["field"] == "reference"
    without_intervals = report.bars([report.Bar("a", 1)], caption="c", x_label="x")
    assert not marks(without_intervals, "rule") and not marks(without_intervals, "point")


def test_heat_map_cells_are_the_matrix_and_its_colours_follow_sign_and_size():
    chart = report.heat_map([[-4.0, 2.0], [1.0, np.nan]], **LABELS, value_label="v")
    assert column(chart, "v") == [-4.0, 2.0, 1.0, None]
    assert list(zip(column(chart, "y"), column(chart, "x"), strict=True)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    cells, missing = marks(chart, "rect")
    scale = cells["encoding"]["color"]["scale"]
    assert (scale["domain"], scale["range"]) == ([-4, 0, 4], "diverging")
    assert missing["transform"] == [{"filter": {"field": "v", "valid": False}}]
    rising = report.heat_map([[1.0, 2.0, 3.0]], **LABELS)
    scale = marks(rising, "rect")[0]["encoding"]["color"]["scale"]
    assert (scale["domain"], scale["range"]) == ([1, 3], "heatmap")


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (lambda **k: report.curves([report.Series("a", [1, 2], [1])], **k), "1-D fields"),
        (lambda **k: report.curves([], x_range=(1, 1), **k), "axis range x_range="),
        (lambda **k: report.curves([], y_range=(0, 1), log_y=True, **k), "y_range=.*log axis"),
        (lambda **k: report.curves([report.Series("a", *np.zeros((2, 20_001)))], **k), "20,001"),
        (lambda **k: report.histogram([1], bins=[1, 1], **k), "increasing"),
        (lambda **k: report.histogram([1], bins=[0, 1], log_x=True, **k), "positive on a log"),
        (lambda **k: report.heat_map([[1]], row_labels=["a", "b"], **k), "row_labels has 2"),
    ],
)
def test_a_chart_names_what_it_cannot_draw(draw, named):
    with pytest.raises(UsageError, match=named):
        draw(**LABELS)


@pytest.mark.parametrize("values", [[], [np.nan], [0.0], [5.0], [1e300, -1e300], [1e-300], [1e308]])
def test_degenerate_values_make_valid_specifications(values):
    count = len(values)
    charts = [
        report.curves([report.Series("a", range(count), values)], log_y=log, **LABELS)
        for log in (False, True)
    ]
    charts += [
        report.scatter([report.Points("a", values, values)], **LABELS),
        report.histogram(values, **LABELS),
        report.histogram(values, log_x=True, **LABELS),
        report.heat_map(np.reshape(values, (1, count)), **LABELS),
        report.bars([report.Bar("a", value) for value in values], caption="c", x_label="x"),
        report.curves([report.Series("a", range(count), values)], y_range=(0, 1e-9), **LABELS),
    ]
    for chart in charts:
        text = json.dumps(spec(chart))
        assert not re.search(r"\bNaN\b|Infinity", text)


def _luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_text_and_series_stand_out_from_the_page(palette):
    """WCAG 2: 4.5 for text, about 3 for marks, whose dash and shape repeat the colour."""
    page = _luminance(palette["page"])

    def contrast(name):
        one, two = sorted((page, _luminance(palette[name])))
        return (two + 0.05) / (one + 0.05)

    assert min(map(contrast, ("ink", "soft"))) >= 4.5
    assert min(contrast(f"s{i}") for i in range(8)) >= 2.9


def test_importing_reports_imports_no_library_of_charts():
    code = "import sys, lm_jax.report; assert not {'altair', 'vl_convert'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
