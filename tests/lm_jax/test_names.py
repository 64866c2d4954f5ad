"""The public names of `lm_jax`, which are imported when they are first used."""

import ast
from pathlib import Path
import subprocess
import sys

import pytest

import lm_jax


def test_every_public_name_is_there_and_is_what_type_checkers_read():
    tree = ast.parse(Path(lm_jax.__file__).read_text("utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    said = {
        alias.name: node.module.removeprefix("lm_jax.")
        for node in typed.body
        for alias in node.names
    }
    assert said.pop("params") == "model" and lm_jax._MODULES["params"] == "model.params"
    assert said == lm_jax._PLACES
    assert {*said, "params"} == set(lm_jax.__all__) <= set(dir(lm_jax))
    for name in lm_jax.__all__:
        assert getattr(lm_jax, name) is not None


@pytest.mark.parametrize(
    "use", ["lm_jax.params.__name__", "lm_jax.weights.__name__", "lm_jax.Replace.__name__"]
)
def test_a_name_is_imported_when_it_is_first_used(use):
    code = f"import sys, lm_jax; assert 'jax' not in sys.modules; print({use})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip().rpartition(".")[2] == use.split(".")[1]


def test_a_name_that_is_not_there_is_named():
    with pytest.raises(AttributeError, match="has no attribute 'Replce'"):
        lm_jax.Replce  # noqa: B018
