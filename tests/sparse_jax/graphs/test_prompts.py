"""Prompts: what a tokenizer puts before a text stays, whatever its id; the ten shipped."""

from collections import Counter
import dataclasses
import hashlib
import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import processors

from lm_jax.errors import CorruptError, UsageError
from sparse_jax.studies.graphs import inputs, prompts
from sparse_jax.studies.graphs.prompts import Prompt
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
    for each in (*ten, *prompts.read_prompts(prompts.REPHRASINGS)):
        assert each.right == each.answers != ()
        if each.kind == "ioi":
            # The one who is named once.
            (answer,) = each.answers
            assert each.prompt.count(answer.strip()) == 1
        if each.kind == "greater-than":
            start = int(re.search(r"\d{4}", each.prompt)[0])
            century = int(each.prompt.split()[-1])
            years = [100 * century + int(year) for year in each.answers]
            assert years == list(range(start + 1, 100 * century + 100))
    monkeypatch.setitem(prompts.SHA256, prompts.FINDINGS, "0" * 64)
    with pytest.raises(CorruptError, match="is not the recorded file"):
        prompts.read_prompts(prompts.FINDINGS)


def test_the_rephrasings_say_eight_things_in_other_words():
    every = prompts.read_prompts(prompts.REPHRASINGS)
    assert len({each.slug for each in every}) == len({each.prompt for each in every}) == 32
    wordings = Counter(each.meaning for each in every)
    assert sorted(wordings.values()) == [3, 3, 3, 3, 5, 5, 5, 5]
    kinds = {each.meaning: each.kind for each in every}
    assert Counter(kinds.values()) == {"ioi": 4, "greater-than": 4}
    # Wordings of one meaning share its names, or its years.
    for each in every:
        said = each.meaning.split() if each.kind == "ioi" else each.meaning.split()[-1:]
        assert all(word in each.prompt for word in said if word[0].isupper() or word.isdigit())


def constant(logits_BV, tokenizer):
    """A model that gives the same logits whatever it reads, in place of a `GraphModel`."""

    def forward(tokens_BT, valid_BT, logits_at):
        del tokens_BT, valid_BT, logits_at
        return types.SimpleNamespace(logits=jnp.asarray(logits_BV)[:, None])

    source = types.SimpleNamespace(
        model=types.SimpleNamespace(forward=forward), tokenizer=tokenizer
    )
    return types.SimpleNamespace(source=source)


def test_a_comparison_is_of_prompts_that_both_models_answer_rightly(monkeypatch):
    monkeypatch.setattr(inputs, "_forward_at", inputs._forward_at.__wrapped__)
    tokenizer = word_tokenizer()
    mary, john, anna = (tokenizer.encode(name)[0] for name in ("Mary", "John", "Anna"))
    texts = ["Mary and John went to"] * 4
    own = [
        Prompt(text, answers=answers, slug=f"{k}")
        for k, (text, answers) in enumerate(
            zip(texts, [(" Mary", " John"), (" Mary",), (), (" Anna",)], strict=True)
        )
    ]
    encoded = prompts.encode(own, tokenizer, max_length=64)
    dense, sparse = np.zeros((2, 4, tokenizer.vocab_size))
    # Dense finds Mary the most probable, sparse John; together they find John.
    dense[:, mary], dense[:, john] = 3.0, 2.9
    sparse[:, mary], sparse[:, john] = 1.0, 3.0
    sparse[3, anna] = 4.0
    models = {"dense": constant(dense, tokenizer), "sparse": constant(sparse, tokenizer)}
    chosen, compared = inputs.choose_targets(models, encoded)
    assert [each.target for each in compared] == ["John", "", "", ""]
    assert [each.targets for each in chosen] == [(john,), None, None, None]
    assert [each.why for each in compared] == [
        "",
        "sparse answers 'John'",
        "it has no right answer of one token (answers in the file of prompts)",
        "dense answers 'Mary'",
    ]
    assert compared[0].answers == {"dense": "Mary", "sparse": "John"}


def test_prompts_of_one_meaning_have_one_kind():
    two = [Prompt("Mary and John", kind=kind, meaning="a gift") for kind in ("ioi", "other")]
    with pytest.raises(
        UsageError, match="'a gift' have the kinds 'ioi' and 'other'; give them one"
    ):
        prompts.encode(two, word_tokenizer(), max_length=64)


def test_a_target_is_explained_against_wrong_tokens():
    tokenizer = word_tokenizer()
    mary, john = (tokenizer.encode(name)[0] for name in ("Mary", "John"))
    text = "Mary and John went to"
    prompt = Prompt(text, targets=(" Mary",), against=(" John",))
    (encoded,) = prompts.encode([prompt], tokenizer, max_length=64)
    assert (encoded.targets, encoded.against) == ((mary,), (john,))
    # Prompts without such tokens have the digest of earlier files.
    plain = Prompt(text, targets=(" Mary",))
    fields = ("prompt", "targets", "kind", "slug", "meaning", "answers")
    line = [{name: getattr(plain, name) for name in fields}]
    assert prompts.digest([plain]) == hashlib.sha256(json.dumps(line).encode()).hexdigest()
    assert prompts.digest([prompt]) != prompts.digest([plain])
    for changes in ({"targets": ()}, {"against": (" Mary",)}, {"answers": (" John",)}):
        with pytest.raises(UsageError, match="needs targets, or has one of them"):
            prompts.encode([dataclasses.replace(prompt, **changes)], tokenizer, max_length=64)
