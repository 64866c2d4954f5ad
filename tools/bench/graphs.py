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
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.precision import exact_products
from sparse_jax import transcoders
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import Graph, attribute, linear, mediation, neurons
from sparse_jax.graphs.replacement import record
from sparse_jax.graphs.rows import POSITIONS, ActiveFeatures, RowFiller
from sparse_jax.transcoders.transcoder import Transcoder
from tools.bench import front
from tools.bench.posttrain import SHAPE

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
    replacement, _ = jax.jit(record)(model, transcoder, jnp.asarray(tokens))
    pre_LTF = transcoder.pre_activations(replacement.input_LTD)
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
    pattern_LNTS = replacement.layers.mixer.pattern_LNTS.at[tuple(entry_4)].set(0.0)
    layers = replacement.layers
    layers = layers.replace(mixer=layers.mixer.replace(pattern_LNTS=pattern_LNTS))
    last_XTD = linear.tangents(replacement.replace(layers=layers), sources).last_XTD
    return (last_XTD[:, -1] * vector_XD).sum(-1)


def by_removal(graph: Graph, edges: np.ndarray) -> np.ndarray:
    """Shares of all entries in edges to logits, a run for each, `[X, L, N, T, S]`."""
    sources, vector_XD = graph.sources(edges[:, 0]), graph.targets(edges[:, 1]).vector_XD
    whole_X = graph.edge_weights(edges)
    shape = graph.replacement.layers.mixer.pattern_LNTS.shape
    shares = np.zeros((len(edges), *shape), np.float32)
    for layer, head, query, key in np.ndindex(shape):
        if key <= query:
            entry_4 = np.array([layer, head, query, key])
            kept_X = np.asarray(_edges_without(graph.replacement, sources, vector_XD, entry_4))
            shares[:, layer, head, query, key] = whole_X - kept_X
    return shares


def bench_open_pairs(graph: Graph, edges: np.ndarray, share: float, repeats: int) -> dict[str, Any]:
    """Times mediation with most of the patterns closed, all contracted and the open ones alone."""
    layers = graph.replacement.layers
    pattern_LNTS = np.asarray(layers.mixer.pattern_LNTS)
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

    runs = {
        "all_pairs": lambda: jax.block_until_ready(mediate(*ends).score_XLNTS),
        "open_pairs": lambda: jax.block_until_ready(mediate(*ends, open_L3P).score_XLNTS),
    }
    all_pairs, alone = (np.asarray(run()) for run in runs.values())
    off, largest = np.abs(all_pairs - alone).max(), np.abs(all_pairs).max()
    label = f"mediation of {len(edges)} edges, {share:.0%} of pairs open"
    what = f"shares of open pairs, up to {largest:.1e}, differ by"
    if not front.agrees(label, off, TOLERANCE * largest, what):
        return {}
    return front.timed(label, runs, repeats, over="open_pairs")


def bench_rows(length: int, features: int, active: int, repeats: int) -> dict[str, Any]:
    """Times rows of all features without the positions after theirs, and with all; {} if unlike."""
    model = random_model(PAIR)
    tokens = np.random.default_rng(0).integers(0, PAIR.vocab_size, length)
    transcoder = random_transcoder(model, tokens, features, active)
    with exact_products():
        replacement, feature_LTF = jax.jit(record)(model, transcoder, jnp.asarray(tokens))
        table = ActiveFeatures.of(feature_LTF)
        every = np.arange(len(table.layer_X))
        runs = {
            name: functools.partial(
                RowFiller(replacement, transcoder, table, step).of_features, every
            )
            for name, step in (("to_position", POSITIONS), ("all_positions", length))
        }
        (some, _), (whole, _) = (run() for run in runs.values())
        off, largest = np.abs(some - whole).max(), np.abs(whole).max()
        label = (
            f"rows of {len(every)} features, {length} tokens, without the positions after theirs "
            f"in steps of {POSITIONS}, and with all"
        )
        what = f"rows up to {largest:.1e} differ by"
        if not front.agrees(label, off, TOLERANCE * largest, what):
            return {}
        return front.timed(label, runs, repeats)


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
    label = f"{is_feature.sum()} features, {length} tokens"
    if not front.agrees(label, off, TOLERANCE, "shares, of their sum, differ from removal's by"):
        return {}
    runs = {
        "graph": lambda: attribute(model, transcoder, tokens),
        "mediation": lambda: mediated(attribute(model, transcoder, tokens)),
        "closed_form": closed_form,
        "removal": lambda: by_removal(graph, chosen),
    }
    seconds = front.timed(label, runs, repeats, over="closed_form")
    entries = PAIR.num_layers * PAIR.num_heads * length * (length + 1) // 2
    print(
        f"    certificate of rows {graph.certificate().max():.1e}; mediation, with the graph, of "
        f"{_PAIRS} edges, certificate {mediated(graph):.1e}\n"
        f"    {edges} edges by removal of each of {entries} entries"
    )
    pruned = graph.prune()
    at = np.unravel_index(np.argsort(-pruned.score_RS, axis=None)[:256], pruned.score_RS.shape)
    strongest = np.stack([at[1], graph.row_nodes[at[0]]], 1)
    opened = bench_open_pairs(graph, strongest, 0.01, repeats)
    return seconds | opened if opened else {}


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


def run(arguments: argparse.Namespace, record: front.Record) -> bool:
    """Times a graph, or what was asked for in its place; false where results differ."""
    if arguments.neurons:
        cfg = dataclasses.replace(SHAPE, num_layers=arguments.layers)
        measured = bench_neurons(cfg, arguments.length, arguments.max_features)
        return record.keep("neurons", measured)
    given = arguments.length, arguments.features, arguments.active
    if arguments.rows:
        return record.keep("seconds", bench_rows(*given, arguments.repeats))
    return record.keep("seconds", bench(*given, arguments.edges, arguments.repeats))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = front.parser("bench.graphs", __doc__, repeats=3)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--features", type=int, default=2_048, help="of each layer's transcoder")
    parser.add_argument("--active", type=int, default=2_000, help="features that are active")
    parser.add_argument("--edges", type=int, default=4, help="whose shares removal gives")
    parser.add_argument("--neurons", action="store_true", help="a graph of neurons instead")
    parser.add_argument("--rows", action="store_true", help="rows of features alone instead")
    parser.add_argument("--layers", type=int, default=SHAPE.num_layers, help="for --neurons")
    parser.add_argument("--max_features", type=int, default=neurons.MAX_FEATURES)
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
