"""Every test that may be skipped stands in QUARANTINE.md with its reason, and nothing else does."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MARKS = {"skip", "skipif", "xfail", "importorskip", "skipTest", "skipUnless", "skipIf"}


def skips(source: str, path: str) -> Iterator[tuple[str, str]]:
    """The (place, kind) of each `x.skip`-like attribute: `path`, or `path::function` inside one."""

    def walk(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{place}::{child.name}"
            if isinstance(child, ast.Attribute) and child.attr in MARKS:
                yield place, child.attr
            yield from walk(child, inner)

    return walk(ast.parse(source), path)


def rows(table: str) -> Iterator[tuple[str, str, str]]:
    """The (place, kind, reason) of each row of the Markdown table, its head left out."""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            yield cells[0].strip("`"), cells[1], cells[2]


def test_every_skip_has_its_row_and_every_row_its_skip():
    result = Counter()
    for file in sorted(TESTS.rglob("*.py")):
        path = file.relative_to(TESTS.parent).as_posix()
        if file != Path(__file__):
            result.update(skips(file.read_text("utf-8"), path))
    listed = list(rows((TESTS / "QUARANTINE.md").read_text("utf-8")))
    assert Counter((place, kind) for place, kind, _ in listed) == result
    assert all(reason for *_, reason in listed)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("@pytest.mark.skip(reason='r')\ndef test_a(): pass", ("f.py::test_a", "skip")),
        ("pytestmark = pytest.mark.skipif(True, reason='r')", ("f.py", "skipif")),
        ("class A:\n  def test_b(self):\n    pytest.xfail('r')", ("f.py::A::test_b", "xfail")),
        ("def test_c():\n  t = pytest.importorskip('t')", ("f.py::test_c", "importorskip")),
        ("P = pytest.param(1, marks=pytest.mark.xfail)", ("f.py", "xfail")),
    ],
)
def test_a_skip_is_found(source, expected):
    assert list(skips(source, "f.py")) == [expected]
