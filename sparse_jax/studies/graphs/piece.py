"""One graph of a command: the document that viewers read, its numbers, and its masses."""

from collections.abc import Collection
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.report import slug as slug_of
from lm_jax.run.files import to_jsonable
from sparse_jax.graphs import graph_document, mediation, neurons
from sparse_jax.graphs.attribute import MOST_LOGITS, SHARE, attribute
from sparse_jax.graphs.graph import Graph
from sparse_jax.graphs.graph_document import TRANSCODER, Mediated, kept_nodes, largest_shares
from sparse_jax.graphs.influence import ERROR, FEATURE, LOGIT, Pruned
from sparse_jax.graphs.neurons import MAX_FEATURES, NEURON
from sparse_jax.studies.graphs import case_study, explanations, mass, stability
from sparse_jax.studies.graphs.inputs import GraphModel, Inputs
from sparse_jax.studies.graphs.intervened import NextToken
from sparse_jax.studies.graphs.mass import COMPONENTS, Component, Mass, MassSums
from sparse_jax.studies.graphs.prompts import EncodedPrompt
from sparse_jax.studies.graphs.results import GraphResult, KeyEdge, MassResult, Sizes
from sparse_jax.studies.graphs.settings import ALONE, GraphConfig

GRAPHS = "graph"
# Bytes for the shares of the edges that are measured at once; sorting them takes a few times more.
_MEMORY = 32 * 2**20
# Bytes for the tangents and values of their sources.
_TANGENTS = 256 * 2**20
# Entries of all patterns beyond which edges are split by heads alone, and the most edges then.
_ENTRIES, _LONG_EDGES = 2**26, 64


def file_name(role: str, slug: str) -> str:
    """The name of a graph's files."""
    return slug if role == ALONE else f"{role}-{slug}"


def scan(model: GraphModel) -> str:
    """The name by which viewers group graphs and features: end of the source, digest, role."""
    facts = model.facts
    source = " ".join(Path(facts.source).parts[-2:])
    role = () if facts.role == ALONE else (facts.role,)
    return slug_of(" ".join([*role, source, facts.sha256[:8]]))


def make_graph(
    config: GraphConfig, inputs: Inputs, role: str, prompt: EncodedPrompt
) -> tuple[GraphResult, dict[str, Any], list[Mass]]:
    """The graph of a prompt: its numbers, its document, its masses."""
    model = inputs.models[role]
    graph = _attribute(config, model, prompt)
    thresholds = {
        "node_threshold": config.node_threshold,
        "edge_threshold": config.edge_threshold,
    }
    pruned = graph.prune(**thresholds)
    components = _components(graph)
    by_pairs = "pairs" in components
    most = config.mediated if by_pairs else min(config.mediated or _LONG_EDGES, _LONG_EDGES)
    edges = mediated_edges(graph, pruned, most)
    key = case_study.key_edge(graph, pruned)
    measured = measure_mediation(graph, edges, config.fraction, key=key, components=components)
    explained = config.explained if by_pairs else 0
    scores = explanations.explain_scores(graph, measured.size_LNTS, explained)
    effects = explanations.intervene(config, model.source.model, graph, pruned)
    logits = _logits(graph, model)
    name = file_name(role, prompt.slug)
    document = graph_document.document(
        graph,
        pruned,
        slug=name,
        model_name=scan(model),
        tokens=prompt.tokens,
        logit_tokens=[each.token for each in logits],
        feature_type=NEURON if config.neurons else TRANSCODER,
        generation=_generation(config, prompt),
        transcoders=[model.facts.transcoder] if model.facts.transcoder else [],
        mediated=measured.carried,
        scores=scores,
        effects=effects,
        **thresholds,
    )
    masses = measured.masses
    document["metadata"]["scores"] = dataclasses.asdict(graph.scores(pruned))
    proposed = explanations.proposals(config, graph, pruned, document)
    scaled = explanations.scale_supernodes(
        config, model.source.model, graph, proposed, model.source.tokenizer.piece
    )
    supernode_scores = explanations.score_supernodes(model.source.model, graph, pruned, proposed)
    document["group_interventions"] = [to_jsonable(each) for each in scaled]
    document["group_scores"] = [to_jsonable(each) for each in supernode_scores]
    result = GraphResult(
        role=role,
        slug=prompt.slug,
        file=f"{GRAPHS}/{name}.json",
        kind=prompt.kind,
        prompt=prompt.text,
        tokens=prompt.tokens,
        logits=logits,
        **_numbers(config, graph, pruned, measured),
        score_errors=tuple(each.certificate() for each in scores),
        agreements=explanations.agreements(effects, pruned),
        supernodes=scaled,
        key_edge=_key_edge(config, graph, pruned, document, key, measured),
        head_shares=stability.head_shares(measured.size_LNTS),
        meaning=prompt.meaning,
        supernode_scores=supernode_scores,
    )
    return result, document, masses


def _components(graph: Graph) -> tuple[Component, ...]:
    """Components of edges, heads alone for a long prompt, whose pairs are too many."""
    return (
        COMPONENTS
        if math.prod(graph.replacement.layers.mixer.pattern_shape) <= _ENTRIES
        else ("heads",)
    )


def _attribute(config: GraphConfig, model: GraphModel, prompt: EncodedPrompt) -> Graph:
    source, most = model.source.model, config.max_features
    if config.neurons:
        return neurons.graph(
            *(source, prompt.ids),
            targets=prompt.targets,
            against=prompt.against,
            max_features=most or MAX_FEATURES,
        )
    return attribute(
        *(source, model.features, prompt.ids),
        targets=prompt.targets,
        against=prompt.against,
        max_features=most or None,
    )


def _generation(config: GraphConfig, prompt: EncodedPrompt) -> dict[str, float]:
    """What decided the nodes, as files of viewers name it."""
    settings: dict[str, float] = {"max_n_logits": MOST_LOGITS, "desired_logit_prob": SHARE}
    if prompt.targets is not None:
        settings = {"max_n_logits": len(prompt.targets)}
    most = config.max_features or (MAX_FEATURES if config.neurons else 0)
    return settings | ({"max_feature_nodes": most} if most else {})


def mediated_edges(graph: Graph, pruned: Pruned, most: int) -> np.ndarray:
    """Kept edges as pairs of source and target `[X, 2]`, of the highest score first.

    Args:
      graph, pruned: the graph.
      most: largest number of edges; 0 for all.
    """
    row_X, source_X = np.nonzero(pruned.kept_RS & (graph.adjacency != 0))
    order_X = np.argsort(-pruned.score_RS[row_X, source_X], kind="stable")[: most or None]
    return np.stack([source_X, graph.row_nodes[row_X]], 1)[order_X]


def _key_edge(
    config: GraphConfig,
    graph: Graph,
    pruned: Pruned,
    document: dict[str, Any],
    key: tuple[int, int] | None,
    measured: "MeasuredMediation",
) -> KeyEdge | None:
    if key is None or measured.key_LNTS is None:
        return None
    index = kept_nodes(graph, pruned)
    source, target = (document["nodes"][index.index(node)]["node_id"] for node in key)
    return KeyEdge(
        source=source,
        target=target,
        weight=float(graph.edge_weights([key])[0]),
        carriers=case_study.count_carriers(
            *(measured.key_LNTS, (case_study.FRACTION, config.fraction)), _components(graph)
        ),
    )


def _logits(graph: Graph, model: GraphModel) -> tuple[NextToken, ...]:
    kinds, ids = graph.nodes["kind"].to_pylist(), graph.nodes["feature"].to_pylist()
    chosen = [i for kind, i in zip(kinds, ids, strict=True) if kind == LOGIT]
    piece = model.source.tokenizer.piece
    return tuple(
        NextToken(piece(i) + graph.minus(piece), i, float(p))
        for i, p in zip(chosen, graph.probabilities, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class MeasuredMediation:
    """What heads and pairs carry of some edges.

    Attributes:
      carried: the largest shares of each edge, by source and target.
      size_LNTS: absolute share of every pair, summed over edges; by heads alone T and S are 1, as
        they are in `key_LNTS`.
      error_L: largest error of the certificate, per layer.
      over_count: median of the sum over layers as a multiple of the edge; NaN without edges.
      masses: mean cumulative masses.
      key_LNTS: shares of all pairs in the key edge; None without one.
    """

    carried: dict[tuple[int, int], Mediated]
    size_LNTS: np.ndarray
    error_L: np.ndarray
    over_count: float
    masses: list[Mass]
    key_LNTS: np.ndarray | None


def measure_mediation(
    graph: Graph,
    edges: np.ndarray,
    fraction: float,
    *,
    key: tuple[int, int] | None,
    components: Collection[Component] = COMPONENTS,
) -> MeasuredMediation:
    """Mediation of edges `[X, 2]`, a batch at a time.

    Args:
      graph: the graph.
      edges: pairs of source and target.
      fraction: share of an edge's mass for which components are counted.
      key: the key edge, all of whose shares are returned.
      components: heads and pairs, or heads alone.
    """
    layers, D = graph.replacement.layers, graph.replacement.error_LTD.shape[-1]
    # N counts what the mixer has, heads or prototypes.
    L, N, T, _ = layers.mixer.pattern_shape
    width = D + layers.mixer.width
    by_head = "pairs" not in components
    pairs = 1 if by_head else T * T
    within = min(_MEMORY // (4 * L * N * pairs), _TANGENTS // (4 * L * T * width))
    at_once = min(max(within, 1), 256)
    parts = mediation.by_source(edges, at_once)
    edges = np.concatenate(parts)
    carried: dict[tuple[int, int], Mediated] = {}
    sums, over = MassSums(fraction, components), [np.empty(0)]
    error_L, size_LNTS = np.zeros(L), np.zeros((L, N, *((1, 1) if by_head else (T, T))))
    weight_X = graph.edge_weights(edges)
    source_X, target_X = graph.nodes["position"].to_numpy()[edges].T
    different_X = source_X != target_X
    start, key_LNTS = 0, None
    options: dict[str, Any] = {"batch": at_once, "by_head": by_head}
    batches = (batch for part in parts for batch in graph.mediations(part, **options))
    for batch in batches:
        score_XLNTS = np.asarray(batch.score_XLNTS)
        at = slice(start, start + len(score_XLNTS))
        start = at.stop
        for (source, target), score_LNTS in zip(edges[at].tolist(), score_XLNTS, strict=True):
            carried[source, target] = largest_shares(
                score_LNTS, **({"pairs": 0} if by_head else {})
            )
            if (source, target) == key:
                key_LNTS = score_LNTS
        sums.add(score_XLNTS, different_X[at])
        size_LNTS += np.abs(score_XLNTS).sum(0, dtype=np.float64)
        error_L = np.maximum(error_L, batch.certificate(weight_X[at]).max(0))
        over.append(batch.over_count(weight_X[at]))
    if key is not None and key_LNTS is None:
        key_LNTS = np.asarray(next(graph.mediations([key], by_head=by_head)).score_XLNTS[0])
    over_X = np.concatenate(over)
    median = float(np.median(over_X)) if len(over_X) else float("nan")
    return MeasuredMediation(carried, size_LNTS, error_L, median, sums.means(), key_LNTS)


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
                each.positions,
                each.edges,
                each.unmediated,
                each.needed,
                mass.needed_of_mean(each.mass_C, config.fraction),
            )
            for each in measured.masses
        ),
    }
