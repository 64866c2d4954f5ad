"""What a command measures beyond a graph's edges: why heads look where they do, and interventions.

Scores are those of the key-query pairs that carry most of the graph's edges, split into the terms
of sources (`qk`). Interventions multiply the features with the most influence (`interventions`).
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import interventions
from sparse_jax.graphs.config import GraphConfig
from sparse_jax.graphs.effects import Effects
from sparse_jax.graphs.graph import Graph
from sparse_jax.graphs.graph_document import Mediated
from sparse_jax.graphs.influence import FEATURE, Pruned
from sparse_jax.graphs.qk import QK
from sparse_jax.graphs.results import InterventionAgreement


def carrying_pairs(
    carried: Mapping[tuple[int, int], Mediated], count: int
) -> list[tuple[int, int, int, int]]:
    """The pairs (layer, head, query, key) with the largest sums of absolute shares of edges."""
    total: defaultdict[tuple[int, int, int, int], float] = defaultdict(float)
    for each in carried.values():
        for layer, head, query, key, share in each.pairs:
            total[layer, head, query, key] += abs(share)
    return sorted(total, key=lambda pair: (-total[pair], pair))[:count]


def explain_scores(
    graph: Graph, carried: Mapping[tuple[int, int], Mediated], count: int
) -> list[QK]:
    """Scores of the pairs that carry most; none where the mixer has no scores."""
    if graph.replacement.scores is None:
        return []
    return [graph.qk(*pair) for pair in carrying_pairs(carried, count)]


def intervene(
    config: GraphConfig, model: CircuitModel, graph: Graph, pruned: Pruned
) -> Effects | None:
    """Effects of scaling the kept features with the most influence; None if there are none."""
    is_kept_S = pruned.kept_S & (graph.kinds[: len(pruned.kept_S)] == FEATURE)
    order_S = np.argsort(-np.where(is_kept_S, pruned.influence_S, -np.inf), kind="stable")
    nodes = order_S[: min(config.intervened, int(is_kept_S.sum()))].tolist()
    chosen = [(node, factor) for node in nodes for factor in config.factors]
    return interventions.measure(model, graph, chosen) if chosen else None


def agreements(effects: Effects | None, pruned: Pruned) -> tuple[InterventionAgreement, ...]:
    """How well the graph predicts the effects on kept features and logits, by mode."""
    if effects is None:
        return ()
    effects = effects.on(effects.is_logit | _is_kept(effects.targets, pruned))
    return tuple(
        InterventionAgreement(
            mode=mode,
            interventions=len(effects.sources),
            spearman=effects.spearman(mode),
            error=float(np.abs(measured_IR - effects.predicted).max(initial=0.0)),
            largest=float(np.abs(measured_IR).max(initial=0.0)),
        )
        for mode, measured_IR in effects.measured.items()
    )


def _is_kept(nodes: np.ndarray, pruned: Pruned) -> np.ndarray:
    """Whether each node is a source that pruning kept."""
    count = len(pruned.kept_S)
    return (nodes < count) & pruned.kept_S[np.minimum(nodes, count - 1)]
