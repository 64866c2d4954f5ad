"""Accuracies by hand, and models compared on the same questions."""

import json

import numpy as np
import pytest

from lm_jax.evaluate.multiple_choice import Question, Scorer, compare, comparison, table
from tests.lm_jax.evaluate import tiny_multiple_choice
from tests.lm_jax.evaluate.tiny_multiple_choice import QUESTIONS


def indifferent() -> Scorer:
    """To it all tokens are equally likely, so that a choice costs its number of tokens."""
    tokenizer = tiny_multiple_choice.tokenizer()
    zeros = np.zeros(tokenizer.vocab_size, np.float32)
    return Scorer(tiny_multiple_choice.unigram_logits(zeros), tokenizer, max_length=64)


def test_accuracies_by_hand():
    scorer = indifferent()
    # In tokens and characters: " the" 1, 3; " the mat" 2, 7; " zzz" 4, 3.
    asked = [
        Question("short", "on", ("the", "the mat", "zzz"), 0),
        Question("long", "on", ("the", "the mat", "zzz"), 1),
        Question("odd", "on", ("zzz", "the"), 0),
    ]
    scored = comparison.answers(scorer, asked)
    cost = -np.log(scorer.tokenizer.vocab_size)
    # Exponentials of 0 are 1 and their sum is exact: a logarithm of 4 units and a sum of four.
    rtol = (4 + 4) * 2.0**-24
    np.testing.assert_allclose(scored.log_likelihoods[0], [cost, 2 * cost, 4 * cost], rtol=rtol)
    assert scored.correct["acc"].tolist() == [True, False, False]
    # 2 tokens for 7 characters are fewer than 1 for 3.
    assert scored.correct["acc_norm"].tolist() == [False, True, False]
    assert scored.cut == 0


def test_two_models_are_compared_on_the_same_questions():
    dense, sparse = tiny_multiple_choice.scorer(seed=1), tiny_multiple_choice.scorer(seed=2)
    result = compare({"dense": dense, "sparse": sparse}, {"made": QUESTIONS, "two": QUESTIONS[:2]})
    task_result = result["tasks"]["made"]
    first, second = (comparison.answers(each, QUESTIONS).correct["acc"] for each in (dense, sparse))
    of_metric = task_result["metrics"]["acc"]
    assert task_result["n"] == of_metric["accuracy"]["dense"]["n"] == len(QUESTIONS)
    assert task_result["chance"] == pytest.approx((4 / 2 + 2 / 3 + 1 / 4) / 7)
    assert task_result["cut"] == {"dense": 1, "sparse": 1}
    assert of_metric["accuracy"]["dense"]["estimate"] == first.mean()
    assert of_metric["accuracy"]["sparse"]["estimate"] == second.mean()
    paired = of_metric["paired"]["sparse"]
    assert paired["lost"] == (first & ~second).sum()
    assert paired["gained"] == (second & ~first).sum()
    assert paired["change"]["estimate"] == pytest.approx(second.mean() - first.mean())
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert task_result["sha256"] != result["tasks"]["two"]["sha256"]


def test_other_models_are_compared_with_a_control_too():
    scorers = {name: tiny_multiple_choice.scorer(seed=i) for i, name in enumerate("abcd")}
    compared = compare(scorers, {"made": QUESTIONS}, controls=("b",))
    for metric, of_metric in compared["tasks"]["made"]["metrics"].items():
        assert list(of_metric["paired"]) == ["b", "c", "d"]
        assert list(of_metric["over_controls"]) == ["b"]
        assert list(of_metric["over_controls"]["b"]) == ["c", "d"]
        alone = {name: scorers[name] for name in ("b", "c", "d")}
        wanted = compare(alone, {"made": QUESTIONS})["tasks"]["made"]["metrics"][metric]
        assert of_metric["over_controls"]["b"] == wanted["paired"]
    first, second = table(compared).split("\n\n")
    assert first + "\n" == table(compare(scorers, {"made": QUESTIONS}))
    assert [line.split(" | ")[:4] for line in second.splitlines()[2:]] == [
        ["| made", metric, "b", name] for metric in comparison.METRICS for name in "cd"
    ]


def test_a_model_beside_itself_changes_nothing():
    scorer = tiny_multiple_choice.scorer()
    result = compare({"dense": scorer, "sparse": scorer}, {"made": QUESTIONS})
    for of_metric in result["tasks"]["made"]["metrics"].values():
        paired = of_metric["paired"]["sparse"]
        assert (paired["lost"], paired["gained"], paired["p_value"]) == (0, 0, 1.0)
        assert paired["change"]["low"] < 0 < paired["change"]["high"]
