"""The index page of `iaj quickstart`: a picture and the answer of each report that is there.

Every sentence is a report's own: the verdict on top of its page, or a sentence of the numbers in
its summary. Nothing is measured here.
"""

from collections.abc import Callable, Sequence
import dataclasses
import html
import math
import os
from pathlib import Path
import re
import statistics

from markupsafe import Markup

from lm_jax import report
from lm_jax.report.markup import element
from lm_jax.run.files import read_json, write_bytes

_VERDICT = re.compile(r'<div class="verdict[^>]*>\s*<strong>(.*?)</strong>', re.DOTALL)
_STYLE = """
main h2 { margin: 1.6rem 0 0.6rem; }
main > section:first-child h2 { margin-top: 1.2rem; }
.card { display: grid; grid-template-columns: minmax(0, 22rem) minmax(0, 1fr); gap: 0 2rem; }
.card svg { display: block; width: 100%; height: auto; }
.card .picture { margin: 0 0 1rem; }
.card .answer { font-size: 1.05rem; }
@media (max-width: 46rem) { .card { grid-template-columns: minmax(0, 1fr); } }
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One report of the index.

    Attributes:
      title: question that the report answers.
      page: file of the report.
      answer: function from the report's page to the sentence that stands beside the picture.
      picture: function from the report's folder to a drawing; None for none.
      command: command that wrote the report.
    """

    title: str
    page: Path
    answer: Callable[[Path], str]
    picture: Callable[[Path], Markup | None] | None
    command: str


def write(file: Path, entries: Sequence[Entry]) -> int:
    """Writes the index of the reports that are there; returns how many they are."""
    present = [each for each in entries if each.page.is_file()]
    waiting = [each.title for each in entries if not each.page.is_file()]
    lead = ["Each report is one file that works offline. What follows is its own answer."]
    if waiting:
        lead.append(f"Still to come (load this page again): {' '.join(waiting)}")
    text = report.page(
        "Quickstart",
        [report.section(each.title, _card(each, file.parent)) for each in present],
        lead=lead,
        provenance={each.title: each.command for each in present},
        style=_STYLE,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, text.encode())
    return len(present)


def _card(entry: Entry, home: Path) -> Markup:
    link = os.path.relpath(entry.page, home)
    drawing = entry.picture(entry.page.parent) if entry.picture else None
    return element(
        "div",
        {"class": "card"},
        *[element("a", {"class": "picture", "href": link}, drawing)] * (drawing is not None),
        element(
            "div",
            None,
            element("p", {"class": "answer"}, entry.answer(entry.page)),
            element("p", None, element("a", {"href": link}, f"Open the report ({link})")),
        ),
    )


def verdict(page: Path) -> str:
    """The last of the verdicts on top of a page: its answer, after that on its controls."""
    top = page.read_text("utf-8").partition("<main>")[0]
    found = _VERDICT.findall(top)
    return html.unescape(re.sub(r"<[^>]*>", "", found[-1])) if found else ""


def prototypes(page: Path) -> str:
    """What a prototype is called, and the half-lives, of the concepts' `summary.json`."""
    found = read_json(page.parent / "summary.json")["prototypes"]
    lives = [math.inf if each["half_life"] is None else each["half_life"] for each in found]
    longest = "endlessly many" if math.isinf(max(lives)) else f"{max(lives):.0f}"
    kept = (
        f"What is written to a prototype has a half-life of {min(lives):.1f} to {longest} tokens, "
        f"of {statistics.median(lives):.1f} in the median over {len(found)} prototypes"
    )
    named = [each for each in found if each["label"]]
    if not named:
        return f"{kept}."
    best = max(
        named, key=lambda each: (each["label"]["disentanglement"], each["label"]["coverage"])
    )
    count = "all" if len(named) == len(found) else len(named)
    return (
        f"{kept}; a language model named {count} of them, and prototype "
        f"{best['prototype']} of layer {best['layer']} “{best['label']['theme']}”."
    )


def graph(page: Path) -> str:
    """The answer on top of a graph's page, and its size by the graphs' `summary.json`."""
    first = read_json(page.parent / "summary.json")["graphs"][0]
    sizes, replacement = first["sizes"], first["scores"]["unpruned"]["replacement"]
    return (
        f"{verdict(page)} {sizes['kept_features']} of its {sizes['features']} active features are "
        f"kept, with {sizes['kept_edges']} edges, and of the influence of tokens and errors "
        f"{100 * replacement:.0f} % is of tokens (replacement)."
    )
