"""Encoding of a text of which a part is from outside, such as a message in a chat template.

The whole is encoded once, because a tokenizer may treat the beginning of a text unlike its middle:
SentencePiece puts a space before it. Control tokens, such as the end of a turn, are read out of the
surrounding text alone; where the part from outside spells one, it stays plain text.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
import json
import re
from typing import Any

import tokenizers

from lm_jax.text.tokenizer import Tokenizer

# The private use area of the last plane, which no text is expected to use up.
_MARKS = range(0x100000, 0x10FFFE)


def encode_around(tokenizer: Tokenizer, around: Sequence[str], plain: str) -> list[int]:
    """Ids of `plain.join(around)`, without the tokens that begin and end a text by default.

    They are those that the tokenizer gives the whole text, unless it would find a control token in
    `plain`, or across an end of it. Then the control tokens of `around` are renamed, in the text
    and in a copy of the tokenizer, to what does not occur in the text, and that is encoded. Control
    tokens are the special ones, those that end a text, and marks that `around` writes.

    Args:
      tokenizer: the model's tokenizer.
      around: the texts before, between and after each occurrence of `plain`.
      plain: text from outside.

    Raises:
      BadInputError: for a lone surrogate, or a token without a row in the model's embedding.
    """
    text = plain.join(around)
    encoding = tokenizer.encoding(text, add_special_tokens=False)
    control = _control_tokens(tokenizer, around)
    starts = itertools.accumulate((len(each) + len(plain) for each in around[1:-1]), initial=0)
    spans = [(len(around[0]) + at, len(around[0]) + at + len(plain)) for at in starts]
    found = [at for i, at in zip(encoding.ids, encoding.offsets, strict=True) if i in control]
    if not any(first < end and start < last for start, last in found for first, end in spans):
        return encoding.ids
    mark = next(chr(code) for code in _MARKS if chr(code) not in text)
    names = {content: f"{mark}{i}{mark}" for i, content in control.items()}
    renamed = _renamed(tokenizer, tuple(names.items()))
    rename = functools.partial(_pattern(tokenizer).sub, lambda match: names.get(match[0], match[0]))
    ids = renamed.encode(plain.join(map(rename, around)), add_special_tokens=False).ids
    tokenizer.check_rows(ids)
    return ids


def _control_tokens(tokenizer: Tokenizer, around: Sequence[str]) -> dict[int, str]:
    """Ids and spellings of the tokens that a text from outside must not bring about."""
    ends = {tokenizer.bos_id, *tokenizer.stop_ids}

    def is_mark(content: str) -> bool:
        # Not all that a template writes as tags are special tokens; words and spaces are no tags.
        tag = not (content[:1].isalnum() or content[:1].isspace() or content[:1] == "▁")
        return tag and any(content in each for each in around)

    return {
        i: token.content
        for i, token in tokenizer.backend.get_added_tokens_decoder().items()
        if token.special or i in ends or is_mark(token.content)
    }


def _pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches added tokens as the package does, the longest of those that begin first."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    words = sorted(added, key=lambda token: len(token.content), reverse=True)
    return re.compile(
        "|".join(
            rf"(?<!\w){re.escape(token.content)}(?!\w)"
            if token.single_word
            else re.escape(token.content)
            for token in words
        )
    )


@functools.lru_cache(maxsize=4)
def _renamed(tokenizer: Tokenizer, names: tuple[tuple[str, str], ...]) -> tokenizers.Tokenizer:
    """A copy of the backend in which tokens have other names, and only those."""
    name: Mapping[str, str] = dict(names)
    data = json.loads(tokenizer.backend.to_str())
    data["post_processor"] = None
    for token in data["added_tokens"]:
        token["content"] = name.get(token["content"], token["content"])
    model: dict[str, Any] = data["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {name.get(token, token): i for token, i in vocab.items()}
    else:
        model["vocab"] = [[name.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = name.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""

        def makes_control(first: str, second: str) -> bool:
            return not name.keys().isdisjoint((first, second, first + second.removeprefix(prefix)))

        model["merges"] = [merge for merge in model["merges"] if not makes_control(*merge)]
    return tokenizers.Tokenizer.from_str(json.dumps(data))
