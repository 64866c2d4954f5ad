"""Prompts as messages to a chat model, in its own template.

    user        the text of the prompt
    assistant   its last sentence again, if that is unfinished ("The secret word is"); the answer

A prompt that ends with a whole sentence is answered at once, without the space that begins its
answer. Nothing in a prompt is ever a control token (`lm_jax.evaluate.framing.frame`).
"""

import re

from absl import logging

from lm_jax.errors import BadInputError
from lm_jax.evaluate.framing import frame
from lm_jax.text.tokenizer import Tokenizer
from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.prompts import Prompt, Suite

# What ends a sentence, with the space after it.
_END = re.compile(r"[.!?:]\s+|[。！？]\s*|\n")


def in_chat(suite: Suite, tokenizer: Tokenizer, *, max_length: int | None = None) -> Suite:
    """The same prompts and answers as messages; a planted answer that the template has is left out.

    Args:
      suite: prompts with texts.
      tokenizer: the model's own, with a chat template.
      max_length: the model's context, checked by the audit.

    Raises:
      BadInputError: there is no template or no text, or a prompt does not fit.
    """
    if tokenizer.chat_template is None:
        raise BadInputError(
            "the model has no chat template, which chat needs; leave chat out, or use a model that "
            "was trained on chats"
        )
    if any(prompt.text is None for prompt in suite.prompts):
        raise BadInputError(f"suite {suite.name!r} is of random tokens, which are no message")
    plant = suite.manifest["audit"]["plant"]
    prompts = [_message(prompt, tokenizer) for prompt in suite.prompts]
    if plant != "none":
        whole, prompts = prompts, [each for each in prompts if each.answer_position is not None]
        if left_out := len(whole) - len(prompts):
            logging.warning(
                "suite %r: %d of %d prompts are left out, whose answer stands twice in the chat",
                suite.name,
                left_out,
                len(whole),
            )
    return prompts_lib.make_suite(
        suite.name,
        prompts,
        vocabulary=tokenizer,
        plant=plant,
        max_length=max_length,
        facts={"chat_of": suite.sha256},
    )


def unfinished(text: str) -> str:
    """The unfinished sentence at the end of a text; empty if the text ends with a whole one."""
    ends = [match.end() for match in _END.finditer(text)]
    last = text[ends[-1] if ends else 0 :].strip()
    return "" if last[-1:] in (".", "!", "?", "。", "！", "？", "") else last


def _message(prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
    text, answer = prompt.text, prompt.meta["answer"]
    assert text is not None, "checked before"
    begun = unfinished(text)
    opening = prompts_lib.encode(tokenizer, begun, start=False)
    whole = prompts_lib.encode(tokenizer, begun + answer if begun else answer.lstrip(), start=False)
    if whole[: len(opening)] != opening or len(whole) == len(opening):
        raise BadInputError(
            f"prompt {prompt.id!r}: the answer {answer!r} fuses with {begun!r} when tokenised; end "
            "the prompt without a space and start the answer with one"
        )
    tokens = [*frame(tokenizer, text), *opening]
    return prompts_lib.answered(prompt.id, tokens, whole[len(opening) :], None, prompt.meta)
