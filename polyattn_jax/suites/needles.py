"""Harder needles: several to tell apart, decoys, pass keys, and prompts in RULER's format.

After "When Does Polynomial Attention Concentrate?", Appendices X, Z, AA and AI:

  * two_needles, four_needles: "The first secret word is X." ... "The second secret word is Y." and
    one of them is asked for. The needles are spread evenly over the haystack.
  * decoys: "The fake secret word is X. The decoy secret word is Y. The real secret word is Z." and
    then the haystack; the real one is asked for.
  * pass_key: "The pass key is X.", X of eight capital letters and digits.
  * ruler_single, ruler_multi: one key, or four of which one is asked for, in the words of RULER
    (Hsieh et al. 2024, arXiv:2404.06654; NVIDIA/RULER, Apache-2.0) for one answer, with numbers of
    seven digits. Keys are the nouns of this package, where RULER joins an adjective and a noun.
  * ruler_paper_single, ruler_paper_multi: the same as the paper has it, in the plural, with UUIDs.

A noun is one token. A pass key, a number or a UUID is several: all of a suite are of one number of
tokens, the most frequent one of this tokenizer, and all tokens of the answer but the last are part
of the prompt. Greedy decoding writes the answer if each of its tokens is the most likely one after
those before it, which one forward pass shows; the paper decodes and looks for the key in the text.

`meta["others"]` holds names and tokens of the other needles, so that a wrong answer is known as a
decoy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any
import uuid

import numpy as np

from lm_jax.errors import BadInputError
from polyattn_jax.suites import haystack as haystack_lib
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.haystack import Size
from polyattn_jax.suites.niah import shipped_nouns, single_token_nouns, spellings
from polyattn_jax.suites.prompts import Prompt, Suite, Tokenizer

ORDINALS = ("first", "second", "third", "fourth")
DECOYS = ("fake", "decoy", "real")
KEYS = 4
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
# Values that are tried to find one of the usual number of tokens, and to find that number.
_TRIES, _SAMPLE = 2000, 200
# Draws that belong to a suite and to none of its prompts.
_OF_SUITE = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Needle:
    """A sentence that holds a value.

    Attributes:
      name: what the answer is called that copies this value.
      sentence: the sentence, which holds the value once.
      value: the value, without the space before it.
      depth: fraction of the haystack's sentences before it.
    """

    name: str
    sentence: str
    value: str
    depth: float


@dataclasses.dataclass(frozen=True)
class Task:
    """A prompt without its haystack.

    Attributes:
      needles: the needles; those of one depth stand in this order.
      asked: index of the needle that holds the answer.
      cue: text after the haystack.
      header: text before it.
      gap: text between the haystack and the cue.
      barred: words that no sentence of the haystack may have.
    """

    needles: tuple[Needle, ...]
    asked: int
    cue: str
    header: str = ""
    gap: str = " "
    barred: tuple[str, ...] = ()

    def text(self, distractors: Sequence[str]) -> str:
        """The prompt with this haystack."""
        parts: list[str] = []
        places = [round(needle.depth * len(distractors)) for needle in self.needles]
        for place in range(len(distractors) + 1):
            here = zip(self.needles, places, strict=True)
            parts += [needle.sentence for needle, at in here if at == place]
            parts += distractors[place : place + 1]
        return f"{self.header}{' '.join(parts)}{self.gap}{self.cue}"


def secret_words(
    tokenizer: Tokenizer,
    modifiers: Sequence[str],
    *,
    depths: Sequence[float],
    asked: Sequence[int] | None = None,
    name: str = "secret_words",
    nouns: Iterable[str] | None = None,
    **options: Any,
) -> Suite:
    """Returns prompts with a secret word for each modifier: "The first secret word is X."

    Args:
      tokenizer: the model's own.
      modifiers: one word for each needle.
      depths: fraction of the haystack before each needle.
      asked: the needles that may be asked for, one at random per prompt; any of them unless given.
      name: name of the suite.
      nouns: words to draw from; the shipped list unless given.
      **options: options of `build`.

    Raises:
      BadInputError: for fewer than 50 usable nouns, and as `build`.
    """
    kept = list(single_token_nouns(tokenizer, shipped_nouns() if nouns is None else nouns))
    asked = range(len(modifiers)) if asked is None else asked

    def draw(rng: np.random.RandomState) -> Task:
        drawn = [kept[i] for i in rng.permutation(len(kept))[: len(modifiers)]]
        chosen = asked[rng.randint(len(asked))]
        needles = tuple(
            Needle(modifier, f"The {modifier} secret word is {noun}.", noun, depth)
            for modifier, noun, depth in zip(modifiers, drawn, depths, strict=True)
        )
        cue = f"The {modifiers[chosen]} secret word is"
        return Task(needles, chosen, cue, barred=tuple(drawn))

    facts = {"modifiers": list(modifiers), "depths": list(depths), "nouns_kept": len(kept)}
    return build(name, tokenizer, draw, facts=facts, **options)


def pass_key(tokenizer: Tokenizer, **options: Any) -> Suite:
    """Returns prompts with "The pass key is X." before the haystack; `options` are of `build`."""
    cue = "The pass key is"
    value = _values(tokenizer, cue, _pass_key, options.get("seed", 0))

    def draw(rng: np.random.RandomState) -> Task:
        key = value(rng)
        needle = Needle("key", f"{cue} {key}.", key, 0.0)
        return Task((needle,), 0, cue, barred=("pass",))

    facts = {"values": "eight of A-Z and 0-9", "value_tokens": value.tokens}
    return build("pass_key", tokenizer, draw, facts=facts, **options)


def ruler(
    tokenizer: Tokenizer, *, keys: int, kind: str, name: str = "ruler", **options: Any
) -> Suite:
    """Returns prompts in RULER's format, with needles at random places.

    Args:
      tokenizer: the model's own.
      keys: number of needles, of which one is asked for.
      kind: "number" in RULER's words for one answer, "uuids" in those of the paper.
      name: name of the suite.
      **options: options of `build`.
    """
    make, plural, header, question, answer = _RULER[kind]
    example = f"{header}\n{question.format('key')} {answer.format('key')}"
    value = _values(tokenizer, example, make, options.get("seed", 0))
    nouns = shipped_nouns()

    def draw(rng: np.random.RandomState) -> Task:
        names = [nouns[i] for i in rng.permutation(len(nouns))[:keys]]
        values = [value(rng) for _ in names]
        depths = rng.uniform(size=keys).tolist()
        asked = int(rng.randint(keys))
        needles = tuple(
            Needle(
                "key" if i == asked else "other key",
                f"One of the special magic {plural} for {names[i]} is: {values[i]}.",
                values[i],
                depths[i],
            )
            for i in range(keys)
        )
        cue = f"{question.format(names[asked])} {answer.format(names[asked])}"
        return Task(needles, asked, cue, f"{header}\n", "\n", ("magic", *names))

    facts = {"values": kind, "value_tokens": value.tokens, "keys": keys}
    return build(name, tokenizer, draw, facts=facts, **options)


def build(
    name: str,
    tokenizer: Tokenizer,
    draw: Callable[[np.random.RandomState], Task],
    *,
    haystack: str | Iterable[str],
    length: int | None = None,
    pad: int | None = None,
    n: int = 200,
    seed: int = 0,
    max_length: int | None = None,
    facts: Mapping[str, Any],
) -> Suite:
    """Returns `n` prompts, audited, of the tasks that `draw` gives.

    Args:
      name: name of the suite.
      tokenizer: the model's own.
      draw: a task from the generator of its prompt.
      haystack: a text, or an iterable of texts.
      length: exact number of tokens that are read: of the prompt, and of the answer but its last.
      pad: number of sentences of the haystack instead.
      n: number of prompts.
      seed: random seed in [0, 2**32).
      max_length: the model's context, checked by the audit.
      facts: facts for the manifest.

    Raises:
      UsageError: unless one of `length` and `pad` is given, or for a length without room.
      BadInputError: for a haystack that is too small, a length that whole sentences cannot reach,
        or any failure of the audit.
    """
    size = Size(pad, "sentences", length)
    pool = haystack_lib.pool(haystack, tokenizer, seed)
    prompts = []
    for index in range(n):
        rng = prompts_lib.rng(seed, index)
        prompts.append(_prompt(f"{name}-{index:04d}", tokenizer, draw(rng), pool, size, rng))
    several = bool(prompts) and isinstance(prompts[0].target, tuple)
    return prompts_lib.make_suite(
        name,
        prompts,
        vocabulary=tokenizer,
        plant="span" if several else "single",
        max_length=max_length,
        facts={
            "seed": seed,
            "rng": prompts_lib.RNG,
            **dataclasses.asdict(size),
            "haystack_sha256": prompts_lib.sha256_lines(pool.sentences),
            "haystack_sentences": len(pool.sentences),
            **facts,
        },
    )


def _prompt(
    name: str,
    tokenizer: Tokenizer,
    task: Task,
    pool: haystack_lib.Pool,
    size: Size,
    rng: np.random.RandomState,
) -> Prompt:
    asked = task.needles[task.asked]
    empty = task.text([])
    answer, *others = (
        _continuation(tokenizer, empty, needle.value)
        for needle in (asked, *(one for one in task.needles if one is not asked))
    )

    def count(distractors: Sequence[str]) -> int:
        return len(prompts_lib.encode(tokenizer, task.text(distractors))) + len(answer) - 1

    free = (pool.without(word, spellings(tokenizer, word)) for word in task.barred)
    allowed = functools.reduce(np.intersect1d, free)
    distractors = haystack_lib.fill(
        pool, allowed, size, count, rng, free_of=", ".join(map(repr, task.barred))
    )
    text = task.text(distractors)
    tokens = prompts_lib.encode(tokenizer, text)
    starts = [i for i in range(len(tokens)) if tuple(tokens[i : i + len(answer)]) == answer]
    where = tuple(range(starts[0], starts[0] + len(answer))) if starts else (-1,) * len(answer)
    last = len(tokens) - 1
    names = [one.name for one in task.needles if one is not asked]
    return Prompt(
        id=name,
        tokens=(*tokens, *answer[:-1]),
        target=answer if len(answer) > 1 else answer[0],
        answer_position=where if len(answer) > 1 else where[0],
        query_positions=tuple(range(last, last + len(answer))),
        text=text,
        meta={
            "answer": f" {asked.value}",
            "asked": asked.name,
            "others": [[name, list(ids)] for name, ids in zip(names, others, strict=True)],
            "sentences": len(distractors),
        },
    )


def _continuation(tokenizer: Tokenizer, text: str, value: str) -> tuple[int, ...]:
    """The tokens of a value after a text and a space."""
    known = prompts_lib.encode(tokenizer, text)
    return tuple(prompts_lib.encode(tokenizer, f"{text} {value}")[len(known) :])


@dataclasses.dataclass(frozen=True)
class _Values:
    """Draws values of one number of tokens."""

    tokenizer: Tokenizer
    text: str
    make: Callable[[np.random.RandomState], str]
    tokens: int

    def __call__(self, rng: np.random.RandomState) -> str:
        for _ in range(_TRIES):
            value = self.make(rng)
            if len(_continuation(self.tokenizer, self.text, value)) == self.tokens:
                return value
        raise BadInputError(
            f"no value such as {self.make(rng)!r} has {self.tokens} tokens: use another tokenizer"
        )


def _values(
    tokenizer: Tokenizer, text: str, make: Callable[[np.random.RandomState], str], seed: int
) -> _Values:
    """Values with the most frequent number of tokens after this text; of equals the smaller number.

    Raises:
      BadInputError: if the tokenizer cannot spell them.
    """
    rng = prompts_lib.rng(seed, _OF_SUITE)
    sample = [make(rng) for _ in range(_SAMPLE)]
    ids = [_continuation(tokenizer, text, value) for value in sample]
    if tokenizer.decode(ids[0]).strip() != sample[0]:
        raise BadInputError(
            f"the tokenizer cannot spell {sample[0]!r}: leave this suite out, or use another "
            "tokenizer"
        )
    counts = Counter(map(len, ids))
    return _Values(tokenizer, text, make, min(counts, key=lambda size: (-counts[size], size)))


def _pass_key(rng: np.random.RandomState) -> str:
    return "".join(_ALPHABET[i] for i in rng.randint(len(_ALPHABET), size=8))


def _number(rng: np.random.RandomState) -> str:
    return str(rng.randint(10**6, 10**7))


def _uuid(rng: np.random.RandomState) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


# What draws a value, the name of all, the text before the haystack, the question after it, and the
# start of the answer.
_RULER = {
    "number": (
        _number,
        "numbers",
        "A special magic number is hidden within the following text. Make sure to memorize it. I "
        "will quiz you about the number afterwards.",
        "What is the special magic number for {} mentioned in the provided text?",
        "The special magic number for {} mentioned in the provided text is",
    ),
    "uuids": (
        _uuid,
        "uuids",
        "Some special magic uuids are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuids afterwards.",
        "What are all the special magic uuids for {} mentioned in the provided text?",
        "The special magic uuids for {} mentioned in the provided text are",
    ),
}
