"""`iaj COMMAND --help`: one screen, as the command has it now, without importing the command."""

from pathlib import Path
import subprocess
import sys

import pytest

from iaj import __main__ as front
from iaj import commands
from tools import store_help

ROOT = Path(__file__).parents[2]
HEAVY = {"jax", "scipy", "altair", "orbax", "tensorflow", "numpy", "flax", "transformers"}

ASK_ALL = """
import contextlib, io, sys
from iaj import __main__ as front
from iaj import commands
for words in commands.COMMANDS:
    for flag in ("--help", "-h", "-?"):
        sys.argv = ["iaj", *words, flag]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert front.main() == 0
        assert printed.getvalue() == commands.help_file(words).read_text("utf-8")
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_no_help_imports_what_its_command_computes_with():
    done = subprocess.run(
        [sys.executable, "-c", ASK_ALL], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "iaj" in loaded and not loaded & HEAVY
    assert not loaded & {"lm_jax", "sparse_jax", "protot_jax", "polyattn_jax"}


@pytest.mark.long
def test_stored_texts_are_what_the_commands_say():
    done = subprocess.run(
        [sys.executable, "-m", "tools.store_help", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", commands.COMMANDS, ids=" ".join)
def test_a_help_is_one_screen_with_examples_and_the_way_to_all(words):
    lines = commands.help_file(words).read_text("utf-8").splitlines()
    assert len(lines) <= store_help.LINES and max(map(len, lines)) <= 110
    assert lines[0] == "Examples:" and f"iaj {' '.join(words)}" in lines[1]
    assert lines[-1].startswith(f"iaj {' '.join(words)} --help-all ")


def test_all_of_it_comes_from_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["iaj", "sparse", "two_hop", "--help-all"])
    monkeypatch.setattr(commands, "run", lambda module: print(module, sys.argv[1:]) or 0)
    assert front.main() == 0
    assert capsys.readouterr().out == "sparse_jax.studies.two_hop ['--help']\n"


FULL = """\
Examples:
    iaj toy --a=1         --b=2

Toys.

More about toys.

Options of this command:
  --a=1                     number of toys
  --a_rather_long_name=<string>
                            name of the toy that is looked for, by which it is found where there
                            are many

Options of every command:
  --config=toy              name of a config
  --debug                   left out

Fields of toy:
  --config.b=2              width
  --config.c.d=3            depth
"""


def test_a_screen_is_made_of_the_whole_help():
    assert store_help.screen(("toy",), FULL).splitlines() == [
        *(
            "Examples:",
            "    iaj toy --a=1 \\",
            "        --b=2",
            "",
            "Toys.",
            "",
            "Options of this command:",
        ),
        "  --a=1                     number of toys",
        "  --a_rather_long_name=<string>  name of the toy that is looked for, by which it is found "
        "where …",
        *("", "Options of every command:", "  --config=toy              name of a config", ""),
        *("Fields of toy, as --config.FIELD=VALUE:", "  b, c.d", ""),
        "iaj toy --help-all says what every option and field means.",
    ]
