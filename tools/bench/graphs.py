"""Time of attribution graphs, and of mediation in closed form relative to removal.

    python -m tools.bench.graphs               four layers of width 256, 16 tokens, 2,000 features
    python -m tools.bench.graphs --neurons     neurons of 30 layers of SmolLM2's shape
    python -m tools.bench.graphs --rows --length 128 --active 4000
    python -m tools.bench.graphs --edges 1 --repeats 1

Weights are random. A graph has a row for every active feature, and the mediation of its edges with
the largest scores. By removal, each entry of the attention patterns (layer, head, query, key) is
set to zero in a run of its own, compiled once with the entry as an argument, as Eq. 7 of Sparse
Attention Post-Training has it; one run serves all `--edges`. First the shares of both are compared;
if they differ, nothing is timed and the exit code is 1. Both run in turns; the median ratio is
printed with its range.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import functools
from pathlib import Path
import resource
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.errors import UserError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.precision import exact_products
from lm_jax.run.files import write_json
from sparse_jax import transcoders
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import Graph, attribute, linear, mediation, neurons
from sparse_jax.graphs.replacement import record
from sparse_jax.graphs.rows import POSITIONS, ActiveFeatures, RowFiller
from sparse_jax.transcoders.transcoder import Transcoder
from tools.bench.posttrain import SHAPE
from tools.bench.timing import PROFILE, conditions, in_turns, profiled, ratio

PAIR = DecoderConfig(
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    hidden_size=256,
    mlp_size=1_024,
    vocab_size=8_192,
    max_length=256,
)
# Of a share, relative to the sum of absolute shares of its edge: float32 over two orders of
# summation.
TOLERANCE = 1e-5
_PAIRS = 2_000


def random_model(cfg: DecoderConfig) -> CircuitModel:
    """Weights larger than initial ones, so that attention is not uniform."""
    params = jax.jit(functools.partial(lm_jax.init_params, cfg=cfg))(jax.random.key(0))
    return CircuitModel(jax.tree.map(lambda x: 3.0 * x, params), cfg)


def random_transcoder(
    model: CircuitModel, tokens: np.ndarray, features: int, active: int
) -> Transcoder:
    """A transcoder whose thresholds give `active` features on the tokens, as many in each layer."""
    transcoder = transcoders.init(jax.random.key(1), model.cfg, features=features)
    pre_LTF = jax.jit(record)(model, transcoder, jnp.asarray(tokens)).pre_LTF
    L = model.cfg.num_layers
    # Between the last that is to be active and the next.
    least = active // L
    theta_L = -np.sort(-np.asarray(pre_LTF).reshape(L, -1))[:, least - 1 : least + 1].mean(1)
    log_LF = np.broadcast_to(np.log(theta_L)[:, None], (L, features))
    params = {**transcoder.params, "log_threshold": jnp.asarray(log_LF)}
    return dataclasses.replace(transcoder, params=params)


def mediated(graph: Graph) -> float:
    """Largest error of the certificates of the edges with the largest scores."""
    pruned = graph.prune()
    at = np.argsort(-pruned.score_RS, axis=None)[:_PAIRS]
    rows, sources = np.unravel_index(at, pruned.score_RS.shape)
    edges = np.stack([sources, graph.row_nodes[rows]], 1)
    largest = 0.0
    for part in mediation.by_source(edges, 256):
        weights = np.split(graph.edge_weights(part), range(256, len(part), 256))
        for each, weight_X in zip(graph.mediations(part), weights, strict=True):
            largest = max(largest, each.certificate(weight_X).max())
    return largest


@jax.jit
def _edges_without(replacement, sources, vector_XD, entry_4):
    """Edges to logits with one entry of the patterns removed, `[X]`."""
    pattern_LNTS = replacement.layers.pattern_LNTS.at[tuple(entry_4)].set(0.0)
    layers = replacement.layers
    layers = layers.replace(mixer=layers.mixer.replace(pattern_LNTS=pattern_LNTS))
    last_XTD = linear.tangents(replacement.replace(layers=layers), sources).last_XTD
    return (last_XTD[:, -1] * vector_XD).sum(-1)


def by_removal(graph: Graph, edges: np.ndarray) -> np.ndarray:
    """Shares of all entries in edges to logits, a run for each, `[X, L, N, T, S]`."""
    sources, vector_XD = graph.sources(edges[:, 0]), graph.targets(edges[:, 1]).vector_XD
    whole_X = graph.edge_weights(edges)
    shape = graph.replacement.layers.pattern_LNTS.shape
    shares = np.zeros((len(edges), *shape), np.float32)
    for layer, head, query, key in np.ndindex(shape):
        if key <= query:
            entry_4 = np.array([layer, head, query, key])
            kept_X = np.asarray(_edges_without(graph.replacement, sources, vector_XD, entry_4))
            shares[:, layer, head, query, key] = whole_X - kept_X
    return shares


def bench_open_pairs(graph: Graph, edges: np.ndarray, share: float, repeats: int) -> list[Any]:
    """Times mediation with most of the patterns closed, all contracted and the open ones alone."""
    layers = graph.replacement.layers
    pattern_LNTS = np.asarray(layers.pattern_LNTS)
    kept_LNTS = np.random.default_rng(0).random(pattern_LNTS.shape) < share
    closed = dataclasses.replace(layers.mixer, pattern_LNTS=jnp.asarray(pattern_LNTS * kept_LNTS))
    replacement = dataclasses.replace(
        graph.replacement, layers=dataclasses.replace(layers, mixer=closed)
    )
    open_L3P = mediation.open_pairs(np.asarray(closed.pattern_LNTS))
    sources, source_X = np.unique(edges[:, 0], return_inverse=True)
    targets, target_X = np.unique(edges[:, 1], return_inverse=True)
    ends = graph.sources(sources), source_X, graph.targets(targets), target_X

    @jax.jit
    def mediate(sources, source_X, targets, target_X, open_L3P=None):
        tangents = linear.tangents(replacement, sources)
        ends = sources, tangents, source_X, targets, target_X
        return mediation.mediate_edges(replacement, *ends, open_L3P)

    runs = [
        lambda: jax.block_until_ready(mediate(*ends).score_XLNTS),
        lambda: jax.block_until_ready(mediate(*ends, open_L3P).score_XLNTS),
    ]
    all_pairs, alone = (np.asarray(run()) for run in runs)
    off, largest = np.abs(all_pairs - alone).max(), np.abs(all_pairs).max()
    if not off <= TOLERANCE * largest:
        print(f"shares of open pairs, up to {largest:.1e}, differ by {off:.1e}, not timed")
        return []
    seconds = in_turns(runs, repeats)
    print(
        f"  mediation of {len(edges)} edges, {share:.0%} of pairs open: over all pairs "
        f"{np.median(seconds[0]):.3f} s, {ratio(*seconds)} times the time of the open ones alone"
    )
    return seconds


def bench_rows(length: int, features: int, active: int, repeats: int) -> dict[str, Any]:
    """Times rows of all features without the positions after theirs, and with all; {} if unlike."""
    model = random_model(PAIR)
    tokens = np.random.default_rng(0).integers(0, PAIR.vocab_size, length)
    transcoder = random_transcoder(model, tokens, features, active)
    with exact_products():
        replacement = jax.jit(record)(model, transcoder, jnp.asarray(tokens))
        table = ActiveFeatures(np.asarray(replacement.feature_LTF))
        every = np.arange(len(table.layer_X))
        runs = [
            functools.partial(RowFiller(replacement, transcoder, table, step).of_features, every)
            for step in (POSITIONS, length)
        ]
        (some, _), (whole, _) = (run() for run in runs)
        off, largest = np.abs(some - whole).max(), np.abs(whole).max()
        if not off <= TOLERANCE * largest:
            print(f"rows up to {largest:.1e} differ by {off:.1e}, not timed")
            return {}
        seconds = in_turns(runs, repeats)
    print(
        f"rows of {len(every)} features, {length} tokens, without the positions after theirs in "
        f"steps of {POSITIONS}: {np.median(seconds[0]):.2f} s; with all positions "
        f"{ratio(seconds[1], seconds[0])} times the time"
    )
    return dict(zip(("to_position", "all_positions"), seconds, strict=True))


def bench(length: int, features: int, active: int, edges: int, repeats: int) -> dict[str, Any]:
    """Times a graph, and mediation both ways in turns; {} and a line if they differ."""
    model = random_model(PAIR)
    tokens = np.random.default_rng(0).integers(0, PAIR.vocab_size, length)
    transcoder = random_transcoder(model, tokens, features, active)
    graph = attribute(model, transcoder, tokens)
    is_feature = graph.kinds == "feature"
    # Late logits, of which the first is the most probable, and features of the first layer.
    logit = int(graph.row_nodes[-len(graph.probabilities)])
    weight_S = np.abs(graph.adjacency[-len(graph.probabilities)]) * is_feature[: graph.num_sources]
    chosen = np.stack([np.argsort(-weight_S)[:edges], np.full(edges, logit)], 1)

    def closed_form() -> np.ndarray:
        return np.concatenate([np.asarray(m.score_XLNTS) for m in graph.mediations(chosen)])

    got, want = closed_form(), by_removal(graph, chosen)
    size_X = np.abs(got).sum((1, 2, 3, 4))
    # Removal subtracts two edges, whose rounding is relative to them.
    size_X = size_X + np.abs(graph.edge_weights(chosen))
    off = float((np.abs(got - want).max((1, 2, 3, 4)) / size_X).max())
    if not off <= TOLERANCE:
        print(f"shares differ from those of removal by {off:.1e} of their sum, not timed")
        return {}
    runs = [
        lambda: attribute(model, transcoder, tokens),
        lambda: mediated(attribute(model, transcoder, tokens)),
        closed_form,
        lambda: by_removal(graph, chosen),
    ]
    seconds = in_turns(runs, repeats)
    alone, with_edges, closed, removal = (statistics.median(taken) for taken in seconds)
    rows = graph.certificate().max()
    print(f"{is_feature.sum()} features, {length} tokens, certificate of rows {rows:.1e}")
    print(
        f"  graph: {alone:.2f} s; with mediation of {_PAIRS} edges: {with_edges:.2f} s, "
        f"certificate {mediated(graph):.1e}"
    )
    entries = PAIR.num_layers * PAIR.num_heads * length * (length + 1) // 2
    print(
        f"  {edges} edges by removal of each of {entries} entries: {removal:.2f} s; "
        f"closed form {closed:.4f} s, {ratio(seconds[3], seconds[2])} times faster"
    )
    pruned = graph.prune()
    at = np.unravel_index(np.argsort(-pruned.score_RS, axis=None)[:256], pruned.score_RS.shape)
    strongest = np.stack([at[1], graph.row_nodes[at[0]]], 1)
    opened = bench_open_pairs(graph, strongest, 0.01, repeats)
    if not opened:
        return {}
    named = dict(zip(("graph", "mediation", "closed_form", "removal"), seconds, strict=True))
    return named | dict(zip(("all_pairs", "open_pairs"), opened, strict=True))


def bench_neurons(cfg: DecoderConfig, length: int, max_features: int) -> dict[str, Any]:
    """Time of one graph of neurons, compilation included, and the peak memory of the process."""
    model = random_model(cfg)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, length)
    jax.block_until_ready(model.params)
    start = time.perf_counter()
    graph = neurons.graph(model, tokens, max_features=max_features)
    seconds = time.perf_counter() - start
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{max_features} of {cfg.num_layers * cfg.mlp_size * length} neurons, {length} tokens: "
        f"{seconds:.1f} s with compilation, peak memory {gigabytes:.2f} GiB, certificate "
        f"{graph.certificate().max():.1e}"
    )
    return {"seconds": seconds, "peak_gib": gigabytes}


@profiled
def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[PROFILE])
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--features", type=int, default=2_048, help="of each layer's transcoder")
    parser.add_argument("--active", type=int, default=2_000, help="features that are active")
    parser.add_argument("--edges", type=int, default=4, help="whose shares removal gives")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--neurons", action="store_true", help="a graph of neurons instead")
    parser.add_argument("--rows", action="store_true", help="rows of features alone instead")
    parser.add_argument("--layers", type=int, default=SHAPE.num_layers, help="for --neurons")
    parser.add_argument("--max_features", type=int, default=neurons.MAX_FEATURES)
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    arguments = parser.parse_args(argv)
    try:
        results: dict[str, Any] = {"conditions": conditions(("jax", "jaxlib", "numpy"))}
        if arguments.neurons:
            cfg = dataclasses.replace(SHAPE, num_layers=arguments.layers)
            results["neurons"] = bench_neurons(cfg, arguments.length, arguments.max_features)
        else:
            given = arguments.length, arguments.features, arguments.active
            results["seconds"] = (
                bench_rows(*given, arguments.repeats)
                if arguments.rows
                else bench(*given, arguments.edges, arguments.repeats)
            )
            if not results["seconds"]:
                return 1
        if arguments.json:
            write_json(arguments.json, results)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
