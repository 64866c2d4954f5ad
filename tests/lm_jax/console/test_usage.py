"""The help's examples and meanings are those of the docstrings."""

import dataclasses

from lm_jax.console import usage


def test_the_examples_go_to_the_top():
    docstring = """Does a thing.

        iaj a b --c=1
        iaj a b \\\\
            --c=2

    It does it twice:

        not an example
    """
    assert usage.examples_first(docstring).split("\n\n") == [
        "Examples:\n    iaj a b --c=1\n    iaj a b \\\\\n        --c=2",
        "Does a thing.",
        "It does it twice:",
        "    not an example",
    ]
    assert usage.examples_first("Does a thing.") == "Does a thing."
    assert usage.examples_first(None) == ""


@dataclasses.dataclass(frozen=True)
class Inner:
    """A section.

    Attributes:
      size: how large it is,
        in bytes: all of it.
    """

    size: int = 1


@dataclasses.dataclass(frozen=True)
class Outer:
    """Settings.

    Attributes:
      rate, warmup: of the
        schedule.
      inner: the section.

    Not a field: a remark.
    """

    rate: float = 1.0
    warmup: int = 2
    inner: Inner = Inner()


def test_the_meanings_are_those_of_the_attributes_and_of_sections():
    assert usage.field_meanings(Outer) == {
        "rate": "of the schedule.",
        "warmup": "of the schedule.",
        "inner": "the section.",
        "inner.size": "how large it is, in bytes: all of it.",
    }


DOC = """Makes a thing.

    iaj make thing --of=wood \\
        --workdir=runs/thing
    iaj make thing --of=stone

It is made.
"""


def test_missing_flags_are_named_together_with_an_example():
    one, two = {"of": "the wood"}, {"of": "the wood", "by": "the maker", "workdir": "the place"}
    assert usage.missing_text(one, None) == "--of is missing; name the wood"
    assert usage.missing_text(two, DOC) == (
        "--of, --by and --workdir are missing; name the wood, and the maker, and the place; for "
        "example: iaj make thing --of=wood --workdir=runs/thing"
    )
