"""The summary of attribution graphs, from their rows and from the numbers of each graph."""

from collections.abc import Sequence

import pyarrow as pa

from sparse_jax.studies.graphs import comparison, stability
from sparse_jax.studies.graphs.results import (
    ComparedPrompt,
    FeatureCorpus,
    GraphResult,
    GraphSummary,
    ModelFacts,
)
from sparse_jax.studies.graphs.settings import GraphConfig


def summarise(
    config: GraphConfig,
    models: Sequence[ModelFacts],
    graphs: Sequence[GraphResult],
    corpora: Sequence[FeatureCorpus],
    table: pa.Table,
    *,
    prompts_sha256: str,
    compared: Sequence[ComparedPrompt],
    device: str,
) -> GraphSummary:
    """The summary.

    Args:
      config: settings.
      models: facts of one model, or of the two that are compared.
      graphs: numbers of each graph, by model, then prompt.
      corpora: text of each model's features.
      table: mean cumulative masses of all graphs, rows of `run.SCHEMA`.
      prompts_sha256: digest of the prompts with their targets.
      compared: prompts, with whether each counts in a comparison; empty for a single model.
      device: kind of the device that computed.
    """
    roles = [each.role for each in models]
    counted = comparison.counted(table, compared)
    return GraphSummary(
        config=config,
        models=tuple(models),
        prompts_sha256=prompts_sha256,
        graphs=tuple(graphs),
        features=tuple(corpora),
        masses=tuple(comparison.role_masses(config, counted, roles)),
        ratios=tuple(comparison.ratios(config, counted, roles)),
        device=device,
        stability=stability.measure(config, graphs, roles, compared),
        compared=tuple(compared),
    )
