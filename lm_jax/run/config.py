"""A command's configuration as plain data: checked, hashed, compared, and frozen for the program.

A config is an `ml_collections.ConfigDict` only between the command line and `main`. There
`from_plain` turns it into a frozen dataclass, typed and hashable, because a ConfigDict must not
enter `jax.jit`. What is stored and compared is `canonical_json`: sorted keys, tuples and lists
alike, no NaN (which ConfigDict's own `to_json` lets through, as invalid JSON). A field
whose metadata is `LATER` is left out at its default: settings stored before it was added are equal.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import hashlib
import json
import math
import typing
from typing import Any, TypeVar

from ml_collections import config_dict

from lm_jax.errors import UsageError
from lm_jax.run.results import InvalidError, members, parse_result

T = TypeVar("T")
_SCALARS = (bool, int, float, str)
# What a field that one of two configs lacks is there.
ABSENT = "absent"
# `metadata` of a field that a dataclass got after settings of that class were stored.
LATER: Mapping[str, bool] = {"later": True}


def to_plain(config: Any, where: str = "config") -> Any:
    """Returns a ConfigDict, mapping or dataclass as nested dicts and lists of plain scalars.

    `where` is the name of `config` in errors.

    Raises:
      UsageError: a number that is not finite, a required value not given, a key that is no
        string or holds a dot, or a value that is no bool, int, float, str, None, list, tuple or
        mapping.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = stored_fields(config)
    if isinstance(config, config_dict.ConfigDict | Mapping):
        return {key: to_plain(_item(config, key, where), f"{where}.{key}") for key in config}
    if isinstance(config, list | tuple):
        return [to_plain(item, f"{where}[{i}]") for i, item in enumerate(config)]
    if isinstance(config, float) and not math.isfinite(config):
        raise UsageError(f"{where} = {config}; give a finite number")
    if config is None or type(config) in _SCALARS:
        return config
    raise UsageError(
        f"{where} is a {type(config).__module__}.{type(config).__qualname__}; give a bool, int, "
        "float, string, None, tuple or section"
    )


def stored_fields(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, without those that are `LATER` and at their default."""
    later = _later_defaults(type(settings))
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    return {
        name: value for name, value in values.items() if name not in later or value != later[name]
    }


def as_stored(settings: Any, cls: type) -> Any:
    """Settings of the dataclass `cls`, or a ConfigDict or mapping of them, as they are stored."""
    plain = to_plain(settings)
    if not isinstance(plain, dict):
        return plain
    hints, later = typing.get_type_hints(cls), _later_defaults(cls)
    kept = {}
    for name, value in plain.items():
        if name in later and value == to_plain(later[name]):
            continue
        section = dataclasses.is_dataclass(hints.get(name))
        kept[name] = as_stored(value, hints[name]) if section else value
    return kept


def _later_defaults(cls: type) -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(cls) if f.metadata.get("later")}


def _item(config: Any, key: Any, where: str) -> Any:
    # A dotted name must mean one field only, in overrides and in `difference`.
    if not isinstance(key, str) or "." in key:
        raise UsageError(f"{where} has the key {key!r}; give keys that are strings without a dot")
    try:
        return config[key]
    except config_dict.RequiredValueError as error:
        raise UsageError(f"{where}.{key} has no value yet; give --{where}.{key}=VALUE") from error


def canonical_json(config: Any) -> str:
    """Returns the one JSON text of `config`: equal settings give equal text."""
    return json.dumps(to_plain(config), sort_keys=True, separators=(",", ":"), allow_nan=False)


def config_hash(config: Any) -> str:
    """Returns the sha256 of `canonical_json(config)`, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()


def plain_leaves(tree: Any, where: str = "config") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of every field of a tree made by `to_plain`."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from plain_leaves(value, f"{where}.{key}")
    else:
        yield where, tree


def config_difference(stored: Any, wanted: Any) -> list[str]:
    """Returns a phrase `config.x = 1, not 2` for every field in which two configs differ."""
    stored_leaves, wanted_leaves = (dict(plain_leaves(to_plain(tree))) for tree in (stored, wanted))
    phrases = []
    for name in sorted(stored_leaves.keys() | wanted_leaves.keys()):
        sides = [
            json.dumps(side[name]) if name in side else ABSENT
            for side in (stored_leaves, wanted_leaves)
        ]
        if sides[0] != sides[1]:
            phrases.append(f"{name} = {sides[0]}, not {sides[1]}")
    return phrases


def from_plain(config: Any, cls: type[T]) -> T:
    """Builds the frozen dataclass `cls` from `config`, field by field and strictly.

    Annotations may be bool, int, float, str, None, `Literal`, `tuple[X, ...]`, `tuple[X, Y]`,
    unions and other dataclasses. An int passes for a float, and nothing else for anything else. A
    field with a default may be left out.

    Raises:
      UsageError: naming every field that is unknown (with the nearest name), missing, of another
        type, or not finite.
      TypeError: an annotation of `cls` that is none of the above.
    """
    tree = to_plain(config)
    _check_annotation(cls, "config")
    try:
        return parse_result(tree, cls, "config")
    except InvalidError as error:
        # An error that a dataclass itself raised keeps its type and message.
        if len(error.raised) == len(error.problems) == 1:
            raise error.raised[0] from None
        raise UsageError(str(error)) from error


@functools.cache
def _check_annotation(kind: Any, where: str) -> None:
    """Raises `TypeError` for what pydantic would read and a config cannot hold, such as a dict."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.init:
                _check_annotation(hints[field.name], f"{where}.{field.name}")
    elif typing.get_origin(kind) is tuple or len(members(kind)) > 1:
        for argument in typing.get_args(kind):
            _check_annotation(argument, where)
    elif typing.get_origin(kind) is not typing.Literal and (
        kind not in (*_SCALARS, type(None), Ellipsis)
    ):
        raise TypeError(f"{where} is annotated {kind}, which no config can hold")
