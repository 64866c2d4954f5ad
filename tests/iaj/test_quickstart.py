"""The commands and configs of the quickstart exist."""

from types import SimpleNamespace

from iaj import commands, quickstart
from lm_jax.assets import entries
from lm_jax.run.config_files import load_config


def test_every_command_of_the_first_run_is_one():
    for *words, flag in (command[:3] for command in quickstart.COMMANDS):
        assert tuple(words) in commands.COMMANDS
        name, _, value = flag.partition("=")
        if name == "--config":
            assert load_config(value)
    # Each report is in a folder that an earlier command writes.
    folders = [flag.partition("=")[2] for command in quickstart.COMMANDS for flag in command[2:]]
    assert all(
        any(report.startswith(folder) for folder in folders) for report in quickstart.REPORTS
    )


def test_a_step_that_fails_ends_the_run_with_its_exit_code(monkeypatch, capsys):
    started = []

    def start(command, check):
        started.append(command[2:])
        return SimpleNamespace(returncode=3 * (len(started) == 2))

    monkeypatch.setattr(quickstart.subprocess, "run", start)
    monkeypatch.setattr(quickstart.assets, "fetch", lambda name: None)
    assert quickstart.main([]) == 3
    assert started == [["iaj", *command] for command in quickstart.COMMANDS[:2]]
    assert "open in a browser" not in capsys.readouterr().out
    assert quickstart.main(["--fast"]) == 2
    assert len(started) == 2


def test_its_assets_are_pinned():
    assert set(quickstart.ASSETS) <= entries().keys()
