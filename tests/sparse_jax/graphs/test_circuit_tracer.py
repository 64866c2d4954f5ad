"""Graphs equal those that circuit-tracer made of the same models and dictionaries."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import lm_jax
from sparse_jax.graphs import attribute
from sparse_jax.graphs.influence import FEATURE, TOKEN, Edges, prune, scores
from sparse_jax.transcoders import files
from tests.sparse_jax.graphs.circuit_tracer_inputs import CASES, write
from tools.bench.workers.graph import active, square

FOLDER = Path(__file__).parent / "circuit_tracer"
# Of entries, relative to the sum of absolute entries of their row: both programs round each of the
# additions of a row's path in float32, which for these models are fewer than 4,000; the random sum
# of their roundings is below the square root of it.
ENTRIES = 4_000**0.5 * 2.0**-24
# Of entries and activations themselves, of which the largest are 6.6.
LARGEST = 5e-6


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """Our graph and theirs."""
    model, dictionary = write(request.param, tmp_path_factory.mktemp(request.param))
    theirs = np.load(FOLDER / f"{request.param}.npz")
    transcoder, _ = files.load(dictionary)
    # It gives the first position no features.
    transcoder = dataclasses.replace(transcoder, skip_start=1)
    loaded = lm_jax.load_pretrained(str(model))
    return attribute(loaded, transcoder, theirs["tokens"]), theirs


def test_the_same_features_are_active(pair):
    graph, theirs = pair
    np.testing.assert_array_equal(active(graph), theirs["active"])
    activation = np.asarray(graph.nodes["activation"].fill_null(0))[graph.kinds == FEATURE]
    np.testing.assert_allclose(activation, theirs["activation"], rtol=0, atol=LARGEST)


def test_the_same_tokens_are_explained(pair):
    graph, theirs = pair
    ids = np.asarray(graph.nodes["feature"].fill_null(-1))[graph.kinds == "logit"]
    np.testing.assert_array_equal(ids, theirs["logit_ids"])
    np.testing.assert_allclose(graph.probabilities, theirs["logit_probabilities"], atol=1e-6)


def test_entries_are_equal_to_rounding(pair):
    graph, theirs = pair
    ours_NN, theirs_NN = square(graph), theirs["adjacency"]
    assert ours_NN.shape == theirs_NN.shape
    size_N1 = np.abs(theirs_NN).sum(1, keepdims=True)
    assert (np.abs(ours_NN - theirs_NN) <= ENTRIES * size_N1).all()
    assert np.abs(ours_NN - theirs_NN).max() <= LARGEST


def test_pruning_and_scores_are_equal(pair):
    graph, theirs = pair
    sources = graph.num_sources
    edges = Edges(
        weight_RS=square(graph)[graph.row_nodes, :sources],
        node_R=np.where(graph.row_nodes < sources, graph.row_nodes, -1),
        start_R=np.where(graph.row_nodes < sources, 0.0, 1.0),
        kind_S=graph.kinds[:sources],
        error_S=np.full(sources, -1),
    )
    edges.start_R[-len(graph.probabilities) :] = graph.probabilities
    found = scores(edges)
    np.testing.assert_allclose([found.replacement, found.completeness], theirs["scores"], rtol=1e-6)
    pruned = prune(edges, node_threshold=0.8, edge_threshold=0.98)
    # It keeps all tokens and logits, and so do we.
    np.testing.assert_array_equal(pruned.kept_S, theirs["node_mask"][:sources])
    assert theirs["node_mask"][:sources][graph.kinds[:sources] == TOKEN].all()
    row, source = np.nonzero(pruned.kept_RS)
    ours = {(int(graph.row_nodes[r]), int(s)) for r, s in zip(row, source, strict=True)}
    assert ours == {tuple(map(int, edge)) for edge in theirs["edges_kept"]}


def test_rows_and_biases_sum_to_readings(pair):
    """Of every layer, by the forward pass alone: no factor of a hook or of a skip is wrong."""
    graph, _ = pair
    assert graph.certificate().max() < 1e-5
