"""Settings whose bounds stand at their fields.

    @dataclasses.dataclass(frozen=True)
    class TwoHopConfig(Settings):
        steps: Annotated[int, at_least(1)] = 2_000
        seeds: Annotated[tuple[int, ...], different(at_least(0))] = (0, 1, 2)

The docstring's section `Attributes` says what each field means, and is the help of its flag.
"""

from collections.abc import Callable, Collection
import dataclasses
import math
import typing
from typing import Any

from lm_jax.errors import UsageError, nearest


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


def different(each: Bound) -> Bound:
    """Tuples of one or more different values, of which each is as told."""

    def holds(values: Collection[Any]) -> bool:
        return bool(values) and len(set(values)) == len(values) and all(map(each.holds, values))

    return Bound(f"one or more different values, each {each.phrase}", holds)


def names(known: Collection[str]) -> Bound:
    """Tuples of one or more different names out of the known ones."""

    def holds(values: Collection[str]) -> bool:
        return bool(values) and len(set(values)) == len(values) and set(values) <= set(known)

    def hint(values: Collection[str]) -> str:
        return "".join(
            f", not {name!r}{nearest(name, known)}" for name in values if name not in known
        )

    return Bound("one or more different names", holds, hint)


class Settings:
    """Base of a frozen dataclass whose fields are compared with their bounds when it is made."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        problems = [
            f"config.{name} = {value!r} must be {bound.phrase}{bound.hint(value)}"
            for name, hint in hints.items()
            for bound in getattr(hint, "__metadata__", ())
            if isinstance(bound, Bound) and not bound.holds(value := getattr(self, name))
        ]
        if problems := [*problems, *self.problems()]:
            raise UsageError("; ".join(problems))

    def problems(self) -> list[str]:
        """What is wrong with fields taken together, a phrase for each; none by default."""
        return []
