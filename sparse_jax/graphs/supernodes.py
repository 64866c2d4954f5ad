"""Supernodes: groups of features that a graph uses alike, proposed by clustering.

Two features may share a group when their layers are at most `band` apart, and are alike by the mean
of these cosines:

    outgoing    of their links, each divided by the sum of absolute links into its target
    incoming    of the links that they read
    decoder     of their decoder vectors, where these are given

Clustering is agglomerative with complete linkage: any two features of a group fulfil both. It is
deterministic. A group is a proposal for a reader, who can edit it on the page of the graph.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial import distance

from lm_jax.errors import UsageError
from sparse_jax.graphs import graph_json
from sparse_jax.graphs.influence import FEATURE

# Beyond 2, the largest distance that cosines make.
_APART = 4.0


def propose(
    document: Mapping[str, Any],
    *,
    decoders: Mapping[tuple[int, int], np.ndarray] | None = None,
    band: int = 1,
    similarity: float = 0.5,
) -> list[list[str]]:
    """Groups of two features or more, as `qParams.supernodes` holds them: a label, then ids.

    Args:
      document: a document of `graph_json`.
      decoders: vectors of one length, by layer and index of a feature; features that are not in it
        are compared by links alone.
      band: largest difference between the layers of two features of a group.
      similarity: least mean cosine of two features of a group.

    Returns:
      The groups, those with the most influential feature first; labels are unique.

    Raises:
      UsageError: `band` is below 0, or `similarity` not within (0, 1].
    """
    if band < 0:
        raise UsageError(f"band = {band} is below 0; 1 lets a group span two layers")
    if not 0 < similarity <= 1:
        raise UsageError(f"similarity = {similarity} is not above 0 and at most 1; 0.5 is usual")
    nodes = document["nodes"]
    features = [i for i, node in enumerate(nodes) if graph_json.kind(node) == FEATURE]
    if len(features) < 2:
        return []
    weight_TS = _weights(document)
    size_T1 = np.abs(weight_TS).sum(1, keepdims=True)
    share_TS = weight_TS / np.where(size_T1 > 0, size_T1, 1.0)
    total_FF = _cosines(share_TS[:, features].T) + _cosines(weight_TS[features])
    count_FF = np.full_like(total_FF, 2.0)
    _add_decoders(total_FF, count_FF, [nodes[i] for i in features], decoders or {})
    layer_F = np.asarray([int(nodes[i]["layer"]) for i in features])
    apart_FF = np.abs(layer_F[:, None] - layer_F[None]) > band
    distance_FF = np.where(apart_FF, _APART, 1.0 - total_FF / count_FF)
    np.fill_diagonal(distance_FF, 0.0)
    tree = hierarchy.linkage(
        distance.squareform(np.maximum(distance_FF, 0.0), checks=False), "complete"
    )
    # The cut is included; rounding of a cosine must not exclude what is equal.
    cluster_F = hierarchy.fcluster(tree, 1.0 - similarity + 1e-9, "distance")
    groups = [[features[k] for k in np.flatnonzero(cluster_F == c)] for c in np.unique(cluster_F)]
    groups = [sorted(group, key=lambda i: _rank(nodes[i])) for group in groups if len(group) > 1]
    groups.sort(key=lambda group: _rank(nodes[group[0]]))
    labels: dict[str, int] = {}
    proposals = []
    for group in groups:
        label = _label(nodes, group, np.abs(share_TS[:, group].sum(1)))
        labels[label] = labels.get(label, 0) + 1
        numbered = f"{label} ({labels[label]})" if labels[label] > 1 else label
        proposals.append([numbered, *(nodes[i]["node_id"] for i in group)])
    return proposals


def _weights(document: Mapping[str, Any]) -> np.ndarray:
    """Weights of the links, `[targets, sources]`, both in the order of nodes."""
    index = {node["node_id"]: i for i, node in enumerate(document["nodes"])}
    weight_TS = np.zeros((len(index), len(index)))
    for link in document["links"]:
        weight_TS[index[link["target"]], index[link["source"]]] = link["weight"]
    return weight_TS


def _cosines(vector_FD: np.ndarray) -> np.ndarray:
    """Cosine of each pair of rows; that of a row of zeros is 0."""
    norm_F1 = np.linalg.norm(vector_FD, axis=1, keepdims=True)
    unit_FD = vector_FD / np.where(norm_F1 > 0, norm_F1, 1.0)
    return unit_FD @ unit_FD.T


def _add_decoders(
    total_FF: np.ndarray,
    count_FF: np.ndarray,
    nodes: Sequence[Mapping[str, Any]],
    decoders: Mapping[tuple[int, int], np.ndarray],
) -> None:
    """Adds the cosines of the decoders that are given."""
    keys = [graph_json.feature_of(node) for node in nodes]
    vectors = {
        k: decoders[key] for k, key in enumerate(keys) if key is not None and key in decoders
    }
    if vectors:
        given = list(vectors)
        total_FF[np.ix_(given, given)] += _cosines(np.asarray(list(vectors.values()), np.float64))
        count_FF[np.ix_(given, given)] += 1.0


def _rank(node: Mapping[str, Any]) -> tuple[float, str]:
    """Orders nodes by influence: its cumulative share is smallest for the most influential."""
    return node.get("influence", 1.0), node["node_id"]


def _label(nodes: Sequence[Mapping[str, Any]], group: Sequence[int], share_T: np.ndarray) -> str:
    """Layers of a group and the target that it has the largest share in."""
    layers = sorted({int(nodes[i]["layer"]) for i in group})
    place = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}–{layers[-1]}"
    if not share_T.any():
        return place
    target = nodes[int(np.argmax(share_T))]
    key = graph_json.feature_of(target)
    name = target["clerp"] or (f"feature {key[1]} of layer {key[0]}" if key else target["node_id"])
    return f"{place} to {name}"
