"""Suites by the name that an audit's setting gives them, all of one signature.

    build("decoys", tokenizer, haystack=text, length=512, n=50, seed=0, max_length=2048)

A suite has exactly `length` tokens per prompt, so that one can be compared over lengths.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from lm_jax.errors import UsageError, nearest
from polyattn_jax.suites import needles, openings
from polyattn_jax.suites.induction import induction
from polyattn_jax.suites.mqar import mqar
from polyattn_jax.suites.needle_file import NeedleFile
from polyattn_jax.suites.niah import niah
from polyattn_jax.suites.prompts import Suite, Tokenizer

# Builders that need a haystack, by the name of their suite.
_NEEDLES: Mapping[str, Callable[..., Suite]] = {
    "needle": niah,
    "two_needles": functools.partial(
        needles.secret_words,
        name="two_needles",
        modifiers=needles.ORDINALS[:2],
        depths=(0.0, 0.5),
    ),
    "four_needles": functools.partial(
        needles.secret_words,
        name="four_needles",
        modifiers=needles.ORDINALS,
        depths=(0.0, 0.25, 0.5, 0.75),
    ),
    "decoys": functools.partial(
        needles.secret_words,
        name="decoys",
        modifiers=needles.DECOYS,
        depths=(0.0, 0.0, 0.0),
        asked=(2,),
    ),
    "pass_key": needles.pass_key,
    "ruler_single": functools.partial(needles.ruler, name="ruler_single", keys=1, kind="number"),
    "ruler_multi": functools.partial(
        needles.ruler, name="ruler_multi", keys=needles.KEYS, kind="number"
    ),
    "ruler_paper_single": functools.partial(
        needles.ruler, name="ruler_paper_single", keys=1, kind="uuids"
    ),
    "ruler_paper_multi": functools.partial(
        needles.ruler, name="ruler_paper_multi", keys=needles.KEYS, kind="uuids"
    ),
}
# Builders from random tokens.
_RANDOM: Mapping[str, Callable[..., Suite]] = {
    "copying": openings.copying,
    "induction": lambda tokenizer, **options: induction(vocabulary=tokenizer, **options),
    "induction_pair": lambda tokenizer, **options: induction(
        vocabulary=tokenizer, form="pair", **options
    ),
    "mqar": lambda tokenizer, **options: mqar(vocabulary=tokenizer, **options),
}
NAMES = (*_NEEDLES, *_RANDOM)


def build(
    name: str,
    tokenizer: Tokenizer,
    *,
    haystack: str,
    length: int,
    n: int,
    seed: int,
    max_length: int,
    common: int | None = None,
    words: NeedleFile | None = None,
) -> Suite:
    """Returns `n` prompts of exactly `length` tokens.

    Args:
      name: one of `NAMES`.
      tokenizer: the model's own.
      haystack: the text around needles.
      length: tokens that are read of each prompt.
      n: number of prompts.
      seed: random seed in [0, 2**32).
      max_length: the model's context.
      words: words and frame of the suite `needle`; None for the shipped ones.
      common: the number of lowest ordinary ids from which random tokens are drawn; None for all.

    Raises:
      UsageError: for an unknown name, or a length that is too short.
      BadInputError: as from the builder.
    """
    if name not in NAMES:
        raise UsageError(f"name has {name!r}{nearest(name, NAMES)}")
    options: dict[str, Any] = {"length": length, "n": n, "seed": seed, "max_length": max_length}
    if words is not None and name == "needle":
        options |= {"nouns": words.words, "cue": words.cue, "end": words.end, "lines": words.lines}
    try:
        if name in _NEEDLES:
            suite = _NEEDLES[name](tokenizer, haystack=haystack, **options)
        else:
            suite = _RANDOM[name](tokenizer, common=common, **options)
    except UsageError as error:
        raise UsageError(f"suite {name!r}: {error}") from error
    return dataclasses.replace(suite, name=name)


def available(name: str, n: int) -> int:
    """How many prompts a suite has where `n` are asked for: `copying` has one of each opening."""
    return min(n, most(name) or n)


def most(name: str) -> int | None:
    """The most prompts that a suite has; None where there is no end."""
    return openings.COUNT if name == "copying" else None


def key(name: str, length: int) -> str:
    """The name of a suite at one length, as in the parquet files: `decoys_512`."""
    return f"{name}_{length}"


def split(suite: str) -> tuple[str, int | None]:
    """Name and length of a suite's `key`; the name alone where no length ends it."""
    name, _, length = suite.rpartition("_")
    return (name, int(length)) if name and length.isdecimal() else (suite, None)


def read_entry(entry: str) -> tuple[str, int | None]:
    """Name and length of an entry of a setting: `decoys@512`, or `decoys` without a length.

    A length that is no number above 0, which `problems` refuses, is 0.
    """
    name, sign, length = entry.partition("@")
    if not sign:
        return name, None
    return name, int(length) if length.isdecimal() else 0


def at_lengths(entries: Iterable[str], lengths: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Suite and tokens of everything that a setting asks for, in its order.

    Args:
      entries: entries as in `read_entry`.
      lengths: tokens of the entries without a length of their own.
    """
    return tuple(
        (name, each)
        for name, length in map(read_entry, entries)
        for each in (lengths if length is None else (length,))
    )


def problems(field: str, entries: tuple[str, ...], lengths: Sequence[int] = ()) -> list[str]:
    """A sentence for each fault of a list of suites.

    Args:
      field: name of the setting.
      entries: entries as in `read_entry`.
      lengths: tokens of the entries without a length of their own.
    """
    faults = []
    for entry in entries:
        name, length = read_entry(entry)
        if name not in NAMES:
            faults.append(f"{field} has {entry!r}{nearest(name, NAMES)}")
        elif length == 0:
            faults.append(
                f"{field} has {entry!r}, whose length is no number of tokens; write "
                f"{name + '@512'!r}, or {name!r} for the lengths that all share"
            )
    asked = at_lengths(dict.fromkeys(entries), tuple(dict.fromkeys(lengths)))
    if len(set(entries)) < len(entries):
        faults.append(f"{field} = {entries} names a suite twice; name each once")
    elif len(set(asked)) < len(asked):
        twice = next(key(*one) for one in asked if asked.count(one) > 1)
        faults.append(
            f"{field} = {entries} asks for {twice} twice, once at a length of its own and once at "
            f"one of {tuple(lengths)}; leave one out"
        )
    return faults
