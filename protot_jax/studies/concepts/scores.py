"""Scores of a judge by layer, with intervals, compared with its scores of random texts.

A judge that finds a theme in anything gives high scores to random texts too, so a score means
something only compared with that baseline. Intervals are 95 % bootstraps over prototypes (for the
baseline, over draws of texts), Student's with the bootstrap's error below 30 of them, and Welch's
for differences, as a side may have ten; they do not include the uncertainty of the judge.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Literal

import numpy as np
from scipy import stats

from lm_jax.evaluate.judge import Label
from lm_jax.evaluate.judge_prompt import SCORES
from lm_jax.statistics import Interval, clustered_bootstrap
from protot_jax.studies.concepts.results import ConceptReport, Prototype, RandomTexts
from protot_jax.studies.concepts.unit_results import Unit

RESAMPLES = 2000
# Of every score (`lm_jax.evaluate.judge.Label`).
_LEAST, _MOST = 1.0, 10.0
Labelled = Sequence[Prototype] | Sequence[RandomTexts] | Sequence[Unit]
Units = Literal["prototypes", "heads", "features", "random texts"]
UNITS: Mapping[str, Units] = {"heads": "heads", "sae": "features"}


@dataclasses.dataclass(frozen=True)
class Scores:
    """Mean scores of one group; an interval is None where fewer than two have a label."""

    group: str
    asked: int
    labelled: int
    intervals: Mapping[str, Interval | None]


def by_layer(result: ConceptReport, *, seed: int = 0) -> list[Scores]:
    """Mean scores of layers, of all together, of compared units, and of random texts if any."""
    groups: list[tuple[str, Labelled]] = [
        (f"layer {one.layer}", [p for p in result.prototypes if p.layer == one.layer])
        for one in result.layers
    ]
    groups.append(("all layers", result.prototypes))
    groups += [(f"{UNITS[one.kind]} of {one.run}", one.units) for one in result.comparisons]
    if result.baseline is not None:
        groups.append(("random texts", result.baseline))
    return [group(name, members, seed) for name, members in groups]


def lead(result: ConceptReport) -> dict[str, Interval | None]:
    """Mean score of the prototypes less that of random texts; `n` counts the prototypes.

    The interval is that of `difference`. None without a baseline, or with fewer than two labels on
    a side.
    """
    ours, random = labels_of(result.prototypes), labels_of(result.baseline or ())
    if min(len(ours), len(random)) < 2:
        return dict.fromkeys(SCORES)
    return {score: difference(values(ours, score), values(random, score)) for score in SCORES}


def difference(ours: np.ndarray, random: np.ndarray) -> Interval:
    """Mean of the first less that of the second, with Welch's 95 % interval (Biometrika, 1947).

    Both have two scores or more; `n` is of the first. Ends do not leave the range of differences.
    """
    value = float(ours.mean() - random.mean())
    squares = np.array([each.var(ddof=1) / each.size for each in (ours, random)])
    reach = 0.0
    if squares.any():
        freedom = squares.sum() ** 2 / (squares**2 / [ours.size - 1, random.size - 1]).sum()
        reach = float(stats.t.ppf(0.975, freedom) * np.sqrt(squares.sum()))
    low, high = np.clip([value - reach, value + reach], _LEAST - _MOST, _MOST - _LEAST).tolist()
    return Interval(value, low, high, ours.size)


def group(name: str, members: Labelled, seed: int) -> Scores:
    """Mean scores of some units or texts."""
    labels = labels_of(members)
    intervals: dict[str, Interval | None] = dict.fromkeys(SCORES)
    if len(labels) > 1:
        for score in SCORES:
            intervals[score] = clustered_bootstrap(
                values(labels, score),
                np.arange(len(labels)),
                resamples=RESAMPLES,
                within=(_LEAST, _MOST),
                seed=seed,
            )
    return Scores(name, len(members), len(labels), intervals)


def labels_of(members: Labelled) -> list[Label]:
    """The labels of those that have one."""
    return [one.label for one in members if one.label is not None]


def values(labels: Sequence[Label], score: str) -> np.ndarray:
    """One score of some labels."""
    return np.array([getattr(label, score) for label in labels], dtype=float)
