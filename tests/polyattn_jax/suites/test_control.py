"""Controls of suites: the same prompts without what their answers rest on."""

import numpy as np
import pytest

from lm_jax.text.tokenizer import Tokenizer as Shipped
from polyattn_jax import suites
from polyattn_jax.suites import named
from polyattn_jax.suites.control import LEFT_OUT, OTHERS, control, kind
from polyattn_jax.suites.niah import needle_words
from polyattn_jax.suites.prompts import answered, make_suite, starts_of
from tests.polyattn_jax.byte_tokenizer import byte_tokenizer
from tests.polyattn_jax.synthetic_suites import HAYSTACK, VOCABULARY, WordTokenizer


def whole(prompt):
    return prompt.target if isinstance(prompt.target, tuple) else (prompt.target,)


def build(name, n=9):
    return named.build(
        name,
        WordTokenizer(VOCABULARY),
        haystack=" ".join(HAYSTACK),
        length=60,
        n=n,
        seed=0,
        max_length=64,
    )


@pytest.mark.parametrize("name", ["needle", "two_needles", "decoys", "induction", "mqar"])
def test_a_planted_answer_is_replaced_by_that_of_another_prompt_and_nothing_else_changes(name):
    suite = build(name)
    made = control(suite, WordTokenizer(VOCABULARY), 50)
    assert kind(suite) == LEFT_OUT and len(made.prompts) == len(suite.prompts)
    answers = {whole(prompt) for prompt in suite.prompts}
    for prompt, changed in zip(suite.prompts, made.prompts, strict=True):
        assert whole(changed) == whole(prompt)
        assert whole(prompt)[0] not in changed.tokens
        where = np.flatnonzero(np.array(prompt.tokens) != np.array(changed.tokens))
        assert where.tolist() == [prompt.answer_position]
        assert (changed.tokens[where[0]],) in answers


def test_where_nothing_is_planted_each_prompt_is_asked_for_another_answer():
    answers = [(1,), (2,), (2,), (3, 4), (5, 6), (7, 8, 9)]
    prompts = [answered(f"{i}", (10 + i, 20), ids, None, {}) for i, ids in enumerate(answers)]
    suite = make_suite("mine", prompts, vocabulary=50, plant="none")
    made = control(suite, 50, 50)
    assert kind(suite) == OTHERS
    # The only answer of three tokens has no other.
    assert [whole(prompt) for prompt in made.prompts] == [(2,), (1,), (1,), (5, 6), (3, 4)]
    for prompt, asked in zip(prompts, made.prompts, strict=False):
        assert asked.tokens == (*prompt.tokens[:2], *whole(asked)[:-1])
    assert len(control(suite, 50, 2).prompts) == 2


def test_prompts_of_one_answer_have_no_control():
    prompts = [answered(f"{i}", (i, 20), (1,), None, {}) for i in range(5)]
    assert control(make_suite("mine", prompts, vocabulary=50, plant="none"), 50, 50) is None


def test_needles_of_a_tokenizer_of_bytes_are_words_of_as_many_tokens():
    tokenizer = byte_tokenizer()
    assert isinstance(tokenizer, Shipped)
    words = needle_words(tokenizer, suites.shipped_nouns())
    assert {len(ids) for ids in words.values()} == {5} == {len(word) + 1 for word in words}
    suite = suites.niah(tokenizer, haystack=" ".join(HAYSTACK), length=200, n=12)
    assert suite.manifest["audit"]["plant"] == "span"
    for prompt in suite.prompts:
        answer = whole(prompt)
        assert len(prompt.tokens) == 200 and tokenizer.decode(answer) == prompt.meta["answer"]
        # All of it but the last token is forced, and it is spelled once before.
        assert prompt.tokens[-4:] == answer[:-1]
        assert len(starts_of(prompt.tokens[:-4], answer)) == 1
    absent = suites.niah(tokenizer, haystack=" ".join(HAYSTACK), length=200, n=12, needle=False)
    for prompt, left_out in zip(suite.prompts, absent.prompts, strict=True):
        assert whole(left_out) == whole(prompt)
        assert not starts_of(left_out.tokens[:-4], whole(prompt))


@pytest.mark.parametrize("name", ["needle", "decoys", "induction", "mqar"])
def test_what_a_tokenizer_puts_after_a_text_is_no_part_of_a_prompt(name):
    options = {"haystack": " ".join(HAYSTACK), "length": 60, "n": 5, "seed": 0, "max_length": 64}
    plain, ending = (
        named.build(name, WordTokenizer(VOCABULARY, start=True, end=end), **options)
        for end in (False, True)
    )
    assert [prompt.tokens for prompt in ending.prompts] == [p.tokens for p in plain.prompts]
    assert all(prompt.tokens[0] == 1 and 2 not in prompt.tokens for prompt in ending.prompts)
