"""Log-likelihoods against one pass each, a cache that separates models, questions as published."""

import dataclasses
import functools
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

import lm_jax
from lm_jax.errors import BadInputError, StorageError, UsageError
from lm_jax.evaluate.multiple_choice import (
    TASKS,
    Question,
    Scorer,
    comparison,
    likelihood,
    open_cache,
    questions,
    read,
)
from tests import rounding, tiny
from tests.lm_jax.evaluate import tiny_multiple_choice
from tests.lm_jax.evaluate.tiny_multiple_choice import QUESTIONS


def pairs(scorer):
    return [
        likelihood.pair(scorer.tokenizer, question.context, f" {choice}")
        for question in QUESTIONS
        for choice in question.choices
    ]


@pytest.fixture(scope="module")
def alone():
    """The score of every fourth pair by a forward pass of its own, without padding."""
    scorer = tiny_multiple_choice.scorer()

    def score(ids, count):
        log_probs_TV = jax.nn.log_softmax(scorer.logits(ids[None, :-1])[0, -count:])
        of_target_T = jnp.take_along_axis(log_probs_TV, ids[-count:, None], axis=1)
        return of_target_T.sum(), (log_probs_TV.argmax(-1) == ids[-count:]).all()

    return [
        rounding.expected(
            functools.partial(score, count=len(each.continuation)),
            jnp.array((each.context + each.continuation)[-65:]),
        )
        for each in pairs(scorer)[::4]
    ]


@pytest.mark.parametrize("batch_tokens", [1, 100, 1024])
def test_scores_are_those_of_a_pass_for_each_pair(alone, batch_tokens):
    scorer = tiny_multiple_choice.scorer(batch_tokens=batch_tokens)
    token_pairs = pairs(scorer)
    assert sum(likelihood.is_cut(scorer, each) for each in token_pairs) == 2
    scores = likelihood.score(scorer, token_pairs)
    for result, wanted in zip(scores[::4], alone, strict=True):
        rounding.assert_within((result.log_likelihood, result.greedy), wanted)


def test_padding_does_not_count_for_rotations_by_length():
    """A text of fewer tokens than the first context of LongRoPE, beside one of more."""
    tokenizer, factors = tiny_multiple_choice.tokenizer(), ((1.0, 1.5, 2.0, 2.5), (4.0,) * 4)
    rope = lm_jax.Rope(theta=10.0, scaling=lm_jax.LongRopeScaling(*factors, 20, 1.0))
    cfg = tiny.decoder(vocab_size=tokenizer.vocab_size, rope=rope)
    params = jax.tree.map(lambda x: 5.0 * x, tiny.params(cfg))

    def logits(tokens_BT, valid_BT):
        return tiny.forward(params, tokens_BT, cfg=cfg, valid_BT=valid_BT).logits

    asked = [likelihood.pair(tokenizer, text, " the cake") for text in ("the dog ate", "42 " * 9)]
    lengths = [len(each.context) + len(each.continuation) - 1 for each in asked]
    assert lengths[0] <= 20 < lengths[1] <= 32
    scores = likelihood.score(Scorer(logits, tokenizer, max_length=64), asked)
    for each, result in zip(asked, scores, strict=True):
        ids, count = np.array(each.context + each.continuation), len(each.continuation)

        def alone(params, ids=ids, count=count):
            logits_TV = lm_jax.forward(params, jnp.asarray(ids[None, :-1]), cfg).logits[0, -count:]
            return jax.nn.log_softmax(logits_TV)[jnp.arange(count), ids[-count:]].sum()

        rounding.assert_within(np.float32(result.log_likelihood), rounding.expected(alone, params))


def test_greedy_is_what_the_model_would_say():
    tokenizer = tiny_multiple_choice.tokenizer()
    (the,) = tokenizer.encode(" the")
    logits_V = np.zeros(tokenizer.vocab_size, np.float32)
    logits_V[the] = 3.0
    scorer = Scorer(tiny_multiple_choice.unigram_logits(logits_V), tokenizer, max_length=64)
    asked = [likelihood.pair(tokenizer, "on", text) for text in (" the", " the the", " the cat")]
    result = likelihood.score(scorer, asked)
    assert [each.greedy for each in result] == [True, True, False]
    of_the = 3.0 - np.log(np.exp(3.0) + logits_V.size - 1)
    wanted = rounding.expected(lambda x: 2 * jax.nn.log_softmax(x)[the], jnp.asarray(logits_V))
    assert wanted.values == pytest.approx(2 * of_the, rel=1e-12)
    rounding.assert_within(result[1].log_likelihood, wanted)


def test_shapes_are_few_and_a_mesh_divides_them():
    shapes = []

    def logits(tokens_BT, valid_BT):
        shapes.append(tokens_BT.shape)
        return np.zeros((*tokens_BT.shape, 300), np.float32)

    scorer = dataclasses.replace(tiny_multiple_choice.scorer(batch_tokens=512), logits=logits)
    likelihood.score(scorer, pairs(scorer))
    assert shapes == [(8, 64), (16, 32)]


def test_equal_pairs_are_scored_once():
    scorer = tiny_multiple_choice.scorer()
    rows = []

    def logits(tokens_BT, valid_BT):
        rows.extend(tokens_BT.any(1))
        return scorer.logits(tokens_BT, valid_BT)

    token_pairs = pairs(scorer)
    twice = likelihood.score(dataclasses.replace(scorer, logits=logits), token_pairs + token_pairs)
    assert sum(rows) == len(token_pairs)
    assert (
        twice[: len(token_pairs)]
        == twice[len(token_pairs) :]
        == likelihood.score(scorer, token_pairs)
    )


def test_a_pair_is_tokenised_as_one_text():
    tokenizer = tiny_multiple_choice.tokenizer()
    token_pair = likelihood.pair(tokenizer, "the cat sat on", " the mat")
    assert token_pair.context + token_pair.continuation == tuple(
        tokenizer.encode("the cat sat on the mat")
    )
    assert tokenizer.decode(token_pair.continuation) == " the mat"
    # The space is part of the token of the next word.
    assert likelihood.pair(tokenizer, "the cat sat on ", "the mat") == token_pair


def test_text_cannot_name_a_special_token():
    tokenizer = tiny_multiple_choice.tokenizer()
    token_pair = likelihood.pair(
        tokenizer, f"a {tiny_multiple_choice.BEGIN}", f" b {tiny_multiple_choice.END}"
    )
    assert not {0, 1} & set(token_pair.context + token_pair.continuation)


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_begin_of_text_is_first_where_the_model_has_it(template):
    begins = tiny_multiple_choice.tokenizer(template=template)
    without_begin = likelihood.pair(tiny_multiple_choice.tokenizer(), "the cat", " sat")
    token_pair = likelihood.pair(begins, "the cat", " sat")
    assert token_pair == ((0, *without_begin.context), without_begin.continuation)
    assert likelihood.pair(begins, "", "the cat").context == (0,)
    assert likelihood.pair(tiny_multiple_choice.tokenizer(), "", "the cat").context == (0,)


@pytest.mark.parametrize(
    ("special", "context", "continuation", "message"),
    [
        (False, "", "the cat", "no token to begin with"),
        (True, "the cat", "", "adds no token"),
        (True, "the cat", "\ud800", "lone surrogate"),
    ],
)
def test_what_cannot_be_scored_is_refused(special, context, continuation, message):
    with pytest.raises(BadInputError, match=message):
        likelihood.pair(tiny_multiple_choice.tokenizer(special=special), context, continuation)


def test_a_model_that_cannot_answer_is_refused():
    scorer = tiny_multiple_choice.scorer()
    long = likelihood.pair(scorer.tokenizer, "a", " 42" * 40)
    with pytest.raises(BadInputError, match="longer than the 64 that the model reads"):
        likelihood.score(scorer, [long])
    nan = tiny_multiple_choice.unigram_logits(
        np.full(scorer.tokenizer.vocab_size, np.nan, np.float32)
    )
    with pytest.raises(BadInputError, match="not numbers"):
        likelihood.score(dataclasses.replace(scorer, logits=nan), pairs(scorer)[:1])


def test_the_cache_tells_models_and_settings_apart(tmp_path):
    calls = []

    def counted(seed):
        scorer = tiny_multiple_choice.scorer(seed)

        def logits(*arrays):
            calls.append(seed)
            return scorer.logits(*arrays)

        return dataclasses.replace(scorer, logits=logits)

    def answers(seed, settings):
        with open_cache(tmp_path / "cache", model=f"{seed:064x}", settings=settings) as cache:
            scorer = dataclasses.replace(counted(seed), cache=cache)
            return comparison.answers(scorer, QUESTIONS).log_likelihoods

    first, second = answers(1, {"dtype": "float32"}), answers(2, {"dtype": "float32"})
    assert first != second
    assert first == comparison.answers(tiny_multiple_choice.scorer(1), QUESTIONS).log_likelihoods
    assert second == comparison.answers(tiny_multiple_choice.scorer(2), QUESTIONS).log_likelihoods
    calls.clear()
    assert answers(1, {"dtype": "float32"}) == first
    assert calls == []
    assert answers(1, {"dtype": "bfloat16"}) == first
    assert set(calls) == {1}


def test_a_killed_run_goes_on(tmp_path):
    whole = tiny_multiple_choice.scorer(batch_tokens=64)
    calls = []

    def dies(tokens_BT, valid_BT):
        calls.append(tokens_BT.shape)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole.logits(tokens_BT, valid_BT)

    def answers(logits):
        with open_cache(tmp_path, model="0" * 64, settings={}) as cache:
            scorer = dataclasses.replace(whole, logits=logits, cache=cache)
            return comparison.answers(scorer, QUESTIONS)

    with pytest.raises(KeyboardInterrupt):
        answers(dies)
    resumed = answers(dies)
    total = len(calls)
    calls.clear()
    comparison.answers(
        dataclasses.replace(whole, logits=lambda *each: calls.append(0) or whole.logits(*each)),
        QUESTIONS,
    )
    # The third batch alone was done twice.
    assert total == len(calls) + 1
    assert resumed.log_likelihoods == comparison.answers(whole, QUESTIONS).log_likelihoods


def test_a_cache_that_cannot_be_created_is_named(tmp_path):
    with pytest.raises(StorageError, match="nowhere"):
        open_cache(tmp_path / "nowhere" / "cache", model="0" * 64, settings={})


@pytest.mark.parametrize(
    ("choices", "gold", "message"),
    [
        (("one",), 0, "two or more"),
        (("one", ""), 0, "none empty"),
        (("one", "two"), 2, "count from 0"),
    ],
)
def test_a_question_has_choices_and_a_right_one(choices, gold, message):
    with pytest.raises(BadInputError, match=f"question 7: .*{message}"):
        Question("7", "why", choices, gold)


@pytest.fixture
def mc(tmp_path, monkeypatch):
    """An asset of two questions a task, laid out as the real one is."""
    labelled = {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}
    arc = {"id": "x", "question": "q", "choices": labelled, "answerKey": "3"}
    book = {"id": "y", "question_stem": "s", "choices": labelled, "answerKey": "1"}
    piqa = {"goal": "g", "sol1": "one ", "sol2": "two", "label": 1}
    for member, row in (("arc_easy", arc), ("openbookqa", book), ("piqa", piqa)):
        rows = pa.Table.from_pylist([row, row | {"id": "z"}] if "id" in row else [row, row])
        file = tmp_path / member / "validation.arrow"
        file.parent.mkdir()
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
    lines = [
        {"doc": {"id": i, "query": f"Question: {i}?\nAnswer:", "choices": ["a", "b"], "gold": 1}}
        for i in ("u", "u", "v", "u", "v")
    ]
    for task in ("arc_easy", "openbookqa"):
        with gzip.open(tmp_path / task / "test_5shot.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    monkeypatch.setattr(questions.assets, "path", lambda name, member: tmp_path / member)


@pytest.mark.usefixtures("mc")
def test_questions_of_the_asset():
    assert read("arc_easy") == [
        Question("u", "Question: u?\nAnswer:", ("a", "b"), 1),
        Question("v", "Question: v?\nAnswer:", ("a", "b"), 1),
    ]
    assert read("openbookqa", limit=1) == [Question("u", "u?", ("a", "b"), 1)]
    assert read("piqa")[0] == Question("0", "Question: g\nAnswer:", ("one ", "two"), 1)
    arc = Question("x", "Question: q\nAnswer:", ("a", "b", "c"), 2)
    assert read("arc_easy", split="validation")[0] == arc
    book = Question("y", "s", ("a", "b", "c"), 0)
    assert read("openbookqa", split="validation")[0] == book


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("arc_eazy", {}, "did you mean 'arc_easy'"),
        ("piqa", {"split": "test"}, "no split 'test'"),
        ("piqa", {"limit": 0}, "limit = 0"),
    ],
)
def test_questions_that_are_not_there(task, options, message):
    with pytest.raises(UsageError, match=message):
        read(task, **options)


@pytest.mark.real("mc")
def test_questions_as_published():
    results = {
        (task, split): read(task, split=split) for task in TASKS for split in TASKS[task].splits
    }
    assert {key: len(asked) for key, asked in results.items()} == {
        ("arc_easy", "test"): 2_376,
        ("arc_easy", "validation"): 570,
        ("piqa", "validation"): 1_838,
        ("openbookqa", "test"): 500,
        ("openbookqa", "validation"): 500,
    }
    for asked in results.values():
        assert len({question.id for question in asked}) == len(asked)
    (arc, *_), (book, *_) = results["arc_easy", "test"], results["openbookqa", "test"]
    assert arc.context.startswith("Question: Which statement best explains why photosynthesis")
    assert arc.context.endswith("\nAnswer:")
    assert arc.choices[arc.gold] == "Sunlight is the source of energy for nearly all ecosystems."
    assert book.context.startswith("A person wants to start saving money")
    assert book.choices[book.gold] == "quit eating lunch out"
