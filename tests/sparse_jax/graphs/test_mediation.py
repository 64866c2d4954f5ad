"""Mediation by heads and key-query pairs against removal of each (paper, Eq. 7), in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax import graphs
from sparse_jax.graphs.mediation import by_source, mediate
from tests import rounding
from tests.sparse_jax.graphs.small_graphs import EACH, LAYERS, MODELS, TOKENS, small_graph, widened


def pairs(graph):
    """Sources of every kind, with a late target, the last logit and an early one."""
    kinds = np.asarray(graph.nodes["kind"].to_pylist())
    layers = np.asarray(graph.nodes["layer"].fill_null(-1).to_pylist())
    is_feature = kinds == "feature"
    early = int(np.flatnonzero(is_feature & (layers == 0))[0])
    late = int(np.flatnonzero(is_feature & (layers == LAYERS - 1))[-1])
    logit = int(np.flatnonzero(kinds == "logit")[0])
    error = int(np.flatnonzero((kinds == "error") & (layers == 0))[1])
    token = int(np.flatnonzero(kinds == "token")[0])
    middle = int(np.flatnonzero(is_feature & (layers == 1))[-1])
    return [(early, late), (early, logit), (error, logit), (token, late), (token, middle)]


def removed_edges(replacement, pattern_BLNTS, sources, targets, x):
    """Edge x in frozen models with other patterns, `[B]`: a forward pass written out."""
    r = replacement

    def centre(v):
        return v - v.mean(-1, keepdims=True) if r.layers.centred else v

    at, target_at = int(sources.position_X[x]), int(targets.position_X[x])
    target_layer, vector_D = int(targets.layer_X[x]), np.asarray(targets.vector_XD[x])
    B, L = pattern_BLNTS.shape[:2]
    stream_BTD = np.zeros((B, *r.token_TD.shape))
    stream_BTD[:, at] = sources.embedding_XD[x]
    for layer in range(L):
        h_BTD = centre(stream_BTD) * np.asarray(r.layers.norm_LTD[layer])
        o_BTD = mixed(r.layers.mixer, layer, h_BTD, pattern_BLNTS[:, layer])
        if r.layers.post_norm_LTD is not None:
            o_BTD = centre(o_BTD) * np.asarray(r.layers.post_norm_LTD[layer])
        middle_BTD = stream_BTD + o_BTD
        if target_layer == layer:
            read_BTD = stream_BTD if r.layers.parallel else middle_BTD
            return read_BTD[:, target_at] @ vector_D
        middle_BTD[:, at] += sources.write_XLD[x, layer]
        stream_BTD = middle_BTD
    return stream_BTD[:, target_at] @ vector_D


def mixed(mixer, layer, h_BTD, pattern_BNTS):
    """Output of attention, or of prototypes, with these patterns."""
    N, T = pattern_BNTS.shape[1:3]
    if hasattr(mixer, "value_LDKH"):
        v_BTKH = np.einsum("btd,dkh->btkh", h_BTD, mixer.value_LDKH[layer])
        v_BTNH = v_BTKH[:, :, np.arange(N) // (N // v_BTKH.shape[2])]
        z_BTNH = np.einsum("bnts,bsnh->btnh", pattern_BNTS, v_BTNH)
        return np.einsum("btnh,nhd->btd", z_BTNH, mixer.output_LNHD[layer])
    v_BTE, taps_CE = h_BTD @ mixer.value_LDE[layer], mixer.taps_LCE[layer]
    last = len(taps_CE) - 1
    convolved = [
        sum(taps_CE[last - c] * v_BTE[:, t - c] for c in range(min(last, t) + 1)) for t in range(T)
    ]
    z_BTE = np.einsum("bnts,bse->bte", pattern_BNTS, np.stack(convolved, 1))
    return z_BTE @ mixer.output_LED[layer]


# The last have grouped keys, rotations, and layer norm with biases at once; and layer norm with
# biases after attention too.
@pytest.mark.parametrize("model", [*MODELS, ("grouped", None, None), ("sandwich", None, None)])
def test_the_share_of_every_pair_is_what_its_removal_takes_from_the_edge(model):
    graph = small_graph(*model)
    chosen = np.array(pairs(graph))
    arrays = graph.replacement, graph.sources(chosen[:, 0]), graph.targets(chosen[:, 1])
    with jax.enable_x64(True):
        wide = widened(arrays)
        mediation = jax.jit(mediate)(*wide)
        wide = jax.tree.map(np.asarray, wide)
        pattern_LNTS = np.asarray(wide[0].layers.mixer.pattern_LNTS)
        L, N, T, S = pattern_LNTS.shape
        entries = np.indices((L, N, T, S)).reshape(4, -1)
        removed = np.broadcast_to(pattern_LNTS, (entries.shape[1], L, N, T, S)).copy()
        removed[np.arange(len(removed)), *entries] = 0.0
        edges, shares = [], 0
        for x in range(len(chosen)):
            edge = removed_edges(wide[0], pattern_LNTS[None], *wide[1:], x)[0]
            expected = edge - removed_edges(wide[0], removed, *wide[1:], x)
            expected_LNTS = expected.reshape(L, N, T, S)
            scale = np.abs(expected_LNTS).sum()
            got_LNTS = np.asarray(mediation.score_XLNTS[x])
            np.testing.assert_allclose(got_LNTS, expected_LNTS, atol=1e-12 * scale, rtol=0)
            assert scale > 0
            shares += np.count_nonzero(expected_LNTS)
            # Whole heads: a path passes a layer once, so that pairs of a layer sum.
            head_LN = np.zeros((L, N))
            for layer, head in np.ndindex(L, N):
                without = pattern_LNTS.copy()
                without[layer, head] = 0.0
                kept = removed_edges(wide[0], without[None], *wide[1:], x)[0]
                head_LN[layer, head] = edge - kept
            np.testing.assert_allclose(got_LNTS.sum((2, 3)), head_LN, atol=1e-12 * scale, rtol=0)
            edges.append(edge)
        assert shares > 100
        assert mediation.certificate(np.array(edges)).max() <= 1e-12
        total = np.asarray(mediation.score_XLNTS).sum((1, 2, 3, 4))
        np.testing.assert_allclose(mediation.over_count(np.array(edges)), total / edges)
    np.testing.assert_allclose(graph.edge_weights(chosen), edges, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "model", [("llama", None, None), ("gpt2", 0.3, 2), ("grouped", None, None)]
)
def test_shares_in_float32_are_within_rounding(model):
    graph = small_graph(*model)
    chosen = np.array(pairs(graph))

    def shares(replacement, sources, targets):
        return mediate(replacement, sources, targets).score_XLNTS

    arrays = graph.replacement, graph.sources(chosen[:, 0]), graph.targets(chosen[:, 1])
    wanted = rounding.expected(shares, *arrays)
    got = np.concatenate([np.asarray(m.score_XLNTS) for m in graph.mediations(chosen, batch=2)])
    rounding.assert_within(got, wanted)
    # The bar: 1e-5 of the sum of absolute shares of the edge.
    sum_X = np.abs(wanted.values).sum((1, 2, 3, 4))
    assert (np.abs(got - wanted.values).max((1, 2, 3, 4)) <= 1e-5 * sum_X).all()
    for (source, target), score_LNTS in zip(chosen[:1], got, strict=False):
        share_LNTS = graph.mediation(int(source), int(target))
        rounding.assert_same(share_LNTS, score_LNTS, jax.tree.map(lambda x: x[0], wanted))


def test_a_batch_holds_no_more_ends_than_edges_whatever_their_order(monkeypatch):
    graph, batch = small_graph("llama"), 8
    rows, columns = np.nonzero(graph.adjacency)
    some = np.random.default_rng(0).choice(len(rows), 45, replace=False)
    chosen = np.stack([columns[some], graph.row_nodes[rows[some]]], 1)
    up, down = [], []
    tangents, mediate_edges = graphs.graph._tangents, graphs.graph._mediate_edges

    def counted_up(replacement, sources):
        up.append(len(sources.position_X))
        return tangents(replacement, sources)

    def counted_down(replacement, sources, kept, source_X, targets, target_X, open_L3P, **options):
        ends = sources.position_X, targets.layer_X, source_X, target_X
        down.append(tuple(map(len, ends)))
        return mediate_edges(replacement, sources, kept, source_X, targets, target_X, open_L3P)

    monkeypatch.setattr(graphs.graph, "_tangents", counted_up)
    monkeypatch.setattr(graphs.graph, "_mediate_edges", counted_down)
    parts = list(graph.mediations(chosen, batch=batch))
    assert [len(part.layer_X) for part in parts] == [8, 8, 8, 8, 8, 5]
    assert len(down) == 6 and np.max(down) == batch and len(set(down)) <= 4
    assert len(up) <= 6 and set(up) == {batch}
    # In the order given, the shares of every edge by itself.
    arrays = graph.replacement, graph.sources(chosen[:, 0]), graph.targets(chosen[:, 1])
    wanted = rounding.expected(lambda *given: mediate(*given).score_XLNTS, *arrays)
    rounding.assert_within(np.concatenate([part.score_XLNTS for part in parts]), wanted)
    certificate = [
        part.certificate(graph.edge_weights(chosen[8 * k : 8 * (k + 1)])).max()
        for k, part in enumerate(parts)
    ]
    assert max(certificate) <= 1e-5
    # By source, one pass for each of them; by target in that, as few as there are in a batch.
    up.clear()
    down.clear()
    both = []
    for part in by_source(chosen, batch):
        both += part.tolist()
        assert len(np.unique(part[:, 0])) <= batch and (np.diff(part[:, 1]) >= 0).all()
        assert sum(len(each.layer_X) for each in graph.mediations(part, batch=batch)) == len(part)
    assert sorted(both) == sorted(chosen.tolist())
    assert len(up) == -(-len(np.unique(chosen[:, 0])) // batch)
    of_one = np.repeat(chosen[:1], batch, 0)
    down.clear()
    next(graph.mediations(of_one, batch=batch))
    # Few numbers of targets are compiled: quarters of a batch.
    assert down == [(batch, batch // 4, batch, batch)]


@pytest.mark.parametrize("model", EACH)
def test_every_layer_accounts_for_the_whole_edge(model):
    graph = small_graph(*model)
    chosen = np.array(pairs(graph))
    (mediation,) = graph.mediations(chosen)
    edge_X = graph.edge_weights(chosen)
    certificate_XL = mediation.certificate(edge_X)
    assert certificate_XL.shape == (len(chosen), LAYERS) and certificate_XL.max() <= 1e-5
    for part in ("score_XLNTS", "bypass_XL", "late_XL"):
        without = mediation.replace(**{part: jnp.zeros_like(getattr(mediation, part))})
        assert without.certificate(edge_X).max() > 1e-3


def test_closed_pairs_have_no_share():
    graph = small_graph("gpt2", 0.3, 2)
    pattern_LNTS = np.asarray(graph.replacement.layers.mixer.pattern_LNTS)
    causal = np.tril(np.ones((TOKENS, TOKENS), bool))
    closed = (pattern_LNTS == 0) & causal[None, None]
    assert closed.any()
    for pair in pairs(graph):
        assert not graph.mediation(*pair)[closed].any()


@pytest.mark.parametrize("model", [("llama", None, None), ("gpt2", 0.3, 2)])
def test_open_pairs_alone_give_the_same_shares(model, monkeypatch):
    graph = small_graph(*model)
    chosen = np.array(pairs(graph))
    arrays = graph.replacement, graph.sources(chosen[:, 0]), graph.targets(chosen[:, 1])
    wanted = rounding.expected(lambda *given: mediate(*given).score_XLNTS, *arrays)
    # Here every pattern is sparse enough; one of the graph's own is not.
    assert graph._open_pairs is None
    monkeypatch.setattr(graphs.graph, "_GATHERED", 1 / 16)
    gathered = dataclasses.replace(graph)
    (got,) = (m.score_XLNTS for m in gathered.mediations(chosen))
    rounding.assert_within(got, wanted)
    pattern_LNTS = np.asarray(graph.replacement.layers.mixer.pattern_LNTS)
    open_L3P = gathered._open_pairs
    L, N = pattern_LNTS.shape[:2]
    for layer_3P, pattern_NTS in zip(open_L3P, pattern_LNTS, strict=True):
        listed = layer_3P[:, layer_3P[0] < N]
        np.testing.assert_array_equal(listed, np.nonzero(pattern_NTS))
    assert open_L3P.shape[0] == L and not np.asarray(got)[:, pattern_LNTS == 0].any()
    # Prototypes have no closed gates.
    assert dataclasses.replace(small_graph("protot"))._open_pairs is None


def test_prototypes_mediate_from_strictly_earlier_tokens():
    graph = small_graph("protot")
    earlier = np.tril(np.ones((TOKENS, TOKENS), bool), -1)
    for pair in pairs(graph):
        share_LNTS = graph.mediation(*pair)
        assert share_LNTS.shape == (LAYERS, 3, TOKENS, TOKENS)
        assert not share_LNTS[..., ~earlier].any()
        assert share_LNTS.any((0, 2, 3)).all()


def test_nodes_that_are_no_source_or_target_are_refused():
    graph = small_graph("llama")
    last = graph.nodes.num_rows - 1
    with pytest.raises(UsageError, match=f"source: node {last} is a bias"):
        graph.mediation(last, 0)
    with pytest.raises(UsageError, match=r"target: node .* is a token"):
        graph.mediation(0, graph.num_sources - 1)
    with pytest.raises(UsageError, match=r"nodes are 0\.\."):
        graph.mediation(last + 1, 0)
