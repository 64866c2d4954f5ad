"""A command's configuration as plain data: checked, hashed, compared, and frozen for the program.

A config is an `ml_collections.ConfigDict` only between the command line and `main`. There `freeze`
turns it into a frozen dataclass, typed and hashable, because a ConfigDict must not enter `jax.jit`.
What is stored and compared is `canonical_json`: sorted keys, tuples and lists alike, no NaN (which
ConfigDict's own `to_json` lets through, as invalid JSON).
"""

from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
import json
import math
import types
import typing
from typing import Any, TypeVar

from ml_collections import config_dict

from lm_jax.errors import UsageError, nearest

T = TypeVar("T")
_SCALARS = (bool, int, float, str)


def to_plain(config: Any, where: str = "config") -> Any:
    """Returns a ConfigDict, mapping or dataclass as nested dicts and lists of plain scalars.

    `where` is the name under which the errors speak of `config`.

    Raises:
      UsageError: a number that is not finite, a required value not given, a key that is no
        string or holds a dot, or a value that is no bool, int, float, str, None, list, tuple or
        mapping.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
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
    """Yields the dotted name and the value of every field of a tree made by `plain`."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from plain_leaves(value, f"{where}.{key}")
    else:
        yield where, tree


def config_difference(stored: Any, wanted: Any) -> list[str]:
    """Returns a phrase `config.x = 1, not 2` for every field in which two configs differ."""
    stored_leaves, wanted_leaves = (dict(plain_leaves(to_plain(tree))) for tree in (stored, wanted))
    absent = "absent"
    phrases = []
    for name in sorted(stored_leaves.keys() | wanted_leaves.keys()):
        sides = [
            json.dumps(side[name]) if name in side else absent
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
    problems: list[str] = []
    value = _build(to_plain(config), cls, "config", problems)
    if problems:
        raise UsageError("; ".join(problems))
    return value


def _build(tree: Any, cls: type, where: str, problems: list[str]) -> Any:
    if not isinstance(tree, dict):
        problems.append(f"{where} = {tree!r}; give a section with the fields of {cls.__name__}")
        return None
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    faults = [
        f"{where}.{name} is not a field of {cls.__name__}{nearest(name, fields)}"
        for name in sorted(tree.keys() - fields.keys())
    ]
    for name in [name for name in fields if name not in tree]:
        optional = (fields[name].default, fields[name].default_factory)
        if all(default is dataclasses.MISSING for default in optional):
            faults.append(f"{where}.{name} is missing; give it a {_spell(hints[name])}")
    values = {
        name: _convert(tree[name], hints[name], f"{where}.{name}", faults)
        for name in fields
        if name in tree
    }
    problems.extend(faults)
    return None if faults else cls(**values)


def _convert(value: Any, kind: Any, where: str, problems: list[str]) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _choose(value, arguments, where, problems)
    if origin is typing.Literal:
        if not any(value == option and type(value) is type(option) for option in arguments):
            hint = nearest(str(value), map(str, arguments))
            problems.append(f"{where} = {value!r} is not one of the choices{hint}")
        return value
    if origin is tuple and isinstance(value, list):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(arguments) == len(value):
            pairs = zip(value, arguments, strict=True)
            return tuple(
                _convert(item, item_kind, f"{where}[{i}]", problems)
                for i, (item, item_kind) in enumerate(pairs)
            )
    elif dataclasses.is_dataclass(kind):
        return _build(value, kind, where, problems)
    elif kind is float and type(value) is int:
        return float(value)
    elif kind is type(None) or kind in _SCALARS:
        if type(value) is kind:
            return value
    elif origin is not tuple:
        raise TypeError(f"{where} is annotated {kind}, which no config can hold")
    problems.append(f"{where} = {value!r} ({type(value).__name__}); give a {_spell(kind)}")
    return None


def _choose(value: Any, kinds: tuple[Any, ...], where: str, problems: list[str]) -> Any:
    """Converts to the first of `kinds` that `value` fits; one that is left speaks for itself."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        return _convert(value, kinds[0], where, problems)
    for kind in kinds:
        faults: list[str] = []
        converted = _convert(value, kind, where, faults)
        if not faults:
            return converted
    problems.append(f"{where} = {value!r}; give a {' or a '.join(map(_spell, kinds))}")
    return None


def _spell(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
