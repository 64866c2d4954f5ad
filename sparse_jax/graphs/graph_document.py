"""A pruned attribution graph as a document of `graph_json`.

Ids follow Neuronpedia and circuit-tracer, except for the error of a layer at a position,
`0_<layer>_<position>`, where a feature of the graph has that id already (layer 0, index = layer):
it ends in `_error` then. The ids of elements on a page, `jsNodeId`, have kind and position too,
without which features and errors share them. Fields of the schema for which a run has no value of
its own are left out: the time, so that a resumed run writes the same file, people, and web pages.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib.metadata
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from lm_jax.run.files import to_jsonable
from sparse_jax.graphs import effects as effects_lib
from sparse_jax.graphs import graph_json, qk
from sparse_jax.graphs.effects import Effects
from sparse_jax.graphs.graph_json import check, pair_number
from sparse_jax.graphs.influence import (
    BIAS,
    ERROR,
    FEATURE,
    LOGIT,
    TOKEN,
    Edges,
    Pruned,
    edge_scores,
    highest,
    largest,
)
from sparse_jax.graphs.paths import StrongestPath, strongest
from sparse_jax.graphs.qk import QK

TRANSCODER = "cross layer transcoder"
_TYPES = {
    "error": "mlp reconstruction error",
    "token": "embedding",
    "logit": "logit",
    "bias": "bias",
}
_SCHEMA_VERSION = 1
_PACKAGE = "interpretable-attention-jax"


class Graph(Protocol):
    """What a document needs of a graph (`graph.Graph`, which has `to_json` of this module)."""

    @property
    def nodes(self) -> pa.Table:
        """All nodes, `graph.SCHEMA`."""
        ...

    @property
    def bias(self) -> np.ndarray:
        """The constant of each row."""
        ...

    @property
    def row_nodes(self) -> np.ndarray:
        """Index in `nodes` of each row."""
        ...

    @property
    def probabilities(self) -> np.ndarray:
        """Probabilities of the logit nodes."""
        ...

    def edges(self) -> Edges:
        """The graph as pruning reads it."""
        ...


@dataclasses.dataclass(frozen=True)
class Mediated:
    """What carries an edge, the largest shares first.

    Attributes:
      heads: (layer, head, share), summed over pairs.
      pairs: (layer, head, query, key, share).
    """

    heads: tuple[tuple[int, int, float], ...]
    pairs: tuple[tuple[int, int, int, int, float], ...]


def largest_shares(score_LNTS: np.ndarray, *, heads: int = 5, pairs: int = 10) -> Mediated:
    """The heads and the pairs with the largest absolute shares of an edge."""
    score_LN = score_LNTS.sum((2, 3))

    def top(score: np.ndarray, count: int) -> list[tuple[Any, ...]]:
        order = highest(np.abs(score).ravel(), count)
        places = np.stack(np.unravel_index(order, score.shape), 1)
        shares = [(*map(int, place), float(score[tuple(place)])) for place in places]
        return [share for share in shares if share[-1]]

    return Mediated(tuple(top(score_LN, heads)), tuple(top(score_LNTS, pairs)))


def document(
    graph: Graph,
    pruned: Pruned,
    *,
    slug: str,
    model_name: str,
    tokens: Sequence[str],
    logit_tokens: Sequence[str],
    node_threshold: float,
    edge_threshold: float,
    feature_type: str = TRANSCODER,
    generation: Mapping[str, float] | None = None,
    transcoders: Sequence[str] = (),
    labels: Mapping[tuple[int, int], str] | None = None,
    mediated: Mapping[tuple[int, int], Mediated] | None = None,
    scores: Sequence[QK] = (),
    effects: Effects | None = None,
) -> dict[str, Any]:
    """A pruned graph as a JSON document.

    Args:
      graph: the graph.
      pruned: what of it to write.
      slug: name of the graph, of letters, digits, `-` and `_`.
      model_name: the `scan` that viewers group graphs by.
      tokens: tokens of the prompt, as text.
      logit_tokens: tokens of the logit nodes, as text.
      node_threshold, edge_threshold: thresholds of the pruning.
      feature_type: type of the nodes of features.
      generation: settings of the attribution as viewers name them (`generation_settings`); the
        number of logits by default.
      transcoders: names of the transcoders whose features these are.
      labels: labels of features, by layer and index.
      mediated: mediation of edges, by source and target as indices in `graph.nodes`.
      scores: attention scores of this graph (`Graph.qk`).
      effects: effects of interventions on this graph (`interventions.measure`), in all modes.

    Raises:
      UsageError: a mode of `effects` is missing.
      BadInputError: the document would not pass `graph_json.check`.
    """
    labels, mediated = labels or {}, mediated or {}
    table = graph.nodes.to_pylist()
    edges = graph.edges()
    rows = graph.row_nodes
    kept = kept_nodes(graph, pruned)
    others = sorted(set().union(*(each.top().nodes for each in scores)).difference(kept))
    ids = _ids(table, [*kept, *others])
    first_logit = next(i for i, row in enumerate(table) if row["kind"] == LOGIT)
    nodes = []
    for i in [*kept, *others]:
        row = table[i]
        node = _node(row, ids[i], len(tokens), feature_type)
        if row["kind"] == LOGIT:
            k = i - first_logit
            probability = float(graph.probabilities[k])
            node |= {
                "clerp": f'Output "{logit_tokens[k]}" (p={probability:.3f})',
                "token_prob": probability,
                "is_target_logit": k == 0,
            }
        elif row["kind"] == FEATURE:
            node["clerp"] = labels.get((row["layer"], row["feature"]), "")
        elif row["kind"] == TOKEN:
            node["clerp"] = f'Emb: "{tokens[row["position"]]}"'
        if i < len(pruned.share_S):
            node["influence"] = float(pruned.share_S[i])
        nodes.append(node)
    links, carried = [], []
    for r, s in zip(*np.nonzero(pruned.kept_RS & (edges.weight_RS != 0)), strict=True):
        pair = int(s), int(rows[r])
        ends = {"source": ids[pair[0]], "target": ids[pair[1]]}
        links.append(ends | {"weight": float(edges.weight_RS[r, s])})
        if pair in mediated:
            carried.append(ends | to_jsonable(mediated[pair]))
    kept_ids = {i: ids[i] for i in kept}
    biases = [
        {"node_id": kept_ids[int(node)], "bias": float(bias)}
        for node, bias in zip(rows, graph.bias, strict=True)
        if int(node) in kept_ids
    ]
    result = {
        "metadata": {
            "slug": slug,
            "scan": model_name,
            "transcoder_list": list(transcoders),
            "prompt_tokens": list(tokens),
            "prompt": "".join(tokens),
            "node_threshold": node_threshold,
            "schema_version": _SCHEMA_VERSION,
            "info": {
                "description": f"Attribution graph; its features are of type {feature_type}",
                "generator": {"name": _PACKAGE, "version": importlib.metadata.version(_PACKAGE)},
            },
            "generation_settings": dict(generation or {"max_n_logits": len(logit_tokens)}),
            "pruning_settings": {
                "node_threshold": node_threshold,
                "edge_threshold": edge_threshold,
            },
        },
        "qParams": {
            "pinnedIds": [],
            "supernodes": [],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": nodes[: len(kept)],
        "links": links,
        "mediation": carried,
        "bias": biases,
        "qk": [qk.as_json(each, ids) for each in scores],
        "qk_only_nodes": nodes[len(kept) :],
    }
    if effects is not None:
        result["interventions"] = effects_lib.as_json(effects, kept_ids)
    check(result, "the graph")
    return result


def kept_nodes(graph: Graph, pruned: Pruned) -> list[int]:
    """Indices in `graph.nodes` of a document's nodes, in its order: kept sources, then logits."""
    is_logit = np.asarray(graph.nodes["kind"]) == LOGIT
    return [*np.flatnonzero(pruned.kept_S).tolist(), *np.flatnonzero(is_logit).tolist()]


def _ids(table: Sequence[Mapping[str, Any]], kept: Sequence[int]) -> dict[int, str]:
    """Ids of the kept nodes, by index; no two are equal."""
    ids, taken = {}, set()
    # Features first: an error gives way to one.
    for i in sorted(kept, key=lambda i: table[i]["kind"] == ERROR):
        row = table[i]
        layer, feature, position = row["layer"], row["feature"], row["position"]
        match row["kind"]:
            case "feature":
                name = f"{layer}_{feature}_{position}"
            case "error":
                name = f"0_{layer}_{position}"
                name += "_error" * (name in taken)
            case "token":
                name = f"E_{feature}_{position}"
            case "bias":
                name = "bias"
            case _:
                name = f"{layer + 1}_{feature}_{position}"
        taken.add(name)
        ids[i] = name
    return ids


def _node(row: Mapping[str, Any], name: str, length: int, feature_type: str) -> dict[str, Any]:
    kind, layer, feature, position = (row[key] for key in ("kind", "layer", "feature", "position"))
    if kind == BIAS:
        # At every position; files have one per node.
        position = 0
    node = {
        "node_id": name,
        "layer": str(layer),
        "ctx_idx": position,
        "reverse_ctx_idx": length - 1 - position,
        "feature_type": feature_type if kind == FEATURE else _TYPES[kind],
        "jsNodeId": f"{layer}_{kind}_{feature}-{position}",
        "clerp": "",
    }
    if kind == FEATURE:
        return node | {"feature": pair_number(layer, feature), "activation": row["activation"]}
    if kind == ERROR:
        return node | {"feature": -1, "jsNodeId": f"{layer}_error-{position}"}
    if kind == LOGIT:
        return node | {"feature": feature, "layer": str(layer + 1), "activation": row["activation"]}
    if kind == BIAS:
        return node | {"feature": None, "layer": "E", "jsNodeId": "bias", "clerp": "Biases"}
    return node | {"feature": position, "layer": "E", "jsNodeId": f"E_{feature}-{position}"}


def edge_shares(document: Mapping[str, Any]) -> np.ndarray:
    """Cumulative share of each link in the logits' influence that passes through links.

    As `influence.prune` ranks edges, among the links of the document: those with a share of at most
    t are the strongest, and have t of the influence together.
    """
    edges, row_E, source_E = _edges(document)
    _, share_E = largest(edge_scores(edges)[row_E, source_E], 1.0)
    return share_E


def likeliest_logit(document: Mapping[str, Any]) -> int | None:
    """Index of the logit node with the largest probability, the first of equals; None without."""
    nodes = document["nodes"]
    logits = [i for i, node in enumerate(nodes) if graph_json.kind(node) == LOGIT]
    return max(logits, key=lambda i: nodes[i].get("token_prob") or 0.0, default=None)


def strongest_path(document: Mapping[str, Any], logit: int) -> StrongestPath | None:
    """The strongest path from a token to a logit (`paths.strongest`), among the document's links.

    Args:
      document: document of a graph.
      logit: index of the logit in its nodes, as those of the path are.
    """
    edges, row_E, _ = _edges(document)
    name = document["nodes"][logit]["node_id"]
    rows = {int(row_E[e]) for e, link in enumerate(document["links"]) if link["target"] == name}
    return strongest(edges, rows.pop()) if rows else None


def _edges(document: Mapping[str, Any]) -> tuple[Edges, np.ndarray, np.ndarray]:
    """The links as pruning reads them, all nodes as sources, with row and source of each link."""
    nodes, links = document["nodes"], document["links"]
    index = {node["node_id"]: i for i, node in enumerate(nodes)}
    target_E = np.asarray([index[link["target"]] for link in links], np.int64)
    source_E = np.asarray([index[link["source"]] for link in links], np.int64)
    node_R, row_E = np.unique(target_E, return_inverse=True)
    weight_RS = np.zeros((len(node_R), len(nodes)))
    weight_RS[row_E, source_E] = [link["weight"] for link in links]
    is_logit_R = np.asarray([graph_json.kind(nodes[i]) == LOGIT for i in node_R], bool)
    start_R = np.asarray([nodes[i].get("token_prob") or 0.0 for i in node_R])
    if not start_R[is_logit_R].any():
        # A file without probabilities: logits count alike.
        start_R = np.ones(len(node_R))
    edges = Edges(
        weight_RS=weight_RS,
        node_R=np.where(is_logit_R, -1, node_R),
        start_R=np.where(is_logit_R, start_R, 0.0),
        kind_S=np.asarray([graph_json.kind(node) for node in nodes]),
        error_S=np.full(len(nodes), -1),
    )
    return edges, row_E, source_E
