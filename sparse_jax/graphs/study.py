"""Makes the graphs of all models and prompts, then the summary and the pages.

The work folder then holds

    graph/<name>.json, graph/graph-metadata.json    graphs for this page, Neuronpedia and
                                                    circuit-tracer (`graph_json`)
    pieces/<name>.json    numbers of each graph (`results.GraphResult`)
    shards/               mean cumulative masses, so that a killed command resumes
    masses.parquet        all of them
    summary.json          every number (`results.GraphSummary`)

Names are the slugs of the prompts, after the role where two models are compared.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from lm_jax.report import slug as slug_of
from lm_jax.run import progress, stop
from lm_jax.run.config import config_hash, to_plain
from lm_jax.run.files import storage_error, write_json
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.rows import RowStore
from sparse_jax.graphs import graph_json, mass
from sparse_jax.graphs.attribute import attribute
from sparse_jax.graphs.config import ALONE, GraphConfig
from sparse_jax.graphs.graph import LOGIT, Graph
from sparse_jax.graphs.graph_json import Mediated, largest_shares
from sparse_jax.graphs.influence import ERROR, FEATURE, Pruned
from sparse_jax.graphs.inputs import GraphModel, Inputs
from sparse_jax.graphs.mass import Mass, MassSums
from sparse_jax.graphs.prompts import EncodedPrompt
from sparse_jax.graphs.results import GraphResult, GraphSummary, LogitNode, MassResult, Sizes

GRAPHS, METADATA, PIECES = "graph", "graph-metadata.json", "pieces"
SHARDS, MASSES, SUMMARY = "shards", "masses.parquet", "summary.json"
SCHEMA = pa.schema(
    [
        ("role", pa.string()),
        ("slug", pa.string()),
        ("component", pa.string()),
        ("sign", pa.string()),
        ("needed", pa.float64()),
        ("mass", pa.list_(pa.float64())),
    ]
)
# Of rows, whose meaning may change with the program.
_FORMAT = 1


def run(config: GraphConfig, inputs: Inputs, folder: Path) -> GraphSummary:
    """Makes what has not been made in an open work folder; returns the summary.

    Raises:
      UsageError: no feature is active on a prompt.
      StoppedError: on a signal, after the graph that was under way.
    """
    facts = [each.facts for each in inputs.models.values()]
    identity = {
        "format": _FORMAT,
        "config": to_plain(config),
        "models": {each.role: each.sha256 for each in facts},
        "transcoders": {each.role: each.transcoder_sha256 for each in facts},
        "prompts": inputs.prompts_sha256,
    }
    first = next(iter(inputs.models.values()))
    origin = collect_provenance(
        seeds={"bootstrap": config.seed},
        dtype="float32",
        data={
            **{f"model {role}": sha256 for role, sha256 in identity["models"].items()},
            **{f"transcoder {role}": sha256 for role, sha256 in identity["transcoders"].items()},
            "prompts": inputs.prompts_sha256,
        },
        tokenizer=first.source.tokenizer.sha256,
    )
    record_provenance(folder, origin)
    pieces = [(role, prompt) for role in inputs.models for prompt in inputs.prompts]
    with RowStore(folder / SHARDS, SCHEMA, config_hash(identity), flush_units=1) as store:
        done = sum((role, prompt.slug) in store for role, prompt in pieces)
        with progress.track("graphs", total=len(pieces), unit="graphs", done=done) as advance:
            for role, prompt in pieces:
                if (role, prompt.slug) not in store:
                    stop.check(f"before {role} on {prompt.slug}")
                    make_piece(config, folder, store, inputs, role, prompt)
                    advance(note=f"{role} on {prompt.slug}")
        store.merge(folder / MASSES)
    results = [
        load_result(folder / PIECES / f"{file_name(role, prompt.slug)}.json", GraphResult)
        for role, prompt in pieces
    ]
    _write_metadata(folder, results)
    summary = GraphSummary(
        config=config,
        models=tuple(facts),
        prompts_sha256=inputs.prompts_sha256,
        graphs=tuple(results),
        masses=(),
        ratios=(),
        device=jax.devices()[0].device_kind,
    )
    write_json(folder / SUMMARY, summary)
    return summary


def file_name(role: str, slug: str) -> str:
    """The name of a graph's files."""
    return slug if role == ALONE else f"{role}-{slug}"


def make_piece(
    config: GraphConfig,
    folder: Path,
    store: RowStore,
    inputs: Inputs,
    role: str,
    prompt: EncodedPrompt,
) -> None:
    """Makes one graph and stores its rows; its files are written first."""
    name = file_name(role, prompt.slug)
    piece, document, masses = make_graph(config, inputs, role, prompt)
    for part in (GRAPHS, PIECES):
        try:
            (folder / part).mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(folder / part, error) from error
    graph_json.write(folder / GRAPHS / f"{name}.json", document)
    write_json(folder / PIECES / f"{name}.json", piece)
    names = {"role": role, "slug": prompt.slug}
    rows = [
        names
        | {
            "component": each.component,
            "sign": each.sign,
            "needed": each.needed,
            "mass": each.mass_C.tolist(),
        }
        for each in masses
    ]
    store.append((role, prompt.slug), pa.Table.from_pylist(rows, schema=SCHEMA))


def make_graph(
    config: GraphConfig, inputs: Inputs, role: str, prompt: EncodedPrompt
) -> tuple[GraphResult, dict[str, Any], list[Mass]]:
    """The graph of a prompt: its numbers, its document, its masses."""
    model = inputs.models[role]
    graph = attribute(
        model.source.model,
        model.transcoder,
        prompt.ids,
        targets=prompt.targets,
        max_features=config.max_features or None,
    )
    thresholds = {
        "node_threshold": config.node_threshold,
        "edge_threshold": config.edge_threshold,
    }
    pruned = graph.prune(**thresholds)
    edges = mediated_edges(graph, pruned, config.mediated)
    measured = measure_mediation(graph, edges, config.fraction)
    logits = _logits(graph, model)
    name = file_name(role, prompt.slug)
    document = graph_json.document(
        graph,
        pruned,
        slug=name,
        model_name=slug_of(model.source.name),
        tokens=prompt.tokens,
        logit_tokens=[each.token for each in logits],
        labels=inputs.labels,
        mediated=measured.carried,
        **thresholds,
    )
    masses = measured.masses
    result = GraphResult(
        role=role,
        slug=prompt.slug,
        file=f"{GRAPHS}/{name}.json",
        kind=prompt.kind,
        prompt=prompt.text,
        tokens=prompt.tokens,
        logits=logits,
        **_numbers(config, graph, pruned, measured),
    )
    return result, document, masses


def mediated_edges(graph: Graph, pruned: Pruned, most: int) -> np.ndarray:
    """Kept edges as pairs of source and target `[X, 2]`, of the highest score first.

    Args:
      graph, pruned: the graph.
      most: at most so many; 0 for all.
    """
    row_X, source_X = np.nonzero(pruned.kept_RS & (graph.adjacency != 0))
    order_X = np.argsort(-pruned.score_RS[row_X, source_X], kind="stable")[: most or None]
    return np.stack([source_X, graph.row_nodes[row_X]], 1)[order_X]


def _logits(graph: Graph, model: GraphModel) -> tuple[LogitNode, ...]:
    kinds, ids = graph.nodes["kind"].to_pylist(), graph.nodes["feature"].to_pylist()
    chosen = [i for kind, i in zip(kinds, ids, strict=True) if kind == LOGIT]
    return tuple(
        LogitNode(model.source.tokenizer.decode([i]), i, float(p))
        for i, p in zip(chosen, graph.probabilities, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class MeasuredMediation:
    """What heads and pairs carry of some edges.

    Attributes:
      carried: the largest shares of each edge, by source and target.
      error_L: largest error of the certificate, per layer.
      over_count: median of the sum over layers as a multiple of the edge; NaN without edges.
      masses: mean cumulative masses.
    """

    carried: dict[tuple[int, int], Mediated]
    error_L: np.ndarray
    over_count: float
    masses: list[Mass]


def measure_mediation(graph: Graph, edges: np.ndarray, fraction: float) -> MeasuredMediation:
    """Mediation of edges `[X, 2]`, a batch at a time."""
    carried: dict[tuple[int, int], Mediated] = {}
    sums, over = MassSums(fraction), [np.empty(0)]
    error_L = np.zeros(len(graph.replacement.error_LTD))
    weight_X = graph.edge_weights(edges)
    start = 0
    for batch in graph.mediations(edges):
        score_XLNTS = np.asarray(batch.score_XLNTS)
        at = slice(start, start + len(score_XLNTS))
        start = at.stop
        for (source, target), score_LNTS in zip(edges[at].tolist(), score_XLNTS, strict=True):
            carried[source, target] = largest_shares(score_LNTS)
        sums.add(score_XLNTS)
        error_L = np.maximum(error_L, batch.certificate(weight_X[at]).max(0))
        over.append(batch.over_count(weight_X[at]))
    over_X = np.concatenate(over)
    median = float(np.median(over_X)) if len(over_X) else float("nan")
    return MeasuredMediation(carried, error_L, median, sums.means())


def _numbers(
    config: GraphConfig, graph: Graph, pruned: Pruned, measured: MeasuredMediation
) -> dict[str, Any]:
    """Fields of `GraphResult` that are measured."""
    kind_S = graph.edges().kind_S
    return {
        "sizes": Sizes(
            tokens=len(graph.replacement.token_TD),
            features=int((kind_S == FEATURE).sum()),
            rows=len(graph.row_nodes) - len(graph.probabilities),
            kept_features=int((pruned.kept_S & (kind_S == FEATURE)).sum()),
            kept_errors=int((pruned.kept_S & (kind_S == ERROR)).sum()),
            kept_edges=int((pruned.kept_RS & (graph.adjacency != 0)).sum()),
            mediated_edges=len(measured.carried),
        ),
        "scores": graph.scores(pruned),
        "row_error": tuple(map(float, graph.certificate())),
        "mediation_error": tuple(map(float, measured.error_L)),
        "over_count": measured.over_count,
        "masses": tuple(
            MassResult(
                each.component,
                each.sign,
                each.edges,
                each.unmediated,
                each.needed,
                mass.needed_of_mean(each.mass_C, config.fraction),
            )
            for each in measured.masses
        ),
    }


def _write_metadata(folder: Path, results: list[GraphResult]) -> None:
    """The list of graphs that the server of circuit-tracer reads."""
    documents = [graph_json.read(folder / each.file) for each in results]
    write_json(
        folder / GRAPHS / METADATA, {"graphs": [document["metadata"] for document in documents]}
    )
