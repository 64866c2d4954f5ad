"""The control of a suite: how often the answer comes without what it rests on.

A model that is right in a suite and as often right in its control has not read the answer in the
prompt: it knows it, or says the same of every prompt.

  * Where the answer is planted in the prompt (needles, induction, recall), that of another prompt
    stands in its place, and the first one is still asked for.
  * Else (memorised text, prompts of a user) each prompt is asked for the answer of another one.
"""

from collections.abc import Sequence
import dataclasses

from polyattn_jax.suites import prompts as prompts_lib
from polyattn_jax.suites.prompts import Prompt, Suite, Vocabulary

# What a control is, by whether the answer is planted.
LEFT_OUT, OTHERS = "left out", "another prompt's"


def kind(suite: Suite) -> str:
    """What the answers of the control are: left out of the prompt, or those of other prompts."""
    return OTHERS if suite.manifest["audit"]["plant"] == "none" else LEFT_OUT


def control(suite: Suite, vocabulary: Vocabulary, n: int) -> Suite | None:
    """The control of a suite, prompt by prompt; None where all prompts have the same answer.

    Args:
      suite: prompts, each with one answer, of one token or several.
      vocabulary: tokenizer or size of the vocabulary.
      n: the most prompts of the control; those without another answer of as many tokens are left
        out.
    """
    planted = kind(suite) == LEFT_OUT
    prompts = []
    for index, prompt in enumerate(suite.prompts):
        other = _other_answer(suite.prompts, index)
        if other is None or len(prompts) == n:
            continue
        made = _replaced(prompt, other) if planted else _asked(prompt, other)
        if made is not None:
            prompts.append(made)
    if not prompts:
        return None
    return prompts_lib.make_suite(
        f"{suite.name}_control",
        prompts,
        vocabulary=vocabulary,
        plant="absent" if planted else "none",
        facts={"control_of": suite.sha256, "answers": kind(suite)},
    )


def _answer(prompt: Prompt) -> tuple[int, ...]:
    return prompt.target if isinstance(prompt.target, tuple) else (prompt.target,)


def _other_answer(prompts: Sequence[Prompt], index: int) -> tuple[int, ...] | None:
    """The answer of the next prompt that has another one of as many tokens."""
    own = _answer(prompts[index])
    later = (_answer(prompts[(index + step) % len(prompts)]) for step in range(1, len(prompts)))
    return next((each for each in later if each != own and len(each) == len(own)), None)


def _replaced(prompt: Prompt, other: tuple[int, ...]) -> Prompt | None:
    """The prompt with another answer in its place; None where its own stands elsewhere too."""
    own, where = _answer(prompt), prompt.answer_position
    places = where if isinstance(where, tuple) else (where,)
    tokens = list(prompt.tokens)
    for place, token in zip(places, other, strict=True):
        assert place is not None, "a planted answer has a position"
        tokens[place] = token
    asked = prompt.query_positions[-len(own)]
    if prompts_lib.starts_of(tokens[: asked + 1], own):
        return None
    return dataclasses.replace(
        prompt, tokens=tuple(tokens), answer_position=None, text=None, meta={}
    )


def _asked(prompt: Prompt, other: tuple[int, ...]) -> Prompt:
    """The prompt asked for another answer."""
    own = _answer(prompt)
    end = prompt.query_positions[-len(own)] + 1
    made = prompts_lib.answered(prompt.id, prompt.tokens[:end], other, None, {})
    return dataclasses.replace(made, answer_position=None)
