"""Batches hold every prompt of a suite once, in few shapes."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from lm_jax.errors import UsageError
from polyattn_jax import suites
from polyattn_jax.suites.prompts import answered, make_suite
from tests.polyattn_jax.synthetic_suites import HAYSTACK, VOCABULARY, WordTokenizer, build


@given(
    count=st.integers(1, 13), size=st.integers(1, 5), buckets=st.sampled_from([None, (60, 30, 90)])
)
def test_batches_hold_every_prompt_once_and_have_few_shapes(count, size, buckets):
    suite = suites.niah(
        WordTokenizer(VOCABULARY), haystack=HAYSTACK, pad=4, n=count, queries=3, depth=1.0
    )
    longest = max(len(prompt.tokens) for prompt in suite.prompts)
    result = set()
    for batch in suites.batches(suite, size, buckets=buckets):
        length = batch.tokens_BT.shape[1]
        assert batch.tokens_BT.shape[0] == size == len(batch.ids)
        assert length in (buckets or (longest,))
        assert batch.tokens_BT.dtype == batch.target_BQ.dtype == np.int32
        for row in range(size):
            prompt = suite.prompts[batch.index_B[row]]
            end = batch.lengths_B[row]
            assert tuple(batch.tokens_BT[row, :end]) == prompt.tokens
            assert not batch.tokens_BT[row, end:].any()
            assert not any(end <= bucket < length for bucket in buckets or ())
            assert tuple(batch.query_positions_BQ[row]) == prompt.query_positions
            assert batch.target_BQ[row].tolist() == [-1, -1, prompt.target]
            assert batch.target_B[row] == prompt.target
            assert batch.ids[row] == prompt.id
            answer = prompt.answer_position
            assert batch.answer_position_B[row] == answer
            # With the needle at the end, the first query precedes it or not, by its position.
            expected = [answer if answer <= q else -1 for q in prompt.query_positions]
            assert batch.answer_position_BQ[row].tolist() == expected
            if batch.valid_B[row]:
                assert prompt.id not in result
                result.add(prompt.id)
        assert batch.valid_B[0]
    assert len(result) == count


def test_answers_of_as_many_tokens_are_in_one_batch():
    answers = [(1,), (2, 3), (4,), (5, 6, 7), (8, 9)]
    prompts = [answered(f"{i}", (i, i, i), ids, None, {}) for i, ids in enumerate(answers)]
    suite = make_suite("mine", prompts, vocabulary=50, plant="none")
    found = list(suites.batches(suite, 2))
    assert [batch.index_B.tolist() for batch in found] == [[0, 2], [1, 4], [3, 3]]
    for batch in found:
        for row, index in enumerate(batch.index_B):
            assert tuple(batch.target_BQ[row]) == answers[index]
            # What decoding has written of the answer is part of the tokens.
            after = batch.tokens_BT[row, 3 : batch.lengths_B[row]]
            assert tuple(after) == answers[index][:-1]


def test_batches_carry_one_target_for_each_query():
    suite = suites.mqar(vocabulary=97, length=50, pairs=4, n=3, read="all")
    (batch,) = suites.batches(suite, 4)
    assert batch.valid_B.tolist() == [True, True, True, False]
    rows, _ = np.indices(batch.target_BQ.shape)
    assert (batch.tokens_BT[rows, batch.answer_position_BQ] == batch.target_BQ).all()
    keys = batch.tokens_BT[rows, batch.answer_position_BQ - 1]
    assert (batch.tokens_BT[rows, batch.query_positions_BQ] == keys).all()
    assert batch.target_BQ.shape == (4, 4)


@pytest.mark.parametrize(
    ("size", "buckets", "match"),
    [(0, None, "batch_size=0"), (2, (39,), "'induction-0000' has 40 tokens"), (2, (), "buckets")],
)
def test_batches_refuse_what_cannot_hold_a_prompt(size, buckets, match):
    with pytest.raises(UsageError, match=match):
        suites.batches(build("block"), size, buckets=buckets)
