"""The first run's commands exist, and their configs are there."""

import importlib.util

from lm_jax.assets import entries
from lm_jax.run.config_files import load_config
from tools import quickstart


def test_every_command_of_the_first_run_is_one():
    for module, *flags in quickstart.COMMANDS:
        assert importlib.util.find_spec(module), module
        for flag in flags:
            name, _, value = flag.partition("=")
            if name == "--config":
                assert load_config(value)
    # Each report lies in the folder that a command before it was told to write.
    folders = [flag.partition("=")[2] for command in quickstart.COMMANDS for flag in command[1:]]
    assert all(
        any(report.startswith(folder) for folder in folders) for report in quickstart.REPORTS
    )


def test_what_it_fetches_is_pinned():
    assert set(quickstart.ASSETS) <= set(entries())
