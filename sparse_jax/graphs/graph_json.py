"""Attribution graphs as JSON: the schema of Neuronpedia and circuit-tracer, with three extensions.

    metadata, qParams, nodes, links    as those tools read them
    mediation    per link, what heads and pairs of a query and a key carry of it (`Mediated`)
    bias         per target, what is constant in its pre-activation or logit
    qk           attention scores by the sources that make them, as `qk_tracing_results` has them;
                 sources that pruning removed are in `qk_only_nodes`

Ids are theirs but for the error of a layer at a position, `0_<layer>_<position>`, where a feature
of the graph has that id already (layer 0, index = layer): it ends in `_error` then. The ids of
elements on a page, `jsNodeId`, have kind and position too, without which features and errors share
them. What is written and what is read passes the same checks (`check`).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import graphlib
import json
import os
from pathlib import Path
import re
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import write_json
from sparse_jax.graphs import qk
from sparse_jax.graphs.graph import BIAS, LOGIT, Graph
from sparse_jax.graphs.influence import ERROR, FEATURE, TOKEN, Pruned
from sparse_jax.graphs.qk import QK, is_finite

_TYPES = {
    "feature": "cross layer transcoder",
    "error": "mlp reconstruction error",
    "token": "embedding",
    "logit": "logit",
    "bias": "bias",
}
_METADATA = ("slug", "scan", "prompt_tokens", "prompt")
_NODE = ("node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId", "clerp")
_LINK = ("source", "target", "weight")
_SCHEMA_VERSION = 1


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
        order = np.argsort(-np.abs(score), axis=None, kind="stable")[:count]
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
    labels: Mapping[tuple[int, int], str] | None = None,
    mediated: Mapping[tuple[int, int], Mediated] | None = None,
    scores: Sequence[QK] = (),
) -> dict[str, Any]:
    """A pruned graph as a JSON document.

    Args:
      graph: the graph.
      pruned: what of it to write.
      slug: name of the graph, of letters, digits, `-` and `_`.
      model_name: the `scan` that viewers group graphs by.
      tokens: of the prompt, as text.
      logit_tokens: of the logit nodes, as text.
      node_threshold, edge_threshold: of the pruning.
      labels: of features, by layer and index.
      mediated: of edges, by source and target as indices in `graph.nodes`.
      scores: attention scores of this graph (`Graph.qk`).

    Raises:
      BadInputError: the document would not pass `check`.
    """
    labels, mediated = labels or {}, mediated or {}
    table = graph.nodes.to_pylist()
    edges = graph.edges()
    rows = graph.row_nodes
    sources = np.flatnonzero(pruned.kept_S)
    kept = [*sources.tolist(), *(i for i, row in enumerate(table) if row["kind"] == LOGIT)]
    others = sorted(set().union(*(each.top().nodes for each in scores)).difference(kept))
    ids = _ids(table, [*kept, *others])
    first_logit = next(i for i, row in enumerate(table) if row["kind"] == LOGIT)
    nodes = []
    for i in [*kept, *others]:
        row = table[i]
        node = _node(row, ids[i], len(tokens))
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
            carried.append(ends | dataclasses.asdict(mediated[pair]))
    biases = [
        {"node_id": ids[int(node)], "bias": float(bias)}
        for node, bias in zip(rows, graph.bias, strict=True)
        if int(node) in ids
    ]
    result = {
        "metadata": {
            "slug": slug,
            "scan": model_name,
            "prompt_tokens": list(tokens),
            "prompt": "".join(tokens),
            "node_threshold": node_threshold,
            "schema_version": _SCHEMA_VERSION,
            "info": {"generator": {"name": "interpretable-attention-jax"}},
            "generation_settings": {"max_n_logits": len(logit_tokens)},
            "pruning_settings": {
                "node_threshold": node_threshold,
                "edge_threshold": edge_threshold,
            },
        },
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": ""},
        "nodes": nodes[: len(kept)],
        "links": links,
        "mediation": carried,
        "bias": biases,
        "qk": [qk.as_json(each, ids) for each in scores],
        "qk_only_nodes": nodes[len(kept) :],
    }
    check(result, "the graph")
    return result


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


def _node(row: Mapping[str, Any], name: str, length: int) -> dict[str, Any]:
    kind, layer, feature, position = (row[key] for key in ("kind", "layer", "feature", "position"))
    if kind == BIAS:
        # At every position; files have one per node.
        position = 0
    node = {
        "node_id": name,
        "layer": str(layer),
        "ctx_idx": position,
        "reverse_ctx_idx": length - 1 - position,
        "feature_type": _TYPES[kind],
        "jsNodeId": f"{layer}_{kind}_{feature}-{position}",
        "clerp": "",
    }
    if kind == FEATURE:
        return node | {"feature": _pair(layer, feature), "activation": row["activation"]}
    if kind == ERROR:
        return node | {"feature": -1, "jsNodeId": f"{layer}_error-{position}"}
    if kind == LOGIT:
        return node | {"feature": feature, "layer": str(layer + 1), "activation": row["activation"]}
    if kind == BIAS:
        return node | {"feature": None, "layer": "E", "jsNodeId": "bias", "clerp": "Biases"}
    return node | {"feature": position, "layer": "E", "jsNodeId": f"E_{feature}-{position}"}


def _pair(layer: int, feature: int) -> int:
    """Cantor's number of a pair, which names a feature in feature files."""
    return (layer + feature) * (layer + feature + 1) // 2 + feature


def check(graph: Any, name: str) -> None:
    """Checks a document.

    Raises:
      BadInputError: a field is missing or of the wrong type, an id is doubled or unknown, a weight
        is not finite, or links form a cycle; the message names it.
    """

    def refuse(what: str) -> None:
        raise BadInputError(f"{name}: {what}; export it again")

    if not isinstance(graph, Mapping):
        refuse("it is no JSON object")
    parts = {"metadata": Mapping, "qParams": Mapping, "nodes": list, "links": list}
    for key, kind in parts.items():
        if not isinstance(graph.get(key), kind):
            refuse(f"{key} is missing or no {'list' if kind is list else 'object'}")
    for key in _METADATA:
        if key not in graph["metadata"]:
            refuse(f"metadata has no {key}")
    slug = graph["metadata"]["slug"]
    if not isinstance(slug, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", slug):
        refuse(f"metadata.slug = {slug!r} must be of letters, digits, - and _")
    length = len(graph["metadata"]["prompt_tokens"])
    ids: set[str] = set()
    _check_nodes(graph["nodes"], "nodes", ids, length, refuse)
    linked = frozenset(ids)
    for key in ("qk", "qk_only_nodes"):
        if not isinstance(graph.get(key, []), list):
            refuse(f"{key} is no list")
    _check_nodes(graph.get("qk_only_nodes", []), "qk_only_nodes", ids, length, refuse)
    for k, entry in enumerate(graph.get("qk", [])):
        if problem := qk.json_problem(entry, ids, length):
            refuse(f"qk[{k}] {problem}")
    inputs: dict[str, set[str]] = {each: set() for each in linked}
    for k, link in enumerate(graph["links"]):
        for key in _LINK:
            if not isinstance(link, Mapping) or key not in link:
                refuse(f"links[{k}] has no {key}")
        for end in ("source", "target"):
            if link[end] not in linked:
                refuse(f"links[{k}].{end} = {link[end]!r} is no node")
        if not is_finite(link["weight"]):
            refuse(f"links[{k}] has weight {link['weight']!r}")
        if link["source"] in inputs[link["target"]]:
            refuse(f"two links go from {link['source']!r} to {link['target']!r}")
        inputs[link["target"]].add(link["source"])
    try:
        graphlib.TopologicalSorter(inputs).prepare()
    except graphlib.CycleError as error:
        refuse(f"links form a cycle: {' -> '.join(map(repr, error.args[1]))}")


def _check_nodes(
    nodes: list[Any], name: str, ids: set[str], length: int, refuse: Callable[[str], None]
) -> None:
    """Checks nodes and adds their ids."""
    for k, node in enumerate(nodes):
        for key in _NODE:
            if not isinstance(node, Mapping) or key not in node:
                refuse(f"{name}[{k}] has no {key}")
        if node["node_id"] in ids:
            refuse(f"two nodes have the id {node['node_id']!r}")
        ids.add(node["node_id"])
        if not isinstance(node["ctx_idx"], int) or not 0 <= node["ctx_idx"] < length:
            refuse(f"node {node['node_id']!r} is at position {node['ctx_idx']!r} of {length}")
        for key in ("activation", "influence", "token_prob"):
            value = node.get(key)
            if value is not None and not is_finite(value):
                refuse(f"node {node['node_id']!r} has {key} = {value!r}")


def write(path: str | os.PathLike[str], graph: Mapping[str, Any]) -> None:
    """Writes a document that passes `check`.

    Raises:
      BadInputError: it does not.
      StorageError: the file cannot be written.
    """
    check(graph, str(path))
    write_json(path, graph)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a document strictly, from here or elsewhere.

    Raises:
      BadInputError: there is no such file, or it does not pass `check`.
      CorruptError: it is no JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInputError(f"{path} is not there; name the JSON file of a graph")
    try:
        graph = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is damaged: {error}") from error
    check(graph, str(path))
    return graph
