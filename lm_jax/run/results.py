"""Results as frozen dataclasses: written as JSON, read back strictly, described by JSON Schema.

    write_json(folder / "summary.json", summary)          # lm_jax.run.files
    summary = load_result(folder / "summary.json", Summary)
    schema = json_schema(Summary)

A field is annotated with bool, int, float, str, None, `Literal`, `tuple`, `dict[str, X]`, a union
or another such dataclass. JSON has no literal for a number that is not finite, so a field says what
its null means: a `float` is finite and never null, a `float | None` is null where there is no
value, a `Real` may be any float and is null where it is NaN. The lines of `Attributes:` in the
docstring of a class describe its fields in the schema.
"""

from collections.abc import Sequence
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import types
import typing
from typing import Annotated, Any, TypeVar

from lm_jax.errors import CorruptError, nearest
from lm_jax.run.files import read_json

T = TypeVar("T")
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}
# Characters of a value in a message: more would hide the place.
_LONGEST_VALUE = 200


@dataclasses.dataclass(frozen=True)
class Between:
    """Marks a number that is at least `low` and, if given, at most `high`."""

    low: float
    high: float | None = None

    def __str__(self) -> str:
        return f"from {self.low} to {self.high}" if self.high is not None else f">= {self.low}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        ends = {"ge": self.low} | ({} if self.high is None else {"le": self.high})
        return handler(source) | ends


def finite(value: float) -> float | None:
    """The value as a Python float, or None where it is not finite, which JSON cannot write."""
    return float(value) if math.isfinite(value) else None


class _NotFinite:
    """Marks a float that may be NaN, in JSON null, or infinite, in JSON "inf" or "-inf"."""

    def __str__(self) -> str:
        return 'or null for NaN, "inf", "-inf"'

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(_read_real, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {"anyOf": [{"type": ["number", "null"]}, {"enum": list(_INFINITIES)}]}


Real = Annotated[float, _NotFinite()]
Count = Annotated[int, Between(0)]
Share = Annotated[float, Between(0, 1)]


def _read_real(value: Any) -> Any:
    if value is None:
        return math.nan
    return _INFINITIES.get(value, value) if isinstance(value, str) else value


class InvalidError(ValueError):
    """Data that does not fit a dataclass.

    Attributes:
      problems: one phrase for each error, with its place.
      raised: what the `__post_init__` of a dataclass raised; each is among the problems.
    """

    def __init__(self, problems: Sequence[str], raised: Sequence[Exception]):
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)
        self.raised = tuple(raised)


def load_result(path: str | os.PathLike[str], cls: type[T]) -> T:
    """Reads the dataclass `cls` from a JSON file that `write_json` wrote, strictly.

    Args:
      path: the file.
      cls: a dataclass or a tuple of some, or a union of dataclasses, of which it is the one whose
        fields fit best.

    Raises:
      CorruptError: the file is not JSON, or fields are missing, unknown or of another type; the
        message names them all.
    """
    tree = read_json(path)
    cls = _meant(tree, cls)
    try:
        return parse_result(tree, cls)
    except InvalidError as error:
        raise CorruptError(
            f"{path} is no {cls.__name__}: {error}; restore it, or start again in another --workdir"
        ) from error


def _meant(tree: Any, cls: type[T]) -> type[T]:
    """The member of a union with the fewest fields that are missing or unknown."""
    if len(choices := members(cls)) == 1:
        # Which need not be a dataclass: a list in JSON is a tuple of some.
        return cls
    held = set(tree) if isinstance(tree, dict) else set()
    return min(choices, key=lambda one: len(held ^ {f.name for f in dataclasses.fields(one)}))


def parse_result(tree: Any, cls: type[T], where: str = "") -> T:
    """Builds the dataclass `cls` from what `json.loads` returned, strictly.

    An int passes for a float, and nothing else for anything else. A field with a default may be
    left out.

    Args:
      tree: dicts, lists and scalars.
      cls: a dataclass.
      where: the name of `tree`, with which the places of errors begin.

    Raises:
      InvalidError: fields are missing, unknown or of another type.
    """
    import pydantic

    try:
        # Strict in the sense of JSON: a list is a tuple there, and a dict is a dataclass.
        return _adapter(cls).validate_json(json.dumps(tree), strict=True, extra="forbid")
    except RecursionError as error:
        raise InvalidError(["its brackets are nested too deeply"], []) from error
    except pydantic.ValidationError as error:
        problems: dict[str, None] = {}
        raised = []
        for each in error.errors(include_url=False):
            if each["type"] == "value_error":
                raised.append(each["ctx"]["error"])
                problems[str(raised[-1])] = None
            else:
                problems[_problem(tree, cls, each, where)] = None
        raise InvalidError(list(problems), raised) from error


def json_schema(cls: type) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what `write_json` writes of a dataclass.

    Every field is required and no other allowed. Titles and descriptions are from the docstrings.
    """
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def default_schema(self, schema: Any) -> dict[str, Any]:
            return self.generate_inner(schema["schema"])

        def dataclass_schema(self, schema: Any) -> dict[str, Any]:
            held = super().dataclass_schema(schema)["properties"]
            title, description, fields = _documented(schema["cls"])
            for name in fields.keys() & held.keys():
                held[name]["description"] = fields[name]
            return {
                "title": title,
                **({"description": description} if description else {}),
                "type": "object",
                "properties": held,
                "required": list(held),
                "additionalProperties": False,
            }

    return {"$schema": DRAFT, **_adapter(cls).json_schema(schema_generator=Generator)}


@functools.cache
def _adapter(cls: type) -> Any:
    # Takes 0.06 s, which commands that read no result need not spend.
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _documented(cls: type) -> tuple[str, str, dict[str, str]]:
    """The first line, the rest and the lines of `Attributes:` of a docstring."""
    doc = inspect.cleandoc(cls.__doc__ or cls.__name__)
    text, _, attributes = doc.partition("\n\nAttributes:\n")
    title, _, rest = text.partition("\n")
    fields = {}
    for entry in re.split(r"\n(?=  \w)", f"\n{attributes}")[1:]:
        name, _, description = entry.partition(":")
        fields[name.strip()] = " ".join(description.split())
    return title.removesuffix("."), " ".join(rest.split()), fields


def _problem(tree: Any, cls: type, error: Any, where: str) -> str:
    """One of pydantic's errors as a phrase that names the place and the remedy."""
    place, kind, value = _locate(tree, cls, error["loc"], where)
    last = str(error["loc"][-1]) if error["loc"] else ""
    owner = _bare(kind)
    if error["type"] == "json_invalid":
        return f"{place or 'it'} cannot be JSON: {error['ctx']['error']}"
    if dataclasses.is_dataclass(owner) and isinstance(value, dict):
        field = f"{place}.{last}".lstrip(".")
        hints = typing.get_type_hints(owner, include_extras=True)
        if error["type"] == "missing":
            return f"{field} is missing; give it a {spell(hints[last])}"
        fields = [each.name for each in dataclasses.fields(owner) if each.init]
        return f"{field} is not a field of {owner.__name__}{nearest(last, fields)}"
    text = repr(value)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}…"
    described = f"{place or 'it'} = {text}"
    if dataclasses.is_dataclass(owner):
        return f"{described}; give a section with the fields of {owner.__name__}"
    if typing.get_origin(owner) is typing.Literal:
        choices = nearest(str(value), map(str, typing.get_args(owner)))
        return f"{described} is not one of the choices{choices}"
    kinds = [each for each in members(kind) if each is not type(None)]
    if len(kinds) > 1:
        return f"{described}; give a {' or a '.join(map(spell, kinds))}"
    return f"{described} ({type(value).__name__}); give a {spell(kinds[0])}"


def _locate(tree: Any, cls: type, loc: Sequence[Any], where: str) -> tuple[str, Any, Any]:
    """The place, the annotation and the value at `loc`, or at its last part that is there.

    It does not go into a union of several types: which of them was meant is not known.
    """
    place, kind, value = where, cls, tree
    for step in loc:
        bare = _bare(kind)
        arguments = typing.get_args(bare)
        if isinstance(value, list) and isinstance(step, int) and step < len(value):
            place = f"{place}[{step}]"
            kind = arguments[0 if arguments[-1] is Ellipsis else step]
        elif isinstance(value, dict) and step in value and typing.get_origin(bare) is dict:
            place, kind = f"{place}.{step}", arguments[1]
        elif isinstance(value, dict) and step in value and dataclasses.is_dataclass(bare):
            hints = typing.get_type_hints(bare, include_extras=True)
            if step not in hints:
                break
            place, kind = f"{place}.{step}", hints[step]
        else:
            break
        value = value[step]
    return place.lstrip("."), kind, value


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; a type itself where it is none."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _bare(kind: Any) -> Any:
    """An annotation without its marks and without `| None`."""
    kinds = [each for each in members(kind) if each is not type(None)]
    if len(kinds) != 1:
        return kind
    return typing.get_args(kinds[0])[0] if typing.get_origin(kinds[0]) is Annotated else kinds[0]


def spell(kind: Any) -> str:
    """An annotation as an error spells it."""
    if typing.get_origin(kind) is Annotated:
        inner, *marks = typing.get_args(kind)
        # Those of a flag or of a bound say nothing of the type.
        said = [str(mark) for mark in marks if isinstance(mark, Between | _NotFinite)]
        return " ".join([spell(inner), *said])
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if len(members(kind)) > 1:
        return " or a ".join(spell(each) for each in arguments if each is not type(None))
    if origin is tuple and arguments:
        if arguments[-1] is Ellipsis:
            return f"list of {spell(arguments[0])}s"
        several = {spell(each) for each in arguments}
        if len(several) == 1 and len(arguments) in _COUNTS:
            example = tuple(_EXAMPLES.get(_bare(each)) for each in arguments)
            shown = f", such as {example}" if None not in example else ""
            return f"list of {_COUNTS[len(arguments)]} {several.pop()}s{shown}"
        return f"list of a {' and a '.join(map(spell, arguments))}"
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if kind in _SPELT:
        return _SPELT[kind]
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


_SPELT = {int: "whole number", float: "number", str: "text", bool: "truth value (True or False)"}
_COUNTS = {1: "one", 2: "two", 3: "three", 4: "four"}
_EXAMPLES = {int: 1, float: 0.5}
