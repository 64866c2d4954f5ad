"""Notebooks of Jupyter have the cells of their sources, a badge and a cell that installs."""

import ast
import re

import nbformat
import pytest

from tools import notebooks


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("notebooks")
    arguments = ["--repository=someone/attention", "--install=some.whl", f"--out={out}"]
    assert notebooks.main(arguments) == 0
    return {file.stem: nbformat.read(file, as_version=4) for file in out.glob("*.ipynb")}


def test_each_notebook_has_the_code_of_its_source(written):
    sources = {file.stem: file.read_text("utf-8") for file in notebooks.SOURCES.glob("*.py")}
    assert sources.keys() == written.keys()
    for name, made in written.items():
        nbformat.validate(made)
        code = "\n".join(cell.source for cell in made.cells[2:] if cell.cell_type == "code")
        assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(sources[name]))
        text = "\n".join(cell.source for cell in made.cells[2:] if cell.cell_type == "markdown")
        # Every line of a comment that stands alone is prose of some cell.
        for line in re.findall(r"^# (?!%%)(.+)$", sources[name], re.MULTILINE):
            assert line in text or line in code


def test_the_badge_opens_the_file_and_the_first_cell_installs(written):
    for name, made in written.items():
        badge, install = made.cells[:2]
        assert f"/github/someone/attention/blob/main/notebooks/{name}.ipynb)" in badge.source
        assert install.source.startswith("%pip install --quiet 'some.whl'")
    assert "!iaj fetch smollm2" in written["first_look"].cells[1].source
    assert "iaj fetch" not in written["graph"].cells[1].source


def test_the_same_sources_give_the_same_files(written, tmp_path):
    notebooks.main(["--repository=someone/attention", "--install=some.whl", f"--out={tmp_path}"])
    for name, made in written.items():
        assert nbformat.read(tmp_path / f"{name}.ipynb", as_version=4) == made


def test_a_repository_without_an_owner_is_refused(capsys):
    with pytest.raises(SystemExit):
        notebooks.main(["--repository=attention"])
    assert "is not OWNER/NAME" in capsys.readouterr().err
