"""`iaj` runs the module of a command with its arguments, and prints `--help` without imports."""

import ast
import fcntl
import os
import subprocess
import sys

import pytest

from iaj import __main__ as front
from iaj import commands
from lm_jax.errors import EXIT_UNREAD


def start(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["iaj", *arguments])
    return front.main()


@pytest.mark.parametrize("module", commands.COMMANDS.values())
def test_a_summary_is_the_first_line_of_the_docstring(module):
    docstring = ast.get_docstring(ast.parse(commands.source_file(module).read_text("utf-8")))
    assert docstring
    assert commands.summary(module) == docstring.partition("\n")[0]


def test_help_lists_every_command_and_loads_nothing_but_the_standard_library():
    source = (
        "import sys; sys.argv = ['iaj', '--help']; before = set(sys.modules)\n"
        "from iaj.__main__ import main\n"
        "assert main() == 0\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before} - {'iaj'}\n"
        "print(sorted(loaded - sys.stdlib_module_names), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"
    for words in commands.COMMANDS:
        assert f"  iaj {' '.join(words)} " in done.stdout


def test_help_opens_with_examples_that_are_commands(monkeypatch, capsys):
    assert start(monkeypatch, "--help") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "Examples:"
    examples = lines[: lines.index("")]
    assert len(examples) == 2
    for example in examples:
        words = example.split()[1:]
        assert any(tuple(words[:n]) in commands.COMMANDS for n in (1, 2)), example


@pytest.mark.parametrize("library", ["polyattn", "protot", "sparse"])
def test_the_name_of_a_library_alone_lists_its_commands(monkeypatch, capsys, library):
    assert start(monkeypatch, library, "--help") == 0
    output = capsys.readouterr().out
    for words in commands.COMMANDS:
        assert (f"  iaj {' '.join(words)} " in output) == (words[0] == library)
    assert start(monkeypatch, library) == 2
    assert capsys.readouterr().err == output


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["polyatn", "audit"], "iaj polyatn is not a command; did you mean 'polyattn'?"),
        (["protot", "gnerate"], "iaj protot gnerate is not a command; did you mean 'generate'?"),
        (["sparse", "zzz"], "iaj sparse zzz is not a command; known: addition, choices, "),
        (["--workdir=x"], "iaj --workdir=x is not a command"),
    ],
)
def test_a_typo_is_one_line_and_exit_2(monkeypatch, capsys, arguments, hint):
    assert start(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert hint in error


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A command `toy run` that prints its arguments and exits with 10."""
    (tmp_path / "toy_command.py").write_text(
        'import sys\nif __name__ == "__main__":\n'
        "    print(sys.argv, __spec__.name)\n    sys.exit(10)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(commands.COMMANDS, ("toy", "run"), "toy_command")


@pytest.mark.usefixtures("toy")
def test_a_command_gets_the_rest_of_the_arguments_and_its_exit_code_is_kept(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        start(monkeypatch, "toy", "run", "--help", "x=1")
    assert stopped.value.code == 10
    argv, name = capsys.readouterr().out.rsplit(" ", 1)
    assert ast.literal_eval(argv)[1:] == ["--help", "x=1"]
    # The provenance of a run takes the command from there, as for `python -m toy_command`.
    assert name == "toy_command\n"


def test_the_version_is_that_of_the_distribution(monkeypatch, capsys):
    assert start(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == "interpretable-attention-jax 0.1.0\n"


PRINTS_ON = """
from iaj.parser import Parser, run_parsed
def action(arguments):
    for i in range(100_000):
        print(i)
raise SystemExit(run_parsed(action, Parser("iaj counts", "Counts."), []))
"""


@pytest.mark.parametrize(
    "command",
    [("-m", "iaj", "sparse", "circuits", "--help-all"), ("-c", PRINTS_ON)],
    ids=["with a config", "parsed"],
)
def test_a_command_whose_output_nobody_reads_ends_without_a_word(command):
    """As before `| head -1`; the pipe holds less than what is printed."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [sys.executable, *command], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert os.read(reading, 1)
    os.close(reading)
    assert process.communicate()[1] == ""
    assert process.returncode == EXIT_UNREAD
