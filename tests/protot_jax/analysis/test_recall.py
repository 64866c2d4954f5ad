"""Rows of the recall suite: streams by number, and what an oracle and a guess score on them."""

import dataclasses

import numpy as np
import pytest

from lm_jax.run.config import from_plain
from protot_jax.analysis import recall as sequences
from protot_jax.analysis.recall import Batches, Condition
from protot_jax.studies.recall import STUDY, run
from protot_jax.studies.recall.settings import RecallConfig

CONDITIONS = (Condition("mqar", 40, 6), Condition("induction", 41), Condition("needle", 40))
V = 60
by_condition = pytest.mark.parametrize("condition", CONDITIONS, ids=lambda each: each.task)


def lookup(tokens_BT):
    """At each position what followed the last earlier occurrence of its token, or 0."""
    predicted_BT = np.zeros_like(tokens_BT)
    for b, row in enumerate(tokens_BT.tolist()):
        last = {}
        for t, token in enumerate(row):
            if token in last:
                predicted_BT[b, t] = row[last[token] + 1]
            last[token] = t
    return predicted_BT


@by_condition
def test_a_perfect_memory_answers_everything(condition):
    tokens_PS = sequences.rows(condition, 30, V, "test")
    right_P, asked_P = run.answered(lookup, tokens_PS, 7)
    wanted = {"mqar": 6, "induction": 20, "needle": 1}[condition.task]
    assert asked_P.tolist() == [wanted] * 30
    np.testing.assert_array_equal(right_P, asked_P)


@by_condition
def test_a_guess_scores_its_chance(condition):
    count, rng = 3000, np.random.default_rng(0)

    def guess(tokens_BT):
        B, T = tokens_BT.shape
        if condition.task == "needle":
            return rng.integers(2, V, (B, T))
        places = 2 * rng.integers(0, 6, (B, T)) + 1
        if condition.task == "induction":
            places = rng.integers(0, 21, (B, T))
        return np.take_along_axis(tokens_BT, places, 1)

    right_P, asked_P = run.answered(guess, sequences.rows(condition, count, V, "test"), 1000)
    p, n = sequences.chance(condition, V), asked_P.sum()
    # Guesses are independent: five standard deviations of their mean.
    assert abs(right_P.sum() / n - p) < 5 * np.sqrt(p * (1 - p) / n)


@by_condition
def test_rows_are_functions_of_their_number(condition):
    few, many = (sequences.rows(condition, count, V, "test") for count in (3, 8))
    np.testing.assert_array_equal(few, many[:3])
    assert len({row.tobytes() for row in many}) == 8
    assert (sequences.rows(condition, 8, V, "choice") != many).any(1).all()
    T = condition.length
    batch = sequences.answer_batch(many)
    np.testing.assert_array_equal(batch.input_BT, many[:, :T])
    np.testing.assert_array_equal(batch.loss_mask_BT, many[:, T:] != 0)
    assert batch.input_mask_BT.all()


def test_batches_are_functions_of_their_number_and_mix_the_pairs():
    conditions = tuple(Condition("mqar", 40, pairs) for pairs in (2, 5, 9))

    def batches(seed):
        return Batches(conditions, batch_size=30, vocab_size=V, seed=seed)

    first, other = batches(0), batches(1)
    _ = first.at(0)
    batch = first.at(7)
    np.testing.assert_array_equal(batch["tokens"], batches(0).at(7)["tokens"])
    assert batch["document"].tolist() == list(range(210, 240))
    assert first.fingerprint != other.fingerprint
    assert (other.at(7)["tokens"] != batch["tokens"]).any()
    asked_B = (batch["tokens"][:, 40:] != 0).sum(1)
    assert set(asked_B.tolist()) == {2, 5, 9}


def test_conditions_without_room_are_left_out():
    assert sequences.is_possible(Condition("mqar", 15, 4), 10)
    assert not sequences.is_possible(Condition("mqar", 14, 4), 10)
    assert not sequences.is_possible(Condition("mqar", 15, 4), 9)
    assert sequences.is_possible(Condition("induction", 16), 10)
    assert not sequences.is_possible(Condition("induction", 18), 10)


def test_the_small_suite_has_every_model_and_task_at_the_size_of_the_quickstart():
    suite, small, quick = (
        from_plain(STUDY.settings(mode), RecallConfig) for mode in ("", "small", "quickstart")
    )
    assert (small.models, small.tasks) == (suite.models, suite.tasks)
    wanted = dataclasses.replace(small, models=quick.models, tasks=("mqar",), lengths=(12, 24))
    assert wanted == quick
    lengths = {task: [each.length for each in small.measured(task)] for task in small.task_names}
    # 48 tokens of induction are 24 different ones, of 19.
    assert lengths == {
        "mqar": [12, 12, 24, 24, 48, 48],
        "induction": [12, 24],
        "needle": [12, 24, 48],
    }
