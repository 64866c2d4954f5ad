"""Attention scores by sources against the forward pass: sums, single terms, files, bad input.

Bounds are of the float32 computation from the weights on, derived by `iaj_kernels.rounding`.
"""

import copy
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.frozen import frozen_sites
from lm_jax.model.sites import keep
from sparse_jax.graphs import attribute, graph_json, linear, qk
from sparse_jax.graphs.replacement import record
from sparse_jax.graphs.rows import ActiveFeatures
from sparse_jax.graphs.scores import freeze_scores
from tests import rounding
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.graphs.small_graphs import (
    EACH_WITH_SCORES,
    LAYERS,
    TOKENS,
    active_writes,
    dense_features,
    small_graph,
    small_model,
    small_tokens,
    small_transcoder,
    source_nodes,
    with_each_doubled,
)
from tests.sparse_jax.graphs.test_graph_json import written

# Above all features, with grouped keys of the second group, at different positions.
PLACE = LAYERS - 1, 3, 4, 2


def place(model):
    return PLACE[0], min(PLACE[1], model.cfg.num_heads - 1), *PLACE[2:]


def all_terms(model, transcoder, feature_LTF):
    """Terms of all sources and the bias, and their sum; `feature_LTF` tells which are active."""
    replacement, own_LTF = record(model, transcoder, jnp.asarray(small_tokens(), jnp.int32))
    table = ActiveFeatures.of(feature_LTF)
    writes = active_writes(transcoder, table, own_LTF)
    targets = qk.targets(replacement, *place(model))
    rows = linear.attribution_rows(replacement, writes, targets, entering=True)
    X = len(rows.bias_X)
    parts = [
        rows.feature_XTZ[:, table.position_X, table.slot_X],
        rows.error_XLT.reshape(X, -1),
        rows.token_XT,
        rows.bias_X[:, None],
    ]
    query_HS, key_HS = jnp.split(jnp.concatenate(parts, 1), 2)
    terms_SS = replacement.scores.scale * query_HS.T @ key_HS
    return terms_SS, terms_SS.sum()


@pytest.mark.parametrize("each", EACH_WITH_SCORES)
def test_terms_are_those_of_the_forward_pass(each):
    """Each pair: what both sources, doubled with all else frozen, add to the query and the key."""
    graph = small_graph(*each)
    model, transcoder = small_model(*each[:2]), small_transcoder(each[2])
    feature_LTF = dense_features(graph)
    layer, head, query, key = place(model)
    nodes = source_nodes(graph)
    group = model.cfg.num_heads // model.cfg.num_kv_heads

    def from_runs(model, transcoder):
        sites = ("attn.rot_q", "attn.rot_k")
        clean, runs = with_each_doubled(model, transcoder, nodes, sites)
        at = {"attn.rot_q": (query, head), "attn.rot_k": (key, head // group)}
        (query_1H, query_SH), (key_1H, key_SH) = [
            [x.records[site][layer, :, position, h] for x in (clean, runs)]
            for site, (position, h) in at.items()
        ]
        shifts = query_SH - query_1H, key_SH - key_1H
        score = model.cfg.scale * (query_1H[0] @ key_1H[0])
        return model.cfg.scale * shifts[0] @ shifts[1].T, score

    def from_graph(model, transcoder):
        return all_terms(model, transcoder, feature_LTF)

    wanted = oracle.expected(from_graph, model, transcoder)
    runs = oracle.expected(from_runs, model, transcoder)
    # Two computations in float64.
    terms, bounds = wanted.values[0][:-1, :-1], wanted.bounds[0][:-1, :-1] + runs.bounds[0]
    allowed = oracle.in_float64(bounds)
    assert (np.abs(terms - runs.values[0]) <= allowed).all()
    score_bound = oracle.in_float64(wanted.bounds[1] + runs.bounds[1])
    assert abs(wanted.values[1] - runs.values[1]) <= score_bound
    # And the one in float32, whose sources that do not reach the head are left out.
    found = graph.qk(layer, head, query, key)
    at = np.append(np.arange(len(nodes)), graph.nodes.num_rows - 1)
    rows = np.searchsorted(at, found.nodes)
    assert (at[rows] == found.nodes).all()
    got = np.zeros(wanted.values[0].shape)
    got[np.ix_(rows, rows)] = found.terms
    rounding.assert_within(got, oracle.part(wanted, 0))
    assert abs(found.score - wanted.values[1]) <= runs.bounds[1]
    assert abs(found.total - found.score) <= wanted.bounds[1] + runs.bounds[1]
    assert np.abs(wanted.values[0]).max() > 10 * wanted.bounds[0].max()


def test_the_score_is_that_before_a_soft_cap():
    model = small_model("gemma")
    cap = 0.7
    capped = model.replace(cfg=dataclasses.replace(model.cfg, score_softcap=cap))
    graph = attribute(capped, small_transcoder(2), small_tokens())
    tokens_BT = jnp.asarray(small_tokens(), jnp.int32)[None]
    run = capped.forward(tokens_BT, jnp.ones_like(tokens_BT, bool), record={"attn.scores": keep})
    for layer, head, query, key in ((0, 1, 3, 3), (1, 2, 4, 1), (2, 3, 5, 4)):
        found = graph.qk(layer, head, query, key)
        shown = float(run.records["attn.scores"][layer, 0, head, query, key])
        assert abs(cap * np.tanh(found.score / cap) - shown) <= 1e-5 * cap
        assert abs(found.score - shown) > 1e-3
        assert found.certificate() <= 1e-5


@pytest.mark.parametrize("each", EACH_WITH_SCORES)
def test_all_terms_sum_to_the_score(each):
    graph = small_graph(*each)
    for layer, query, key in ((0, 3, 1), (1, 5, 5), (2, 4, 0)):
        found = graph.qk(layer, 1, query, key)
        assert found.certificate() <= 1e-5 and abs(found.score) > 1e-4
        assert abs(found.terms.sum() - found.total) <= 1e-12 * np.abs(found.terms).sum()


def test_norms_that_have_no_frozen_form():
    model = small_model("olmo2")
    cfg = dataclasses.replace(model.cfg, norm="layer")
    with pytest.raises(UsageError, match="norm_placement = 'post' has no frozen form"):
        frozen_sites(cfg, model.mixer)
    mixer = model.params["blocks"]["mixer"]
    with pytest.raises(UsageError, match="qk_norm = 'projection' with norm = 'layer'"):
        freeze_scores(mixer, jnp.zeros(()), {}, cfg, model.mixer)


def test_the_largest_contributions_are_those_of_all_pairs():
    graph = small_graph("gpt2", 0.3, 2)
    found = graph.qk(2, 1, 4, 2)
    terms = found.terms
    top = found.top(4)
    order = np.argsort(-np.abs(terms), axis=None)[:4]
    for (q, k, value), at in zip(top.pairs, order, strict=True):
        i, j = np.unravel_index(at, terms.shape)
        assert (q, k) == (found.nodes[i], found.nodes[j]) and value == terms[i, j]
    for part, marginal in ((top.queries, terms.sum(1)), (top.keys, terms.sum(0))):
        order = np.argsort(-np.abs(marginal))[:4]
        assert [node for node, _ in part] == list(found.nodes[order])
        np.testing.assert_allclose([v for _, v in part], marginal[order], rtol=1e-12)
    # Nothing reaches a head from its own layer on, nor from positions after it.
    kinds = graph.kinds[found.nodes]
    layers, positions = (
        np.asarray(graph.nodes[name].fill_null(-1))[found.nodes] for name in ("layer", "position")
    )
    assert layers.max() == 1 and positions.max() == 4 and set(kinds) >= {"feature", "bias"}


@functools.cache
def with_scores():
    graph = small_graph("gpt2", 0.3, 2)
    pruned = graph.prune()
    return written(graph, pruned, scores=[graph.qk(2, 1, 4, 2), graph.qk(1, 0, 3, 0)]), pruned


def test_a_file_holds_scores_with_all_nodes_that_make_them(tmp_path):
    graph = small_graph("gpt2", 0.3, 2)
    document, pruned = with_scores()
    plain = written(graph, pruned)
    assert document["nodes"] == plain["nodes"] and document["links"] == plain["links"]
    ids = {node["node_id"] for part in ("nodes", "qk_only_nodes") for node in document[part]}
    entry = document["qk"][0]
    found = graph.qk(2, 1, 4, 2)
    assert (entry["layer"], entry["head"], entry["query"], entry["key"]) == (2, 1, 4, 2)
    assert entry["score"] == found.score
    values = [value for *_, value in entry["pair_wise_contributors"]]
    assert values == [value for *_, value in found.top().pairs]
    named = {node for *nodes, _ in entry["pair_wise_contributors"] for node in nodes}
    assert named <= ids and document["qk_only_nodes"] and "bias" in ids
    graph_json.write(tmp_path / "a.json", document)
    assert graph_json.read(tmp_path / "a.json")["qk"][1]["query"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["qk"][0].pop("head"), r"qk\[0\] has no head"),
        (lambda d: d["qk"][0].update(layer=-1), r"qk\[0\] has layer = -1"),
        (lambda d: d["qk"][1].update(key=5), r"qk\[1\] has key 5 and query 3 of 6 tokens"),
        (lambda d: d["qk"][0].update(score=float("nan")), r"qk\[0\] has score nan"),
        (
            lambda d: d["qk"][0]["pair_wise_contributors"][0].__setitem__(1, "9_9_9"),
            r"pair_wise_contributors with '9_9_9', which is no node",
        ),
        (
            lambda d: d["qk"][0]["top_k_marginal_contributors"][0].append(1.0),
            r"qk\[0\] has top_k_marginal_contributors with \[",
        ),
        (
            lambda d: d["qk"][0]["top_q_marginal_contributors"][0].__setitem__(1, float("inf")),
            r"top_q_marginal_contributors with value inf",
        ),
        (
            lambda d: d["qk_only_nodes"].append(copy.deepcopy(d["nodes"][0])),
            r"two nodes have the id",
        ),
        (
            lambda d: d["links"][0].update(source=d["qk_only_nodes"][0]["node_id"]),
            r"links\[0\].source = .* is no node",
        ),
        (lambda d: d.update(qk={}), r"qk is no list"),
    ],
)
def test_files_with_other_scores_are_refused(change, message):
    document = copy.deepcopy(with_scores()[0])
    change(document)
    with pytest.raises(BadInputError, match=message):
        graph_json.check(document, "the file")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((LAYERS, 0, 0, 0), "layer = 3 is outside 0..2"),
        ((0, 4, 0, 0), "head = 4 is outside 0..3"),
        ((0, 0, TOKENS, 0), "query = 6 is outside 0..5"),
        ((0, 0, 2, 3), "key = 3 must be within 0..2"),
    ],
)
def test_scores_that_are_not_there_are_refused(place, message):
    graph = small_graph("llama")
    with pytest.raises(UsageError, match=f"qk: {message}"):
        graph.qk(*place)


def test_a_mixer_without_queries_and_keys_has_no_scores():
    graph = small_graph("protot")
    assert graph.replacement.scores is None
    with pytest.raises(UsageError, match="qk: this model's mixer has no attention scores"):
        graph.qk(0, 0, 0, 0)
