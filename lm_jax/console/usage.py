"""Help texts of commands from docstrings: examples, and the meanings of config fields.

The first indented block of the module's docstring holds the examples, two or more command lines.
The section `Attributes` of the config's dataclass says what each field means.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import inspect
import re
import textwrap
import typing

_HEAD = "Examples:"
_WIDTH, _COLUMN = 100, 28
_ATTRIBUTE = re.compile(r"^  (\w[\w, ]*): (.*(?:\n    .*)*)", re.MULTILINE)


def examples_first(docstring: str | None) -> str:
    """The docstring with its first indented block at the top, under a heading."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    at = next((i for i, text in enumerate(paragraphs) if text.startswith(" ")), None)
    if at is None:
        return "\n\n".join(paragraphs)
    examples = paragraphs.pop(at)
    return "\n\n".join([f"{_HEAD}\n{examples}", *paragraphs])


def first_example(docstring: str | None) -> str:
    """The first command line of the examples, those continued by a backslash in one; "" if none."""
    _, _, lines = examples_first(docstring).partition(f"{_HEAD}\n")
    line = re.findall(r"(?:.*\\\n)*.*", lines)[0]
    return " ".join(line.replace("\\\n", " ").split())


def missing_text(missing: Mapping[str, str], doc: str | None) -> str:
    """Which flags are missing, what they name, and an example of the command."""
    *others, last = (f"--{name}" for name in missing)
    named = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    example = first_example(doc)
    return f"{named} missing; name {', and '.join(missing.values())}" + (
        f"; for example: {example}" if example else ""
    )


def field_meanings(config_class: type) -> dict[str, str]:
    """Dotted name of each field of a config's dataclass, and of its sections, to its meaning."""
    meanings: dict[str, str] = {}
    # A subclass may say more of a field of its base.
    for cls in reversed(config_class.__mro__):
        _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        for names, text in _ATTRIBUTE.findall(section.partition("\n\n")[0]):
            meanings |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    for name, kind in typing.get_type_hints(config_class).items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            meanings |= {f"{name}.{inner}": text for inner, text in field_meanings(kind).items()}
    return meanings


def entry(head: str, text: str) -> Iterator[str]:
    """The lines of one flag: its name and value, and its help text in a column beside it."""
    indent = " " * _COLUMN
    lines = textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    if len(head) < _COLUMN - 1 and lines:
        lines[0] = head.ljust(_COLUMN) + lines[0].strip()
    else:
        lines.insert(0, head)
    yield from lines
