"""Circuits in the format of MIB and EAP-IG: export, strict reading, evaluation at ten sizes.

The file (Hanna et al. 2024; Mueller et al. 2025) holds the component graph with a key and a value
reader for each query head:

    cfg     n_layers, n_heads, parallel_attn_mlp, d_model
    nodes   name -> in_graph
    edges   name -> score, in_graph        names such as "a0.h1->a3.h2<k>", "m1->logits"

A score that is NaN marks an edge that no method scored: it is never ranked and always kept.

Circuits are the floor(k E) edges of highest score at the shares k of `curves.MIB_FRACTIONS`, less
those of heads and MLPs that read nothing or that nothing reads. The curve keeps the nominal k; the
number of edges that are left is reported beside it.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.precision import exact_jit
from lm_jax.run.files import load_json, write_bytes
from lm_jax.text import lines
from sparse_jax.circuits import curves
from sparse_jax.circuits.component_ablation import ablate_edges
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.components import ungrouped
from sparse_jax.circuits.discover import component_values
from sparse_jax.circuits.runs import Batch, CircuitModel, map_in_batches, measure

_CFG = {"n_layers": int, "n_heads": int, "parallel_attn_mlp": bool, "d_model": int}


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredGraph:
    """A component graph with scores.

    Attributes:
      graph: the graph, with readers for each query head.
      scores_UR: NaN for edges without a score, 0 where there is no edge.
      kept_UR: edges in the circuit.
    """

    graph: ComponentGraph
    scores_UR: np.ndarray
    kept_UR: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class MibCurve:
    """Circuits of the ten sizes of one ranking.

    Attributes:
      absolute: whether edges are ranked by the absolute score.
      fractions: nominal shares of edges, `[K]`.
      edges: number of edges in each circuit.
      metric_KB: the metric of each prompt in each circuit.
      empty_B: the metric of each prompt with every edge ablated.
      whole_B: the metric of each prompt in the untouched model.
    """

    absolute: bool
    fractions: np.ndarray
    edges: np.ndarray
    metric_KB: np.ndarray
    empty_B: np.ndarray
    whole_B: np.ndarray

    @property
    def faithfulness(self) -> np.ndarray:
        """f at each size, `[K]` (`curves.explained`)."""
        return curves.explained(self.metric_KB, self.empty_B, self.whole_B)

    @property
    def cpr_cmd(self) -> tuple[float, float]:
        """MIB's two areas of this one ranking (`curves.cpr_cmd`)."""
        return curves.cpr_cmd(self.fractions, self.faithfulness)

    @property
    def log_area(self) -> float:
        """The mean of f over ln k for this ranking (`curves.log_area`)."""
        return curves.log_area(self.fractions, self.faithfulness)


def edge_names(graph: ComponentGraph) -> dict[str, tuple[int, int]]:
    """Writer and reader of every edge, by its name."""
    writers, readers = graph.writer_names, graph.reader_names
    return {f"{writers[u]}->{readers[r]}": (u, r) for u, r in np.argwhere(graph.mask_UR).tolist()}


def save_graph(
    path: str | os.PathLike[str],
    graph: ComponentGraph,
    scores_UR: np.ndarray,
    kept_UR: np.ndarray | None = None,
) -> None:
    """Writes scores of component edges, those of keys and values for each query head.

    Args:
      path: a .json file.
      graph: the graph of `components.ungrouped(model)`.
      scores_UR: scores of its edges, higher for those that matter more; NaN for edges without a
        score.
      kept_UR: the circuit; None keeps every edge.

    Raises:
      UsageError: query heads share keys, so that a score is a sum over heads.
      StorageError: it cannot be written.
    """
    if graph != graph.ungrouped():
        raise UsageError(
            f"graph: {graph.num_heads} query heads share {graph.num_kv_heads} key heads, whose "
            "scores are sums over query heads; give graph and scores of components.ungrouped(model)"
        )
    kept = graph.mask_UR if kept_UR is None else np.asarray(kept_UR) & graph.mask_UR
    connected = nodes_in_circuit(graph, kept)
    names = (*graph.writer_names, "logits")
    content = {
        "cfg": {
            "n_layers": graph.num_layers,
            "n_heads": graph.num_heads,
            "parallel_attn_mlp": graph.parallel,
            "d_model": graph.hidden_size,
        },
        "nodes": {
            name: {"in_graph": bool(each)} for name, each in zip(names, connected, strict=True)
        },
        "edges": {
            name: {"score": float(scores_UR[place]), "in_graph": bool(kept[place])}
            for name, place in edge_names(graph).items()
        },
    }
    write_bytes(Path(path), json.dumps(content).encode())


def load_graph(path: str | os.PathLike[str]) -> ScoredGraph:
    """Reads a graph that MIB, EAP-IG or `save_graph` wrote.

    Raises:
      BadInputError: the file cannot be read, a field is missing or of another type, or its nodes
        and edges are not those of the graph that `cfg` describes.
    """
    path = Path(path)
    text = lines.decode(lines.read_data(path, ".json file"), path)
    try:
        content = load_json(text, object_pairs_hook=_unique)
    except (ValueError, BadInputError) as error:
        raise BadInputError(f"{path}: {error}; export the graph again") from error
    return _parse(content, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInputError(f"{twice!r} is there twice")
    return result


def _parse(content: Any, where: str) -> ScoredGraph:
    _check_names(content, ("cfg", "nodes", "edges"), where)
    cfg = content["cfg"]
    _check_names(cfg, _CFG, f"{where}: cfg")
    for name, kind in _CFG.items():
        if type(cfg[name]) is not kind or (kind is int and cfg[name] < 1):
            wanted = "true or false" if kind is bool else "a positive integer"
            raise BadInputError(f"{where}: cfg.{name} = {cfg[name]!r} must be {wanted}")
    L, H = cfg["n_layers"], cfg["n_heads"]
    graph = ComponentGraph(L, H, H, cfg["d_model"], cfg["parallel_attn_mlp"])
    nodes, edges, places = content["nodes"], content["edges"], edge_names(graph)
    _check_names(nodes, (*graph.writer_names, "logits"), f"{where}: nodes")
    _check_names(edges, places, f"{where}: edges")
    for name, node in nodes.items():
        if not isinstance(node, dict) or not isinstance(node.get("in_graph"), bool):
            raise BadInputError(f"{where}: nodes[{name!r}].in_graph must be true or false")
    scores, kept = np.zeros(graph.mask_UR.shape), np.zeros(graph.mask_UR.shape, bool)
    for name, place in places.items():
        edge = edges[name]
        _check_names(edge, ("score", "in_graph"), f"{where}: edges[{name!r}]")
        score, in_graph = edge["score"], edge["in_graph"]
        if isinstance(score, bool) or not isinstance(score, int | float) or np.isinf(score):
            raise BadInputError(
                f"{where}: edges[{name!r}].score = {score!r} must be a finite number, or NaN for "
                "no score"
            )
        if not isinstance(in_graph, bool):
            raise BadInputError(f"{where}: edges[{name!r}].in_graph must be true or false")
        scores[place], kept[place] = score, in_graph
    return ScoredGraph(graph, scores, kept)


def _check_names(have: Any, want: Any, where: str) -> None:
    """Refuses what is no object with exactly these names."""
    if not isinstance(have, Mapping):
        raise BadInputError(f"{where} must be an object with names")
    missing = [name for name in want if name not in have]
    unknown = [name for name in have if name not in set(want)]
    if missing or unknown:
        problems = [
            f"{len(names)} {what}, such as {names[0]!r}"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise BadInputError(
            f"{where}: {len(have)} names in place of {len(want)}: {'; '.join(problems)}; "
            "export the graph of this model again"
        )


def nodes_in_circuit(graph: ComponentGraph, kept_UR: np.ndarray) -> np.ndarray:
    """Writers, and last the logits, that read something and that something reads, `[U + 1]`.

    The input reads nothing and nothing reads the logits; both count as connected on that side.
    """
    reads = np.zeros(graph.num_writers + 1, bool)
    np.logical_or.at(reads, graph.writer_of_R, kept_UR.any(0))
    reads[0] = True
    return reads & np.append(kept_UR.any(1), True)


def prune(graph: ComponentGraph, kept_UR: np.ndarray) -> np.ndarray:
    """The circuit without edges of nodes that read nothing or that nothing reads, `[U, R]`."""
    kept_UR = kept_UR & graph.mask_UR
    while True:
        node = nodes_in_circuit(graph, kept_UR)
        # The logits stay, even where nothing reaches them.
        node[-1] = True
        pruned = kept_UR & node[:-1, None] & node[graph.writer_of_R]
        if (pruned == kept_UR).all():
            return kept_UR
        kept_UR = pruned


def top_edges(
    graph: ComponentGraph, scores_UR: np.ndarray, count: int, *, absolute: bool
) -> np.ndarray:
    """The `count` edges of highest score, and all without one, `[U, R]`; ties in order of edges."""
    scores = np.abs(scores_UR) if absolute else np.asarray(scores_UR, np.float64)
    unscored = np.isnan(scores) & graph.mask_UR
    scores = np.where(graph.mask_UR & ~unscored, scores, -np.inf)
    order = np.argsort(-scores, axis=None, kind="stable")[: min(count, np.isfinite(scores).sum())]
    kept = unscored.copy()
    kept.ravel()[order] = True
    return kept


def evaluate(
    model: CircuitModel,
    batch: Batch,
    scores_UR: np.ndarray,
    *,
    absolute: bool,
    ablation: str = "counterfactual",
    key: jax.Array | None = None,
    at_once: int = 1,
) -> MibCurve:
    """The metric of the circuits of MIB's ten sizes, edges not kept being ablated.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      scores_UR: scores of the edges with readers for each query head (`ScoredGraph.scores_UR`, or
        those of `components.ungrouped(model)`); higher is kept first.
      absolute: whether edges are ranked by the absolute score; give both rankings, and the areas of
        each.
      ablation: one of `ablation.Ablation`.
      key: random key of the ablation "resample".
      at_once: circuits run side by side.

    Raises:
      BadInputError: the scores are of another graph.
    """
    model = ungrouped(model)
    graph = ComponentGraph.of(model.cfg)
    wanted = graph.mask_UR.shape
    if np.shape(scores_UR) != wanted:
        raise BadInputError(
            f"scores have shape {np.shape(scores_UR)}, and this model's graph {wanted}; give "
            "scores of this model, one reader for each query head"
        )
    counts = [int(k * graph.num_edges) for k in curves.MIB_FRACTIONS]
    kept = [prune(graph, top_edges(graph, scores_UR, count, absolute=absolute)) for count in counts]
    masks = np.stack([np.zeros_like(kept[0]), *kept])
    values = component_values(model, batch, ablation, key=key)
    program = functools.partial(_metrics, model, batch, values)
    metric_KB = np.asarray(map_in_batches(program, jnp.asarray(~masks), at_once), np.float64)
    whole_B, _ = measure(model, batch, batch.clean_BT)
    return MibCurve(
        absolute,
        np.array(curves.MIB_FRACTIONS),
        masks[1:].sum((1, 2)),
        metric_KB[1:],
        metric_KB[0],
        np.asarray(whole_B, np.float64),
    )


@exact_jit
def _metrics(
    model: CircuitModel, batch: Batch, values_UBTD: jax.Array, ablate_KUR: jax.Array
) -> jax.Array:
    B = len(batch.clean_BT)

    def kept(ablate_UR: jax.Array) -> jax.Array:
        U, R = ablate_UR.shape
        ablate_UBR = jnp.broadcast_to(ablate_UR[:, None], (U, B, R))
        edits = ablate_edges(model, ablate_UBR, values_UBTD)
        return measure(model, batch, batch.clean_BT, edits=edits)[0]

    return jax.vmap(kept)(ablate_KUR)
