"""Reports: what a page shows is what it was given, hostile text stays text, nothing is fetched."""

import base64
import hashlib
import html.parser
import math
import re
from xml.etree import ElementTree

import hypothesis
from hypothesis import strategies as st
from markupsafe import Markup
import numpy as np
import pytest

from lm_jax import report
from lm_jax.errors import StorageError, UsageError
from lm_jax.report.markup import clean, element
from lm_jax.run.files import write_text
from lm_jax.statistics import Interval, wilson

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "\"' onmouseover='alert(1)",
    "{{ 7 * 7 }} {% raw %}",
    "]]> <!-- &amp; &#0;",
    r"$x$ $$ \foo",
    "漢字カナ 한국어 ܐ العربية \u202eabc",
    "\x00\x01\x1b[31m\x7f\x85\ufffe",
    "\ud800 lone",
    "line\nbreak\ttab\r",
    "x" * 3000,
    "",
]


class _Reader(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def _xml(part):
    """Parses a part as strict XML, which fails on anything unescaped or unclosed."""
    assert isinstance(part, Markup)
    return ElementTree.fromstring(f"<div>{part}</div>")


def _marks(part, style):
    return [node for node in _xml(part).iter() if style in node.get("class", "").split()]


def _text(node):
    return "".join(node.itertext())


def _parts(text):
    """Every part of a report, with `text` wherever a caller may put any."""
    labels = {"caption": text, "x_label": text, "y_label": text}
    bar = {"caption": text, "x_label": text, "v_lines": [(1, text)]}
    shown = [
        report.curves(
            [report.Series(text, [1, 2, 3], [1, np.nan, 3], [0, 0, 2], [2, 2, 4])],
            **labels,
            n=text,
            h_lines=[(2, text), (np.nan, text)],
            annotations=[report.Note(2, 2, text), report.Note(9, 9, text)],
        ),
        report.scatter(
            [report.Points(text, [1, np.inf], [1, 2], [text, text])],
            **labels,
            boundaries=[report.Series(text, [0, 1, 2], [0, 1, 9])],
        ),
        report.histogram([1, 2, np.nan], **labels, markers=[(1.5, text)]),
        report.bars([report.Bar(text, 1, 0, 2, 1), report.Bar(text, math.nan)], **bar),
        report.heat_map([[1, np.nan]], **labels, row_labels=[text], column_labels=[text, 1]),
        report.heat_map([[1, -2]], **labels, titles=[[text, text]], show_values=True),
        report.words([text, text], [1, np.nan], caption=text, titles=[text, text]),
        report.words([text], [-1], caption=text),
        report.table([text], [[text], [report.cell(text, note=text, tone="bad")]], caption=text),
        report.verdict(text, text, tone="warn"),
        report.coverage(1, 2, missing=[text]),
        report.key_values({text: text, "nested": {text: [text]}}),
        report.details(text, text),
    ]
    return [*shown, report.grid(*shown[:2])]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:24])
def test_hostile_text_stays_text_in_every_part(text):
    parts = _parts(text)
    allowed = {node.tag for part in _parts("plain") for node in _xml(part).iter()}
    for part in parts:
        nodes = list(_xml(part).iter())
        assert {node.tag for node in nodes} <= allowed
        assert not [name for node in nodes for name in node.attrib if name.startswith("on")]
    page = report.page(
        text, [report.section(text, text, *parts)], provenance={text: text}, lead=[text]
    )
    page.encode()
    reader = _Reader(page)
    plain = report.page("t", [report.section("t", *_parts("plain"))], provenance={})
    assert {tag for tag, _ in reader.tags} <= {tag for tag, _ in _Reader(plain).tags} | {"p"}
    # the reader sees the text itself, not its entities, once per place
    assert reader.text.count(clean(text)) > 20


@hypothesis.given(st.text(st.characters(exclude_categories=[])))
@hypothesis.settings(max_examples=100, deadline=None)
def test_any_text_survives_an_element_as_valid_xml(text):
    node = ElementTree.fromstring(element("a", {"title": text}, text))
    # XML reads a carriage return as a line end
    assert (node.text or "") == re.sub("\r\n?", "\n", clean(text))


def test_a_page_asks_for_nothing_outside_itself():
    reader = _Reader(
        page := report.page("t", [report.section("s", *_parts("plain"))], provenance={"seed": 0})
    )
    policy = next(
        a["content"] for _, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.split("; ")[0] == "default-src 'none'"
    assert "script-src" not in policy
    assert not {"script", "link", "img", "iframe", "object", "base"} & {t for t, _ in reader.tags}
    links = [a[name] for _, a in reader.tags for name in ("href", "src", "action") if name in a]
    assert all(link.startswith("#") for link in links)
    assert "url(" not in page and "@import" not in page


def test_a_script_runs_by_its_hash_only():
    script = "document.title = 'a & b < c';"
    page = report.page("t", [], provenance={}, script=script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a for _, a in _Reader(page).tags if a.get("http-equiv"))["content"]
    assert f"script-src 'sha256-{digest}'" in policy
    assert f"<script>{script}</script>" in page
    with pytest.raises(UsageError, match="script contains"):
        report.page("t", [], provenance={}, script="'</script>'")


def test_a_page_takes_style_of_its_own_after_the_house_style():
    page = report.page("t", [], provenance={}, style=".own { color: red; }\n")
    assert page.index(".own { color: red; }") > page.index("h1 {")
    with pytest.raises(UsageError, match="style contains"):
        report.page("t", [], provenance={}, style="</style>")


def test_contents_lead_to_their_sections_even_when_titles_agree():
    sections = [report.section(title, "x") for title in ("A b", "A b", "漢字")]
    reader = _Reader(report.page("t", sections, provenance={}))
    ids = [a["id"] for tag, a in reader.tags if tag == "section"]
    assert len(set(ids)) == 3
    assert [a["href"] for tag, a in reader.tags if tag == "a"] == [f"#{one}" for one in ids]


def test_provenance_shows_nested_fields_by_dotted_name():
    page = report.page("t", [], provenance={"versions": {"jax": "0.1"}, "seeds": [0, 1]})
    assert re.search(r"versions\.jax\s*0\.1\s*seeds\s*0, 1", _Reader(page).text)


def test_write_replaces_a_report_whole_and_refuses_a_missing_folder(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    page = report.page("漢字", [], provenance={})
    write_text(path, page)
    assert path.read_text(encoding="utf-8") == page
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(StorageError, match="no-such-folder"):
        write_text(tmp_path / "no-such-folder" / "report.html", page)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..", "a/b\\c", "漢字", "", "C:\\x", "." * 99]
)
def test_a_slug_cannot_leave_its_folder(name):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", report.slug(name))


def _axis(part, anchor):
    """Returns the map from drawing units to data that the tick labels of one axis state."""
    ticks = [node for node in _marks(part, "tick") if node.get("text-anchor") == anchor]
    place = "y" if anchor == "end" else "x"
    shown = [
        (float(node.get(place)), float(node.text.replace(",", "").replace("−", "-")))
        for node in ticks
    ]
    return np.array(shown).T


@pytest.mark.parametrize("log", [False, True])
def test_points_stand_where_the_ticks_say(log):
    x, y = np.array([0.2, 3.0, 40.0, 900.0]), np.array([70.0, 0.5, 8.0, 30.0])
    part = report.scatter(
        [report.Points("a", x, y)], caption="c", x_label="x", y_label="y", log_x=log, log_y=log
    )
    results = []
    for anchor, axis in (("middle", 0), ("end", 1)):
        places, values = _axis(part, anchor)
        line = np.polyfit(places, np.log10(values) if log else values, 1)
        starts = [
            re.match(r"M([\d.]+) ([\d.]+)", node.get("d")) for node in _marks(part, "dot")[1:]
        ]
        # a disc is drawn from its left end, 3.4 units off its middle
        drawn = np.array([float(start[axis + 1]) for start in starts]) + (3.4 if axis == 0 else 0)
        results.append(np.polyval(line, drawn))
    expected = np.log10([x, y]) if log else np.array([x, y])
    np.testing.assert_allclose(results, expected, atol=0.004 * np.ptp(expected, axis=1).max())


def test_a_line_breaks_at_nan_and_its_count_is_told():
    y = np.arange(100.0)
    y[[10, 50, 52]] = np.nan
    part = report.curves(
        [report.Series("a", np.arange(100), y)], caption="c", x_label="x", y_label="y"
    )
    strokes = [node.get("d") for node in _marks(part, "s0") if node.tag.endswith("path")]
    assert [len(d.split(" ")) for d in strokes] == [10, 39, 1, 47]
    assert "3 values not shown" in _text(_xml(part))


def test_a_long_line_keeps_its_extremes_on_linear_and_log_axes():
    x = np.arange(1, 200_001)
    y = np.sin(x / 7.0)
    y[[5, 123_456]] = 40.0, -40.0
    for log_x in (False, True):
        part = report.curves(
            [report.Series("", x, y)], caption="c", x_label="x", y_label="y", log_x=log_x
        )
        (path,) = [node for node in _marks(part, "line") if node.tag.endswith("path")]
        points = np.array([p.split(",") for p in path.get("d")[1:].split(" ")], dtype=float)
        assert len(points) < 8000
        # the spikes reach across the axis, whose margins are 4 % of the range
        assert np.ptp(points[:, 1]) == pytest.approx((330 - 28 - 12) / 1.08, abs=0.3)


def test_values_that_an_axis_cannot_show_are_counted():
    part = report.scatter(
        [report.Points("a", [1, 2, 3, 4], [0, -1, np.inf, 5], None)],
        caption="c",
        x_label="x",
        y_label="y",
        log_y=True,
        x_range=(0, 3),
        annotations=[report.Note(9, 5, "far")],
    )
    text = _text(_xml(part))
    assert "3 values not shown (not finite, or not positive on a log axis)" in text
    assert "1 outside the axes" in text and "Notes outside the axes: far" in text
    assert "nothing to show" in text


def test_boundary_labels_stand_over_the_places_where_the_curves_leave():
    x = np.linspace(0, 0.999, 2000)
    walls = [report.Series(f"p={p}", x, (1 - x) ** -p) for p in (2, 4, 8, 16)]
    part = report.scatter(
        [report.Points("heads", [0.5], [10])],
        caption="c",
        x_label="x",
        y_label="y",
        boundaries=walls,
        log_y=True,
        x_range=(0, 1),
        y_range=(1, 1e4),
    )
    places, values = _axis(part, "middle")
    at = {node.text: float(node.get("x")) for node in _marks(part, "note")}
    results = [np.polyval(np.polyfit(places, values, 1), at[f"p={p}"]) for p in (4, 8, 16)]
    # A (1 - rho)^p = 1 reaches A = 10^4 at rho = 1 - 10^(-4/p)
    np.testing.assert_allclose(results, 1 - 10 ** (-4 / np.array([4, 8, 16])), atol=0.03)


def test_histogram_bars_are_the_counts():
    values = np.random.default_rng(0).lognormal(size=500)
    part = report.histogram(
        np.r_[values, np.nan, -1, 0], caption="c", x_label="x", bins=12, log_x=True
    )
    heights = np.array([float(node.get("height")) for node in _marks(part, "bar")])
    counts, _ = np.histogram(np.log10(values), 12)
    np.testing.assert_allclose(heights / heights.max(), counts / counts.max(), atol=1e-4)
    assert "n = 500" in _text(_xml(part)) and "3 values not shown" in _text(_xml(part))
    outside = report.histogram([0.5, 1.5, 9], caption="c", x_label="x", bins=[0, 1, 2])
    assert "1 outside the bins" in _text(_xml(outside))


def test_bars_whiskers_and_references_share_one_scale():
    part = report.bars(
        [report.Bar("a", 50, 40, 60, 80), report.Bar("b", -25, -30, -20)], caption="c", x_label="x"
    )
    places, values = _axis(part, "middle")
    slope = np.polyfit(values, places, 1)[0]
    widths = [float(node.get("width")) for node in _marks(part, "bar")[1:]]
    np.testing.assert_allclose(widths, [50 * slope, 25 * slope], atol=0.05)
    spans = [float(node.get("x2")) - float(node.get("x1")) for node in _marks(part, "whisker")]
    np.testing.assert_allclose(sorted(spans)[-2:], [10 * slope, 20 * slope], atol=0.05)
    assert len(_marks(part, "reference")) == 2


def test_heat_map_colours_follow_sign_and_size():
    part = report.heat_map([[-4.0, 2.0], [1.0, np.nan]], caption="c", x_label="x", y_label="y")
    cells = _marks(part, "cell")
    assert [node.get("class") for node in cells] == [
        "cell cold",
        "cell hot",
        "cell hot",
        "cell missing",
    ]
    assert [node.get("fill-opacity") for node in cells] == ["1", "0.5", "0.25", None]
    rising = report.heat_map([[1.0, 2.0, 3.0]], caption="c", x_label="x", y_label="y")
    assert [node.get("fill-opacity") for node in _marks(rising, "cell")] == ["0", "0.5", "1"]


def test_words_keep_their_text_in_order():
    tokens = ["The", " cat", "\n", " sat", "<b>"]
    (line,) = _xml(report.words(tokens, range(5), caption="c")).iter("p")
    assert _text(line).replace("↵", "") == "".join(tokens)


@pytest.mark.parametrize(
    ("ours", "paper", "tone"),
    [
        (0.196, 0.196, "good"),
        (0.206, 0.196, "good"),
        (0.215, 0.196, "warn"),
        (0.300, 0.196, "bad"),
        (math.nan, 0.196, "bad"),
        (wilson(30, 100), 0.22, "warn"),
        (wilson(3000, 10_000), 0.22, "bad"),
        (0.5, None, "none"),
    ],
)
def test_a_comparison_takes_the_tone_of_its_distance(ours, paper, tone):
    cell = report.compared(ours, paper, tolerance=0.01, scale=100)
    assert cell.tone == tone
    assert ("paper 19.6 ± 1.0" in cell.note) == (paper == 0.196)


def test_a_tone_is_also_a_sign():
    signs = [
        _text(node)
        for tone in ("good", "warn", "bad")
        for node in _marks(report.table(["a"], [[report.cell(1, tone=tone)]], caption="c"), "sign")
    ]
    assert len(set(signs)) == 3
    with pytest.raises(UsageError, match="tone='fine'"):
        report.cell(1, tone="fine")


def test_tables_align_numbers_and_say_when_they_are_empty():
    part = report.table(
        ["name", report.Column("rate", ".1f")],
        [["a", 1.25], ["b", None], ["c", np.nan]],
        caption="c",
    )
    sides = [node.get("class").split()[0] for node in _xml(part).iter("td")]
    assert sides == ["left", "right"] * 3
    assert [_text(node).strip() for node in _xml(part).iter("td")][1::2] == ["1.2", "–", "NaN"]
    assert "no rows" in _text(_xml(report.table(["a", "b"], [], caption="c")))
    with pytest.raises(UsageError, match="row 1 has 1 values for 2 columns"):
        report.table(["a", "b"], [[1, 2], [1]], caption="c")


def test_a_rate_prints_its_interval_and_n():
    cell = report.rate(Interval(0.985, 0.957, 0.995, 1200))
    assert (cell.text, cell.note) == ("98.5 [95.7, 99.5]", "n = 1,200")


def test_a_gap_in_the_rows_is_a_warning_that_names_it():
    whole, holed = report.coverage(5, 5), report.coverage(40, 100, missing=["rows-3.parquet"])
    assert "all 5 rows" in _text(_xml(whole)) and not _marks(whole, "warn")
    (banner,) = _marks(holed, "warn")
    assert "40 of 100 rows" in _text(banner) and "rows-3.parquet" in _text(banner)


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (lambda **k: report.curves([report.Series("a", [1, 2], [1])], **k), "1-D fields"),
        (lambda **k: report.curves([report.Series("a", [1], [1], [0])], **k), "low and high"),
        (lambda **k: report.curves([], x_range=(1, 1), **k), "axis range"),
        (lambda **k: report.scatter([report.Points("a", *np.zeros((2, 20_001)))], **k), "20,001"),
        (lambda **k: report.histogram([1], bins=[1, 1], **k), "increasing"),
        (lambda **k: report.heat_map([1, 2], **k), "rows by columns"),
        (lambda **k: report.heat_map([[1]], scale="divergin", **k), "did you mean 'diverging'"),
    ],
)
def test_a_plot_names_what_it_cannot_draw(draw, named):
    with pytest.raises(UsageError, match=named):
        draw(caption="c", x_label="x", y_label="y")


@pytest.mark.parametrize("values", [[], [np.nan], [0.0], [5.0], [1e300, -1e300], [1e-300], [1e308]])
def test_degenerate_values_draw_with_finite_coordinates(values):
    labels = {"caption": "c", "x_label": "x", "y_label": "y"}
    count = len(values)
    parts = [
        report.curves([report.Series("a", range(count), values)], log_y=log, **labels)
        for log in (False, True)
    ]
    parts += [
        report.scatter([report.Points("a", values, values)], **labels),
        report.histogram(values, **labels),
        report.histogram(values, log_x=True, **labels),
        report.heat_map(np.reshape(values, (1, count)), **labels),
        report.bars([report.Bar("a", value) for value in values], caption="c", x_label="x"),
        report.curves([report.Series("a", range(count), values)], y_range=(0, 1e-9), **labels),
    ]
    for part in parts:
        for node in _xml(part).iter():
            for name in ("x", "y", "x1", "y1", "width", "height", "d", "points"):
                assert not re.search("nan|inf|e", node.get(name, ""))
