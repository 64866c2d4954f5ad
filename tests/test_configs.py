"""Every file under configs/ can be launched as its docstring says, in full and as a smoke run.

Running the smoke modes is the business of each library's own tests. Without a file there,
collection fails (`empty_parameter_set_mark`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path
import re
from typing import Any

from ml_collections import config_dict
import pytest

from iaj import commands
from lm_jax.console.config_files import load_config

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.py"))
COMMAND = re.compile(r"^ *iaj (?P<words>\w+ \w+) --config=(?P<config>[^\s:`]+)", re.MULTILINE)

every_config = pytest.mark.parametrize("path", CONFIGS)


def fields(config: config_dict.ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the value of every field, references left unread."""
    for key, value in config.items(preserve_field_references=True):
        if isinstance(value, config_dict.ConfigDict):
            yield from fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def not_overridable(config: config_dict.ConfigDict) -> list[str]:
    """Fields without a type for `--config.name=value` to be read as: None, and lists."""
    return [name for name, value in fields(config) if value is None or isinstance(value, list)]


@every_config
def test_a_config_opens_with_the_command_that_launches_it(path):
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8"))) or ""
    command = COMMAND.search(docstring)
    assert command, "the docstring has no line `iaj LIBRARY COMMAND --config=NAME ...`"
    assert f"configs/{command['config']}.py" == path
    assert tuple(command["words"].split()) in commands.COMMANDS


@every_config
@pytest.mark.parametrize("mode", ["", "smoke"])
def test_each_mode_gives_a_locked_config_whose_fields_can_all_be_overridden(path, mode):
    config = load_config(str(ROOT / path) + (f":{mode}" if mode else ""))
    assert list(fields(config)), "the config is empty"
    assert not_overridable(config) == []
    with pytest.raises(AttributeError, match="no_such_field"):
        config.no_such_field = 1


@every_config
def test_the_smoke_mode_is_another_run_of_the_same_fields(path):
    full, smoke = (load_config(f"{ROOT / path}{mode}") for mode in ("", ":smoke"))
    assert {name for name, _ in fields(full)} == {name for name, _ in fields(smoke)}
    assert full != smoke


def test_a_field_that_cannot_be_overridden_is_found():
    config = config_dict.ConfigDict({"good": 1, "bad": None, "section": {"worse": [1], "ok": (1,)}})
    config.placeholder = config_dict.placeholder(float)
    config.section.required = config_dict.required_placeholder(int)
    assert sorted(not_overridable(config)) == ["bad", "section.worse"]
