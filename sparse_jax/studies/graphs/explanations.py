"""What a command measures beyond a graph's edges: why heads look where they do, and interventions.

Attention scores of the key-query pairs that carry most of the graph's edges are split into the
terms of sources (`qk`). Interventions multiply the features with the most influence
(`interventions`), and all features of proposed supernodes at once (`groups`). Supernodes are scored
by removing their members one by one and together, beside other features of their layers.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import features, graph_json, interventions, supernodes
from sparse_jax.graphs.effects import Effects, Mode
from sparse_jax.graphs.graph import Graph
from sparse_jax.graphs.graph_document import kept_nodes
from sparse_jax.graphs.groups import GroupEffects, scale_groups, score_groups
from sparse_jax.graphs.influence import FEATURE, LOGIT, Pruned
from sparse_jax.graphs.qk import QK
from sparse_jax.studies.graphs.intervened import (
    GroupIntervention,
    GroupOutcome,
    InterventionAgreement,
    NextToken,
    SupernodeScore,
)
from sparse_jax.studies.graphs.settings import GraphConfig

# In which supernodes are scaled; with all frozen the effect is the prediction.
_RESPONDING: tuple[Mode, ...] = ("attention_frozen", "free")
# Members of a supernode that are removed one by one, and features beside it: the most influential.
_REMOVED = 8


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


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A proposed supernode of a graph: its label, ids of its members, and their nodes."""

    label: str
    ids: tuple[str, ...]
    nodes: tuple[int, ...]


def proposals(
    config: GraphConfig, graph: Graph, pruned: Pruned, document: Mapping[str, Any]
) -> list[Proposal]:
    """The first proposed supernodes, as many as the config wants.

    Args:
      config: how many.
      graph, pruned: the graph.
      document: document of the pruned graph.
    """
    if not config.supernodes:
        return []
    nodes = document["nodes"]
    keys = sorted({key for node in nodes if (key := graph_json.feature_of(node))})
    decoders = features.decoders(graph.transcoder, keys)
    index = dict(zip((node["node_id"] for node in nodes), kept_nodes(graph, pruned), strict=True))
    return [
        Proposal(label, tuple(ids), tuple(int(index[name]) for name in ids))
        for label, *ids in supernodes.propose(document, decoders=decoders)[: config.supernodes]
    ]


def scale_supernodes(
    config: GraphConfig,
    model: CircuitModel,
    graph: Graph,
    proposed: Sequence[Proposal],
    decode: Callable[[int], str],
) -> tuple[GroupIntervention, ...]:
    """Effects of scaling supernodes.

    Args:
      config: the factors.
      model: model that the graph describes.
      graph: the graph.
      proposed: the supernodes.
      decode: the text of a token's id.
    """
    if not proposed:
        return ()
    groups = [each.nodes for each in proposed]
    effects = scale_groups(model, graph, groups, factors=config.factors, modes=_RESPONDING)
    return tuple(
        GroupIntervention(
            label=each.label,
            members=each.ids,
            factor=factor,
            predicted=float(effects.predicted_GFK[g, f, 0]),
            outcomes=_outcomes(effects, g, f, decode),
        )
        for g, each in enumerate(proposed)
        for f, factor in enumerate(effects.factors)
    )


def score_supernodes(
    model: CircuitModel, graph: Graph, pruned: Pruned, proposed: Sequence[Proposal]
) -> tuple[SupernodeScore, ...]:
    """How far supernodes act as one thing, on kept features and logits (`groups.score_groups`).

    Args:
      model: model that the graph describes.
      graph, pruned: the graph.
      proposed: the supernodes.
    """
    is_feature_S = pruned.kept_S & (graph.kinds[: len(pruned.kept_S)] == FEATURE)
    layer_S = graph.nodes["layer"].to_numpy(zero_copy_only=False)[: len(is_feature_S)]
    groups, others = [], []
    for each in proposed:
        members = np.asarray(each.nodes)
        beside_S = is_feature_S & np.isin(layer_S, layer_S[members])
        beside_S[members] = False
        groups.append(_most_influential(pruned, members))
        others.append(_most_influential(pruned, np.flatnonzero(beside_S)))
    kept_R = (graph.kinds[graph.row_nodes] == LOGIT) | _is_kept(graph.row_nodes, pruned)
    scores = score_groups(model, graph, groups, others=others, rows=kept_R)
    return tuple(
        SupernodeScore(each.label, each.ids, score.members, score.within, score.outside, score.off)
        for each, score in zip(proposed, scores, strict=True)
    )


def _most_influential(pruned: Pruned, nodes: np.ndarray) -> np.ndarray:
    order = np.argsort(-pruned.influence_S[nodes], kind="stable")
    return nodes[order[:_REMOVED]]


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
