"""The summary of multiple choice, from the comparison of all models."""

from collections.abc import Mapping
from typing import Any

from lm_jax.run.results import parse_result
from sparse_jax.studies.multiple_choice.results import ChoiceSummary


def summarise(
    comparison: Mapping[str, Any],
    *,
    digests: Mapping[str, str],
    edges: Mapping[str, str],
    device: str,
) -> ChoiceSummary:
    """The summary.

    Args:
      comparison: result of `lm_jax.evaluate.multiple_choice.compare`.
      digests: sha256 of the weights by model.
      edges: share of open edges by sparse model.
      device: kind of the device that scored.
    """
    tree = {"models": dict(digests), "edges": dict(edges), "device": device, **comparison}
    return parse_result(tree, ChoiceSummary)
