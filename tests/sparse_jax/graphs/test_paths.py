"""The strongest path of a graph against all paths of small ones."""

import itertools

import numpy as np
import pytest

from sparse_jax.graphs import graph_document, influence, paths
from sparse_jax.graphs.influence import ERROR, FEATURE, TOKEN, Edges
from tests.sparse_jax.graphs.test_influence import CHAIN, TOY
from tools.bench.graph_documents import synthetic

FEATURES = 5
KINDS = [*[FEATURE] * FEATURES, ERROR, ERROR, TOKEN, TOKEN, TOKEN]


def random_graph(seed, share):
    """Two logits over features in a shuffled order, each of which reads those before it in it."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(FEATURES)
    weight_RS = rng.normal(size=(FEATURES + 2, len(KINDS)))
    weight_RS *= rng.random(weight_RS.shape) < share
    for k, feature in enumerate(order):
        weight_RS[feature, order[k:]] = 0.0
    node_R = np.array([*range(FEATURES), -1, -1])
    start_R = np.array([0.0] * FEATURES + [0.6, 0.4])
    return Edges(weight_RS, node_R, start_R, np.array(KINDS), np.full(len(KINDS), -1))


def all_paths(edges, row):
    """Every path from a token to a row through any features, with its product."""
    share_RS = influence.normalised(edges)
    tokens = np.flatnonzero(edges.kind_S == TOKEN)
    for count in range(FEATURES + 1):
        for through in itertools.permutations(range(FEATURES), count):
            for token in tokens:
                sources = [int(token), *through]
                rows = [*through, row]
                product = np.prod([share_RS[r, s] for r, s in zip(rows, sources, strict=True)])
                if product > 0:
                    yield tuple(sources), float(product)


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_no_path_of_a_small_graph_is_stronger(seed, share):
    edges = random_graph(seed, share)
    for row in (FEATURES, FEATURES + 1):
        found = paths.strongest(edges, row)
        every = list(all_paths(edges, row))
        through = [one for one in every if len(one[0]) > 1] or every
        if not through:
            assert found is None
            continue
        sources, product = max(through, key=lambda one: one[1])
        assert found.sources == sources
        assert found.share == pytest.approx(product, rel=1e-14)


def test_the_products_of_all_paths_from_tokens_and_errors_are_the_whole_influence():
    edges = random_graph(3, 1.0)
    only_tokens = edges.without(edges.kind_S != ERROR)
    total = sum(product for _, product in all_paths(only_tokens, FEATURES))
    assert total == pytest.approx(1.0, rel=1e-12)


def test_the_strongest_path_of_graphs_by_hand():
    # From t0 through f0 and f1 to either logit; of the first .6, .9 of it read f1.
    assert paths.strongest(CHAIN, 3).sources == (4, 0, 1)
    assert paths.strongest(CHAIN, 3).share == pytest.approx(0.6 * 0.75, rel=1e-14)
    assert paths.strongest(CHAIN, 4).share == pytest.approx(0.9 * 0.75, rel=1e-14)
    assert paths.strongest(TOY, 1) == paths.StrongestPath((2, 0), 0.5)


def test_without_features_on_the_way_it_is_the_strongest_edge_from_a_token():
    edges = Edges(
        np.array([[0.0, 5.0, -3.0, 2.0]]),
        np.array([-1]),
        np.array([1.0]),
        np.array([FEATURE, ERROR, TOKEN, TOKEN]),
        np.full(4, -1),
    )
    assert paths.strongest(edges, 0) == paths.StrongestPath((2,), 0.3)


def test_of_a_document_the_path_is_in_indices_of_its_nodes():
    document = synthetic(features=1, layers=1, positions=1, logits=2, links=0)
    feature, _, token, a, b = document["nodes"]
    a["token_prob"], b["token_prob"] = 0.25, 0.75
    assert graph_document.likeliest_logit(document) == 4
    assert graph_document.strongest_path(document, 4) is None
    ends = [(feature, b, -3.0), (token, b, 1.0), (token, a, -2.0), (token, feature, 5.0)]
    document["links"] = [
        {"source": s["node_id"], "target": t["node_id"], "weight": w} for s, t, w in ends
    ]
    assert graph_document.strongest_path(document, 4) == paths.StrongestPath((2, 0), 0.75)
    assert graph_document.strongest_path(document, 3) == paths.StrongestPath((2,), 1.0)
