"""Prompts as data, the audit that every suite must pass, and the suite's fingerprint.

A suite is a tuple of token sequences with known answers. What the paper verified once by hand
("When Does Polynomial Attention Concentrate?", Appendix E, prompt audit) is checked here whenever a
suite is built, so an unsound suite cannot reach a model:

1. ids are distinct, tokens are in the vocabulary, no prompt is longer than the model's context;
2. a planted answer is where the prompt says it is, and nowhere else before the query;
3. the text and the answer tokenise to exactly the tokens of the prompt plus the answer's token.

All randomness is `RandomState([seed, prompt index])`: its stream is frozen by NumPy's NEP 19, so a
manifest hash holds across NumPy versions, and the first prompts of a suite do not depend on n.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import re
from typing import Any, Literal, Protocol

import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text.tokenizer import added_tokens

RNG = "numpy RandomState([seed, prompt index])"


class Tokenizer(Protocol):
    """The tokenizer that a suite needs; `special_ids` and `eos_id` are read where it has them."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def sha256(self) -> str: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


Vocabulary = int | Tokenizer

# What a suite claims about its answers, and the audit therefore proves:
# "pair"    the answer occurs once, after the only earlier occurrence of the query token; a query
#           token that is new has no answer position (first copy of repeated tokens)
# "single"  the answer token occurs exactly once (a needle)
# "span"    the answer of several tokens occurs once in a row, and again after the prompt, where all
#           but its last token follow: greedy decoding is judged in one forward pass
# "absent"  the answer occurs nowhere, its tokens in a row (the control without a needle)
# "none"    nothing (prompts of a user)
Plant = Literal["pair", "single", "span", "absent", "none"]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One token sequence and the tokens that must follow.

    Attributes:
      id: a name that is unique within its suite.
      tokens: the prompt, start token included where the tokenizer adds one.
      target: an int is the token that must follow the last position; a tuple is aligned with
        `query_positions` and holds the token that must follow each of them.
      answer_position: the key that holds the answer (needle, value or planted token), or None
        where no key does; a tuple where `target` is one, with -1 for none.
      query_positions: rows that a diagnostic reads; the last position unless given.
      text: the prompt before tokenisation, or None for random tokens.
      meta: further facts as JSON values; `answer` is the answer's text, `answer_ids` its tokens.
    """

    id: str
    tokens: tuple[int, ...]
    target: int | tuple[int, ...]
    answer_position: int | tuple[int, ...] | None
    query_positions: tuple[int, ...] = ()
    text: str | None = None
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not self.query_positions:
            object.__setattr__(self, "query_positions", (len(self.tokens) - 1,))

    def answers(self) -> list[tuple[int, int, int]]:
        """Returns (query position, target token, answer position or -1) for each scored query."""
        where = self.answer_position
        if isinstance(self.target, int):
            return [
                (self.query_positions[-1], self.target, where if isinstance(where, int) else -1)
            ]
        where = where if isinstance(where, tuple) else (-1,) * len(self.target)
        return list(zip(self.query_positions, self.target, where, strict=True))


def answered(
    name: str,
    tokens: Sequence[int],
    answer: Sequence[int],
    text: str | None,
    meta: Mapping[str, Any],
) -> Prompt:
    """A prompt that is asked for an answer of one token or several.

    Args:
      name: id of the prompt.
      tokens: the prompt, without the answer.
      answer: the answer, all of whose tokens but the last are forced.
      text: the prompt before tokenisation; None for random tokens.
      meta: further facts.
    """
    tokens, answer, last = tuple(tokens), tuple(answer), len(tokens) - 1
    size = len(answer)
    starts = starts_of(tokens, answer)
    where = tuple(range(starts[0], starts[0] + size)) if len(starts) == 1 else None
    several = size > 1
    return Prompt(
        id=name,
        tokens=(*tokens, *answer[:-1]),
        target=answer if several else answer[0],
        answer_position=where if several or where is None else where[0],
        query_positions=tuple(range(last, last + size)),
        text=text,
        meta={**meta, "answer_ids": list(answer)},
    )


@dataclasses.dataclass(frozen=True)
class Suite:
    """Audited prompts with a manifest of how they were built and what the audit found."""

    name: str
    prompts: tuple[Prompt, ...]
    manifest: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        return self.manifest["prompts_sha256"]


def rng(seed: int, index: int) -> np.random.RandomState:
    """Returns the generator of one prompt; `seed` is an integer in [0, 2**32)."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed} is out of range: give an integer from 0 to 2**32 - 1")
    return np.random.RandomState([seed, index])


def sha256_lines(lines: Sequence[str]) -> str:
    """Hash of texts joined by newlines, as UTF-8."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def encode(tokenizer: Tokenizer, text: str, *, start: bool = True) -> list[int]:
    """The tokens of a text whose special tokens are plain text, with the start token if any.

    What a tokenizer puts after a text is left off, since a prompt goes on.
    """
    ids = tokenizer.encode(text, add_special_tokens=start, split_special_tokens=True)
    _, end = added_tokens(tokenizer) if start else ((), ())
    return ids[: len(ids) - len(end)]


def start_tokens(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Returns what the tokenizer's own default puts before a text: one start token, or nothing."""
    return () if isinstance(vocabulary, int) else added_tokens(vocabulary)[0]


def ordinary_tokens(vocabulary: Vocabulary, common: int | None = None) -> np.ndarray:
    """Returns the ids that random prompts draw from, ascending, int64; the first `common` if given.

    For a plain vocabulary size these are all ids. For a tokenizer, left out are: its special ids,
    start and end token, ids that decode to nothing, and ids whose text looks like <...>, the form
    of reserved and byte tokens that tokenizer files do not always flag as special. A BPE numbers
    its tokens in the order of merging, so the first ids are the common ones.
    """
    if common is not None and common < 1:
        raise UsageError(f"common={common} leaves no token to draw: give at least 1")
    if isinstance(vocabulary, int):
        return np.arange(vocabulary)[:common]
    special = set(getattr(vocabulary, "special_ids", None) or ())
    special |= {vocabulary.bos_id, getattr(vocabulary, "eos_id", None)}
    texts = ((i, vocabulary.decode([i])) for i in range(vocabulary.vocab_size) if i not in special)
    ids = [i for i, text in texts if text and not re.fullmatch(r"<[^<>\s]+>", text)]
    return np.array(ids[:common], int)


def draw_facts(ordinary: np.ndarray) -> dict[str, Any]:
    """Returns what a manifest says about random tokens."""
    return {
        "rng": RNG,
        "random_tokens": len(ordinary),
        "random_rule": "no special, start, end, empty or <...> token",
    }


def vocabulary_facts(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns what a manifest says about the vocabulary or the tokenizer."""
    if isinstance(vocabulary, int):
        return {"vocab_size": vocabulary, "tokenizer_sha256": None, "start_tokens": []}
    return {
        "vocab_size": vocabulary.vocab_size,
        "tokenizer_sha256": vocabulary.sha256,
        "start_tokens": list(start_tokens(vocabulary)),
    }


def make_suite(
    name: str,
    prompts: Sequence[Prompt],
    *,
    vocabulary: Vocabulary,
    plant: Plant,
    max_length: int | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Suite:
    """Audits `prompts` and returns them with their manifest.

    `facts` (seed, lengths, hashes of sources) go into the manifest as they are. Raises
    BadInputError, naming the suite and the prompt, at the first check that fails.
    """
    audit = audit_prompts(name, prompts, vocabulary=vocabulary, plant=plant, max_length=max_length)
    manifest = {
        "suite": name,
        "n": len(prompts),
        **vocabulary_facts(vocabulary),
        **(facts or {}),
        "audit": audit,
        "prompts_sha256": hashlib.sha256(canonical_json(prompts).encode()).hexdigest(),
    }
    return Suite(name, tuple(prompts), manifest)


def canonical_json(prompts: Sequence[Prompt]) -> str:
    """All prompts as one JSON text with sorted keys, no spaces and ASCII only: what is hashed."""
    rows = [dataclasses.asdict(prompt) for prompt in prompts]
    return json.dumps(rows, sort_keys=True, separators=(",", ":"), allow_nan=False)


def audit_prompts(
    name: str,
    prompts: Sequence[Prompt],
    *,
    vocabulary: Vocabulary,
    plant: Plant,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Proves what a suite claims (PA-25) and returns the findings; BadInputError otherwise."""
    if not prompts:
        raise BadInputError(f"suite {name!r} is empty: give at least one prompt (n >= 1)")
    vocab_size = vocabulary if isinstance(vocabulary, int) else vocabulary.vocab_size
    checks: list[Callable[[Prompt], str | None]] = [
        lambda p: _form_fault(p, vocab_size, max_length),
        lambda p: _plant_fault(p, plant),
    ]
    if not isinstance(vocabulary, int):
        checks.append(lambda p: _text_fault(p, vocabulary, plant))
    visited = set()
    for prompt in prompts:
        if prompt.id in visited:
            raise BadInputError(f"suite {name!r}: prompt id {prompt.id!r} occurs twice: rename one")
        visited.add(prompt.id)
        for check in checks:
            if fault := check(prompt):
                raise BadInputError(f"suite {name!r}, prompt {prompt.id!r}: {fault}")
    lengths = [len(prompt.tokens) for prompt in prompts]
    return {
        "passed": len(prompts),
        "plant": plant,
        "texts_checked": sum(prompt.text is not None for prompt in prompts),
        "longer_answers": sum(len(prompt.meta.get("answer_ids", ())) > 1 for prompt in prompts),
        "shortest": min(lengths),
        "longest": max(lengths),
        "max_length": max_length,
    }


def _form_fault(prompt: Prompt, vocab_size: int, max_length: int | None) -> str | None:
    length = len(prompt.tokens)
    if not length:
        return "it has no tokens: give it a text"
    if max_length is not None and length > max_length:
        return (
            f"it has {length} tokens, the limit is {max_length}: shorten it or choose a model with "
            "a longer context"
        )
    targets = prompt.target if isinstance(prompt.target, tuple) else (prompt.target,)
    for token in (*prompt.tokens, *targets):
        if not 0 <= token < vocab_size:
            return f"token {token} is outside the vocabulary of {vocab_size}: use its own tokenizer"
    positions = prompt.query_positions
    if list(positions) != sorted(set(positions)) or positions[0] < 0 or positions[-1] >= length:
        return f"query_positions {positions} must ascend within its {length} tokens"
    if isinstance(prompt.target, int) and positions[-1] != length - 1:
        return "its target follows the last token, so query_positions must end there"
    if isinstance(prompt.target, tuple) and len(prompt.target) != len(positions):
        return f"it has {len(prompt.target)} targets for {len(positions)} query positions"
    where = prompt.answer_position
    if where is not None and np.shape(where) != np.shape(prompt.target):
        return f"answer_position {where} and target {prompt.target} must be of one form"
    return None


def _plant_fault(prompt: Prompt, plant: Plant) -> str | None:
    if plant == "none":
        return None
    if plant == "span":
        return _span_fault(prompt)
    if plant == "absent":
        return _absent_fault(prompt)
    for query, target, answer in prompt.answers():
        context, cue = prompt.tokens[: query + 1], prompt.tokens[query]
        if plant == "pair" and answer < 0 and cue not in context[:-1]:
            continue
        if not 0 <= answer <= query or context[answer] != target:
            return f"answer_position {answer} does not hold the answer, token {target}"
        if places := _places(context, target, but=answer):
            return f"the answer leaks: token {target}, planted at {answer}, is also at {places}"
        if plant == "pair" and _places(context[:-1], cue) != [answer - 1]:
            places = _places(context[:-1], cue)
            return (
                f"the query, token {cue}, must occur once before, at {answer - 1}, not at {places}"
            )
    return None


def _absent_fault(prompt: Prompt) -> str | None:
    answer = prompt.target if isinstance(prompt.target, tuple) else (prompt.target,)
    asked = prompt.query_positions[-len(answer)]
    if starts := starts_of(prompt.tokens[: asked + 1], answer):
        return f"the control holds its answer, tokens {answer}, at {starts[0]}"
    return None


def starts_of(tokens: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The positions at which these tokens begin in a row."""
    tokens, answer = tuple(tokens), tuple(answer)
    return [i for i in range(len(tokens)) if tokens[i : i + len(answer)] == answer]


def _span_fault(prompt: Prompt) -> str | None:
    target, where, queries = prompt.target, prompt.answer_position, prompt.query_positions
    if not isinstance(target, tuple) or not isinstance(where, tuple):
        return f"an answer of several tokens is a tuple with their positions, not {target}, {where}"
    size = len(target)
    context, forced = prompt.tokens[: queries[0] + 1], prompt.tokens[queries[0] + 1 :]
    if forced != target[:-1] or queries != tuple(range(queries[0], queries[0] + size)):
        return "after its first query the answer must follow, all of it but the last token"
    starts = starts_of(context, target)
    if where[0] not in starts or where != tuple(range(where[0], where[0] + size)):
        return f"answer_position {where} does not hold the answer, tokens {target}"
    if len(starts) > 1:
        return f"the answer leaks: tokens {target}, planted at {where[0]}, begin at {starts}"
    return None


def _places(tokens: Sequence[int], token: int, but: int = -1) -> list[int]:
    return [i for i, other in enumerate(tokens) if other == token and i != but]


def _text_fault(prompt: Prompt, tokenizer: Tokenizer, plant: Plant) -> str | None:
    if prompt.text is None:
        return None
    # Of an answer of several tokens all but the last are part of the tokens, and none of the text.
    ids = encode(tokenizer, prompt.text)
    whole = [prompt.target] if isinstance(prompt.target, int) else [*prompt.target]
    if (*ids, *whole[:-1]) != prompt.tokens:
        return "its text does not give its tokens: build it with the model's own tokenizer"
    answer = prompt.meta.get("answer")
    if answer is None:
        return None
    if encode(tokenizer, prompt.text + answer) != [*ids, *prompt.meta.get("answer_ids", whole)]:
        return (
            f"the answer {answer!r} fuses with the prompt's end when tokenised, so its first token "
            "cannot be predicted: end the prompt without a space and start the answer with one"
        )
    if plant == "span" and prompt.text.count(answer.strip()) != 1:
        return f"the answer {answer.strip()!r} must occur once in the text"
    times, wanted = words(prompt.text).count(answer.strip().casefold()), {"single": 1, "absent": 0}
    if times != wanted.get(plant, times):
        return f"the word {answer.strip()!r} occurs {times} times in the text, not {wanted[plant]}"
    return None


def words(text: str) -> list[str]:
    """The words of a text, case folded: runs of letters, digits and underscores."""
    return re.findall(r"\w+", text.casefold())
