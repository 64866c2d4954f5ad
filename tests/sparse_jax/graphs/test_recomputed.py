"""Graphs whose attention patterns are computed again from queries and keys, against stored ones."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.model.frozen import attention as frozen_attention
from lm_jax.model.frozen.attention import FrozenAttention, RecomputedAttention
from lm_jax.model.precision import exact_jit
from sparse_jax.graphs import attribute, mediation
from sparse_jax.graphs import rows as rows_lib
from sparse_jax.graphs.replacement import record
from sparse_jax.graphs.rows import ActiveFeatures, RowFiller
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.circuits.small_models import circuit_model
from tests.sparse_jax.graphs.small_graphs import (
    TOKENS,
    WITH_SCORES,
    dense_features,
    small_graph,
    small_model,
    small_tokens,
    small_transcoder,
)

# Without gates, whose patterns are no softmax of scores.
DENSE = [each for each in WITH_SCORES if each[1] is None]
# Two parts, the second filled up.
QUERIES = 4


@pytest.fixture
def graph_of(monkeypatch):
    """Graphs of small models that store no patterns, where they need not."""
    monkeypatch.setattr(frozen_attention, "_QUERIES", QUERIES)
    own = exact_jit(functools.partial(record, stored=0))
    # Programs are cached by shapes of arguments, which the number of queries is not one of.
    jax.clear_caches()

    def graph(each, model=None):
        model = small_model(*each[:2]) if model is None else model
        window = None if each is None else each[2]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["sparse_jax.graphs.attribute"], "_record", own)
            return attribute(model, small_transcoder(window), small_tokens())

    yield graph
    jax.clear_caches()


@pytest.mark.parametrize("each", DENSE)
def test_graphs_are_those_of_stored_patterns(each, graph_of):
    stored, graph = small_graph(*each), graph_of(each)
    assert isinstance(stored.replacement.layers.mixer, FrozenAttention)
    mixer = graph.replacement.layers.mixer
    assert isinstance(mixer, RecomputedAttention)
    assert mixer.pattern_shape == stored.replacement.layers.mixer.pattern_LNTS.shape
    assert graph.nodes.drop(["activation"]) == stored.nodes.drop(["activation"])
    size_R1 = np.abs(stored.adjacency).sum(1, keepdims=True) + np.abs(stored.bias)[:, None]
    assert (np.abs(graph.adjacency - stored.adjacency) <= 1e-5 * size_R1).all()
    assert (np.abs(graph.bias - stored.bias) <= 1e-5 * size_R1[:, 0]).all()
    assert graph.certificate().max() < 1e-5
    # Every head and pair of some edges, and heads alone.
    edges = [(source, int(graph.row_nodes[-1])) for source in range(0, graph.num_sources, 7)]
    for by_head in (False, True):
        both = [
            np.concatenate([each.score_XLNTS for each in own.mediations(edges, by_head=by_head)])
            for own in (graph, stored)
        ]
        assert np.abs(both[0] - both[1]).max() <= 1e-5 * np.abs(both[1]).max()
        assert np.abs(both[1]).max() > 1e-3


def test_a_soft_cap_and_the_first_positions_alone(graph_of, monkeypatch):
    """Scores are capped by far, and features' rows are of two positions at a time."""
    windows = (3, None, 3)
    model = circuit_model("gemma", num_layers=3, scale=6.0, windows=windows, score_softcap=0.5)
    stored = attribute(model, small_transcoder(), small_tokens())
    own = graph_of(None, model)
    assert isinstance(own.replacement.layers.mixer, RecomputedAttention)
    # Four targets at a time, so that some need the first two positions alone.
    monkeypatch.setattr(rows_lib, "MOST_TARGETS", 4)
    table = ActiveFeatures.of(dense_features(stored))
    filler = RowFiller(own.replacement, own.transcoder, table, positions=2)
    with jax.default_matmul_precision("highest"):
        rows, biases = filler.of_features(np.arange(len(table.layer_X)))
    count = len(rows)
    size_R1 = np.abs(stored.adjacency).sum(1, keepdims=True)[:count]
    assert (np.abs(rows - stored.adjacency[:count]) <= 1e-5 * size_R1).all()
    assert (np.abs(biases - stored.bias[:count]) <= 1e-5 * size_R1[:, 0]).all()
    uncapped = attribute(
        circuit_model("gemma", num_layers=3, scale=6.0, windows=windows),
        small_transcoder(),
        small_tokens(),
    )
    assert np.abs(uncapped.replacement.error_LTD - stored.replacement.error_LTD).max() > 0.1


@pytest.mark.parametrize("blocks", ["gpt2", "gemma"])
def test_maps_are_those_of_stored_patterns_in_float64(blocks, monkeypatch):
    monkeypatch.setattr(frozen_attention, "_QUERIES", QUERIES)
    model, transcoder = small_model(blocks), small_transcoder()
    rng = np.random.default_rng(0)
    cfg = model.cfg
    L, N, K, H = cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    value = rng.normal(size=(L, 2, TOKENS, K, H)).astype(np.float32)
    u = rng.normal(size=(L, 2, TOKENS, N, H)).astype(np.float32)

    def maps(stored, model, transcoder, value, u):
        replacement, _ = record(model, transcoder, jnp.asarray(small_tokens()), stored=stored)
        layers = replacement.layers

        def of_layer(mixer, value_XSKH, u_XTNH):
            return (
                mixer.mix(value_XSKH),
                mixer.transpose(u_XTNH),
                mixer.shares(value_XSKH, u_XTNH),
                mixer.head_shares(value_XSKH, u_XTNH),
            )

        found = jax.vmap(of_layer)(layers.mixer, value, u)
        return *found, layers.constants()

    given = model, transcoder, value, u
    stored = oracle.expected(functools.partial(maps, 2**40), *given)
    again = oracle.expected(functools.partial(maps, 0), *given)
    for a, b, one, other in zip(
        stored.values, again.values, stored.bounds, again.bounds, strict=True
    ):
        assert (np.abs(a - b) <= oracle.in_float64(one + other)).all()
    # Constants are 0 of a model without biases.
    assert all(np.abs(a).max() > 1e-3 for a in stored.values[:4])


def test_a_model_with_gates_keeps_its_patterns(graph_of):
    graph = graph_of(("gpt2", 0.3, 2))
    assert isinstance(graph.replacement.layers.mixer, FrozenAttention)


def test_open_pairs_are_not_asked_of_what_is_not_stored(graph_of):
    graph = graph_of(("gpt2", None, None))
    assert graph._open_pairs is None
    edge = (0, int(graph.row_nodes[-1]))
    weight = graph.edge_weights([edge])
    (found,) = graph.mediations([edge])
    assert found.certificate(weight).max() < 1e-5
    assert isinstance(found, mediation.Mediation)
