"""Accuracies of models on the same questions, each with its interval, and the paired test.

    acc         the choice of the highest log-likelihood is the right one
    acc_norm    the same of log-likelihood / characters of the choice, which removes the advantage
                of short choices

Accuracies have Wilson intervals. Two models answer the same questions, so they are compared by the
questions that only one of them gets right: the exact McNemar test, and Tango's score interval of
the change (`lm_jax.statistics`). The p values are of single comparisons, not corrected for their
number.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from lm_jax import statistics
from lm_jax.errors import UsageError
from lm_jax.evaluate.multiple_choice.likelihood import Pair, Scorer, is_cut, pair, score
from lm_jax.evaluate.multiple_choice.questions import Question

# The text between a prompt and a choice; no character of the choice.
DELIMITER = " "
METRICS = ("acc", "acc_norm")


@dataclasses.dataclass(frozen=True)
class Answers:
    """A model's scores and answers on questions, in their order.

    Attributes:
      log_likelihoods: log-likelihoods of every choice, in nats.
      correct: metric to a bool for each question.
      cut: number of questions with a prompt that was too long and lost its beginning.
    """

    log_likelihoods: tuple[tuple[float, ...], ...]
    correct: Mapping[str, np.ndarray]
    cut: int


def answers(scorer: Scorer, questions: Sequence[Question], *, quiet: bool = True) -> Answers:
    """Scores every choice of every question.

    Raises:
      UsageError: no questions.
      BadInputError: as from `likelihood.pair` and `likelihood.score`.
    """
    if not questions:
        raise UsageError("there are no questions to answer; give one or more")
    pairs = [_pairs(scorer, question) for question in questions]
    scores = iter(score(scorer, [each for of_one in pairs for each in of_one], quiet=quiet))
    log_likelihoods = tuple(tuple(next(scores).log_likelihood for _ in of_one) for of_one in pairs)
    return Answers(
        log_likelihoods=log_likelihoods,
        correct=_correct(questions, log_likelihoods),
        cut=sum(any(is_cut(scorer, each) for each in of_one) for of_one in pairs),
    )


def compare(
    scorers: Mapping[str, Scorer],
    questions: Mapping[str, Sequence[Question]],
    *,
    controls: Collection[str] = (),
    confidence: float = 0.95,
    quiet: bool = True,
) -> dict[str, Any]:
    """The accuracies of one or more models on tasks, as plain data for a JSON file and `table`.

    Args:
      scorers: models by name, as `{"dense": ..., "sparse": ...}`. Every further one is paired with
        the first.
      questions: questions by task.
      controls: names of models, not the first, with which all are paired too that are neither the
        first nor a control.
      confidence: coverage of all intervals.
      quiet: whether no progress is printed.

    Returns:
      `{"confidence", "tasks": {task: {"n", "chance", "sha256", "cut", "metrics"}}}`: `chance` is
      the accuracy of guessing, `sha256` that of the questions, `cut` as in `Answers`, by model. A
      metric has `accuracy`, by model, and `paired`, by model but the first: `change` of the
      accuracy, `lost` and `gained` questions, `p_value`; `over_controls` has the same by control
      and model. Intervals are `statistics.Interval` as a dict.

    Raises:
      UsageError: no model, no task, or a task without questions.
      BadInputError: as from `answers`.
    """
    if not scorers or not questions:
        raise UsageError("compare: give one model or more, and one task or more")
    tasks = {}
    for task, asked in questions.items():
        by_model = {name: answers(each, asked, quiet=quiet) for name, each in scorers.items()}
        tasks[task] = {
            "n": len(asked),
            "chance": float(np.mean([1 / len(each.choices) for each in asked])),
            "sha256": _digest(asked),
            "cut": {name: each.cut for name, each in by_model.items()},
            "metrics": {
                metric: _metric(
                    {name: each.correct[metric] for name, each in by_model.items()},
                    controls,
                    confidence,
                )
                for metric in METRICS
            },
        }
    return {"confidence": confidence, "tasks": tasks}


def table(compared: Mapping[str, Any]) -> str:
    """The Markdown table of a comparison: a row for each task, metric and model, in per cent.

    A second table has the changes from controls, if there are any.
    """
    spread = f"{100 * compared['confidence']:g} % interval"
    heads = ("task", "n", "chance", "metric", "model", "value", spread, "change", "paired p")
    rows = [heads, tuple("---" for _ in heads)]
    for task, of_task in compared["tasks"].items():
        for metric, of_metric in of_task["metrics"].items():
            for model, accuracy in of_metric["accuracy"].items():
                n, chance = str(of_task["n"]), f"{100 * of_task['chance']:.1f}"
                value = f"{100 * accuracy['estimate']:.1f}"
                paired = _paired_cells(of_metric["paired"].get(model))
                rows.append((task, n, chance, metric, model, value, _interval(accuracy), *paired))
    over_controls = [
        (task, metric, control, model, *_paired_cells(paired))
        for task, of_task in compared["tasks"].items()
        for metric, of_metric in of_task["metrics"].items()
        for control, of_control in of_metric.get("over_controls", {}).items()
        for model, paired in of_control.items()
    ]
    if over_controls:
        heads = ("task", "metric", "control", "model", "change from the control", "paired p")
        over_controls = [heads, tuple("---" for _ in heads), *over_controls]
    return "\n".join(_markdown(each) for each in (rows, over_controls) if each)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _pairs(scorer: Scorer, question: Question) -> list[Pair]:
    return [
        pair(scorer.tokenizer, question.context, f"{DELIMITER}{choice}")
        for choice in question.choices
    ]


def _correct(
    questions: Sequence[Question], log_likelihoods: Sequence[Sequence[float]]
) -> dict[str, np.ndarray]:
    correct = {metric: np.zeros(len(questions), bool) for metric in METRICS}
    for i, (question, result) in enumerate(zip(questions, log_likelihoods, strict=True)):
        lengths = np.array([len(choice) for choice in question.choices])
        correct["acc"][i] = np.argmax(result) == question.gold
        correct["acc_norm"][i] = np.argmax(np.asarray(result) / lengths) == question.gold
    return correct


def _metric(
    correct: Mapping[str, np.ndarray], controls: Collection[str], confidence: float
) -> dict[str, Any]:
    (_, first), *rest = correct.items()
    others = dict(rest)
    compared = {name: each for name, each in others.items() if name not in controls}
    return {
        "accuracy": {
            name: dataclasses.asdict(statistics.wilson(int(each.sum()), each.size, confidence))
            for name, each in correct.items()
        },
        "paired": _paired(first, others, confidence),
        "over_controls": {name: _paired(others[name], compared, confidence) for name in controls},
    }


def _paired(
    first: np.ndarray, others: Mapping[str, np.ndarray], confidence: float
) -> dict[str, dict[str, Any]]:
    """The changes of others from the first, by their names."""
    tests = {name: statistics.mcnemar(first, each, confidence) for name, each in others.items()}
    return {
        name: {
            "change": dataclasses.asdict(test.delta),
            "lost": test.b,
            "gained": test.c,
            "p_value": test.p_value,
        }
        for name, test in tests.items()
    }


def _digest(questions: Sequence[Question]) -> str:
    text = json.dumps([dataclasses.astuple(each) for each in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _interval(interval: Mapping[str, float]) -> str:
    return f"{100 * interval['low']:.1f} to {100 * interval['high']:.1f}"


def _paired_cells(paired: Mapping[str, Any] | None) -> tuple[str, str]:
    if paired is None:
        return "", ""
    change = paired["change"]
    return f"{100 * change['estimate']:+.1f} ({_interval(change)})", f"{paired['p_value']:.2g}"
