"""Groups of scores, each compared with the first.

Difference of the means with Welch's 95 % interval, and p of a permutation of labels between both,
corrected for the number of groups by Holm's method.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np
from scipy import stats

from lm_jax.evaluate.judge_prompt import SCORES
from lm_jax.statistics import holm
from protot_jax.studies.concepts import scores
from protot_jax.studies.concepts.results import ConceptReport
from protot_jax.studies.scores.results import NAME, VERSION, Difference, Group, ScoreComparison


def summarise(
    reports: Mapping[str, ConceptReport], *, seed: int, permutations: int
) -> ScoreComparison:
    """The groups of the reports, each compared with the first.

    Args:
      reports: concept reports by name, all labelled by one judge.
      seed: seed of bootstrap samples and permutations.
      permutations: labels of two groups are permuted so many times.
    """
    groups: list[Group] = []
    first: dict[str, np.ndarray] = {}
    for name, result in reports.items():
        model = result.model
        size = f"{model.layers} layers of {model.prototypes} prototypes, width {model.hidden_size}"
        members: list[tuple[str, scores.Units, str, scores.Labelled]] = [
            (name, "prototypes", size, result.prototypes)
        ]
        for one in result.comparisons:
            units = scores.UNITS[one.kind]
            members.append((f"{name}: {units} of {one.run}", units, one.model, one.units))
        if result.baseline is not None:
            members.append((f"{name}: random texts", "random texts", size, result.baseline))
        for title, units, about, labelled in members:
            labels = scores.labels_of(labelled)
            values = {score: scores.values(labels, score) for score in SCORES}
            differences = {
                score: difference(own, first[score], seed, permutations) if first else None
                for score, own in values.items()
            }
            groups.append(
                Group(
                    name=title,
                    units=units,
                    model=about,
                    asked=len(labelled),
                    scores={score: tuple(each.tolist()) for score, each in values.items()},
                    means=dict(scores.group(title, labelled, seed).intervals),
                    differences=differences,
                )
            )
            first = first or values
    judge = next(iter(reports.values())).settings.judge
    return ScoreComparison(NAME, VERSION, judge, seed, tuple(_corrected(groups)))


def difference(
    ours: np.ndarray, first: np.ndarray, seed: int, permutations: int
) -> Difference | None:
    """The mean of the first less that of the second; None for fewer than two scores in either."""
    if min(ours.size, first.size) < 2:
        return None
    p = stats.permutation_test(
        (ours, first),
        lambda x, y, axis: x.mean(axis) - y.mean(axis),
        vectorized=True,
        n_resamples=permutations,
        rng=np.random.default_rng(seed),
    ).pvalue
    return Difference(scores.difference(ours, first), float(p), float(p))


def _corrected(groups: Sequence[Group]) -> list[Group]:
    """The groups with p corrected within each score."""
    found = {name: [group.differences[name] for group in groups] for name in SCORES}
    for differences in found.values():
        tested = [i for i, one in enumerate(differences) if one is not None]
        corrected = holm([one.p for one in differences if one is not None])
        for i, p in zip(tested, corrected, strict=True):
            if one := differences[i]:
                differences[i] = dataclasses.replace(one, p_holm=p)
    return [
        dataclasses.replace(group, differences={name: found[name][i] for name in SCORES})
        for i, group in enumerate(groups)
    ]
