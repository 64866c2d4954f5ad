"""Metrics are what their definitions give, by enumeration in float64."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.circuits import metrics
from sparse_jax.circuits.tasks import make_task
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer

# float32 logits of a few units, a log-sum-exp over the vocabulary and sums of at most 100 terms.
BOUND = 100 * float(np.finfo(np.float32).eps)


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def drawn_logits(task, tokenizer, seed=0):
    shape = (2, len(task.examples), tokenizer.vocab_size)
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


def values(task, logits):
    return {
        name: np.asarray(metric(*map(jnp.asarray, logits), task.arrays.continuations))
        for name, metric in metrics.METRICS.items()
    }


def test_metrics_of_one_token():
    tokenizer = word_tokenizer(digits=2)
    for name in ("docstring", "greater_than"):
        task = make_task(name, tokenizer, count=6, seed=0)
        logits = drawn_logits(task, tokenizer)
        result, first = values(task, logits), logits[0].astype(np.float64)
        for b, example in enumerate(task.examples):
            right, wrong = (
                [tokenizer.encode(text)[0] for text in texts]
                for texts in (example.answers, example.wrong_answers)
            )
            p = softmax(first[b])
            difference = first[b][right].mean() - first[b][wrong].mean()
            np.testing.assert_allclose(result["logit_difference"][b], difference, atol=10 * BOUND)
            np.testing.assert_allclose(
                result["probability_difference"][b], p[right].sum() - p[wrong].sum(), atol=BOUND
            )
            np.testing.assert_allclose(
                result["log_probability_difference"][b],
                np.log(p[right].sum()) - np.log(p[wrong].sum()),
                atol=10 * BOUND,
            )


def test_numbers_of_two_tokens_are_the_sum_over_all_hundred():
    """Units after another tens digit are random: they must not matter."""
    tokenizer = word_tokenizer(digits=1)
    task = make_task("greater_than", tokenizer, count=30, seed=1)
    logits = drawn_logits(task, tokenizer)
    result = values_of_probabilities(task, logits)
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
        right, wrong = sums[True], sums[False]
        np.testing.assert_allclose(result["probability_difference"][b], right - wrong, atol=BOUND)
        if right:
            np.testing.assert_allclose(
                result["log_probability_difference"][b], np.log(right / wrong), atol=10 * BOUND
            )


def values_of_probabilities(task, logits):
    names = ("probability_difference", "log_probability_difference")
    return {
        name: np.asarray(
            metrics.METRICS[name](*map(jnp.asarray, logits), task.arrays.continuations)
        )
        for name in names
    }


def test_a_logit_difference_needs_continuations_of_one_token():
    tokenizer = word_tokenizer(digits=1)
    task = make_task("greater_than", tokenizer, count=2, seed=1)
    logits = drawn_logits(task, tokenizer)
    with pytest.raises(UsageError, match="choose probability_difference"):
        metrics.logit_difference(*map(jnp.asarray, logits), task.arrays.continuations)


def test_shifting_all_logits_changes_no_metric():
    tokenizer = word_tokenizer(digits=2)
    task = make_task("ioi", tokenizer, count=4, seed=2)
    logits = drawn_logits(task, tokenizer)
    for name, before in values(task, logits).items():
        np.testing.assert_allclose(values(task, logits + 1.5)[name], before, atol=10 * BOUND)
    assert all(np.ptp(each) > 0.01 for each in values(task, logits).values())


def test_every_pair_of_metrics_has_the_same_sign_for_one_answer_each():
    """With one right and one wrong continuation, all three order the two alike."""
    tokenizer = word_tokenizer(digits=2)
    task = make_task("copy", tokenizer, count=20, seed=2)
    result = values(task, drawn_logits(task, tokenizer))
    for one, other in itertools.pairwise(result.values()):
        np.testing.assert_array_equal(np.sign(one), np.sign(other))
