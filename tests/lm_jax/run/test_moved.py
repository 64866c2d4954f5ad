"""Modules under their earlier names are the modules of now, with a warning."""

import importlib
import importlib.util
import subprocess
import sys
import warnings

import pytest

import lm_jax
from lm_jax.run.moved import _Moved
import polyattn_jax
import protot_jax
import sparse_jax

# Importing a library keeps its names.
LIBRARIES = (lm_jax, polyattn_jax, protot_jax, sparse_jax)
FINDERS = [each for each in sys.meta_path if isinstance(each, _Moved)]
TABLE = {old: now for each in FINDERS for old, now in each.names.items()}
# One of each kind: a module, one with another name, a package, a module of it, one that left its
# package, one of a package that is in two places now.
KINDS = {
    "lm_jax.run.cli": "lm_jax.console.cli",
    "polyattn_jax.row_maps": "polyattn_jax.recipes.row_maps",
    "protot_jax.mixer": "protot_jax.mixers.prototypes",
    "protot_jax.interventions": "protot_jax.studies.interventions",
    "protot_jax.judging.prompts": "protot_jax.studies.judging.prompts",
    "protot_jax.robustness.screening": "protot_jax.studies.perturbations.screening",
    "sparse_jax.graphs.prompts": "sparse_jax.studies.graphs.prompts",
}


def forget(name):
    """Makes the next import look for a module again."""
    sys.modules.pop(name, None)


@pytest.mark.parametrize("old", KINDS)
def test_both_names_are_one_module(old):
    forget(old)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    assert f"{old} is {KINDS[old]} now" in [str(each.message) for each in caught]
    assert module is importlib.import_module(KINDS[old])
    assert module.__name__ == module.__spec__.name == KINDS[old]
    assert importlib.util.find_spec(KINDS[old]) is module.__spec__
    forget(old)


def test_every_earlier_name_leads_to_a_module():
    assert len(TABLE) > 100
    for now in TABLE.values():
        assert importlib.util.find_spec(now) is not None, now


def test_a_module_that_never_was_is_missing_by_its_own_name():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'protot_jax\.judging\.no'"):
        importlib.import_module("protot_jax.judging.no")


def test_an_earlier_name_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "protot_jax.count", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Examples:")


@pytest.mark.parametrize("name", ["protot_jax.pretrain", "sparse_jax.posttrain"])
def test_an_earlier_command_that_is_a_study_now_does_not_end_as_if_it_had_run(name):
    command = [sys.executable, "-W", "ignore", "-m", name, "--workdir=run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and f"{name} is no command; `iaj --help` lists all" in done.stderr
