"""Distractor sentences for needle prompts: how they are split, filtered, counted and fitted.

The paper ("When Does Polynomial Attention Concentrate?", Appendices E and Z) takes its haystack
from a pool of distractor sentences, about 12 tokens each by its prompt lengths, and neither names
nor ships them. Here the pool comes from any text:

1. white space is collapsed and the text is split after . ! or ? before a capital letter;
2. kept are distinct sentences of 4 to 14 words that start with a capital, end with . ! or ?, and
   hold no quotation mark, bracket, markup, address or form of the cue word "secret" (the filters of
   Appendix AI, in spirit). On English essays these average 12 tokens;
3. of more than 4,000 a seeded sample is taken, which bounds the work for any size of text.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import itertools
import re
from typing import Literal

import numpy as np

from lm_jax.errors import BadInputError, UsageError
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.prompts import Tokenizer

WORDS = (4, 14)
POOL = 4000
_ATTEMPTS = 50

# Texts that lost their line breaks glue a sentence to the next: "... a cog.The five ...".
# The next letter is to be a capital of any alphabet.
_BOUNDARY = re.compile(r"(?<=[.!?])\s+(?=\S)|(?<=[a-z][.!?])(?=[A-Z])")
_UNUSABLE = re.compile(r"[\"“”„«»()\[\]{}<>*_|\\]|https?:|secret", re.IGNORECASE)


def sentences(text: str) -> list[str]:
    """Splits a text after . ! or ? before a capital letter and collapses white space."""
    text, parts, start = " ".join(text.split()), [], 0
    for match in _BOUNDARY.finditer(text):
        if text[match.end()].isupper():
            parts.append(text[start : match.start()])
            start = match.end()
    return [part for part in (*parts, text[start:]) if part]


def usable(sentence: str) -> bool:
    """Whether a sentence may be part of a haystack, by rule 2 of the module."""
    return (
        WORDS[0] <= len(sentence.split()) <= WORDS[1]
        and sentence[0].isupper()
        and sentence[-1] in ".!?"
        and not _UNUSABLE.search(sentence)
    )


@dataclasses.dataclass(frozen=True)
class Pool:
    """Distractor sentences and their tokens under one tokenizer."""

    sentences: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]  # of each sentence, after another one

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.tokens]

    @functools.cached_property
    def _holders(self) -> dict[str | int, set[int]]:
        holders: dict[str | int, set[int]] = {}
        for i, (sentence, ids) in enumerate(zip(self.sentences, self.tokens, strict=True)):
            for item in {*prompts_lib.words(sentence), *ids}:
                holders.setdefault(item, set()).add(i)
        return holders

    def without(self, word: str, ids: Iterable[int]) -> np.ndarray:
        """Returns the indices of sentences that hold neither the word, in any case, nor a token."""
        results = [self._holders.get(item, set()) for item in (word.casefold(), *ids)]
        barred = set().union(*results)
        return np.array([i for i in range(len(self.sentences)) if i not in barred], int)


def pool(
    haystack: str | Iterable[str],
    tokenizer: Tokenizer,
    seed: int,
    *,
    lines: bool = False,
    free_of: str = "",
) -> Pool:
    """Returns the usable sentences of a text, or of several, at most 4,000 of them.

    Args:
      haystack: a text, or an iterable of texts.
      tokenizer: the model's own.
      seed: random seed of the sample of a larger text.
      lines: whether to take whole lines, of any form but empty ones, in place of sentences.
      free_of: text that no sentence or line has.

    Raises:
      BadInputError: if nothing usable is left.
    """
    texts = [haystack] if isinstance(haystack, str) else haystack
    if lines:
        parts = itertools.chain.from_iterable(text.splitlines() for text in texts)
        whole = (part.rstrip() for part in parts)
        kept = list(dict.fromkeys(filter(None, whole)))
    else:
        parts = itertools.chain.from_iterable(map(sentences, texts))
        kept = list(dict.fromkeys(filter(usable, parts)))
    kept = [part for part in kept if not free_of or free_of not in part]
    if not kept and lines:
        raise BadInputError("haystack has no line; give a text file with some")
    if not kept:
        raise BadInputError(
            f"haystack has no usable sentence: give prose with sentences of {WORDS[0]} to "
            f"{WORDS[1]} words that begin with a capital letter, without quotes or brackets; or "
            "take its lines (suites.needle_file)"
        )
    if len(kept) > POOL:
        chosen = np.random.RandomState(seed).permutation(len(kept))[:POOL]
        kept = [kept[i] for i in sorted(chosen.tolist())]
    # Encoded after a full stop, since a sentence alone may lack the token of the space before it.
    before = ".\n" if lines else ". "
    stop = len(prompts_lib.encode(tokenizer, ".", start=False))
    ids = (prompts_lib.encode(tokenizer, before + part, start=False)[stop:] for part in kept)
    return Pool(tuple(kept), tuple(map(tuple, ids)))


def fit(
    lengths: Sequence[int], allowed: np.ndarray, need: int, rng: np.random.RandomState
) -> list[int] | None:
    """Returns distinct random sentences whose lengths sum to `need`, or None if none were found.

    Sentences are taken in random order while there is room for two of the longest; a subset sum
    over the rest closes the gap exactly.
    """
    order = allowed[rng.permutation(len(allowed))].tolist()
    room = 2 * max(lengths)
    taken = []
    while order and need - lengths[order[-1]] >= room:
        taken.append(order.pop())
        need -= lengths[taken[-1]]
    closing = _subset(lengths, order, need)
    return None if closing is None else taken + closing


@dataclasses.dataclass(frozen=True)
class Size:
    """How much haystack a prompt has: `pad` sentences or tokens of it, or `length` tokens in all.

    Raises:
      UsageError: unless one of the two is given, for an unknown unit, or a negative pad.
    """

    pad: int | None
    pad_unit: Literal["sentences", "tokens"]
    length: int | None

    def __post_init__(self) -> None:
        if (self.pad is None) == (self.length is None):
            raise UsageError("give either pad= or length=, not both and not neither")
        if self.pad_unit not in ("sentences", "tokens"):
            raise UsageError(
                f"pad_unit={self.pad_unit!r} is unknown: choose 'sentences' or 'tokens'"
            )
        if self.pad is not None and self.pad < 0:
            raise UsageError(f"pad={self.pad} is negative: give 0 or more")


def fill(
    pool: Pool,
    allowed: np.ndarray,
    size: Size,
    count: Callable[[Sequence[str]], int],
    rng: np.random.RandomState,
    *,
    free_of: str,
) -> list[str]:
    """Returns distinct random sentences that give a prompt its size.

    Args:
      pool: the sentences.
      allowed: indices of those that may be taken.
      size: size of the prompt.
      count: a function that counts the tokens of the prompt with these sentences in it.
      rng: the generator that draws them.
      free_of: what the allowed ones are free of, for a message.

    Raises:
      UsageError: for a length that leaves no room for needle and cue.
      BadInputError: for too few sentences, or a length that whole ones cannot reach.
    """
    if size.pad is not None and size.pad_unit == "sentences":
        if size.pad > len(allowed):
            raise BadInputError(
                f"haystack: pad={size.pad} sentences, but only {len(allowed)} usable ones are free "
                f"of {free_of}: give more text"
            )
        return [pool.sentences[i] for i in allowed[rng.permutation(len(allowed))[: size.pad]]]
    bare = count([])
    length = bare + (size.pad or 0) if size.length is None else size.length
    if length < bare:
        raise UsageError(
            f"length={length} is too short for the needle and cue: give {bare} or more"
        )
    if length == bare:
        return []
    need = length - bare
    for _ in range(_ATTEMPTS):
        chosen = fit(pool.lengths, allowed, need, rng)
        if chosen is None:
            continue
        distractors = [pool.sentences[i] for i in chosen]
        actual = count(distractors)
        if actual == length:
            return distractors
        # A sentence at the very start of a text may have one token more or less than elsewhere.
        need += length - actual
    raise BadInputError(
        f"haystack: no set of whole sentences gives {length} tokens ({bare} of them are needle and "
        "cue): give more text, or another length"
    )


def _subset(lengths: Sequence[int], candidates: Sequence[int], need: int) -> list[int] | None:
    reached: dict[int, tuple[int, ...]] = {0: ()}
    for candidate in candidates:
        if need in reached:
            break
        for total, chosen in list(reached.items()):
            longer = total + lengths[candidate]
            if longer <= need:
                reached.setdefault(longer, (*chosen, candidate))
    return list(reached[need]) if need in reached else None
