"""The commands and configs of the quickstart exist."""

from pathlib import Path
import subprocess
import sys

import pytest

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

    def call(command):
        started.append(command[2:])
        return 3 * (len(started) == 2)

    monkeypatch.setattr(quickstart.subprocess, "call", call)
    monkeypatch.setattr(quickstart.assets, "fetch", lambda name: None)
    assert quickstart.main([]) == 3
    assert started == [["iaj", *command] for command in quickstart.COMMANDS[:2]]
    assert "open in a browser" not in capsys.readouterr().out
    assert quickstart.main(["--fast"]) == 2
    assert len(started) == 2


# Signals itself too as soon as the step has started, before it waits for it.
RUN_ONE_STEP = """
import os
import signal
import subprocess
import sys
from iaj import quickstart

class Started(subprocess.Popen):
    def __init__(self, command):
        super().__init__(command)
        os.kill(os.getpid(), signal.SIGINT)

subprocess.Popen = Started
quickstart.assets.fetch = lambda name: None
quickstart.COMMANDS = (("step",),)
sys.executable = sys.argv[1]
sys.exit(quickstart.main([]))
"""
SAVES = "trap 'sleep 1; echo saved; exit 75' INT; kill -INT 0; sleep 5"
IS_KILLED = "kill -INT 0; sleep 5"


@pytest.mark.parametrize(
    ("step", "code", "said"),
    [(SAVES, 75, "saved"), (IS_KILLED, 130, "")],
    ids=["saves", "is killed"],
)
def test_ctrl_c_stops_the_step_which_saves_first(step, code, said, tmp_path):
    """The step signals its whole group, as a terminal does."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/bash\n{step}\n")
    program.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "-c", RUN_ONE_STEP, str(program)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert result.returncode == code
    assert result.stdout.split() == ["iaj", "step", *said.split()] and not result.stderr


def test_ctrl_c_while_assets_are_fetched_is_one_line(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart.assets, "fetch", interrupted)
    assert quickstart.main([]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_its_assets_are_pinned():
    assert set(quickstart.ASSETS) <= entries().keys()
