"""Suites as messages in a model's chat template."""

import dataclasses
import re

import pytest

from lm_jax.errors import BadInputError
from polyattn_jax import suites
from polyattn_jax.suites.chat import in_chat, unfinished
from polyattn_jax.suites.prompts import answered, make_suite
from tests.polyattn_jax.byte_tokenizer import byte_tokenizer
from tests.polyattn_jax.synthetic_suites import HAYSTACK

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return dataclasses.replace(byte_tokenizer(), chat_template=TEMPLATE)


@pytest.mark.parametrize(
    ("text", "begun"),
    [
        ("They sing. The secret word is", "The secret word is"),
        ("What is it? The key for apple is", "The key for apple is"),
        ("Question: what is it?\nAnswer:", "Answer:"),
        ("The capital of France is", "The capital of France is"),
        ("What is the capital of France?", ""),
        ("Name it.\n", ""),
        ("彼らは歌う。秘密の言葉は", "秘密の言葉は"),
        ("秘密の言葉は何ですか？", ""),
    ],
)
def test_the_assistant_begins_with_an_unfinished_sentence(text, begun):
    assert unfinished(text) == begun


def test_a_needle_is_a_message_and_its_cue_the_beginning_of_the_answer(tokenizer):
    plain = suites.niah(tokenizer, haystack=" ".join(HAYSTACK), length=200, n=9)
    made = in_chat(plain, tokenizer, max_length=300)
    assert made.manifest["chat_of"] == plain.sha256
    for prompt, message in zip(plain.prompts, made.prompts, strict=True):
        assert message.target == prompt.target
        asked = message.query_positions[0] + 1
        text = tokenizer.decode(message.tokens[:asked])
        assert text == f"[user]{prompt.text}[assistant]The secret word is"
        # The answer stands where the needle does.
        where = message.answer_position
        assert tokenizer.decode([message.tokens[i] for i in where]) == prompt.meta["answer"]


def test_a_question_is_answered_without_the_space_of_its_answer(tokenizer):
    prompt = answered("a", tokenizer.encode("Who?"), tokenizer.encode(" Mary"), "Who?", {})
    prompt = dataclasses.replace(prompt, meta={**prompt.meta, "answer": " Mary"})
    suite = make_suite("mine", [prompt], vocabulary=tokenizer, plant="none")
    (message,) = in_chat(suite, tokenizer).prompts
    assert tokenizer.decode(message.target) == "Mary"
    assert tokenizer.decode(message.tokens) == "[user]Who?[assistant]Mar"


def test_what_is_no_message_is_refused(tokenizer):
    random = suites.induction(vocabulary=tokenizer, length=20, n=2)
    with pytest.raises(BadInputError, match="is of random tokens, which are no message"):
        in_chat(random, tokenizer)
    plain = suites.niah(tokenizer, haystack=" ".join(HAYSTACK), length=200, n=2)
    with pytest.raises(BadInputError, match="no chat template"):
        in_chat(plain, byte_tokenizer())
    with pytest.raises(BadInputError, match=re.escape("the limit is 210")):
        in_chat(plain, tokenizer, max_length=210)
