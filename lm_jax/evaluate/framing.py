"""A message to a language model in the form that the model was trained on.

A chat model gets the message in its own template; a base model continues it after some opening
words of the answer.
"""

import functools

from jinja2.sandbox import ImmutableSandboxedEnvironment

from lm_jax.errors import BadInputError
from lm_jax.text.tokenizer import Tokenizer


def frame(tokenizer: Tokenizer, opening: str) -> tuple[list[int], list[int]]:
    """Token ids before and after the message of a user.

    Args:
      tokenizer: of the model; with a chat template if it is a chat model.
      opening: what a base model reads after the message.

    Raises:
      BadInputError: the template leaves the message out.
    """
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    if tokenizer.chat_template is None:
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return bos, encode(opening)
    # A template is a program by the author of the model, and not trusted.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    special = {
        f"{kind}_token": "" if i is None else tokenizer.token(i)
        for kind, i in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
    }
    place = "\ue000message\ue000"
    framed = environment.from_string(tokenizer.chat_template).render(
        messages=[{"role": "user", "content": place}], add_generation_prompt=True, **special
    )
    before, result, after = framed.partition(place)
    if not result:
        raise BadInputError(
            "the model's chat template leaves out the message; use a model whose template has it"
        )
    return encode(before), encode(after)
