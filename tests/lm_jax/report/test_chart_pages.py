"""A page with charts holds their libraries once, their numbers twice, and makes no request."""

import base64
import hashlib
import html
import json
import re

import numpy as np
import pytest

from lm_jax import report
from lm_jax.report.markup import json_script
from tests.browser import drive, without_scripts

HOSTILE = "</script><img src=x onerror=alert(1)>\ud800\x00 漢 ]]> &amp;"
X = [1, 2.5, 41_666, 1e-7]
XY = {"x_label": "x", "y_label": "y"}


def charts(text="plain"):
    y = [3.25, -1.0, 0.123456, 1e6]
    labels = {"caption": text, **XY}
    return [
        report.curves([report.Series(text, X, y, np.subtract(y, 1), np.add(y, 1))], **labels),
        report.scatter([report.Points(text, X, y, [text, "b", "c", "d"])], **labels),
        report.histogram(X, caption=text, x_label="x", bins=3, markers=[(2.0, text)]),
        report.bars([report.Bar(text, 50, 40, 60, 55)], caption=text, x_label="x"),
        report.heat_map([[1, 2], [3, np.nan]], **labels, row_labels=[text, text]),
    ]


def page(*parts, **options):
    return report.page("t", [report.section("s", *parts)], provenance={}, **options)


def scripts(text):
    """The attributes and contents of the script elements."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL)


def test_the_libraries_are_in_a_page_once_and_only_where_a_chart_is():
    text = page(*charts(), report.grid(*charts()), report.details("more", *charts()))
    code = [content for attributes, content in scripts(text) if not attributes]
    assert len(code) == 2
    assert ["window.vegaEmbed=" in one for one in code] == [True, False]
    assert text.count('<figure class="plot chart"') == 15
    assert text == page(*charts(), report.grid(*charts()), report.details("more", *charts()))
    without = page("no chart", report.table(["a"], [[1]], caption="c"))
    assert "vega" not in without.split("</style>")[1] and not scripts(without)


def test_only_the_scripts_of_the_page_run_and_none_evaluates_text():
    text = page(*charts(), script="own();")
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    hashes = [
        base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        for attributes, content in scripts(text)
        if not attributes
    ]
    assert len(hashes) == 3
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [f"'sha256-{one}'" for one in hashes]


def test_no_address_is_in_a_page_but_in_the_code_of_the_libraries():
    text = page(*charts())
    own = without_scripts(text)
    assert "http" not in own.replace('http-equiv="', "")
    assert not re.search(r'(src|href)="(?!#)', own)


def test_specifications_are_whole_and_hostile_text_cannot_leave_them():
    text = page(*charts(HOSTILE))
    text.encode()
    held = [content for attributes, content in scripts(text) if "json" in attributes]
    specs = [json.loads(content) for content in held if "layer" in json.loads(content)]
    assert len(specs) == 5
    assert not [content for content in held if set("<>&") & set(content)]
    assert "<img" not in without_scripts(text)
    for drawn, chart in zip(specs, charts(HOSTILE), strict=True):
        assert drawn["data"]["values"] == json.loads(json.dumps(chart.data.values))
        assert not {"config", "usermeta", "$schema", "title"} & set(drawn)
        assert drawn["width"] == "container"
    assert json.loads(json_script({"a": HOSTILE})) == {"a": HOSTILE}


def number(text):
    return float(text.replace(",", "").replace("−", "-"))


def test_the_table_of_a_chart_holds_every_number_of_it_with_four_digits_or_all_of_a_whole_one():
    for chart in charts()[:4]:
        text = page(chart)
        table = re.search(r'<details class="numbers">.*?</details>', text, re.DOTALL)[0]
        cells = re.findall(r"<td>(.*?)</td>", table)
        printed = [number(cell) for cell in cells if re.fullmatch(r"[−\d.,e+]+", cell)]
        assert cells
        fields = chart.usermeta["columns"]
        values = [row[field] for row in chart.data.values for field in fields if field in row]
        for value in values:
            if isinstance(value, int):
                assert value in printed
            elif isinstance(value, float):
                # half a unit of the fourth digit
                assert any(abs(value - one) <= 5e-4 * abs(value) for one in printed), value
            elif value is not None:
                assert html.escape(value) in cells
    assert "Lines: plain at 2." in re.sub(r"\.00", ".", page(charts()[2]))


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
def test_charts_are_drawn_within_the_screen(tmp_path, width):
    folded = report.details("more", *charts(HOSTILE))
    result = drive(
        tmp_path,
        page(report.grid(*charts()), folded),
        """
        const drawn = () => all("figure.chart .vega-actions").length;
        await until(() => drawn() >= 5);
        const before = drawn();
        $("main > section > details").open = true;
        await until(() => drawn() >= 10);
        const root = page.document.documentElement;
        return {
          before, after: drawn(), wide: [root.clientWidth, root.scrollWidth],
          over: all("figure.chart").filter((f) =>
            f.querySelector("svg.marks").getBoundingClientRect().right
              > f.getBoundingClientRect().right + 1).length,
          actions: [...$("figure.chart .vega-actions").children].map((a) => a.textContent),
          hint: $(".charts-hint").hidden,
          images: all("img").length,
        };""",
        width=width,
    )
    assert (result["before"], result["after"], result["over"]) == (5, 10, 0)
    assert result["wide"][0] == result["wide"][1]
    assert result["actions"] == ["Save as SVG", "Save as PNG"]
    assert result["hint"] is False and result["images"] == 0


@pytest.mark.slow
def test_the_pointer_shows_the_numbers_and_the_menu_saves_the_figure(tmp_path):
    result = drive(
        tmp_path,
        page(report.bars([report.Bar("a", 50, 40, 60)], caption="Two bars.", x_label="share (%)")),
        """
        await until(() => $(".vega-actions"));
        const bar = $("svg.marks .mark-rect path");
        const box = bar.getBoundingClientRect();
        bar.dispatchEvent(new page.MouseEvent("pointermove", {
          bubbles: true, clientX: box.left + 5, clientY: box.top + 5 }));
        bar.dispatchEvent(new page.PointerEvent("pointerover", {
          bubbles: true, clientX: box.left + 5, clientY: box.top + 5 }));
        await settle();
        const link = $(".vega-actions a");
        link.dispatchEvent(new page.MouseEvent("mousedown", { bubbles: true }));
        await until(() => /^(blob|data):/.test(link.href));
        const saved = link.href.startsWith("data:image/svg+xml")
          ? decodeURIComponent(link.href.split(",")[1])
          : await (await fetch(link.href)).text();
        return { tip: $("#vg-tooltip-element")?.textContent, name: link.download, saved };""",
    )
    assert result["name"] == "two-bars.svg"
    assert result["saved"].startswith("<svg") and "share (%)" in result["saved"]
    assert re.search(r"share \(%\):?\s*50", result["tip"])
