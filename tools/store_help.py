"""Writes the help of each command, a screen long, into iaj/help/.

    python -m tools.store_help
    python -m tools.store_help --check      name the texts that are not what their commands say

`iaj COMMAND --help` prints the stored text, so that it need not import the command; `--help-all`
has the command print all. Run this after an option, a field or an example has changed;
`tests/iaj/test_help.py` compares the texts with the commands.
"""

import argparse
from collections.abc import Collection, Iterator, Sequence
import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import sys
import textwrap
import typing
from typing import Any, cast

from iaj import commands
from iaj.early import INPUTS_FILE
from iaj.parser import Parser, run_parsed
from lm_jax.console.config_files import load_config, shipped_names
from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.files import write_text
from lm_jax.run.settings import Reads, annotations, own_flags
from lm_jax.study import Study

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


def stored_inputs() -> str:
    """What `iaj.early` knows of every study: its flags that name models, assets and files."""
    studies = {
        " ".join(words): importlib.import_module(module).STUDY
        for words, module in commands.COMMANDS.items()
        if commands.is_study(module)
    }
    steps = {study.config for study in studies.values()}
    found = {name: _inputs_of(study, steps) for name, study in studies.items()}
    return json.dumps(found, indent=1) + "\n"


def _inputs_of(study: Study, steps: Collection[type]) -> dict[str, Any]:
    library = study.config_name.partition("/")[0]
    configs = {}
    for name in shipped_names():
        for mode in ("", *study.modes) if name.startswith(f"{library}/") else ():
            # Other commands have configs and modes too.
            with contextlib.suppress(UsageError):
                spec = f"{name}:{mode}" if mode else name
                configs[spec] = load_config(spec)
    own = own_flags(study.config)
    fields = []
    for path, reads in _reading(study.config, steps):
        name = own[path].name or path if path in own else ""
        values = {
            spec: list(value) if isinstance(value, tuple) else [str(value)]
            for spec, config in configs.items()
            if set(config.keys()) <= {field.name for field in dataclasses.fields(study.config)}
            and (value := _at(config, path))
        }
        fields.append(
            {
                "flags": [*([name] if name else []), f"config.{path}"],
                "many": _at(study.settings(), path).__class__ is tuple,
                "values": values,
                **dataclasses.asdict(reads),
            }
        )
    return {
        "config": study.config_name,
        "shortcuts": list(study.config.shortcuts),
        "reads": fields,
    }


def _reading(cls: type, steps: Collection[type], before: str = "") -> Iterator[tuple[str, Reads]]:
    """The fields of settings that name what is read, by their dotted names.

    A study that has others as its steps, whose settings are `steps`, names their inputs itself.
    """
    hints = typing.get_type_hints(cls)
    for name, found in annotations(cls, Reads).items():
        yield from ((before + name, each) for each in found)
        if dataclasses.is_dataclass(hints[name]) and hints[name] not in steps:
            yield from _reading(cast(type, hints[name]), steps, f"{before}{name}.")


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if config is not None else None
    return config


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
    texts[next(iter(texts)).parent / INPUTS_FILE] = stored_inputs()
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
