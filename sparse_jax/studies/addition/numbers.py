"""Numbers over seeds, from those of each seed."""

from collections.abc import Sequence

import jax

from sparse_jax.studies.addition.results import (
    AdditionSummary,
    ModelResult,
    ModelSpread,
    ModelSpreads,
    SeedSummary,
)
from sparse_jax.studies.addition.settings import AdditionConfig
from sparse_jax.studies.posttrain.numbers import spread


def summarise(config: AdditionConfig, seeds: Sequence[SeedSummary]) -> AdditionSummary:
    """The summary of all seeds."""
    return AdditionSummary(
        config=config,
        seeds=tuple(seeds),
        between_seeds=between_seeds(seeds),
        device=jax.devices()[0].device_kind,
    )


def between_seeds(seeds: Sequence[SeedSummary]) -> ModelSpreads:
    """Exact sums and open edges of each model over seeds."""
    return ModelSpreads(
        dense=_spread([each.models.dense for each in seeds]),
        sparse=_spread([each.models.sparse for each in seeds]),
    )


def _spread(models: Sequence[ModelResult]) -> ModelSpread:
    return ModelSpread(
        exact=spread([each.accuracy.all.estimate for each in models]),
        edges=spread([each.edges.all.estimate for each in models]),
    )
