"""Pages are what results/ give: a changed digit in a page or in a result is found."""

import re
import shutil

import pytest

from tools import render_docs

ROOT = render_docs.ROOT
PAGES = render_docs.pages(ROOT)
DIGIT = re.compile(r"(?<=[| (+-])\d(?=\.\d)")


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


@pytest.mark.parametrize("page", render_docs.all_pages(ROOT), ids=lambda page: page.name)
def test_no_page_has_a_measured_number_without_data(page):
    assert render_docs.numbers_without_data(page.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "words",
    [
        "45.7 [44.0, 47.7] % of rows",
        "−45 [−66, −22] points",
        "93.3 % [87.4, 96.6]",
        "0.466 (0.453 to 0.480)",
        "20 prompts (n = 20)",
        "at commit 0f78c75",
        "is 1.13 times as fast",
        "a perplexity of 72.7",
    ],
)
def test_a_measured_number_without_data_is_found(words):
    text = f"# A page\n\nHere it {words}, they say.\n"
    ((line, found),) = render_docs.numbers_without_data(text)
    assert line == 3 and found in words
    block = f'<!-- [[[cog cog.out(numbers("a/b")) ]]] -->\n{words}\n<!-- [[[end]]] -->\n'
    assert render_docs.numbers_without_data(f"# A page\n\n{block}") == []
    assert render_docs.numbers_without_data(f"# A page\n\n```\n{words}\n```\n") == []


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
