"""A command's own options: a frozen dataclass, each field of which becomes a flag.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        run: Path = required("work folder of a pretraining run")
        tokens: int = option(100, "number of tokens to generate; 0 for no end", least=0)

A field may be a bool, an int, a float, a str, a Path, a `Literal` of strings, one of these or None,
or a `tuple[str, ...]`, which is written with commas or, where it is `repeated`, by giving the flag
again. The flags are defined for each run: two runs of one process share nothing.
"""

from collections.abc import Iterable, Iterator
import dataclasses
from pathlib import Path
import types
import typing
from typing import Any, TypeVar

from absl import flags

from lm_jax.errors import UsageError
from lm_jax.run.usage import entry

T = TypeVar("T")
_HELP, _LEAST, _REPEATED, _REQUIRED = "help", "least", "repeated", "required"


def option(
    default: Any, help: str, *, least: int | float | None = None, repeated: bool = False
) -> Any:
    """A field with the flag's default, help text, and the least number that it accepts."""
    metadata = {_HELP: help, _LEAST: least, _REPEATED: repeated, _REQUIRED: False}
    return dataclasses.field(default=default, metadata=metadata)


def required(help: str) -> Any:
    """A field whose flag is required."""
    metadata = {_HELP: help, _LEAST: None, _REPEATED: False, _REQUIRED: True}
    return dataclasses.field(metadata=metadata)


def define_flags(options: type, values: flags.FlagValues) -> list[flags.Flag]:
    """Adds a flag to `values` for every field of a dataclass, and returns the flags.

    Raises:
      TypeError: an annotation that no flag can have.
    """
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        _define(field, hints[field.name], values)
    return [values[field.name] for field in dataclasses.fields(options)]


def _define(field: dataclasses.Field, hint: Any, values: flags.FlagValues) -> None:
    name, text, least = field.name, field.metadata[_HELP], field.metadata[_LEAST]
    default: Any = None if field.metadata[_REQUIRED] else field.default
    kind = _without_none(hint)
    if typing.get_origin(kind) is typing.Literal:
        flags.DEFINE_enum(name, default, list(typing.get_args(kind)), text, values)
    elif kind == tuple[str, ...] and field.metadata[_REPEATED]:
        flags.DEFINE_multi_string(name, list(default or ()), text, values)
    elif kind == tuple[str, ...]:
        flags.DEFINE_list(name, list(default or ()), text, values)
    elif kind is bool:
        flags.DEFINE_boolean(name, default, text, values)
    elif kind is int:
        flags.DEFINE_integer(name, default, text, lower_bound=least, flag_values=values)
    elif kind is float:
        flags.DEFINE_float(name, default, text, lower_bound=least, flag_values=values)
    elif kind in (str, Path):
        flags.DEFINE_string(name, None if default is None else str(default), text, values)
    else:
        raise TypeError(f"{name} is annotated {hint}, which no flag can have")


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if len(kinds) == 1:
            return kinds[0]
    return hint


def read_options(options: type[T], values: flags.FlagValues) -> T:
    """The dataclass filled from the flags of `define_flags`, after a command line has set them.

    Raises:
      UsageError: a required one is missing.
    """
    hints = typing.get_type_hints(options)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, options)):
        value = values[field.name].value
        if field.metadata[_REQUIRED] and not value:
            raise UsageError(f"--{field.name} is missing; name the {field.metadata[_HELP]}")
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and _without_none(hints[field.name]) is Path:
            value = Path(value)
        arguments[field.name] = value
    return options(**arguments)


def help_lines(listed: Iterable[flags.Flag]) -> Iterator[str]:
    """Lines of `--help` for flags: name and default, help text, choices."""
    for flag in listed:
        # absl adds lines of its own to the text of a repeated flag.
        head, text = f"  --{flag.name}={_default(flag)}", " ".join(str(flag.help).split())
        if flag.boolean:
            head = f"  --[no]{flag.name}"
            text += f" (default: {'yes' if flag.default else 'no'})"
        choices = getattr(flag.parser, "enum_values", None)
        if choices:
            # absl writes them before the text.
            text = text.partition(">: ")[2]
            text += f"; one of {', '.join(choices)}"
        yield from entry(head, text)


def _default(flag: flags.Flag) -> str:
    if isinstance(flag.default, list):
        return ",".join(flag.default)
    return f"<{flag.flag_type().split()[-1]}>" if flag.default is None else str(flag.default)
