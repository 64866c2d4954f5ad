"""A message to a language model in the form that the model was trained on.

A chat model gets the message in its own template; a base model continues it after some opening
words of the answer.
"""

import dataclasses

from lm_jax.text.chat_template import after_answer, render
from lm_jax.text.plain_text import encode_around
from lm_jax.text.tokenizer import Tokenizer, added_tokens


def frame(tokenizer: Tokenizer, message: str, *, opening: str = "") -> list[int]:
    """Token ids of a message of a user, up to where the model is to answer.

    The rendered template is encoded as one text, as transformers does it. What the message spells
    is never a control token. The text begins with one BOS: that of the template, else that of a
    tokenizer which begins every text with it, and without a template that of the tokenizer.

    Args:
      tokenizer: the model's tokenizer; with a chat template if it is a chat model.
      message: plain text.
      opening: what a base model reads after the message.

    Raises:
      BadInputError: the template cannot be rendered, or leaves the message out.
    """
    if tokenizer.chat_template is None:
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return [*bos, *encode_around(tokenizer, ["", opening], message)]
    ids = encode_around(tokenizer, *render(tokenizer.chat_template, message, _special(tokenizer)))
    first = list(added_tokens(tokenizer)[0])
    return ids if ids[: len(first)] == first else [*first, *ids]


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends the answer to a framed message.

    They are those of the tokenizer, and the special token that the chat template puts after an
    answer, which no file but the template names for some models.

    Raises:
      BadInputError: the template cannot be rendered.
    """
    if tokenizer.chat_template is None:
        return tokenizer.stop_ids
    after = after_answer(tokenizer.chat_template, _special(tokenizer)).lstrip()
    # Its tokens may lack a row in the embedding, and then the model never gives them.
    whole = dataclasses.replace(tokenizer, embedding_rows=None)
    first = whole.encode(after, add_special_tokens=False)[:1]
    added = tokenizer.backend.get_added_tokens_decoder()
    rows = tokenizer.embedding_rows
    ends = [i for i in first if i in added and added[i].special and (rows is None or i < rows)]
    return tuple(dict.fromkeys([*tokenizer.stop_ids, *ends]))


def _special(tokenizer: Tokenizer) -> dict[str, str]:
    """What a template knows of the tokenizer."""
    return {
        f"{kind}_token": "" if i is None else tokenizer.token(i)
        for kind, i in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
    }
