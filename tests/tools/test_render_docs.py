"""Pages are what results/ give: a changed digit in a page or in a result is found."""

import re
import shutil

import pytest

from tools import render_docs

ROOT = render_docs.ROOT
PAGES = render_docs.pages(ROOT)
DIGIT = re.compile(r"(?<=[| (])\d(?=\.\d)")


def blocks(text):
    """Start and end of what the marked blocks of a page printed."""
    block = re.compile(r"\[\[\[cog .*?\]\]\] -->\n(.*?)<!-- \[\[\[end", re.S)
    return [match.span(1) for match in block.finditer(text)]


def test_every_block_is_what_the_results_give(capsys):
    assert render_docs.check_results(ROOT) == []
    assert render_docs.render(PAGES, check=True) == 0, capsys.readouterr().out


@pytest.mark.parametrize("turn", range(10))
def test_a_changed_digit_in_a_page_is_found(tmp_path, capsys, turn):
    page = PAGES[turn % len(PAGES)]
    text = page.read_text("utf-8")
    places = [
        start + match.start()
        for start, end in blocks(text)
        for match in DIGIT.finditer(text[start:end])
    ]
    at = places[turn * 7 % len(places)]
    changed = tmp_path / page.name
    changed.write_text(text, "utf-8")
    assert render_docs.render([changed], check=True) == 0
    changed.write_text(f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}", "utf-8")
    assert render_docs.render([changed], check=True) == 1


@pytest.mark.parametrize("name", ["pretrain/h200_ten_epochs", "check_kernels/h200"])
def test_a_changed_digit_in_a_result_is_found(tmp_path, name):
    shutil.copytree(ROOT / "results" / name, tmp_path / "results" / name)
    assert render_docs.check_results(tmp_path) == []
    file = tmp_path / "results" / name / "summary.json"
    text = file.read_text("utf-8")
    at = text.index("9")
    file.write_text(f"{text[:at]}8{text[at + 1 :]}", "utf-8")
    assert render_docs.check_results(tmp_path) == [f"results/{name}: summary.json"]


def test_the_results_are_small():
    files = [file for file in (ROOT / "results").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 40e6
