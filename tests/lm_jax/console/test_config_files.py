"""A config is found by its name in any folder, and by its path; else the nearest is named."""

from pathlib import Path

import pytest

from lm_jax.console import config_files
from lm_jax.console.config_files import find_config, load_config, shipped_names
from lm_jax.errors import UsageError

ROOT = Path(__file__).parents[3]
TINY = """
from ml_collections import ConfigDict

def get_config(mode=""):
    return ConfigDict({"mode": mode})
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_is_that_of_a_file_of_the_checkout(elsewhere):
    files = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.py")}
    assert {f"{name}.py" for name in shipped_names()} == {path.as_posix() for path in files}
    for name in shipped_names():
        assert find_config(name) == ROOT / "configs" / f"{name}.py"
    by_name = load_config("polyattn/smollm2:quickstart")
    assert by_name == load_config(f"{ROOT}/configs/polyattn/smollm2.py:quickstart")
    assert by_name != load_config("polyattn/smollm2")


def test_the_configs_inside_the_package_go_first(tmp_path, monkeypatch):
    """As in a wheel, beside which a folder `configs` may be of another package."""
    for folder in ("lm_jax/configs/own", "configs/other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "tiny.py").write_text(TINY)
    monkeypatch.setattr(config_files, "__file__", str(tmp_path / "lm_jax/console/config_files.py"))
    assert shipped_names() == ["own/tiny"]
    assert load_config("own/tiny:fast").mode == "fast"


def test_a_path_is_a_file_of_the_working_folder(elsewhere):
    (elsewhere / "polyattn").mkdir()
    (elsewhere / "polyattn" / "smollm2.py").write_text(TINY)
    assert load_config("polyattn/smollm2.py:mine").mode == "mine"
    # A name never means a file in the current folder: configs are executed.
    assert "niah_n" in load_config("polyattn/smollm2")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("polyattn/smolm2", "did you mean 'polyattn/smollm2'?"),
        ("smollm2", "did you mean 'sparse/smollm2'?"),
        ("configs/polyattn/smollm2.py", "no such file; did you mean 'polyattn/smollm2'?"),
        ("../configs/polyattn/smollm2", "no config of this name comes with the packages"),
        ("/etc/passwd", "no config of this name comes with the packages"),
        ("", "no config of this name"),
        ("zzzz", "known: polyattn/audit, "),
    ],
)
def test_what_is_not_found_names_the_nearest(name, words):
    with pytest.raises(UsageError) as refused:
        load_config(name)
    assert words in str(refused.value)
