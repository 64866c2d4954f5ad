"""Prompts of attribution graphs: read from a file or the command line, as ids of a tokenizer.

A line of a .jsonl file is {"prompt": "..."}, with "targets" (texts of one token each, written with
their leading space), "against" (such texts that targets are explained against), "answers" (right
next tokens), "kind", "slug" and "meaning" if wanted. Two files come with the package, whose digests
are recorded here: `FINDINGS`, ten prompts of four kinds, and `REPHRASINGS`, eight meanings of two
kinds in three to five wordings each, 32 prompts.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import importlib.resources
import itertools
import json
import re
from typing import Any

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.report import slug as slug_of
from lm_jax.run.results import InvalidError, parse_result
from lm_jax.text.lines import json_lines, read_data
from lm_jax.text.tokenizer import Tokenizer, added_tokens
from sparse_jax.circuits.encoding import continuation_token

FINDINGS, REPHRASINGS = "findings", "rephrasings"
SHA256 = {
    FINDINGS: "fbe6a81a03fae86de63e57797bc667362c160c5548ebbfe4bdf8f4319a98ec69",
    REPHRASINGS: "5f1ff6a2ef2cf1230cce937ae01bc7a469a81af519701f5b757c9cdd2c252de5",
}
_LONGEST_SLUG = 60


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as a line of a file has it.

    Attributes:
      prompt: the text.
      targets: texts of the logit nodes; empty for the most probable tokens.
      kind: kind of prompt, such as "ioi".
      slug: name of its files, of letters, digits, `-` and `_`; "" makes one of the text.
      meaning: prompts that share it say the same in other words (`stability`); "" for none.
      answers: texts of one token each that go on rightly; a comparison counts prompts that both
        models answer so. Where it is empty, the first of `targets` is the right one.
      against: texts of one token each, whose mean logit is taken from that of the targets; empty
        for the mean over the vocabulary.
    """

    prompt: str
    targets: tuple[str, ...] = ()
    kind: str = ""
    slug: str = ""
    meaning: str = ""
    answers: tuple[str, ...] = ()
    against: tuple[str, ...] = ()

    @property
    def right(self) -> tuple[str, ...]:
        """Right answers; empty where none is given."""
        return self.answers or self.targets[:1]


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as ids.

    Attributes:
      slug: name of its files; no two prompts share one.
      kind: same as in `Prompt`.
      text: text of the prompt.
      ids: token ids, with those that the tokenizer puts before a text.
      tokens: the ids as text, one by one.
      targets: ids of the logit nodes; None for the most probable tokens.
      meaning: same as in `Prompt`.
      right: ids of right answers, of those that are one token.
      against: ids that the targets are explained against; None for the whole vocabulary.
    """

    slug: str
    kind: str
    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    targets: tuple[int, ...] | None
    meaning: str = ""
    right: tuple[int, ...] = ()
    against: tuple[int, ...] | None = None


def read_prompts(source: str) -> tuple[Prompt, ...]:
    """The prompts of a .jsonl file, or of one that comes with the package.

    Raises:
      BadInputError: the file cannot be read, or a line holds no prompt; with the line.
      CorruptError: the file of the package is not the recorded one.
    """
    if source in SHA256:
        data = importlib.resources.files("sparse_jax.studies.graphs").joinpath(f"{source}.jsonl")
        content = data.read_bytes()
        if hashlib.sha256(content).hexdigest() != SHA256[source]:
            raise CorruptError(f"{data} is not the recorded file; install the package again")
    else:
        content = read_data(source, f".jsonl file, {' or '.join(SHA256)}")
    prompts = [_parse(tree, where) for _, where, tree in json_lines(content, source)]
    if not prompts:
        raise BadInputError(f"{source}: no prompts; write one JSON object per line")
    return tuple(prompts)


def _parse(tree: Any, where: str) -> Prompt:
    try:
        return parse_result(tree, Prompt)
    except InvalidError as error:
        raise BadInputError(f"{where}: {error}") from error


def digest(prompts: Sequence[Prompt]) -> str:
    """The sha256 of prompts, in order."""
    # A prompt without tokens to explain against has the digest that it had before there were any.
    lines = [
        {name: x for name, x in vars(prompt).items() if name != "against" or x}
        for prompt in prompts
    ]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def encode(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_length: int
) -> list[EncodedPrompt]:
    """Prompts as ids.

    Args:
      prompts: prompts as `read_prompts` returns them.
      tokenizer: tokenizer of the model.
      max_length: positions of the model.

    Raises:
      UsageError: a prompt is empty or longer than the context, two have one slug, or two of one
        meaning have different kinds.
      BadInputError: a target is not one token.
    """
    before, _ = added_tokens(tokenizer)
    slugs: set[str] = set()
    encoded = []
    _check_kinds(prompts)
    for prompt in prompts:
        body = tokenizer.encode(prompt.prompt, add_special_tokens=False, split_special_tokens=True)
        ids = [*before, *body]
        if not body:
            raise UsageError(f"prompt {prompt.prompt!r} has no token; write its text")
        if len(ids) > max_length:
            raise UsageError(
                f"prompt {_short(prompt.prompt)!r} has {len(ids)} tokens, and the model a context "
                f"of {max_length}; shorten it"
            )
        name = prompt.slug or _free(slug_of(prompt.prompt)[:_LONGEST_SLUG], slugs)
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise UsageError(f"slug {name!r} must be of letters, digits, - and _; change it")
        if name in slugs:
            raise UsageError(f"two prompts have the slug {name!r}; give each another one")
        slugs.add(name)
        targets, against = (
            tuple(continuation_token(tokenizer, prompt.prompt, text) for text in texts)
            for texts in (prompt.targets, prompt.against)
        )
        for name_of, texts, given in (
            ("targets", prompt.targets, targets),
            ("against", prompt.against, against),
        ):
            if len(set(given)) < len(given):
                raise UsageError(f"{name_of} {list(texts)} name a token twice; name each once")
        right = _right(prompt, tokenizer)
        if against and (not targets or {*targets, *right} & {*against}):
            raise UsageError(
                f"against {list(prompt.against)} needs targets, or has one of them or of the right "
                "answers; name the right tokens as targets and the wrong ones here"
            )
        tokens = tuple(tokenizer.piece(i) for i in ids)
        encoded.append(
            EncodedPrompt(
                name,
                prompt.kind,
                prompt.prompt,
                tuple(ids),
                tokens,
                targets or None,
                prompt.meaning,
                right,
                against or None,
            )
        )
    return encoded


def _right(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of those right answers that are one token; a prompt without any is not compared."""
    ids = []
    for text in prompt.right:
        # Of numbers, a tokenizer may have some alone.
        with contextlib.suppress(BadInputError):
            ids.append(continuation_token(tokenizer, prompt.prompt, text))
    return tuple(dict.fromkeys(ids))


def _check_kinds(prompts: Sequence[Prompt]) -> None:
    kinds: dict[str, str] = {}
    for each in prompts:
        if each.meaning and kinds.setdefault(each.meaning, each.kind) != each.kind:
            raise UsageError(
                f"prompts of the meaning {each.meaning!r} have the kinds {kinds[each.meaning]!r} "
                f"and {each.kind!r}; give them one"
            )


def _free(name: str, taken: set[str]) -> str:
    """The name, with a number after it where it is taken."""
    numbered = (f"{name}-{k}" for k in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
