"""Flags of settings (`lm_jax.run.settings`): one for each field that has its own.

    class GraphConfig(Settings):
        prompts: Annotated[tuple[str, ...], Flag("prompt", repeated=True)] = ()

A field may be a bool, an int, a float, a str, a Path, a `Literal` of strings, one of these or None,
or a tuple of str, int or float, which is written with commas or, where it is `repeated`, by giving
the flag again. The flags are defined for each run: two runs of one process share nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
import dataclasses
from pathlib import Path
import types
import typing
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_dict

from lm_jax.console.usage import entry, field_meanings
from lm_jax.errors import UsageError
from lm_jax.run.settings import CommandOptions, Settings, own_flags

Own = TypeVar("Own", bound=CommandOptions)


def define_flags(cls: type[Settings], values: flags.FlagValues) -> list[flags.Flag]:
    """Adds the flags of a class of settings to `values`, and returns them.

    A flag of `CommandOptions` has its field's default. One of other settings has none: what is not
    given is what the config file says.

    Raises:
      TypeError: an annotation that no flag can have.
    """
    hints, meanings = typing.get_type_hints(cls), field_meanings(cls)
    defaults = _defaults(cls) if issubclass(cls, CommandOptions) else {}
    defined = []
    for name, shortcut in cls.shortcuts.items():
        flags.DEFINE_string(name, None, shortcut.help, values)
        defined.append(values[name])
    for field, flag in own_flags(cls).items():
        name = flag.name or field
        text = meanings.get(field, "").removesuffix(".")
        _define(name, hints[field], defaults.get(field), text, flag.repeated, values)
        defined.append(values[name])
    return defined


def _defaults(cls: type) -> dict[str, Any]:
    """The defaults of the fields that need not be given."""
    own = own_flags(cls)
    return {
        field.name: field.default
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING and not own[field.name].required
    }


def _define(
    name: str, hint: Any, default: Any, text: str, repeated: bool, values: flags.FlagValues
) -> None:
    kind = _without_none(hint)
    if typing.get_origin(kind) is typing.Literal:
        flags.DEFINE_enum(name, default, list(typing.get_args(kind)), text, values)
    elif typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (...,):
        listed = None if default is None else [str(each) for each in default]
        if repeated:
            flags.DEFINE_multi_string(name, listed, text, values)
        else:
            # Whoever gives it twice means both, of which absl would keep the last.
            flags.DEFINE_list(name, listed, text, values, allow_overwrite=False)
    elif kind is bool:
        flags.DEFINE_boolean(name, default, text, values)
    elif kind is int:
        flags.DEFINE_integer(name, default, text, flag_values=values)
    elif kind is float:
        flags.DEFINE_float(name, default, text, flag_values=values)
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


def _given(cls: type[Settings], values: flags.FlagValues) -> dict[str, Any]:
    """The value of each field whose flag has one."""
    hints = typing.get_type_hints(cls)
    given = {}
    for field, flag in own_flags(cls).items():
        name = flag.name or field
        if (value := values[name].value) is not None:
            given[field] = _typed(name, value, hints[field])
    return given


def _typed(name: str, value: Any, hint: Any) -> Any:
    kind = _without_none(hint)
    if isinstance(value, list):
        each = typing.get_args(kind)[0]
        try:
            return tuple(map(each, value))
        except ValueError as error:
            raise UsageError(
                f"--{name} = {value} holds what is no {each.__name__}; give numbers"
            ) from error
    if kind is not Path:
        return value
    # An empty path would be the current folder.
    return Path(value) if value or kind is hint else None


def missing_flags(
    cls: type[Settings],
    values: flags.FlagValues,
    config: config_dict.ConfigDict | None = None,
) -> dict[str, str]:
    """The required flags that are not given, each with what it names.

    Args:
      cls: class of the settings.
      values: flags, after a command line has set them.
      config: settings with what the flags say (`apply`); None for options, which have no config.
    """
    meanings, missing = field_meanings(cls), {}
    for field, flag in own_flags(cls).items():
        name = flag.name or field
        if config is not None:
            # An empty value of a repeated flag is one, too.
            given = (config.get(one) for one in (field, flag.unless) if one)
            lacks = flag.required and all(one in (None, "", (), ("",)) for one in given)
        else:
            lacks = field not in _defaults(cls) and not values[name].value
        if lacks:
            missing[name] = f"the {meanings.get(field, 'value').removesuffix('.')}"
    return missing


def read_options(cls: type[Own], values: flags.FlagValues) -> Own:
    """The options filled from the flags of `define_flags`, after a command line has set them.

    None of the required ones is missing (`missing_flags`).

    Raises:
      UsageError: one is outside of its bound.
    """
    return cls(**_given(cls, values))


def apply_shortcuts(
    cls: type[Settings], values: flags.FlagValues, config: config_dict.ConfigDict
) -> None:
    """Writes what the shortcuts were given into a config, before anything that is more exact.

    Raises:
      UsageError: a shortcut refuses its value.
    """
    for name, shortcut in cls.shortcuts.items():
        if (value := values[name].value) is not None:
            _set(config, shortcut.fields(value))


def apply(
    cls: type[Settings],
    values: flags.FlagValues,
    config: config_dict.ConfigDict,
    overridden: Collection[str] = (),
) -> None:
    """Writes what the flags of `define_flags` were given into a config.

    Args:
      cls: class of the settings.
      values: flags, after a command line has set them.
      config: settings as the config file has them.
      overridden: fields that `--config.FIELD` has set.

    Raises:
      UsageError: a field is set by its flag and by `--config.FIELD`.
    """
    given, own = _given(cls, values), own_flags(cls)
    for field in given:
        if field in overridden:
            raise UsageError(
                f"--{own[field].name or field} and --config.{field} are one setting; give one of "
                "them"
            )
    _set(config, given)


def _set(config: config_dict.ConfigDict, given: Mapping[str, Any]) -> None:
    # A config file may leave a field out, and may say 1 where a number is a float.
    with config.unlocked(), config.ignore_type():
        for field, value in given.items():
            config[field] = str(value) if isinstance(value, Path) else value


def help_lines(
    listed: Iterable[flags.Flag], defaults: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Lines of `--help` for flags: name and default, help text, choices.

    Args:
      listed: flags.
      defaults: values by the name of the flag, where they are not those of the flags.
    """
    for flag in listed:
        default = flag.default if flag.default is not None else (defaults or {}).get(flag.name)
        # absl adds lines of its own to the text of a repeated flag.
        head, text = f"  --{flag.name}={_shown(flag, default)}", " ".join(str(flag.help).split())
        if flag.boolean:
            head = f"  --[no]{flag.name}"
            text += f" (default: {'yes' if default else 'no'})"
        choices = getattr(flag.parser, "enum_values", None)
        if choices:
            # absl writes them before the text.
            text = text.partition(">: ")[2]
            text += f"; one of {', '.join(choices)}"
        yield from entry(head, text)


def _shown(flag: flags.Flag, default: Any) -> str:
    if isinstance(default, Sequence) and not isinstance(default, str):
        return ",".join(map(str, default))
    return f"<{flag.flag_type().split()[-1]}>" if default is None else str(default)
