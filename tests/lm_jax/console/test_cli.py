"""A command ends with one line and the exit code of its error, for any error in its call."""

import errno
import os
from pathlib import Path
import signal
import subprocess
import sys
import textwrap

import pytest

from lm_jax.console import cli
from lm_jax.errors import BadInputError, CorruptError, DivergedError, ElsewhereError, StorageError
from lm_jax.run import processes
from lm_jax.run.workdir import open_workdir

CONFIG = """
from ml_collections import config_dict

def get_config(mode="full"):
    config = config_dict.ConfigDict()
    config.lr = 0.1
    config.steps = {"full": 100, "smoke": 2}[mode]
    config.flag = True
    config.untyped = None
    config.widths = (1, 2)
    config.names = ["a"]
    config.limit = config_dict.placeholder(int)
    config.model = config_dict.ConfigDict({"num_layers": 2})
    return config
"""


@pytest.fixture
def config_path(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def command(config_path, tmp_path, capsys):
    """Runs a main in this process; returns exit code, lines of standard error, its arguments."""

    def call(*argv, main=None, workdir=True):
        calls = []

        def default_main(arguments):
            calls.append(arguments)

        argv = ["prog", *([f"--workdir={tmp_path / 'run'}"] if workdir else []), *argv]
        code = cli.run(main or default_main, argv, config=str(config_path))
        out = capsys.readouterr()
        return code, out.err.splitlines(), calls or out.out

    return call


def test_overrides_reach_main(command, config_path):
    code, lines, (arguments,) = command(
        "--config", f"{config_path}:smoke", "--config.lr", "-3", "--noconfig.flag",
        "--config.widths=(4,5,6)", "--config.limit=7", "--config.model.num_layers=12",
    )  # fmt: skip
    config = arguments.config
    assert (code, lines) == (0, [])
    assert (config.lr, config.steps, config.flag, config.widths) == (-3.0, 2, False, (4, 5, 6))
    assert (config.limit, config.model.num_layers) == (7, 12)
    assert config.is_locked


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.lrr=3", "--config.lrr is not a field; did you mean 'lr'?"),
        ("--config.model.num_layers.x=3", "is not a field; did you mean 'model.num_layers'?"),
        ("config.lr=3", "'config.lr=3' is not a flag; arguments are written --config.lr=VALUE"),
        ("--config.lr=abc", "--config.lr=abc"),
        ("--config.lr=nan", "config.lr = nan; give a finite number"),
        ("--config.flag=maybe", "--config.flag=maybe"),
        ("--config.names=3", "its type in the config file is list"),
        ("--config.names[9]=b", "out of range"),
        ("--wrokdir=x", "--wrokdir is not a flag of this command; did you mean 'workdir'?"),
        ("--resume=maybe", "value should be one of <auto|force|never>"),
        ("--config=absent.py", "--config=absent.py: there is no such file"),
    ],
)
def test_a_call_that_cannot_be_used_is_one_line_and_exit_2(command, argument, words):
    code, lines, calls = command(argument)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith("error: ")
    assert words in lines[0]
    assert not calls


def test_help_shows_the_fields_of_the_chosen_config(command, config_path):
    code, lines, text = command(f"--config={config_path}:smoke", "--help", workdir=False)
    assert (code, lines) == (0, [])
    for line in ("--config.steps=2", "--config.model.num_layers=2", "--config.limit=<int>"):
        assert f"  {line}\n" in text + "\n"
    assert "--workdir" in text


def _raising(error):
    def main(arguments):
        with open_workdir(arguments.workdir, arguments.config):
            raise error

    return main


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInputError("model x: no weights\nthere; bring some"), 3),
        (DivergedError("loss is nan at step 3; lower config.lr"), 4),
        (StorageError("x: disk full; free some"), 5),
        (CorruptError("x: damaged; delete it"), 7),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), 5),
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), 5),
    ],
)
def test_refusal_is_one_line_and_its_traceback_is_in_the_log(command, tmp_path, error, code):
    got, lines, _ = command(main=_raising(error))
    assert (got, len(lines)) == (code, 1)
    assert lines[0].startswith("error: ")
    if isinstance(error, OSError) and error.filename:
        assert error.filename in lines[0]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Traceback" in log
    assert type(error).__name__ in log


def test_tracebacks_of_another_process_are_in_its_own_log(tmp_path, monkeypatch):
    """And one of an error of process 0 in none, as the folder may be that of another run."""
    monkeypatch.setattr(processes, "join", lambda *_: 1)
    logs = {name: tmp_path / name for name in ("log.txt", "log.1.txt")}
    for log in logs.values():
        log.write_text("")
    argv = ["prog", f"--workdir={tmp_path}", "--coordinator=10.0.0.1:80"]

    def run(error):
        def main(arguments):
            raise error

        return cli.run(main, argv, distributed=True)

    assert run(ElsewhereError(6)) == 6
    assert [log.read_text() for log in logs.values()] == ["", ""]
    assert run(CorruptError("x: damaged; delete it")) == 7
    assert logs["log.txt"].read_text() == ""
    assert "damaged" in logs["log.1.txt"].read_text()


def test_a_fault_of_the_program_names_the_file_with_its_traceback(command, tmp_path):
    code, lines, _ = command(main=_raising(KeyError("a\x1b[31m")))
    assert (code, len(lines)) == (1, 1)
    assert lines[0] == f"error: KeyError: 'a\\x1b[31m'; traceback in {tmp_path / 'run' / 'log.txt'}"


def test_without_a_work_folder_the_traceback_of_a_fault_is_on_standard_error(command):
    def main(arguments):
        raise RuntimeError("odd \x1b[31m")

    code, lines, _ = command(main=main)
    assert code == 1
    assert lines[0].startswith("Traceback")
    # The escape sequence would colour the user's terminal.
    assert lines[-1] == "error: RuntimeError: odd [31m; traceback above"


PROGRAM = """
import sys, time
from lm_jax.console import cli
from lm_jax.run import stop

def main(arguments):
    print("ready", flush=True)
    step = 0
    while True:
        time.sleep(0.01)
        step += 1
        if arguments.config.lr < 0.5:
            stop.check(f"after step {step}")

cli.app(main, config=sys.argv.pop(1))
"""


@pytest.fixture
def program(config_path, tmp_path):
    """Starts a command that runs until it is stopped; with `--config.lr=1` it never checks."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    root = Path(__file__).parents[3]

    def start(*argv):
        process = subprocess.Popen(
            [sys.executable, script, config_path, f"--workdir={tmp_path / 'run'}", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
        assert process.stdout.readline() == "ready\n"
        return process

    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_ends_the_run_at_its_next_safe_point(program, number):
    process = program()
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75
    notice, line = err.splitlines()
    assert notice.startswith("stopping at the next safe point")
    assert line.startswith("stopped: stopped on request after step ")


def test_a_second_interrupt_quits_at_once(program):
    process = program("--config.lr=1")
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("stopping")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
