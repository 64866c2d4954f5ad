"""The summary of the pair, from the post-trainings and the tasks of all models."""

from collections.abc import Mapping, Sequence

import jax

from sparse_jax.studies.pair.results import (
    DenseTraining,
    PairSummary,
    TaskScore,
    UnscoredTask,
    VariantResult,
)
from sparse_jax.studies.posttrain.results import PosttrainSummary


def variants(results: Mapping[str, PosttrainSummary]) -> tuple[VariantResult, ...]:
    """The post-trainings by the names of their variants, without what all of them share."""
    return tuple(
        VariantResult(variant=name, bounds=each.bounds, runs=each.runs)
        for name, each in results.items()
    )


def summarise(
    dense: DenseTraining,
    results: Mapping[str, PosttrainSummary],
    scores: Sequence[TaskScore],
    unscored: Sequence[UnscoredTask],
) -> PairSummary:
    """The summary of the pair; its controls come from the first variant."""
    first = next(iter(results.values()))
    return PairSummary(
        dense=dense,
        dense_loss=first.dense_loss,
        validation_tokens=first.validation_tokens,
        controls=first.controls,
        variants=variants(results),
        scores=tuple(scores),
        unscored=tuple(unscored),
        device=jax.devices()[0].device_kind,
    )


def by_role(summary: PairSummary, task: str) -> dict[str, list[TaskScore]]:
    """The scores of one task by role, in the order of the models."""
    scores: dict[str, list[TaskScore]] = {}
    for score in summary.scores:
        if score.task == task:
            scores.setdefault(score.model.role, []).append(score)
    return scores
