"""What a command measures beyond a graph's edges: why heads look where they do, and interventions.

Attention scores of the key-query pairs that carry most of the graph's edges are split into the
terms of sources (`qk`). Interventions multiply the features with the most influence
(`interventions`), and all features of proposed supernodes at once (`groups`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import features, graph_json, interventions, supernodes
from sparse_jax.graphs.effects import Effects, Mode
from sparse_jax.graphs.graph import Graph
from sparse_jax.graphs.graph_document import kept_nodes
from sparse_jax.graphs.groups import GroupEffects, scale_groups
from sparse_jax.graphs.influence import FEATURE, Pruned
from sparse_jax.graphs.qk import QK
from sparse_jax.studies.graphs.results import (
    GroupIntervention,
    GroupOutcome,
    InterventionAgreement,
    NextToken,
)
from sparse_jax.studies.graphs.settings import GraphConfig

# In which supernodes are scaled; with all frozen the effect is the prediction.
_RESPONDING: tuple[Mode, ...] = ("attention_frozen", "free")


def carrying_pairs(size_LNTS: np.ndarray, count: int) -> list[tuple[int, int, int, int]]:
    """The pairs (layer, head, query, key) of the largest sizes, without those of size 0."""
    order = np.argsort(-size_LNTS, axis=None, kind="stable")[:count]
    places = np.stack(np.unravel_index(order, size_LNTS.shape), 1)
    return [(*pair,) for pair in places.tolist() if size_LNTS[*pair] > 0]


def explain_scores(graph: Graph, size_LNTS: np.ndarray, count: int) -> list[QK]:
    """Scores of the pairs that carry most; none where the mixer has no scores.

    Args:
      graph: the graph.
      size_LNTS: sums of the absolute shares of edges (`piece.MeasuredMediation`).
      count: largest number of pairs.
    """
    if graph.replacement.scores is None:
        return []
    return [graph.qk(*pair) for pair in carrying_pairs(size_LNTS, count)]


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


def scale_supernodes(
    config: GraphConfig,
    model: CircuitModel,
    graph: Graph,
    pruned: Pruned,
    document: Mapping[str, Any],
    decode: Callable[[int], str],
) -> tuple[GroupIntervention, ...]:
    """Effects of scaling the first proposed supernodes; none where none is proposed or wanted.

    Args:
      config: how many, and the factors.
      model: model that the graph describes.
      graph, pruned: the graph.
      document: document of the pruned graph.
      decode: the text of a token's id.
    """
    if not config.supernodes:
        return ()
    nodes = document["nodes"]
    keys = sorted({key for node in nodes if (key := graph_json.feature_of(node))})
    decoders = features.decoders(graph.transcoder, keys)
    proposals = supernodes.propose(document, decoders=decoders)[: config.supernodes]
    if not proposals:
        return ()
    index = dict(zip((node["node_id"] for node in nodes), kept_nodes(graph, pruned), strict=True))
    effects = scale_groups(
        model,
        graph,
        [[index[name] for name in ids] for _, *ids in proposals],
        factors=config.factors,
        modes=_RESPONDING,
    )
    return tuple(
        GroupIntervention(
            label=label,
            members=tuple(ids),
            factor=factor,
            predicted=float(effects.predicted_GFK[g, f, 0]),
            outcomes=_outcomes(effects, g, f, decode),
        )
        for g, (label, *ids) in enumerate(proposals)
        for f, factor in enumerate(effects.factors)
    )


def _outcomes(
    effects: GroupEffects, g: int, f: int, decode: Callable[[int], str]
) -> tuple[GroupOutcome, ...]:
    """What becomes of the first logit and the next token, by mode."""
    results = []
    for mode, each in effects.outcomes.items():
        top = zip(each.top_GFn[g, f].tolist(), each.top_probability_GFn[g, f].tolist(), strict=True)
        results.append(
            GroupOutcome(
                mode=mode,
                change=float(each.change_GFK[g, f, 0]),
                probability=float(each.probability_GFK[g, f, 0]),
                top=tuple(NextToken(decode(i), i, p) for i, p in top),
            )
        )
    return tuple(results)
