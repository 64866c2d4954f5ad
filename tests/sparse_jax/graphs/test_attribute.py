"""Attribution graphs against the forward pass: row sums, interventions, nodes, bad input.

Bars are those of circuits.md's sources: 1e-5 for row sums; 5e-4 and 1e-5 for interventions.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from lm_jax.model.layers import unembedding
from lm_jax.model.sites import keep
from sparse_jax.graphs import attribute, linear, rows
from tests.sparse_jax.graphs.small_graphs import (
    EACH,
    FEATURES,
    LAYERS,
    MODELS,
    TOKENS,
    dense_features,
    small_graph,
    small_model,
    small_tokens,
    small_transcoder,
    source_nodes,
    with_each_doubled,
)


def run(model, **options):
    tokens_BT = jnp.asarray(small_tokens(), jnp.int32)[None]
    return model.forward(tokens_BT, jnp.ones_like(tokens_BT, bool), **options)


def demeaned_logits(model, hidden_BTD, ids):
    w_VD = np.asarray(unembedding(model.params, model.cfg), np.float64)
    logits_BV = np.asarray(hidden_BTD, np.float64)[:, -1] @ w_VD.T
    return logits_BV[:, ids] - logits_BV.mean(-1, keepdims=True)


def column(graph, name):
    column = graph.nodes[name]
    return np.asarray((column if name == "kind" else column.fill_null(-1)).to_pylist())


def logit_ids(graph):
    return column(graph, "feature")[column(graph, "kind") == "logit"]


@pytest.mark.parametrize("model", [*MODELS, ("sandwich", None, None)])
def test_rows_and_biases_sum_to_the_readings_of_the_forward_pass(model):
    graph, blocks = small_graph(*model), small_model(*model[:2])
    output = run(blocks, record={"mlp.in": keep})
    pre_LTF = small_transcoder(model[2]).pre_activations(output.records["mlp.in"][:, 0])
    is_feature = column(graph, "kind")[graph.row_nodes] == "feature"
    features = graph.row_nodes[is_feature]
    at = tuple(column(graph, name)[features] for name in ("layer", "position", "feature"))
    readings = np.concatenate(
        [np.asarray(pre_LTF)[at], demeaned_logits(blocks, output.hidden, logit_ids(graph))[0]]
    )
    weight = graph.adjacency.astype(np.float64)
    size = np.abs(weight).sum(1) + np.abs(graph.bias)
    np.testing.assert_array_less(np.abs(weight.sum(1) + graph.bias - readings), 1e-5 * size)
    assert graph.certificate().shape == (LAYERS + 1,)
    assert graph.certificate().max() <= 1e-5
    # The certificate is of the recorded readings, which a wrong row does not meet.
    wrong = graph.adjacency.copy()
    wrong[0] = 0.0
    broken = dataclasses.replace(graph, adjacency=wrong).certificate()
    assert broken[column(graph, "layer")[graph.row_nodes[0]]] > 1e-3


@pytest.mark.parametrize("model", EACH)
def test_an_intervention_with_all_frozen_shifts_readings_by_the_column_of_its_source(model):
    graph, blocks = small_graph(*model), small_model(*model[:2])
    transcoder = small_transcoder(model[2])
    doubled = jax.jit(lambda *given: with_each_doubled(*given, source_nodes(graph)))
    clean, output = doubled(blocks, transcoder)
    encoder_LFD = np.asarray(transcoder.params["encoder"], np.float64)
    shift_LSTD = np.asarray(output.records["mlp.in"], np.float64) - clean.records["mlp.in"]
    pre_LSTF = np.einsum("LSTD,LFD->LSTF", shift_LSTD, encoder_LFD)
    features = graph.row_nodes[column(graph, "kind")[graph.row_nodes] == "feature"]
    layer, position, feature = (
        column(graph, name)[features] for name in ("layer", "position", "feature")
    )
    shifted = pre_LSTF[layer, :, position, feature]
    expected = graph.adjacency[: len(features)]
    np.testing.assert_allclose(shifted, expected, atol=5e-4, rtol=1e-5)
    ids = logit_ids(graph)
    logits = demeaned_logits(blocks, output.hidden, ids) - demeaned_logits(
        blocks, clean.hidden, ids
    )
    np.testing.assert_allclose(logits.T, graph.adjacency[len(features) :], atol=1e-5, rtol=1e-3)
    assert np.abs(expected).max() > 0.1 and np.abs(logits).max() > 0.1


def test_nodes_are_listed_by_kind_with_every_position():
    graph = small_graph("llama")
    blocks = small_model("llama")
    kinds = column(graph, "kind")
    _, first, counts = np.unique(kinds, return_index=True, return_counts=True)
    assert list(kinds[np.sort(first)]) == ["feature", "error", "token", "logit", "bias"]
    by_kind = dict(zip(kinds[first], counts, strict=True))
    assert by_kind["error"] == LAYERS * TOKENS and by_kind["token"] == TOKENS
    assert by_kind["bias"] == 1
    output = run(blocks, record={"mlp.in": keep})
    z_LTF = np.asarray(small_transcoder().encode(output.records["mlp.in"][:, 0]))
    at = np.nonzero(z_LTF)
    is_feature = kinds == "feature"
    for axis, name in enumerate(("layer", "position", "feature")):
        np.testing.assert_array_equal(column(graph, name)[is_feature], at[axis])
    np.testing.assert_array_equal(column(graph, "activation")[is_feature], z_LTF[at])
    assert (column(graph, "position")[is_feature] == 0).any()
    assert list(column(graph, "feature")[kinds == "token"]) == list(small_tokens())
    assert graph.num_sources == len(kinds) - len(graph.probabilities) - 1


def test_token_0_has_its_node_at_the_first_position():
    # As a start token of id 0 would; position 0 is a source like any other.
    tokens = np.concatenate([[0], small_tokens()[1:]])
    graph = attribute(small_model("llama"), small_transcoder(), tokens)
    is_token = column(graph, "kind") == "token"
    assert list(column(graph, "feature")[is_token]) == list(tokens)
    first = int(np.flatnonzero(is_token)[0])
    assert np.abs(graph.adjacency[:, first]).max() > 1e-3
    assert graph.certificate().max() <= 1e-5


def test_logit_nodes_are_the_most_probable_tokens_or_those_asked_for():
    graph, model = small_graph("llama"), small_model("llama")
    probability_V = np.asarray(jax.nn.softmax(run(model).logits[0, -1]))
    ids = logit_ids(graph)
    order = np.argsort(-probability_V)
    assert list(ids) == list(order[: len(ids)])
    share = probability_V[ids].sum()
    assert len(ids) == 10 or (share >= 0.95 > share - probability_V[ids[-1]])
    asked = attribute(model, small_transcoder(), small_tokens(), targets=[7, 3])
    assert list(logit_ids(asked)) == [7, 3]
    np.testing.assert_allclose(asked.probabilities, probability_V[[7, 3]], rtol=1e-5)


def test_logits_are_read_before_their_soft_cap():
    # The cap is not linear: the graph is of the capped logits' arguments, with their probabilities.
    model = small_model("gemma")
    capped = model.replace(cfg=dataclasses.replace(model.cfg, logit_softcap=0.5))
    graph = attribute(capped, small_transcoder(), small_tokens(), targets=[4, 9])
    expected = demeaned_logits(model, run(model).hidden, [4, 9])[0]
    np.testing.assert_allclose(graph.readings[-2:], expected, rtol=1e-4)
    assert graph.certificate()[-1] <= 1e-5
    probabilities = jax.nn.softmax(run(capped).logits[0, -1])[jnp.array([4, 9])]
    np.testing.assert_allclose(graph.probabilities, probabilities, rtol=1e-5)


def test_targets_in_small_chunks_get_the_same_rows(monkeypatch):
    whole = small_graph("gpt2")
    monkeypatch.setattr(rows, "MOST_TARGETS", 4)
    parts = attribute(small_model("gpt2"), small_transcoder(), small_tokens())
    size = np.abs(whole.adjacency).sum(1, keepdims=True) + np.abs(whole.bias)[:, None]
    assert (np.abs(parts.adjacency - whole.adjacency) <= 1e-5 * size).all()
    assert (np.abs(parts.bias - whole.bias) <= 1e-5 * size[:, 0]).all()


@pytest.mark.parametrize("model", EACH)
def test_targets_are_computed_without_the_positions_after_them(model, monkeypatch):
    graph, swept, original = small_graph(*model), [], rows._attribution_rows

    def counted(*given, positions, **options):
        swept.append(positions)
        return original(*given, positions=positions, **options)

    monkeypatch.setattr(rows, "_attribution_rows", counted)
    monkeypatch.setattr(rows, "MOST_TARGETS", 4)
    table = rows.ActiveFeatures.of(dense_features(graph))
    filler = rows.RowFiller(graph.replacement, graph.transcoder, table, positions=2)
    count = len(table.layer_X)
    with jax.default_matmul_precision("highest"):
        got, biases = filler.of_features(np.arange(count))
    assert set(swept) == {2, 4, TOKENS}
    whole, bias = graph.adjacency[:count], graph.bias[:count]
    size = np.abs(whole).sum(1, keepdims=True) + np.abs(bias)[:, None]
    assert (np.abs(got - whole) <= 1e-5 * size).all()
    assert (np.abs(biases - bias) <= 1e-5 * size[:, 0]).all()
    position = column(graph, "position")
    later = position[: graph.num_sources] > position[:count, None]
    assert later.any() and not got[later].any() and not whole[later].any()
    assert got[~later & (np.abs(whole) > 1e-4 * size)].all()


@pytest.mark.parametrize("model", EACH)
def test_rows_do_not_depend_on_whether_writes_are_stored(model, monkeypatch):
    graph = small_graph(*model)
    table = rows.ActiveFeatures.of(dense_features(graph))
    monkeypatch.setattr(rows, "MEMORY", 0)
    # Four positions at a time, the last time two and two that do not exist.
    width = graph.replacement.error_LTD.shape[2]
    monkeypatch.setattr(linear, "_GATHERED", 4 * table.layer_TZ.shape[1] * width)
    jax.clear_caches()
    filler = rows.RowFiller(graph.replacement, graph.transcoder, table)
    assert isinstance(filler.writes, linear.GatheredWrites)
    some = np.unique(np.linspace(0, len(table.layer_X) - 1, 9, dtype=int))
    with jax.default_matmul_precision("highest"):
        got, biases = filler.of_features(some)
    size = np.abs(graph.adjacency[some]).sum(1, keepdims=True) + np.abs(graph.bias[some])[:, None]
    assert (np.abs(got - graph.adjacency[some]) <= 1e-5 * size).all()
    assert (np.abs(biases - graph.bias[some]) <= 1e-5 * size[:, 0]).all()
    assert (np.abs(got).sum(1) > 0).any()


def test_a_maximum_of_features_keeps_those_of_most_influence():
    whole = small_graph("llama")
    logits = np.abs(whole.adjacency[-len(whole.probabilities) :].astype(np.float64))
    direct = whole.probabilities @ (logits / logits.sum(1, keepdims=True))
    count = int((column(whole, "kind") == "feature").sum())
    most = np.sort(np.argsort(-direct[:count])[:9])
    few = attribute(small_model("llama"), small_transcoder(), small_tokens(), max_features=9)
    assert list(few.row_nodes[:9]) == list(most) and len(few.row_nodes) == 9 + logits.shape[0]
    size = np.abs(whole.adjacency).sum(1, keepdims=True)[most]
    assert (np.abs(few.adjacency[:9] - whole.adjacency[most]) <= 1e-5 * size).all()
    assert few.certificate().max() <= 1e-5
    with pytest.raises(UsageError, match="raise max_features"):
        few.edge_weights([(0, int(np.setdiff1d(np.arange(count), most)[0]))])


def broken(transcoder, name):
    params = {**transcoder.params, name: transcoder.params[name].at[0].set(jnp.nan)}
    return transcoder.replace(params=params)


def silent(transcoder):
    bias_LF = jnp.full((LAYERS, FEATURES), -1e3)
    return transcoder.replace(params={**transcoder.params, "encoder_bias": bias_LF})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "ids of one prompt"),
        ({"tokens": [[1, 2]]}, "ids of one prompt"),
        ({"tokens": [1, -1]}, "outside the vocabulary"),
        ({"tokens": [1] * 65}, "shorten the prompt"),
        ({"targets": [1, 1]}, "different token ids"),
        ({"targets": []}, "different token ids"),
        ({"targets": [10**6]}, "targets: id 1000000"),
        ({"max_features": 0}, "at least 1"),
        # Made in the test: each process collects all tests, and runs some.
        ({"transcoder": lambda: broken(small_transcoder(), "encoder")}, "encoder.* not finite"),
        ({"transcoder": lambda: silent(small_transcoder())}, "none of its features is active"),
        ({"model": lambda: small_model("llama").above(1)}, "its num_layers is 3"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(changes, message):
    arguments = {
        "model": small_model("llama"),
        "transcoder": small_transcoder(),
        "tokens": small_tokens(),
    } | {name: value() if callable(value) else value for name, value in changes.items()}
    with pytest.raises(UsageError, match=message):
        attribute(**arguments)


@pytest.mark.parametrize("max_features", [None, 5])
@pytest.mark.parametrize("model", EACH)
def test_the_graph_of_a_logit_difference_has_the_difference_of_the_rows_by_logits(
    model, max_features
):
    blocks, transcoder, tokens = small_model(*model[:2]), small_transcoder(model[2]), small_tokens()
    first, second, third = 3, 7, 5
    each = attribute(blocks, transcoder, tokens, targets=[first, second, third])
    both = attribute(
        *(blocks, transcoder, tokens),
        targets=[first],
        against=[second, third],
        max_features=max_features,
    )
    is_logit = column(both, "kind")[both.row_nodes] == "logit"
    rows_KS = each.adjacency[-3:].astype(np.float64)
    (got_S,) = both.adjacency[is_logit].astype(np.float64)
    wanted_S = rows_KS[0] - rows_KS[1:].mean(0)
    # A product of a direction with what is written has as many roundings as both have terms, of
    # terms that are no larger than the largest of any row.
    D = blocks.cfg.hidden_size
    bound = 8 * D * 2.0**-24 * np.abs(rows_KS).max()
    np.testing.assert_allclose(got_S, wanted_S, rtol=0, atol=bound)
    assert np.abs(wanted_S).max() > 100 * bound
    # Rows of features are no others, and the row and its bias have the difference of the logits.
    features = both.row_nodes[~is_logit]
    if max_features is None:
        np.testing.assert_allclose(both.adjacency[:-1], each.adjacency[:-3], rtol=0, atol=bound)
    assert len(features) == (max_features or len(each.row_nodes) - 3)
    logits_V = np.asarray(run(blocks).hidden, np.float64)[0, -1] @ (
        np.asarray(unembedding(blocks.params, blocks.cfg), np.float64).T
    )
    difference = logits_V[first] - logits_V[[second, third]].mean()
    assert both.readings[-1] == pytest.approx(difference, rel=1e-5, abs=1e-5)
    total = got_S.sum() + float(both.bias[-1])
    assert total == pytest.approx(difference, rel=1e-4, abs=1e-4)
    assert both.against.tolist() == [second, third] and each.against is None


def test_a_logit_difference_is_of_different_tokens():
    blocks, transcoder, tokens = small_model("llama"), small_transcoder(), small_tokens()
    for against, message in (
        ([3], r"against: \[3\] are targets, too"),
        ([], "one at least"),
        ([4, 4], "must be different token ids"),
        ([10**6], "against"),
    ):
        with pytest.raises(UsageError, match=message):
            attribute(blocks, transcoder, tokens, targets=[3], against=against)


def test_rows_that_no_memory_holds_are_refused(monkeypatch):
    given = small_model("llama"), small_transcoder(), small_tokens()
    monkeypatch.setattr(rows.os, "sysconf", lambda name: 100)
    for most, size in ((None, r"\d+ rows of \d+ sources"), (3, r"13 rows of \d+ sources")):
        with pytest.raises(UsageError, match=rf"max_features: {size} are .* lower one"):
            attribute(*given, max_features=most)
