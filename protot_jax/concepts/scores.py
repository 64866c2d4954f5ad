"""Scores of a judge by layer, with intervals, compared with its scores of random texts.

A judge that finds a theme in anything gives high scores to random texts too, so a score means
something only compared with that baseline. Intervals are 95 % percentile bootstraps over prototypes
(for the baseline, over draws of texts); they do not include the uncertainty of the judge.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Literal

import numpy as np
from scipy import stats

from lm_jax.evaluate.judge import Label
from lm_jax.evaluate.judge_prompt import SCORES
from lm_jax.statistics import Interval, clustered_bootstrap
from protot_jax.concepts.results import ConceptReport, Prototype, RandomTexts, Unit

RESAMPLES = 2000
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


def lead(result: ConceptReport, *, seed: int = 0) -> dict[str, Interval | None]:
    """Mean score of the prototypes less that of random texts; `n` counts the prototypes.

    Both sides are resampled. None without a baseline, or with fewer than two labels on a side.
    """
    ours, random = labels_of(result.prototypes), labels_of(result.baseline or ())
    if min(len(ours), len(random)) < 2:
        return dict.fromkeys(SCORES)
    return {score: difference(values(ours, score), values(random, score), seed) for score in SCORES}


def difference(ours: np.ndarray, random: np.ndarray, seed: int) -> Interval:
    """Mean of the first less that of the second; both are resampled, `n` is of the first."""
    result = stats.bootstrap(
        (ours, random),
        lambda x, y, axis: x.mean(axis) - y.mean(axis),
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    value = float(ours.mean() - random.mean())
    return Interval(value, float(result.low), float(result.high), ours.size)


def group(name: str, members: Labelled, seed: int) -> Scores:
    """Mean scores of some units or texts."""
    labels = labels_of(members)
    intervals: dict[str, Interval | None] = dict.fromkeys(SCORES)
    if len(labels) > 1:
        for score in SCORES:
            intervals[score] = clustered_bootstrap(
                values(labels, score), np.arange(len(labels)), resamples=RESAMPLES, seed=seed
            )
    return Scores(name, len(members), len(labels), intervals)


def labels_of(members: Labelled) -> list[Label]:
    """The labels of those that have one."""
    return [one.label for one in members if one.label is not None]


def values(labels: Sequence[Label], score: str) -> np.ndarray:
    """One score of some labels."""
    return np.array([getattr(label, score) for label in labels], dtype=float)
