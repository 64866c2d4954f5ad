"""Flags that belong to a kind of command, over all commands of the libraries."""

import ast
import importlib
from pathlib import Path

import pytest

from lm_jax.run import cli

ROOT = Path(__file__).parents[1]
LIBRARIES = ("lm_jax", "polyattn_jax", "protot_jax", "sparse_jax")
TRAINING = {
    "protot_jax.pretrain",
    "protot_jax.search",
    "protot_jax.study",
    "sparse_jax.addition",
    "sparse_jax.posttrain",
}
# Commands that train no model.
OTHERS = {
    "polyattn_jax.audit",
    "polyattn_jax.check",
    "protot_jax.concepts",
    "protot_jax.count",
    "protot_jax.generate",
    "protot_jax.interventions",
    "sparse_jax.multiple_choice",
}


def commands():
    """Every command by its name: its module, and the keywords of its call of `launch.app`."""
    results = {}
    for library in LIBRARIES:
        for file in (ROOT / library).rglob("*.py"):
            for node in ast.parse(file.read_text("utf-8")).body:
                if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)):
                    continue
                (call,) = (each.value for each in node.body)
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                options = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
                results[module.removesuffix(".__main__")] = (module, options)
    return results


COMMANDS = commands()


def test_every_command_is_known_here():
    """So that a new one is put among those that train or the others."""
    assert COMMANDS.keys() == TRAINING | OTHERS


@pytest.mark.parametrize("name", sorted(TRAINING | OTHERS))
def test_training_commands_and_no_others_take_a_range_of_steps_to_trace(name, tmp_path, capsys):
    module, options = COMMANDS[name]
    main = importlib.import_module(module).main
    # A range that cannot be, so that nothing is started.
    argv = [name, f"--workdir={tmp_path / 'run'}", "--profile=2:1"]
    assert cli.run(main, argv, **options) == 2
    wanted = "--profile=2:1 is not FIRST:LAST" if name in TRAINING else "--profile is not a flag"
    assert wanted in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_guide_to_traces_names_every_training_command():
    guide = (ROOT / "docs" / "profiling.md").read_text("utf-8")
    assert {name for name in COMMANDS if f"`{name}`" in guide} == TRAINING
