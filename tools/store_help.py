"""Writes the help of each command, a screen long, into iaj/help/.

    python -m tools.store_help
    python -m tools.store_help --check      name the texts that are not what their commands say

`iaj COMMAND --help` prints the stored text, so that it need not import the command; `--help-all`
has the command print all. Run this after an option, a field or an example has changed;
`tests/iaj/test_help.py` compares the texts with the commands.
"""

import argparse
from collections.abc import Sequence
import contextlib
import io
import os
import re
import sys
import textwrap

from iaj import commands
from iaj.parser import Parser, run_parsed
from lm_jax.errors import BadInputError
from lm_jax.run.files import write_text

# Lines of a screen, and columns.
LINES, WIDTH = 40, 100
# Options of every command that a screen has room for.
_COMMON = ("config", "workdir", "resume")
_MOST_FIELDS = 4


def full_help(words: tuple[str, ...]) -> str:
    """What the command itself prints for `--help`."""
    before, printed = sys.argv, io.StringIO()
    # The width of argparse's lines.
    os.environ["COLUMNS"] = str(WIDTH)
    sys.argv = [f"iaj {' '.join(words)}", "--help"]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            commands.run(commands.COMMANDS[words])
    finally:
        sys.argv = before
    return printed.getvalue()


def screen(words: tuple[str, ...], full: str) -> str:
    """The help of one screen: examples, what the command does, its options, names of fields."""
    text, usage, arguments = full.partition("\nusage: ")
    parts = _parts(text)
    head = [*parts["Examples"], "", *parts[""]]
    more = ["", f"iaj {' '.join(words)} --help-all says what every option and field means."]
    if usage:
        options = f"usage: {arguments}".rstrip().splitlines()
        return "\n".join([*head, "", *options, *more, ""])
    common = [
        _one_line(each)
        for each in _entries(parts["Options of every command"])
        if each[0].strip().lstrip("-").partition("=")[0] in _COMMON
    ]
    tail = ["", "Options of every command:", *common, *_fields(parts), *more]
    own = [_one_line(each) for each in _entries(parts.get("Options of this command", []))]
    if own:
        room = LINES - len(head) - len(tail) - 2
        if len(own) > room:
            own = [*own[: room - 1], f"  and {len(own) - room + 1} more"]
        own = ["", "Options of this command:", *own]
    return "\n".join([*head, *own, *tail, ""])


def _parts(text: str) -> dict[str, list[str]]:
    """Lines of each headed part, of the examples with their heading; "" is the first paragraph."""
    first, _, rest = text.partition("\n\n")
    # A docstring joins the lines of an example that one backslash continues.
    first = re.sub(r"(?<=\S) {8,}(?=-)", r" \\\n        ", first)
    about, _, rest = rest.partition("\n\n")
    parts = {"Examples": first.splitlines(), "": about.splitlines()}
    for block in rest.split("\n\n"):
        heading, *lines = block.splitlines() or [""]
        if re.fullmatch(r"(Options|Fields) of .*:", heading):
            parts[heading.removesuffix(":")] = lines
    return parts


def _entries(lines: Sequence[str]) -> list[list[str]]:
    entries: list[list[str]] = []
    for line in lines:
        if line.startswith("  --"):
            entries.append([])
        entries[-1].append(line)
    return entries


def _one_line(entry: Sequence[str]) -> str:
    head, *rest = entry
    if rest and "   " not in head.strip():
        head = f"{head}  {rest.pop(0).strip()}"
    if not rest and len(head) <= WIDTH:
        return head
    whole = head if len(head) <= WIDTH - 2 else head[: WIDTH - 2].rpartition(" ")[0]
    return f"{whole.rstrip(' ;,:')} …"


def _fields(parts: dict[str, list[str]]) -> list[str]:
    heading = next((each for each in parts if each.startswith("Fields of ")), None)
    if heading is None:
        return []
    names = [
        line.strip().removeprefix("--config.").partition("=")[0]
        for line in parts[heading]
        if line.startswith("  --config.")
    ]
    lines = textwrap.wrap(", ".join(names), WIDTH - 2, break_on_hyphens=False)
    if len(lines) > _MOST_FIELDS:
        shown = " ".join(lines[:_MOST_FIELDS])
        left = len(names) - shown.rstrip(",").count(",") - 1
        lines = [*lines[:_MOST_FIELDS], f"and {left} more"]
    return ["", f"{heading}, as --config.FIELD=VALUE:", *(f"  {line}" for line in lines)]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks every text."""
    parser = Parser("python -m tools.store_help", __doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 3 for a stale text"
    )
    return run_parsed(_run, parser, argv)


def _run(arguments: argparse.Namespace) -> None:
    texts = {
        commands.help_file(words): screen(words, full_help(words)) for words in commands.COMMANDS
    }
    files = [*texts, *next(iter(texts)).parent.glob("*")]
    stale = [
        file.name
        for file in dict.fromkeys(files)
        if not file.is_file() or texts.get(file) != file.read_text("utf-8")
    ]
    if not arguments.check:
        for file, text in texts.items():
            write_text(file, text)
    elif stale:
        raise BadInputError(
            f"iaj/help: {', '.join(stale)} is not what the command says; run: "
            "python -m tools.store_help"
        )


if __name__ == "__main__":
    sys.exit(main())
