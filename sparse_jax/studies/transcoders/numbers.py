"""A transcoder against its controls: replacement scores prompt by prompt, errors at equal activity.

Intervals are of 95 %, over prompts (`lm_jax.statistics.cluster_interval`).
"""

from collections.abc import Sequence

import numpy as np

from lm_jax import statistics
from lm_jax.statistics import Interval
from sparse_jax.studies.transcoders.results import Control, PromptScores, TranscoderSummary

# Rounding moves features at their thresholds: counts of active ones nearer than this are equal.
_ROUNDING = 1e-3


def replacement(graphs: PromptScores) -> Interval | None:
    """Mean replacement score of unpruned graphs; None for fewer than two."""
    return _over_prompts(graphs.replacement_by_prompt)


def replacement_over(graphs: PromptScores, control: PromptScores) -> Interval | None:
    """Mean of the replacement score less that of a control, prompt by prompt.

    None where the two are not of the same prompts, or a prompt of either has no graph.
    """
    if graphs.sha256 != control.sha256 or graphs.without_features or control.without_features:
        return None
    pairs = zip(graphs.replacement_by_prompt, control.replacement_by_prompt, strict=True)
    return _over_prompts([own - other for own, other in pairs])


def better_control(summary: TranscoderSummary) -> Control | None:
    """The control with no more active features that leaves least variance unexplained.

    None if that is not less than the transcoder leaves.
    """
    own = summary.reconstruction
    rivals = [
        each
        for each in summary.controls
        if each.l0 <= own.l0 * (1 + _ROUNDING) and each.unexplained < own.unexplained
    ]
    return min(rivals, key=lambda each: each.unexplained, default=None)


def as_control(summary: TranscoderSummary) -> Control:
    """A transcoder in the numbers of a control: as the per-layer control of another one."""
    return Control(
        name="per_layer",
        features=summary.features,
        parameters=summary.parameters,
        l0=summary.reconstruction.l0,
        unexplained=summary.reconstruction.unexplained,
        substitution=summary.substitution,
        graphs=summary.graphs,
        steps=summary.steps,
    )


def _over_prompts(values: Sequence[float]) -> Interval | None:
    if len(values) < 2:
        return None
    return statistics.cluster_interval(values, np.arange(len(values)), seed=0)
