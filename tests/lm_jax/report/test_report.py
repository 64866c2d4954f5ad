"""Reports: a page shows its data, hostile text stays text, nothing is fetched."""

import base64
import hashlib
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
from lm_jax.report.figure import MARK, figure
from lm_jax.report.markup import clean, element
from lm_jax.run.files import write_text
from lm_jax.statistics import Interval, wilson
from tests.browser import PageReader

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


def _xml(part):
    """Parses a part as strict XML, which fails on anything unescaped or unclosed."""
    assert isinstance(part, Markup)
    return ElementTree.fromstring(f"<div>{part}</div>")


def _marks(part, style):
    return [node for node in _xml(part).iter() if style in node.get("class", "").split()]


def _text(node):
    return "".join(node.itertext())


def _charts(text):
    """Every kind of chart, with `text` wherever a caller may put any."""
    labels = {"caption": text, "x_label": text, "y_label": text}
    bar = {"caption": text, "x_label": text, "reference_label": text}
    return [
        report.curves(
            [report.Series(text, [1, 2, 3], [1, np.nan, 3], [0, 0, 2], [2, 2, 4])],
            **labels,
            n=text,
            h_lines=[(2, text), (np.nan, text)],
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
    ]


def _parts(text):
    """Every part of a report, with `text` wherever a caller may put any."""
    parts = [
        *(figure(chart) for chart in _charts(text)),
        report.words([text, text], [1, np.nan], caption=text, titles=[text, text]),
        report.words([text], [-1], caption=text),
        report.table([text], [[text], [report.cell(text, note=text, tone="bad")]], caption=text),
        report.verdict(text, text, tone="warn"),
        report.coverage(1, 2, missing=[text]),
        report.key_values({text: text, "nested": {text: [text]}}),
        report.details(text, text),
    ]
    return [*parts, report.grid(*parts[:2])]


def _still(text="plain"):
    return [part for part in _parts(text) if MARK not in part]


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
    reader = PageReader(page)
    harmless = report.page("t", [report.section("t", *_parts("plain"))], provenance={})
    assert {tag for tag, _ in reader.tags} <= {tag for tag, _ in PageReader(harmless).tags} | {"p"}
    # the reader sees the text itself, not its entities, once per place
    assert reader.text.count(clean(text)) > 20


@hypothesis.given(st.text(st.characters(exclude_categories=[])))
@hypothesis.settings(max_examples=100, deadline=None)
def test_any_text_survives_an_element_as_valid_xml(text):
    node = ElementTree.fromstring(element("a", {"title": text}, text))
    # XML reads a carriage return as a line end
    assert (node.text or "") == re.sub("\r\n?", "\n", clean(text))


def test_a_page_without_charts_has_no_script_and_asks_for_nothing():
    reader = PageReader(
        page := report.page("t", [report.section("s", *_still())], provenance={"seed": 0})
    )
    policy = next(
        a["content"] for _, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.split("; ")[0] == "default-src 'none'"
    assert "script-src" not in policy
    assert not {"script", "link", "img", "iframe", "object", "base"} & {t for t, _ in reader.tags}
    links = reader.values("href", "src", "action")
    assert all(link.startswith("#") for link in links)
    assert "url(" not in page and "@import" not in page


def test_a_script_runs_by_its_hash_only():
    script = "document.title = 'a & b < c';"
    page = report.page("t", [], provenance={}, script=script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a for _, a in PageReader(page).tags if a.get("http-equiv"))["content"]
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
    reader = PageReader(report.page("t", sections, provenance={}))
    ids = [a["id"] for tag, a in reader.tags if tag == "section"]
    assert len(set(ids)) == 3
    assert [a["href"] for tag, a in reader.tags if tag == "a"] == [f"#{one}" for one in ids]


def test_provenance_shows_nested_fields_by_dotted_name():
    page = report.page("t", [], provenance={"versions": {"jax": "0.1"}, "seeds": [0, 1]})
    assert re.search(r"versions\.jax\s*0\.1\s*seeds\s*0, 1", PageReader(page).text)


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


def test_words_keep_their_text_in_order():
    tokens = ["The", " cat", "\n", " sat", "<b>"]
    (line,) = _xml(report.words(tokens, range(5), caption="c")).iter("p")
    assert _text(line).replace("↵", "") == "".join(tokens)


@pytest.mark.parametrize(("count", "n"), [(1, "n = 1 word"), (2, "n = 2 words")])
def test_what_a_text_is_cut_into_stands_beside_its_number(count, n):
    drawn = report.words(["a"] * count, range(count), caption="c", unit="word")
    assert _text(_xml(drawn).find(".//figcaption")).endswith(n)


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


def test_a_table_of_rows_is_what_its_columns_make_of_each():
    rows = [Interval(0.5, 0.25, 0.75, 8), Interval(0.125, 0.0, 0.25, 9)]
    columns = [
        report.Column("rate", ".2f", lambda row: row.estimate),
        report.Column("n", value=lambda row: report.cell(row.n, note="prompts")),
    ]
    part = report.table_of(rows, columns, caption="c", n=2)
    cells = [[0.5, report.cell(8, note="prompts")], [0.125, report.cell(9, note="prompts")]]
    assert part == report.table([report.Column("rate", ".2f"), "n"], cells, caption="c", n=2)
    assert "no rows" in report.table_of([], columns, caption="c")
    with pytest.raises(UsageError, match="column 'a' has no function"):
        report.table_of(rows, [report.Column("a")], caption="c")


def test_a_rate_prints_its_interval_and_n():
    cell = report.rate(Interval(0.985, 0.957, 0.995, 1200))
    assert (cell.text, cell.note) == ("98.5 [95.7, 99.5]", "n = 1,200")
    assert report.rate(None) == report.cell(None)


def test_a_section_of_nothing_is_left_out():
    shown = [report.section("One", "text"), report.section("Two", "text")]
    pages = [report.page("t", own, provenance={}) for own in (shown, [shown[0], None, shown[1]])]
    assert pages[0] == pages[1]


def test_a_gap_in_the_rows_is_a_warning_that_names_it():
    whole, holed = report.coverage(5, 5), report.coverage(40, 100, missing=["rows-3.parquet"])
    assert "all 5 rows" in _text(_xml(whole)) and not _marks(whole, "warn")
    (banner,) = _marks(holed, "warn")
    assert "40 of 100 rows" in _text(banner) and "rows-3.parquet" in _text(banner)
