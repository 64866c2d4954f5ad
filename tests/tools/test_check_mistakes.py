"""The table of mistakes fits the sources; a test that notices is told from one that cannot run."""

import ast

import pytest

from tools import check_mistakes
from tools.check_mistakes import ROOT


def test_every_mistake_can_be_made_and_has_its_test():
    found = check_mistakes.mistakes()
    assert len({each.name for each in found}) == len(found) > 0
    for each in found:
        text = (ROOT / each.file).read_text("utf-8")
        wrong = each.made(text)
        assert wrong != text
        ast.parse(wrong)
        file, _, name = each.test.partition("::")
        # A case of a test may be named; a whole file has no name.
        name = name.partition("[")[0]
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in names or (not name and names), each.name


def test_a_text_that_is_not_there_once_is_refused():
    mistake = check_mistakes.Mistake("a mistake", "a.py", "x = 1", "x = 2", "t.py::test")
    assert mistake.made("x = 1\n") == "x = 2\n"
    with pytest.raises(ValueError, match=r"a mistake: a.py has 2 times 'x = 1'"):
        mistake.made("x = 1\nx = 1\n")


# A test file, and whether it notices what it is about.
RUNS = {
    "passes": ("def test():\n    pass\n", False),
    "fails": ("def test():\n    assert 1 == 2\n", True),
    "is refused": ("def test():\n    raise ValueError('x')\n", True),
    "is not collected": ("import nothing_like_it\ndef test():\n    pass\n", False),
    "has no such test": ("def test_other():\n    pass\n", False),
    "breaks before": (
        "import pytest\n@pytest.fixture\ndef x():\n    assert False\ndef test(x):\n    pass\n",
        False,
    ),
}


@pytest.mark.parametrize("what", RUNS)
def test_a_mistake_is_noticed_by_a_test_that_fails(what, tmp_path):
    text, noticed = RUNS[what]
    (tmp_path / "test_it.py").write_text(text)
    code, output = check_mistakes.run(["test_it.py::test"], tmp_path)
    assert check_mistakes.is_noticed(code, output) == noticed, output


def test_the_file_is_as_it_was_after_a_mistake(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    mistake = check_mistakes.Mistake("a mistake", "a.py", "x = 1", "x = 2", "t.py::test")
    with check_mistakes.made(mistake, tmp_path):
        assert file.read_text() == "x = 2\n"
    assert file.read_text() == "x = 1\n"


def test_mistakes_are_tried_in_several_copies_and_told_in_order(tmp_path):
    copies = [tmp_path / "0", tmp_path / "1"]
    for copy in copies:
        copy.mkdir()
        (copy / "values.py").write_text("x = 1\ny = 1\n")
        (copy / "test_it.py").write_text("import values\ndef test():\n    assert values.x == 1\n")
    noticed, missed = (
        check_mistakes.Mistake(name, "values.py", f"{name} = 1", f"{name} = 2", "test_it.py::test")
        for name in "xy"
    )
    found = check_mistakes.try_all([noticed, missed, noticed], copies)
    assert [each[0] for each in found] == [True, False, True]
    assert {(copy / "values.py").read_text() for copy in copies} == {"x = 1\ny = 1\n"}
