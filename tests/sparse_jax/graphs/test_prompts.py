"""Prompts: what a tokenizer puts before a text stays, whatever its id; the ten shipped."""

import pytest
from tokenizers import processors

from lm_jax.errors import CorruptError
from sparse_jax.graphs import prompts
from sparse_jax.graphs.prompts import Prompt
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer


def test_a_start_token_of_id_0_comes_before_the_prompt():
    tokenizer = word_tokenizer()
    text = "Mary and John went to the park"
    (plain,) = prompts.encode([Prompt(text)], tokenizer, max_length=64)
    assert plain.ids == tuple(tokenizer.encode(text)) and 0 not in plain.ids
    # The first token of the vocabulary, as the start token of SmolLM2 is.
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 0)]
    )
    (started,) = prompts.encode([Prompt(text)], tokenizer, max_length=64)
    assert started.ids == (0, *plain.ids)
    assert started.tokens == ("<unk>", *plain.tokens)


def test_the_ten_prompts_are_the_recorded_ones(monkeypatch):
    ten = prompts.read_prompts(prompts.FINDINGS)
    assert len(ten) == 10 and len({each.slug for each in ten}) == 10
    assert {each.kind for each in ten} == {"ioi", "greater-than", "completion", "category"}
    monkeypatch.setattr(prompts, "FINDINGS_SHA256", "0" * 64)
    with pytest.raises(CorruptError, match="is not the recorded file"):
        prompts.read_prompts(prompts.FINDINGS)
