"""Graphs of neurons against the forward pass: activations, what is left over, interventions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from lm_jax.model.edits import Scale
from lm_jax.model.sites import keep
from sparse_jax.graphs import attribute, influence, interventions, neuron_rows, neurons
from sparse_jax.graphs.neurons import Neurons
from sparse_jax.graphs.replacement import record
from tests import rounding
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.graphs.small_graphs import LAYERS, TOKENS, small_model, small_tokens

# A gated MLP, a plain one with biases and gates on attention, a plain one in parallel blocks.
MODELS = [("llama", None), ("gpt2", 0.3), ("pythia", None)]
KEPT = 40


def tokens_T():
    return jnp.asarray(small_tokens(), jnp.int32)


@pytest.mark.parametrize("each", [*MODELS[:2], pytest.param(MODELS[2], marks=pytest.mark.slow)])
def test_features_are_the_neurons_of_the_forward_pass_and_leave_nothing_over(each):
    model = small_model(*each)

    def from_forward(model):
        tokens_BT = tokens_T()[None]
        sites = {"mlp.post": keep, "mlp.out": keep}
        run = model.forward(tokens_BT, jnp.ones_like(tokens_BT, bool), record=sites)
        return run.records["mlp.post"][:, 0], jnp.zeros_like(run.records["mlp.out"][:, 0])

    def from_graph(model):
        replacement, feature_LTF = record(model, Neurons.of(model), tokens_T())
        return feature_LTF, replacement.error_LTD

    wanted = oracle.expected(from_forward, model)
    found = oracle.expected(from_graph, model)
    both = jax.tree.map(np.add, wanted.bounds, found.bounds)
    for got, want, bound in zip(found.values, wanted.values, both, strict=True):
        assert (np.abs(got - want) <= oracle.in_float64(bound)).all()
    rounding.assert_within(jax.jit(from_graph)(model), found)
    # The whole graph: rows and biases sum to the activations.
    graph = attribute(model, Neurons.of(model), small_tokens())
    features = graph.row_nodes[graph.kinds[graph.row_nodes] == "feature"]
    table = graph.nodes.take(features)
    at = tuple(np.asarray(table[name]) for name in ("layer", "position", "feature"))
    active = np.nonzero(found.values[0])
    assert all((x == y).all() for x, y in zip(at, active, strict=True))
    activations = wanted.values[0][at]
    # A few of them alone, on inputs where no quotient is frozen.
    layer_Y, feature_Y = np.array([2, 0, 0]), np.array([1, 3, 0])
    some_TY = Neurons.of(model).encode_some(graph.replacement.input_LTD, layer_Y, feature_Y)
    some_error_YT = np.abs(np.asarray(some_TY).T - wanted.values[0][layer_Y, :, feature_Y])
    assert (some_error_YT <= both[0][layer_Y, :, feature_Y]).all()
    error_R = np.abs(graph.readings[: len(features)] - activations)
    assert (error_R <= both[0][at]).all()
    assert graph.certificate().max() <= 1e-5


@pytest.mark.parametrize("each", MODELS[:2])
def test_the_kept_neurons_have_most_influence_and_the_others_are_errors(each):
    model = small_model(*each)
    whole = attribute(model, Neurons.of(model), small_tokens())
    few = neurons.graph(model, small_tokens(), max_features=KEPT)
    names = ("layer", "position", "feature")
    nodes = {tuple(row[name] for name in names): i for i, row in enumerate(whole.nodes.to_pylist())}
    rows = few.nodes.filter(few.kinds == "feature").to_pylist()
    columns = [nodes[tuple(row[name] for name in names)] for row in rows]
    assert len(columns) == KEPT
    # Direct influence finds the first chunk of them.
    logits = np.abs(whole.adjacency[-len(whole.probabilities) :].astype(np.float64))
    direct = (whole.probabilities @ (logits / logits.sum(1, keepdims=True)))[: len(whole.kinds)]
    is_feature = whole.kinds[: whole.num_sources] == "feature"
    first = np.argsort(-np.where(is_feature, direct, -1), kind="stable")[: neurons.STEP]
    assert set(first) <= set(columns)
    # What other neurons add to a row is that of the errors.
    kept = np.zeros(whole.num_sources, bool)
    kept[columns] = True
    rest = np.zeros((len(whole.adjacency), LAYERS * TOKENS))
    layer, position = (np.asarray(whole.nodes[name].fill_null(0)) for name in names[:2])
    for column in np.flatnonzero(is_feature & ~kept):
        rest[:, layer[column] * TOKENS + position[column]] += whole.adjacency[:, column]
    row_of = {int(node): r for r, node in enumerate(whole.row_nodes)}
    at = [row_of[column] for column in columns]
    at += list(range(len(whole.adjacency) - len(few.probabilities), len(whole.adjacency)))
    is_error = few.kinds[: few.num_sources] == "error"
    size = np.abs(whole.adjacency[at]).sum(1, keepdims=True)
    assert (np.abs(few.adjacency[:, is_error] - rest[at]) <= 1e-5 * size).all()
    got, want = few.adjacency[:, :KEPT], whole.adjacency[np.ix_(at, columns)]
    assert (np.abs(got - want) <= 1e-5 * size).all()
    assert few.certificate().max() <= 1e-5


def greedy(whole, count, step):
    """Columns of the neurons of most influence, `step` at a time, from the whole matrix."""
    logits = len(whole.probabilities)
    features = len(whole.adjacency) - logits
    chosen = []
    while len(chosen) < count:
        rows = [*range(features, features + logits), *chosen]
        edges = influence.Edges(
            weight_RS=whole.adjacency[rows],
            node_R=np.array([-1] * logits + chosen),
            start_R=np.concatenate([whole.probabilities, np.zeros(len(chosen))]),
            kind_S=whole.kinds[: whole.num_sources],
            error_S=np.full(whole.num_sources, -1),
        )
        of_features = influence.influence(edges)[:features]
        of_features[chosen] = -1
        chosen += np.argsort(-of_features, kind="stable")[: min(step, count - len(chosen))].tolist()
    return chosen


@pytest.mark.parametrize("each", MODELS[:2])
def test_rows_by_layer_choose_what_whole_rows_do(each, monkeypatch):
    """Eight neurons at a time, four targets at once, and two positions of six at least."""
    for name, value in (("_CHUNK", 4), ("POSITIONS", 2), ("_PARTS", 3)):
        monkeypatch.setattr(neuron_rows, name, value)
    monkeypatch.setattr(neurons, "STEP", 8)
    model = small_model(*each)
    whole = attribute(model, Neurons.of(model), small_tokens())
    few = neurons.graph(model, small_tokens(), max_features=KEPT)
    names = ("layer", "position", "feature")
    wanted = whole.nodes.take(np.sort(greedy(whole, KEPT, 8))).select(names)
    assert few.nodes.slice(0, KEPT).select(names).equals(wanted)


def test_entries_that_are_not_kept_count_as_errors(monkeypatch):
    model = small_model("llama")
    exact = neurons.graph(model, small_tokens(), max_features=KEPT)
    monkeypatch.setattr(neuron_rows, "LEAST", 0.01)
    rough = neurons.graph(model, small_tokens(), max_features=KEPT)
    features = [graph.adjacency[:, :KEPT] for graph in (exact, rough)]
    assert np.count_nonzero(features[1]) < np.count_nonzero(features[0]) / 2
    assert rough.certificate().max() <= 1e-5


def test_a_neuron_times_a_factor_is_the_model_with_that_hidden_unit_scaled():
    model = small_model("gpt2", 0.3)
    graph = neurons.graph(model, small_tokens(), max_features=KEPT)
    node = int(np.flatnonzero(graph.kinds == "feature")[3])
    row = graph.nodes.slice(node, 1).to_pylist()[0]
    effects = interventions.measure(model, graph, [(node, -5.0)])
    L, F = LAYERS, model.cfg.mlp_size
    factor = np.ones((L, 1, TOKENS, F), np.float32)
    factor[row["layer"], 0, row["position"], row["feature"]] = -5.0
    tokens_BT = tokens_T()[None]
    valid_BT = jnp.ones_like(tokens_BT, bool)
    hidden = [
        np.asarray(model.forward(tokens_BT, valid_BT, edits=edits).hidden[0, -1])
        for edits in ({}, {"mlp.post": Scale(jnp.asarray(factor))})
    ]
    shift = (hidden[1] - hidden[0]) @ graph.directions.T
    got = effects.measured["free"][0, effects.is_logit]
    np.testing.assert_allclose(got, shift, atol=1e-5 * np.abs(hidden[0]).sum())
    assert np.abs(shift).max() > 1e-3


def test_neurons_that_are_not_the_whole_mlp_are_refused():
    with pytest.raises(UsageError, match="neurons: MLP outputs of this model pass a norm"):
        neurons.graph(small_model("gemma"), small_tokens())
    with pytest.raises(UsageError, match="neurons: of 3 layers"):
        attribute(small_model("llama").above(1), Neurons.of(small_model("llama")), small_tokens())
    with pytest.raises(UsageError, match="at least 1"):
        neurons.graph(small_model("llama"), small_tokens(), max_features=0)
    with pytest.raises(UsageError, match="call for_prompt"):
        Neurons.of(small_model("llama")).pre_activations(jnp.zeros((LAYERS, 2, 16)))
