"""Needle in a haystack: "The secret word is X. [haystack] The secret word is".

From "When Does Polynomial Attention Concentrate?", Appendix E. X is drawn uniformly, per prompt,
from 200 common nouns that are one token each, and counts as retrieved when it is the first token
that the model generates.

1. Nouns: kept if " X" is one token after the cue and the same token inside the needle sentence. Of
   a tokenizer with fewer than 50 such words, as one of bytes, those of as many tokens as most of
   them have are taken, and all tokens of the answer must be right (`prompts.answered`).
2. Haystack: random sentences of a pool (`haystack.py`) that hold X neither as a word, in any case,
   nor as a token in any spelling.
3. Size: `pad` sentences (the paper's 128 give about 1,500 tokens, so it counts sentences, as its
   Appendix Z says), or `pad` tokens (as its Appendix E says), or exactly `length` tokens in all.
4. The prompt begins as the tokenizer's own default does: with its start token or without.

The control (`needle=False`) is the same prompt with the needle sentence replaced by a harmless one
of as many tokens; its target stays X, so retrieval without a needle is measured.
"""

from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import importlib.resources
from typing import Literal

import numpy as np

from lm_jax.errors import BadInputError, UsageError
from polyattn_jax.suites import haystack as haystack_lib
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.haystack import Size
from polyattn_jax.suites.prompts import Prompt, Suite, Tokenizer

CUE = "The secret word is"
MIN_NOUNS = 50
# Stand-ins for the needle sentence, with as many words; several, for one may name the needle.
HARMLESS = (
    "The little room is quiet.",
    "The open door is wide.",
    "The old man is here.",
    "The long day is over.",
)


def shipped_nouns() -> list[str]:
    """The 200 common English nouns of `polyattn_jax/data/nouns.txt`, each one token in SmolLM2."""
    file = importlib.resources.files("polyattn_jax") / "data" / "nouns.txt"
    return file.read_text(encoding="utf-8").split()


def single_token_nouns(
    tokenizer: Tokenizer, nouns: Iterable[str], *, cue: str = CUE, end: str = "."
) -> dict[str, int]:
    """Returns noun -> token for those that are one token after the cue and in the needle sentence.

    Raises:
      BadInputError: if fewer than 50 are left.
    """
    known = prompts_lib.encode(tokenizer, cue)
    nouns = list(dict.fromkeys(nouns))
    kept = {}
    for noun in nouns:
        one_word = prompts_lib.words(noun) == [noun.casefold()]
        if not one_word or noun.casefold() in prompts_lib.words(cue):
            continue
        ids = prompts_lib.encode(tokenizer, f"{cue} {noun}")
        planted = prompts_lib.encode(tokenizer, f"{cue} {noun}{end}")
        # An unknown-word token is one token too, but does not spell the noun.
        spelled = ids[:-1] == known and tokenizer.decode(ids[-1:]).strip() == noun
        if spelled and planted[: len(ids)] == ids:
            kept[noun] = ids[-1]
    if len(kept) < MIN_NOUNS:
        raise BadInputError(
            f"nouns: {len(kept)} of {len(nouns)} are one token in this tokenizer, {MIN_NOUNS} are "
            "needed: pass nouns= with more words that are"
        )
    return kept


def needle_words(
    tokenizer: Tokenizer, nouns: Iterable[str], *, cue: str = CUE, end: str = "."
) -> dict[str, tuple[int, ...]]:
    """Nouns and their tokens after the cue, all of one number: one, or else the most frequent.

    Raises:
      BadInputError: if fewer than 50 nouns have as many tokens.
    """
    nouns = list(dict.fromkeys(nouns))
    with contextlib.suppress(BadInputError):
        found = single_token_nouns(tokenizer, nouns, cue=cue, end=end)
        return {noun: (one,) for noun, one in found.items()}
    known = prompts_lib.encode(tokenizer, cue)
    by_size: dict[int, dict[str, tuple[int, ...]]] = {}
    for noun in nouns:
        if prompts_lib.words(noun) != [noun.casefold()]:
            continue
        ids = prompts_lib.encode(tokenizer, f"{cue} {noun}")
        planted = prompts_lib.encode(tokenizer, f"{cue} {noun}{end}")
        spelled = ids[: len(known)] == known and tokenizer.decode(ids[len(known) :]).strip() == noun
        if spelled and planted[: len(ids)] == ids and noun.casefold() not in cue.casefold():
            by_size.setdefault(len(ids) - len(known), {})[noun] = tuple(ids[len(known) :])
    size = max(by_size, key=lambda size: len(by_size[size]), default=1)
    kept = by_size.get(size, {})
    if len(kept) < MIN_NOUNS:
        one = len(by_size.get(1, {}))
        longer = ", ".join(f"{len(by_size[n])} have {n}" for n in sorted(by_size) if n > 1)
        raise BadInputError(
            f"nouns: {one} of {len(nouns)} are one token in this tokenizer, {MIN_NOUNS} are needed"
            f", or as many of another number of tokens{f' ({longer})' if longer else ''}: pass "
            f"nouns= with {MIN_NOUNS - len(kept)} more words of {size} token{'s' * (size > 1)}"
        )
    return kept


def niah(
    tokenizer: Tokenizer,
    *,
    haystack: str | Iterable[str] | None = None,
    pad: int | None = None,
    pad_unit: Literal["sentences", "tokens"] = "sentences",
    length: int | None = None,
    n: int = 200,
    seed: int = 0,
    nouns: Iterable[str] | None = None,
    needle: bool = True,
    depth: float = 0.0,
    queries: int = 1,
    max_length: int | None = None,
    cue: str = CUE,
    end: str = ".",
    lines: bool = False,
) -> Suite:
    """Returns `n` needle prompts, audited; `meta["answer"]` is the answer's text, with its space.

    Args:
      tokenizer: the model's own.
      haystack: a text, or an iterable of texts such as sentences; None only for pad=0.
      pad: size of the haystack in `pad_unit`; give this or `length`.
      pad_unit: "sentences" or "tokens".
      length: exact number of tokens of every prompt, start token included, and those of the
        answer but the last.
      n: number of prompts.
      seed: random seed in [0, 2**32).
      nouns: needles to draw from; the shipped list unless given.
      needle: False builds the control, prompt by prompt the same haystack.
      depth: fraction of the haystack's sentences before the needle, 0 as in the paper.
      queries: number of final positions that `query_positions` holds.
      max_length: the model's context, checked by the audit.
      cue: text that the needle begins with, and the prompt ends with.
      end: what ends the needle after its word.
      lines: whether distractors are the lines of the haystack, as of code, and not its sentences.

    Raises:
      UsageError: for arguments that do not fit together.
      BadInputError: for a haystack that is too small, fewer than 50 usable nouns, a length that
        whole sentences cannot reach, or any failure of the audit.
    """
    size = Size(pad, pad_unit, length)
    if not 0 <= depth <= 1:
        raise UsageError(f"depth={depth} is not a fraction: give 0 (first) to 1 (last)")
    if haystack is None and pad != 0:
        raise UsageError("haystack= is missing: pass a text or sentences, or pad=0 for none")
    if queries < 1:
        raise UsageError(f"queries={queries} reads nothing: give at least 1")
    nouns = list(shipped_nouns() if nouns is None else nouns)
    ids_of = needle_words(tokenizer, nouns, cue=cue, end=end)
    several = len(next(iter(ids_of.values()))) > 1
    joint = "\n" if lines else " "
    if several and queries > 1:
        raise UsageError(
            f"queries={queries}: the words of this tokenizer are several tokens, each of which has "
            "its own query; give queries=1"
        )
    if haystack is None:
        pool = haystack_lib.Pool((), ())
    else:
        pool = haystack_lib.pool(haystack, tokenizer, seed, lines=lines, free_of=cue)
    prompts = []
    for index in range(n):
        rng = prompts_lib.rng(seed, index)
        noun = list(ids_of)[rng.randint(len(ids_of))]
        sentence = f"{cue} {noun}{end}"

        forced = len(ids_of[noun]) - 1

        def count(
            distractors: Sequence[str], sentence: str = sentence, forced: int = forced
        ) -> int:
            whole = _assemble(sentence, distractors, depth, cue, joint)[0]
            return len(prompts_lib.encode(tokenizer, whole)) + forced

        allowed = pool.without(noun, spellings(tokenizer, noun))
        if several:
            # "cat" is spelled in "category" too.
            free = [noun.casefold() not in pool.sentences[i].casefold() for i in allowed]
            allowed = allowed[np.array(free, bool)]
        distractors = haystack_lib.fill(pool, allowed, size, count, rng, free_of=repr(noun))
        text, at = _assemble(sentence, distractors, depth, cue, joint)
        tokens = prompts_lib.encode(tokenizer, text)
        if not needle:
            text, tokens = _control(
                tokenizer, pool, noun, distractors, depth, len(tokens), cue, joint
            )
        meta = {"answer": f" {noun}", "sentences": len(distractors), "needle_sentence": at}
        name = f"niah-{index:04d}"
        if several:
            prompts.append(prompts_lib.answered(name, tokens, ids_of[noun], text, meta))
            continue
        (target,) = ids_of[noun]
        prompts.append(
            Prompt(
                id=name,
                tokens=tuple(tokens),
                target=target,
                answer_position=_first(tokens, target) if needle else None,
                query_positions=tuple(range(max(0, len(tokens) - queries), len(tokens))),
                text=text,
                meta=meta,
            )
        )
    return prompts_lib.make_suite(
        "niah" if needle else "niah_control",
        prompts,
        vocabulary=tokenizer,
        plant=("span" if several else "single") if needle else "absent",
        max_length=max_length,
        facts={
            "seed": seed,
            "rng": prompts_lib.RNG,
            "template": f"{cue} X{end} [haystack] {cue}",
            "needle": "planted" if needle else "replaced by a harmless sentence of equal length",
            "depth": depth,
            **dataclasses.asdict(size),
            "haystack_sha256": prompts_lib.sha256_lines(pool.sentences),
            "haystack_sentences": len(pool.sentences),
            "nouns_sha256": prompts_lib.sha256_lines(nouns),
            "nouns": len(nouns),
            "nouns_kept": len(ids_of),
        },
    )


def _assemble(
    needle: str, distractors: Sequence[str], depth: float, cue: str, joint: str
) -> tuple[str, int]:
    """Returns the prompt's text and how many sentences come before the needle."""
    at = round(depth * len(distractors))
    return joint.join([*distractors[:at], needle, *distractors[at:], cue]), at


def spellings(tokenizer: Tokenizer, noun: str) -> set[int]:
    """Single tokens that spell the noun: with and without a space, lower, title and upper case."""
    forms = {noun, noun.lower(), noun.title(), noun.upper()}
    after_stop = len(prompts_lib.encode(tokenizer, ".", start=False))
    ids = [prompts_lib.encode(tokenizer, form, start=False) for form in forms]
    ids += [prompts_lib.encode(tokenizer, f". {form}", start=False)[after_stop:] for form in forms]
    return {spelling[0] for spelling in ids if len(spelling) == 1}


def _control(
    tokenizer: Tokenizer,
    pool: haystack_lib.Pool,
    noun: str,
    distractors: Sequence[str],
    depth: float,
    length: int,
    cue: str,
    joint: str,
) -> tuple[str, list[int]]:
    """Puts a harmless sentence in the needle's place, so that the prompt keeps its length."""
    spelled = spellings(tokenizer, noun)
    unused = [s for s in pool.sentences if s not in distractors]
    for sentence in (*HARMLESS, *unused):
        text, _ = _assemble(sentence, distractors, depth, cue, joint)
        if noun.casefold() in prompts_lib.words(sentence):
            continue
        tokens = prompts_lib.encode(tokenizer, text)
        if len(tokens) == length and not spelled & set(tokens):
            return text, tokens
    raise BadInputError(
        f"the control for {noun!r} finds no sentence as long as the needle's: give more haystack"
    )


def _first(tokens: Sequence[int], token: int) -> int:
    return tokens.index(token) if token in tokens else -1
