"""Each entry of `Args:` and `Attributes:` in a docstring begins with a noun phrase.

An entry that begins with a preposition, a possessive, a relative word or a bare participle
("of the queries", "as `query`", "added to the scores") makes the reader guess the noun. `whether`,
`what` and `how` with a clause are fine. The paragraph under `Returns:` and the first line of a
docstring follow the same rule. The docstrings are read from the source, so no module is run.

`CLEAN` folders have no such entry. What is left elsewhere is counted in `DEBT` and may only fall:
lower the number when it has fallen, and move a folder to `CLEAN` when nothing is left.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
import inspect
from pathlib import Path
import re
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
CLEAN = (
    *("configs", "iaj", "kernels", "lm_jax", "tools"),
    *(f"protot_jax/{name}" for name in ("mixers", "training", "analysis")),
    *("polyattn_jax/recipes", "polyattn_jax/suites"),
    *(f"sparse_jax/{name}" for name in ("gates", "circuits", "transcoders", "graphs")),
)
# Folder -> the violations in what of it is in no folder listed here or above.
DEBT = {
    "polyattn_jax": 97,
    "protot_jax": 198,
    "sparse_jax": 200,
}

PREPOSITIONS = {
    *("above", "after", "as", "at", "before", "below", "between", "by", "for", "from", "in"),
    *("inside", "into", "of", "on", "over", "per", "since", "to", "under", "until", "when"),
    *("while", "with", "within", "without"),
}
RELATIVES = {"that", "where", "which", "who", "whom", "whose", "its", "their"}
# A participle before one of these stands alone ("added to", "measured where"); before a noun it is
# an adjective ("stored rows").
AFTER_PARTICIPLE = {
    *PREPOSITIONS,
    *RELATIVES,
    *("a", "alone", "and", "but", "how", "if", "like", "once", "one", "only", "or", "so", "than"),
    *("the", *".,;:()"),
}
PARTICIPLE = re.compile(
    r"(?!(seed|need|speed|embed|feed)$)[a-z]+ed"
    r"|cut|drawn|found|given|held|kept|left|made|put|seen|shown|taken|told|written"
)
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):\s*")
ENTRY = re.compile(r"  (\*{0,2}\w[\w, .*]*): +(\S.*)")
# What nobody would say, in any line of a docstring and at the beginning of one of its texts.
TELEGRAPHIC = re.compile(r"\b(is|are) none of (?!(these|those|the (above|following))\b)")
TELEGRAPHIC_OPENING = re.compile(r"(?i)(none of (its|the|their)|(is|are) (that|those) of)\b")


class Violation(NamedTuple):
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def opens_badly(text: str, *, summary: bool = False) -> bool:
    """Whether a text begins with something else than a noun phrase or an allowed clause.

    Args:
      text: the text of an entry or paragraph.
      summary: whether it is the first line of a docstring, which may also say where, when or which
        something is, and begin with two adjectives.
    """
    first, second, *_ = [*re.findall(r"[\w'`*\[-]+|[.,;:()]", text.lower()), "", "."]
    if TELEGRAPHIC_OPENING.match(text):
        return True
    if first in PREPOSITIONS | RELATIVES:
        return not (summary and first in ("where", "when", "which", "who"))
    alone = second in AFTER_PARTICIPLE and not (summary and second == ",")
    return bool(PARTICIPLE.fullmatch(first)) and alone


def bad_lines(docstring: str) -> Iterator[tuple[int, str]]:
    """Yields the index and the text of each line of a clean docstring that breaks a rule."""
    section = ""
    for index, line in enumerate(docstring.splitlines()):
        if header := SECTION.fullmatch(line):
            section = header[1]
            continue
        if line and not line.startswith(" "):
            section = ""
        text = line.strip()
        if section in ("Args", "Attributes"):
            entry = ENTRY.fullmatch(line)
            text = entry[2] if entry else ""
        elif section in ("Returns", "Yields"):
            # The first line alone: those after it go on with the sentence.
            section = ""
        elif index:
            text = ""
        if opens_badly(text, summary=not index) or TELEGRAPHIC.search(line):
            yield index, line.strip()


def violations(source: str, path: str) -> Iterator[Violation]:
    """Yields the violations in the docstrings of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is not None:
            for index, line in bad_lines(inspect.cleandoc(docstring)):
                yield Violation(path, node.body[0].lineno + index, line)


def room(path: str) -> str:
    """Returns the innermost folder of `CLEAN` or `DEBT` that holds the file."""
    parents = [parent.as_posix() for parent in Path(path).parents]
    return next(parent for parent in parents if parent in CLEAN or parent in DEBT)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Violation]]:
    """The violations by room."""
    result = defaultdict(list)
    for folder in sorted({room.split("/")[0] for room in (*CLEAN, *DEBT)}):
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            for each in violations(file.read_text("utf-8"), path):
                result[room(path)].append(each)
    return result


@pytest.mark.parametrize("folder", CLEAN)
def test_entries_begin_with_a_noun(found, folder):
    assert (ROOT / folder).is_dir()
    assert not found[folder], "\n".join(["begin with a noun:", *map(str, found[folder])])


@pytest.mark.parametrize("folder", DEBT)
def test_the_debt_of_a_folder_does_not_grow(found, folder):
    count = len(found[folder])
    assert count <= DEBT[folder], "\n".join(
        [f"{count} violations, {DEBT[folder]} allowed; some are new:", *map(str, found[folder])]
    )


MADE = '''
"""A module."""

def f(query, key, mask, scale, count, rows):
    """Scores of a tile.

    Args:
      query: the queries; of these none is hidden,
        as in a longer text.
      key: as `query`.
      mask: whether a key is visible.
      scale, count: added to the scores.
      rows: stored rows.

    Returns:
      By row, the score
      of each key.

    Raises:
      ValueError: of whatever kind.
    """

class A:
    """None of the rows.

    It is none of them. The words that follow are none of those.

    Attributes:
      a: its number.
      **b: given.
      c: what a reader wants.
    """
'''


def test_a_made_violation_is_found():
    lines = [(each.line, each.text) for each in violations(MADE, "made.py")]
    assert sorted(lines) == [
        (10, "key: as `query`."),
        (12, "scale, count: added to the scores."),
        (16, "By row, the score"),
        (24, "None of the rows."),
        (26, "It is none of them. The words that follow are none of those."),
        (29, "a: its number."),
        (30, "**b: given."),
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("encoded prompts of a task.", "seed of the splits.", "`of` as a word", "[T] positions"),
        *("how many keys each of them sees", "what a step adds", "need of memory", "offset, at 0"),
    ],
)
def test_a_noun_phrase_is_no_violation(text):
    assert not opens_badly(text)
