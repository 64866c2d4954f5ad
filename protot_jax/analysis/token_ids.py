"""Token ids of prompts and words: what a model continues, and what is looked up in its logits."""

from collections.abc import Sequence

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import UNKNOWN


def open_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of an incomplete text: with its start token and without an end token."""
    ids = tokenizer.encode(text, split_special_tokens=True)
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_id else ids


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word.

    Raises:
      BadInputError: naming a word that is not in the vocabulary.
    """
    unknown = tokenizer.backend.token_to_id(UNKNOWN)
    results = []
    for word in words:
        ids = tokenizer.encode(word, add_special_tokens=False, split_special_tokens=True)
        if not ids or unknown in ids:
            raise BadInputError(f"the word {word!r} is not in the vocabulary; give another one")
        results.append(ids)
    return results


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt that is to be continued, with the mark of the beginning.

    Raises:
      UsageError: it has fewer than two tokens, so that no prototype holds anything.
    """
    ids = open_ids(tokenizer, prompt)
    if len(ids) < 2:
        raise UsageError(
            f"--prompt={prompt!r} has {len(ids)} tokens, so that no token is read from another; "
            "give a longer text"
        )
    return ids
