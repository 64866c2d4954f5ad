"""Metrics are what their definitions give, by enumeration in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.circuits import metrics
from sparse_jax.circuits.tasks import make_task
from tests import rounding
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def drawn_logits(task, tokenizer, seed=0):
    shape = (2, len(task.examples), tokenizer.vocab_size)
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


def functions(task, names):
    def run(first_BV, second_BV):
        continuations = task.arrays.continuations
        return {name: metrics.METRICS[name](first_BV, second_BV, continuations) for name in names}

    return run


def values(task, logits, names=tuple(metrics.METRICS)):
    """In float32, and in float64 with the bounds of float32, which the former are within."""
    function, logits = functions(task, names), tuple(map(jnp.asarray, logits))
    exact = rounding.expected(function, *logits)
    result = jax.device_get(function(*logits))
    rounding.assert_within(result, exact)
    return result, exact


def test_metrics_of_one_token():
    tokenizer = word_tokenizer(digits=2)
    for name in ("docstring", "greater_than"):
        task = make_task(name, tokenizer, count=6, seed=0)
        logits = drawn_logits(task, tokenizer)
        _, exact = values(task, logits)
        by_hand = {metric: np.empty(6) for metric in metrics.METRICS}
        for b, (example, first) in enumerate(
            zip(task.examples, logits[0].astype(np.float64), strict=True)
        ):
            right, wrong = (
                [tokenizer.encode(text)[0] for text in texts]
                for texts in (example.answers, example.wrong_answers)
            )
            p = softmax(first)
            by_hand["logit_difference"][b] = first[right].mean() - first[wrong].mean()
            by_hand["probability_difference"][b] = p[right].sum() - p[wrong].sum()
            by_hand["log_probability_difference"][b] = np.log(p[right].sum() / p[wrong].sum())
        oracle.assert_equal(by_hand, exact, name)


def test_numbers_of_two_tokens_are_the_sum_over_all_hundred():
    """Units after another tens digit are random: they must not matter."""
    tokenizer = word_tokenizer(digits=1)
    task = make_task("greater_than", tokenizer, count=30, seed=1)
    logits = drawn_logits(task, tokenizer)
    names = ("probability_difference", "log_probability_difference")
    _, exact = values(task, logits, names)
    by_hand = {name: np.empty(30) for name in names}
    rng = np.random.default_rng(5)
    ids = [tokenizer.encode(str(digit))[0] for digit in range(10)]
    for b, example in enumerate(task.examples):
        year = len(example.wrong_answers) - 1
        tens_p, units_p = (softmax(each[b].astype(np.float64)) for each in logits)
        sums = {True: 0.0, False: 0.0}
        for d in range(10):
            # All that follows a tens digit sums to 1, and here it is always a digit.
            after = units_p[ids] if d == year // 10 else rng.dirichlet(np.ones(10))
            for u in range(10):
                sums[10 * d + u > year] += tens_p[ids[d]] * after[u]
        by_hand["probability_difference"][b] = sums[True] - sums[False]
        with np.errstate(divide="ignore"):
            by_hand["log_probability_difference"][b] = np.log(sums[True] / sums[False])
    oracle.assert_equal(by_hand, exact)


def test_a_logit_difference_needs_continuations_of_one_token():
    tokenizer = word_tokenizer(digits=1)
    task = make_task("greater_than", tokenizer, count=2, seed=1)
    logits = drawn_logits(task, tokenizer)
    with pytest.raises(UsageError, match="choose probability_difference"):
        metrics.logit_difference(*map(jnp.asarray, logits), task.arrays.continuations)


def test_shifting_all_logits_changes_no_metric():
    tokenizer = word_tokenizer(digits=2)
    task = make_task("ioi", tokenizer, count=4, seed=2)
    # With so few digits that the shift is exact.
    logits = np.round(drawn_logits(task, tokenizer) * 1024) / 1024
    before, exact = values(task, logits)
    _, shifted = values(task, logits + np.float32(1.5))
    oracle.assert_equal(shifted.values, exact)
    assert all(np.ptp(each) > 0.01 for each in before.values())


def test_every_pair_of_metrics_has_the_same_sign_for_one_answer_each():
    """With one right and one wrong continuation, all three order the two alike."""
    tokenizer = word_tokenizer(digits=2)
    task = make_task("copy", tokenizer, count=20, seed=2)
    result, _ = values(task, drawn_logits(task, tokenizer))
    for one, other in itertools.pairwise(result.values()):
        np.testing.assert_array_equal(np.sign(one), np.sign(other))


def test_a_right_answer_beats_every_wrong_one():
    """A mean over wrong logits is low where the model expects one of two wrong names."""
    logits_BV = jnp.array([[2.0, 3.0, -9.0], [2.0, 1.0, -9.0], [2.0, 2.0, 2.0]])
    one = jnp.zeros((3, 1), jnp.int32)
    wrong = jnp.tile(jnp.array([1, 2]), (3, 1))
    nothing = jnp.zeros((3, 0), jnp.int32)
    continuations = metrics.Continuations(one, wrong, one[:, 0], nothing, nothing)
    given = (logits_BV, logits_BV, continuations)
    assert (metrics.logit_difference(*given)[:2] > 0).all()
    right = metrics.answers_right("logit_difference", *given)
    np.testing.assert_array_equal(right, [False, True, False])
    # Of many, sums are compared: e^2 is below e^3, and above e.
    both = metrics.answers_right("probability_difference", *given)
    np.testing.assert_array_equal(both, [False, True, False])
