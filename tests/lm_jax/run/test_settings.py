"""Bounds at the fields of settings: what holds, what is refused, and in which words."""

import dataclasses
import math
from typing import Annotated

import pytest

from lm_jax.errors import UsageError
from lm_jax.run.config import from_plain
from lm_jax.run.settings import Settings, above, at_least, between, different, names, within


@dataclasses.dataclass(frozen=True)
class Inner(Settings):
    """A section."""

    share: Annotated[float, within(0, 1)] = 0.5


@dataclasses.dataclass(frozen=True)
class Outer(Settings):
    """Settings of every kind."""

    count: Annotated[int, at_least(1)] = 1
    rate: Annotated[float, above(0)] = 0.1
    chance: Annotated[float, between(0, 1)] = 0.5
    seeds: Annotated[tuple[int, ...], different(at_least(0))] = (0,)
    kinds: Annotated[tuple[str, ...], names(("relay", "and"))] = ("relay",)
    inner: Inner = dataclasses.field(default_factory=Inner)

    def problems(self) -> list[str]:
        return ["config.count exceeds its limit"] * (self.count > 99)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("count", 0, "config.count = 0 must be at least 1"),
        ("count", 100, "config.count exceeds its limit"),
        ("rate", 0.0, "config.rate = 0.0 must be above 0"),
        ("rate", math.inf, "config.rate = inf must be above 0"),
        ("rate", math.nan, "config.rate = nan must be above 0"),
        ("chance", 1.0, "config.chance = 1.0 must be between 0 and 1"),
        ("seeds", (), "config.seeds = () must be one or more different values"),
        ("seeds", (1, 1), "config.seeds = (1, 1) must be one or more different values"),
        ("seeds", (-1,), "each at least 0"),
        ("kinds", ("rely",), "one or more different names, not 'rely'; did you mean 'relay'?"),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_words(field, value, words):
    with pytest.raises(UsageError) as caught:
        Outer(**{field: value})
    assert words in str(caught.value)


def test_all_problems_are_in_one_message():
    with pytest.raises(UsageError) as caught:
        Outer(count=0, rate=-1.0)
    assert str(caught.value).count(" must be ") == 2


def test_values_at_the_ends_hold():
    assert Outer(count=99, rate=1e-9, chance=0.99, seeds=(0, 1)).inner == Inner()
    assert {Inner(0.0).share, Inner(1.0).share} == {0.0, 1.0}


def test_a_config_is_read_with_the_same_bounds():
    assert from_plain({"count": 3, "inner": {"share": 1.0}}, Outer) == Outer(3, inner=Inner(1.0))
    for tree in ({"count": 0}, {"inner": {"share": 2.0}}):
        with pytest.raises(UsageError, match="must be"):
            from_plain(tree, Outer)


@pytest.mark.parametrize("value", [None, "three", (3,)])
def test_a_value_of_another_type_is_refused_in_words(value):
    with pytest.raises(UsageError, match=r"config.count = .* must be at least 1"):
        Outer(count=value)


def test_none_is_a_value_of_fields_that_may_be_none_alone():
    @dataclasses.dataclass(frozen=True)
    class Optional(Settings):
        most: Annotated[int | None, at_least(1)] = None
        least: Annotated[int, at_least(1)] = 1

        def problems(self):
            return [] if self.most is None or self.least <= self.most else ["least > most"]

    assert Optional().most is None and Optional(2).most == 2
    # Fields taken together are not compared with None.
    with pytest.raises(UsageError, match=r"^config.least = None must be at least 1$"):
        Optional(2, None)
