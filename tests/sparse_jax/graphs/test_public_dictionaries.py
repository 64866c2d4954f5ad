"""Interventions and mediation in graphs of W_skip, of TopK and of features that read the stream."""

import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model.sites import keep
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.graphs import attribute, interventions
from sparse_jax.transcoders import files
from sparse_jax.transcoders.substitution import substitute
from tests.sparse_jax.graphs.circuit_tracer_inputs import TOKENS, VOCABULARY, write

CASES = ("llama_skip", "llama_topk", "llama_resid_mid")


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """A model and its graph."""
    folder, dictionary = write(request.param, tmp_path_factory.mktemp(request.param))
    model = CircuitModel.of(lm_jax.load_pretrained(str(folder)))
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, TOKENS)
    return model, attribute(model, files.load(dictionary)[0], tokens)


def some(graph, kind, count):
    return np.random.default_rng(0).choice(
        np.flatnonzero(graph.kinds == kind), count, replace=False
    )


def test_with_all_frozen_effects_are_the_columns_of_the_graph(pair):
    model, graph = pair
    nodes = np.concatenate([some(graph, kind, 8) for kind in ("feature", "error", "token")])
    pairs = [(int(node), (0.0, 2.0, -5.0)[i % 3]) for i, node in enumerate(nodes)]
    effects = interventions.measure(model, graph, pairs, modes=("frozen",), batch=12)
    times = np.abs(effects.factors - 1.0)[:, None]
    error = np.abs(effects.measured["frozen"] - effects.predicted)
    assert (error <= times * 5e-5).all() and np.abs(effects.predicted).max() > 0.5


def test_runs_in_which_features_respond_begin_with_the_model_itself(pair):
    """With its errors the replaced model is the model: no path is left out, none is there twice."""
    model, graph = pair
    tokens_BT = jnp.asarray(np.asarray(graph.nodes["feature"])[graph.kinds == "token"], jnp.int32)[
        None
    ]
    valid_BT = jnp.ones_like(tokens_BT, bool)
    error_LBTD = graph.replacement.error_LTD[:, None]
    edits = substitute(graph.transcoder, valid_BT, written_LBTD=error_LBTD)
    replaced = model.forward(tokens_BT, valid_BT, edits=edits, record={"mlp.out": keep})
    whole = model.forward(tokens_BT, valid_BT, record={"mlp.out": keep})
    size = np.abs(whole.records["mlp.out"]).max()
    np.testing.assert_allclose(
        replaced.records["mlp.out"], whole.records["mlp.out"], atol=1e-5 * size
    )


def test_shares_of_heads_the_bypass_and_later_writes_sum_to_edges(pair):
    _, graph = pair
    sources = np.concatenate([some(graph, kind, 6) for kind in ("feature", "error", "token")])
    logits = np.flatnonzero(graph.kinds == "logit")
    targets = np.concatenate([some(graph, "feature", 6), logits[:2]])
    edges = [(int(s), int(t)) for s in sources for t in targets]
    row = {int(node): r for r, node in enumerate(graph.row_nodes)}
    weights = np.array([graph.adjacency[row[t], s] for s, t in edges])
    (mediation,) = graph.mediations(edges)
    assert mediation.certificate(weights).max() <= 1e-5
    assert np.abs(weights).max() > 0.05
