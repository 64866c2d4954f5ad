"""Settings whose bounds stand at their fields.

    @dataclasses.dataclass(frozen=True)
    class TwoHopConfig(Settings):
        steps: Annotated[int, at_least(1)] = 2_000
        seeds: Annotated[tuple[int, ...], different(at_least(0))] = (0, 1, 2)

The docstring's section `Attributes` says what each field means, and is the help of its flag: a
field is `--config.steps` of its command, and with `Flag()` also `--steps` (`lm_jax.console.flags`).
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import math
from pathlib import Path
import typing
from typing import Annotated, Any, ClassVar, Literal

from lm_jax.errors import UsageError, closest, nearest


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a value must be.

    Attributes:
      phrase: what it must be, in words: "at least 1".
      holds: whether a value is.
      hint: what else to say of a value that is not, such as a name that it may have meant.
    """

    phrase: str
    holds: Callable[[Any], bool]
    hint: Callable[[Any], str] = lambda _: ""


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of its own for a field, besides `--config.FIELD`.

    Attributes:
      name: name of the flag; "" for that of the field.
      repeated: whether a tuple is given by repeating the flag, and not with commas.
      required: whether the command needs it.
      unless: field of the same settings that stands for it: given that, the command needs no flag.
    """

    name: str = ""
    repeated: bool = False
    required: bool = False
    unless: str = ""


@dataclasses.dataclass(frozen=True)
class Reads:
    """What the text of a field names and the command reads; `iaj` looks for it before it starts.

    Attributes:
      kind: "model" for what `load_pretrained` takes, "run" for a run of training or the name of a
        published one, "file" for a file, "name" for what only `assets` knows, or "length" for a
        number of tokens that the model must have positions for.
      assets: entries of the manifest that a value needs, if any, by the value; it is no file then.
      suffix: ending of the values that name a file; others name something else.
      unless: fields of the same settings with which it is not read.
    """

    kind: Literal["model", "run", "file", "name", "length"]
    assets: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    suffix: str = ""
    unless: tuple[str, ...] = ()


READS_MODEL, READS_RUN, READS_FILE = Reads("model"), Reads("run"), Reads("file")
READ_AT_ONCE = Reads("length")


@dataclasses.dataclass(frozen=True)
class Shortcut:
    """A flag that sets several fields at once.

    Attributes:
      help: what it names.
      fields: the values of the fields, by name, from the text of the flag.
    """

    help: str
    fields: Callable[[str], Mapping[str, Any]]


def annotations(cls: type, kind: type) -> dict[str, list[Any]]:
    """The objects of one kind (`Bound`, `Flag`) in the annotations of each field of a class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: [
            one for one in getattr(hints[field.name], "__metadata__", ()) if isinstance(one, kind)
        ]
        for field in dataclasses.fields(cls)
    }


def own_flags(cls: type) -> dict[str, Flag]:
    """The flag of each field that has one of its own; of `CommandOptions` all have."""
    declared = {name: flags[0] for name, flags in annotations(cls, Flag).items() if flags}
    if not issubclass(cls, CommandOptions):
        return declared
    return {name: declared.get(name, Flag()) for name in annotations(cls, Flag)}


def at_least(least: float) -> Bound:
    """Finite numbers from `least` on."""
    return Bound(f"at least {least:,}", lambda value: least <= value < math.inf)


def above(limit: float) -> Bound:
    """Finite numbers above `limit`."""
    return Bound(f"above {limit:,}", lambda value: limit < value < math.inf)


def between(low: float, high: float) -> Bound:
    """Numbers above `low` and below `high`."""
    return Bound(f"between {low:,} and {high:,}", lambda value: low < value < high)


def within(low: float, high: float) -> Bound:
    """Numbers from `low` to `high`."""
    return Bound(f"from {low:,} to {high:,}", lambda value: low <= value <= high)


def choice(known: Collection[str]) -> Bound:
    """Names out of the known ones."""
    return Bound(
        f"one of {', '.join(known)}",
        lambda value: value in known,
        lambda value: closest(str(value), known),
    )


SEED = within(0, 2**32 - 1)
SHARE_BELOW_1 = Bound("at least 0 and below 1", lambda value: 0 <= value < 1)
# Annotations of fields that many settings have.
Seed = Annotated[int, SEED]
PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, above(0)]
NonNegativeFloat = Annotated[float, at_least(0)]
Finite = Annotated[float, Bound("finite", math.isfinite)]
ShareBelow1 = Annotated[float, SHARE_BELOW_1]


def different(each: Bound) -> Bound:
    """Tuples of one or more different values, of which each is as told."""

    def holds(values: Collection[Any]) -> bool:
        return bool(values) and len(set(values)) == len(values) and all(map(each.holds, values))

    return Bound(f"one or more different values, each {each.phrase}", holds)


def none_or(bound: Bound, phrase: str = "") -> Bound:
    """The empty tuple, or tuples as told; `phrase` says it in other words than "none or"."""
    return dataclasses.replace(
        bound,
        phrase=phrase or f"none or {bound.phrase}",
        holds=lambda values: values == () or bound.holds(values),
    )


def names(known: Collection[str]) -> Bound:
    """Tuples of one or more different names out of the known ones."""

    def holds(values: Collection[str]) -> bool:
        return bool(values) and len(set(values)) == len(values) and set(values) <= set(known)

    def hint(values: Collection[str]) -> str:
        return "".join(
            f", not {name!r}{nearest(name, known)}" for name in values if name not in known
        )

    return Bound("one or more different names", holds, hint)


def _holds(bound: Bound, value: Any, hint: Any) -> bool:
    """Whether a value of a field is within its bound; None is where the field may be None."""
    if value is None:
        return type(None) in typing.get_args(hint)
    try:
        return bound.holds(value)
    except TypeError:
        # Text in place of a number, or one value in place of several.
        return False


def _hint(bound: Bound, value: Any) -> str:
    """What else to say of a value, where it is of the right type."""
    try:
        return "" if value is None else bound.hint(value)
    except TypeError:
        return ""


class Settings:
    """Base of a frozen dataclass whose fields are compared with their bounds when it is made.

    Attributes:
      shortcuts: flags that set several fields, by name.
      where: text before the name of a field in errors.
    """

    shortcuts: ClassVar[Mapping[str, Shortcut]] = {}
    where: ClassVar[str] = "config."

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        problems = [
            f"{self._assigned(name, value)} must be {bound.phrase}{_hint(bound, value)}"
            for name, bounds in annotations(type(self), Bound).items()
            for bound in bounds
            if not _holds(bound, value := getattr(self, name), hints[name])
        ]
        try:
            problems += self.problems()
        except UsageError as error:
            problems.append(str(error))
        except TypeError:
            # Of a field that was found to be of another type.
            if not problems:
                raise
        if problems:
            raise UsageError("; ".join(problems))

    def problems(self) -> list[str]:
        """What is wrong with fields taken together, a phrase for each; none by default.

        It may raise the one that ends the search. A field that may be None has no bounds there.
        """
        return []

    def default_folder(self) -> Path | None:
        """The work folder of a command that names none; None where it must name one."""
        return None

    def _assigned(self, field: str, value: Any) -> str:
        """A field and its value as the command line has them."""
        own = own_flags(type(self))
        if field in own:
            return f"--{own[field].name or field}={value}"
        return f"{self.where}{field} = {value!r}"


class CommandOptions(Settings):
    """Base of the settings of a command without a config file: each field is a flag."""
