"""When a task decides, and what several tasks decide together."""

import dataclasses
import math

import pytest

from lm_jax.statistics import Interval, mcnemar, wilson
from polyattn_jax.audit import decision
from polyattn_jax.audit.results import ConditionResult, RowShares
from polyattn_jax.studies.check.decisions import holm, overall, task_result
from polyattn_jax.studies.check.tasks import GUESSED, Answers
from polyattn_jax.suites.control import LEFT_OUT, OTHERS

N = 120


def condition(right, base):
    """The result of answers, right or not, against those of softmax."""
    paired = mcnemar(base, right)
    verdict = decision.verdict(base, right).name
    return ConditionResult(
        cell="a",
        recipe="a",
        bias=0.0,
        heads=1,
        accuracy=wilson(sum(right), len(right)),
        verdict=verdict,
        delta=paired.delta,
        p_value=paired.p_value,
        lost=paired.b,
        won=paired.c,
        loss=math.nan,
        median_rank=0.0,
        dead_rows_per_prompt=0.0,
    )


def answers(softmax, recipe, control=0, *, kind=LEFT_OUT, most_frequent=0.01, **more):
    before = [i < softmax for i in range(N)]
    after = [i < recipe for i in range(N)]
    return Answers(
        condition(before, before),
        condition(after, before),
        wilson(control, 50),
        kind,
        64,
        most_frequent=most_frequent,
        **more,
    )


def results(**tasks):
    return holm(
        task_result(name, own, RowShares(), unmeasured="not measured", tolerance=0.05)
        for name, own in tasks.items()
    )


def test_a_model_that_always_gives_the_most_frequent_answer_solves_nothing():
    """Right in the 84 prompts of 120 whose answer is yes, and in its control in 36 %."""
    own = answers(84, 84, control=18, kind=OTHERS, most_frequent=84 / 120)
    assert "always gives the most frequent answer in 70 %" in own.unsolved
    (task,) = results(mine=own)
    assert task.verdict == "undecidable"
    # One that is right where others are wrong too does.
    assert not answers(115, 115, control=3, kind=OTHERS, most_frequent=84 / 120).unsolved


@pytest.mark.parametrize(
    ("softmax", "control", "words"),
    [(60, 0, "does not show that it solves"), (110, 45, "left out of the prompt"), (110, 2, "")],
)
def test_softmax_must_solve_the_task_and_not_its_control(softmax, control, words):
    found = answers(softmax, softmax, control).unsolved
    assert words in found and bool(words) == bool(found)


def test_multiple_choice_must_be_further_above_guessing_than_a_recipe_may_lose():
    chance = Interval(0.25, 0.25, 0.25, N)
    near = answers(45, 30, kind=GUESSED, floor=0.30)
    near = dataclasses.replace(near, control=chance)
    assert near.softmax.accuracy.low < 0.30 and "further above guessing" in near.unsolved
    far = dataclasses.replace(answers(60, 60, kind=GUESSED, floor=0.30), control=chance)
    assert far.softmax.accuracy.low > 0.30 and not far.unsolved
    (task,) = results(choices=far)
    assert task.verdict != "undecidable" and "softmax itself" not in task.reason


def test_all_tasks_must_preserve_and_one_loss_is_enough():
    kept, lost = answers(N, N), answers(N, 90)
    both = results(a=kept, b=kept)
    assert overall(both, {}, tolerance=0.05).verdict == "preserve"
    mixed = results(a=kept, b=lost)
    decided = overall(mixed, {}, tolerance=0.05)
    assert decided.verdict == "no-go" and decided.reason.startswith("b: ")
    undecidable = results(a=kept, b=answers(20, 20))
    assert overall(undecidable, {}, tolerance=0.05).verdict == "preserve"
    assert overall(results(b=answers(20, 20)), {}, tolerance=0.05).verdict == "undecided"
    none = overall((), {"needle": "no words"}, tolerance=0.05)
    assert none.verdict == "undecided" and "needle cannot be asked: no words" in none.reason


def test_a_loss_that_one_of_many_tasks_shows_by_chance_decides_nothing():
    """Seven of 120 lost has p = 0.016: enough for one task, and not for four."""
    lost = dataclasses.replace(answers(N, N - 7))
    (alone,) = results(a=lost)
    assert alone.verdict == "no-go" and 0.0125 < alone.p_value < 0.05
    assert overall((alone,), {}, tolerance=0.05).verdict == "no-go"
    many = results(a=lost, **{name: answers(N, N) for name in "bcd"})
    decided = overall(many, {}, tolerance=0.05)
    assert decided.verdict == "undecided"
    assert decided.reason == "a: a loss that Holm's correction for all tasks leaves open"


def test_why_all_tasks_fail_is_said_where_it_is_not_their_accuracy():
    read = results(a=answers(N, N, control=50))
    reason = overall((*read, *results(b=answers(20, 20))), {}, tolerance=0.05).reason
    assert "left out of the prompt" in reason


def test_a_task_with_too_few_prompts_to_preserve_says_so():
    few = dataclasses.replace(answers(N, N - 2), most=54)
    (task,) = results(copying=few)
    assert task.verdict == "undecided" and task.next.startswith("leave the task out: it has 54")
