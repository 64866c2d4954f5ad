"""Metrics of the GLUE tasks, with what each returns where it is undefined.

With TP, TN, FP, FN counted for class 1 (the second label):

    accuracy   share of right predictions
    f1         2 TP / (2 TP + FP + FN); 0 where no example has or gets class 1
    matthews   (TP TN - FP FN) / sqrt((TP+FP) (TP+FN) (TN+FP) (TN+FN)); 0 where a factor is 0, so
               that constant predictions have 0 (Matthews, 1975)
    pearson    correlation; NaN where predictions or targets are constant, never 0
    spearman   the same of ranks, ties at their mean rank

All but `spearman` are functions of sums over examples, so that training computes them on the
device: the counts `[C, C]` of classes by target and prediction, or the moments `[6]` of scores.
"""

from collections.abc import Callable, Mapping, Sequence
import math

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from protot_jax.studies.glue.tasks import Metric, Task

COUNTS, MOMENTS = "counts", "moments"


def accuracy(counts: np.ndarray) -> float:
    """Share of right predictions among counts `[C, C]` by target and prediction."""
    return float(np.trace(counts) / counts.sum())


def f1(counts: np.ndarray) -> float:
    """F1 of class 1 of two."""
    (_, fp), (fn, tp) = counts.tolist()
    return 2 * tp / (2 * tp + fp + fn) if tp or fp or fn else 0.0


def matthews(counts: np.ndarray) -> float:
    """Matthews' correlation of two classes."""
    (tn, fp), (fn, tp) = (map(float, row) for row in counts.tolist())
    factors = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(factors) if factors else 0.0


def pearson(moments: np.ndarray) -> float:
    """Pearson's correlation from the moments of predictions p and targets t (`moments_of`)."""
    n, p, t, pp, tt, pt = map(float, moments)
    spread = (n * pp - p * p) * (n * tt - t * t)
    return (n * pt - p * t) / math.sqrt(spread) if spread > 0 else math.nan


def moments_of(prediction: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
    """Sums of 1, p, t, p^2, t^2 and p t over examples of weight 1, `[6]`."""
    ones = jnp.ones_like(prediction)
    parts = (ones, prediction, target, prediction**2, target**2, prediction * target)
    return jnp.stack([jnp.sum(weight * part) for part in parts])


def counts_of(prediction: jax.Array, target: jax.Array, weight: jax.Array, C: int) -> jax.Array:
    """Examples of weight 1 by target and prediction, `[C, C]`."""
    hot = weight[:, None] * jax.nn.one_hot(target, C)
    return jnp.einsum("BC,BP->CP", hot, jax.nn.one_hot(prediction, C)).astype(jnp.int32)


_OF_COUNTS: Mapping[Metric, Callable[[np.ndarray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
}


def from_sums(metric: Metric, sums: Mapping[str, np.ndarray]) -> float:
    """A metric from the sums of an evaluation; NaN where it is undefined."""
    if metric in _OF_COUNTS:
        return _OF_COUNTS[metric](sums[COUNTS])
    return pearson(sums[MOMENTS])


def score(metric: Metric, targets: np.ndarray, predictions: np.ndarray, classes: int) -> float:
    """A metric of whole arrays `[n]` of classes or scores; NaN where it is undefined."""
    if metric in _OF_COUNTS:
        cells = classes * targets.astype(int) + predictions.astype(int)
        counts = np.bincount(cells, minlength=classes**2).reshape(classes, classes)
        return _OF_COUNTS[metric](counts)
    if np.ptp(targets) == 0 or np.ptp(predictions) == 0:
        return math.nan
    if metric == "spearman":
        targets, predictions = stats.rankdata(targets), stats.rankdata(predictions)
    return float(np.corrcoef(targets, predictions)[0, 1])


def scores(task: Task, targets: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """Every metric of a task, by name."""
    return {name: score(name, targets, predictions, task.outputs) for name in task.metrics}


def constant_prediction(task: Task, targets: Sequence[float] | np.ndarray, metric: Metric) -> float:
    """What a model that ignores its input would best predict: one class, or the mean score.

    Args:
      task: task whose classes are compared.
      targets: targets of the training split, on which the class has the best value of the metric;
        of equal ones the most frequent class is taken.
      metric: accuracy gives the most frequent class, F1 class 1.
    """
    targets = np.asarray(targets)
    if not task.labels:
        return float(targets.mean())

    def value(index: int) -> tuple[float, int]:
        constant = np.full_like(targets, index)
        return score(metric, targets, constant, task.outputs), int((targets == index).sum())

    return float(max(range(task.outputs), key=value))


def constant_predictions(task: Task, targets: Sequence[float] | np.ndarray) -> dict[Metric, float]:
    """The constant prediction for every metric of a task, and for the accuracy of classes."""
    names: tuple[Metric, ...] = (*task.metrics, "accuracy") if task.labels else task.metrics
    return {name: constant_prediction(task, targets, name) for name in names}
