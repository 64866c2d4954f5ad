"""Influence, pruning and scores on graphs worked out by hand."""

import dataclasses

import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.graphs import influence
from sparse_jax.graphs.influence import ERROR, FEATURE, TOKEN, Edges
from tests.sparse_jax.graphs.small_graphs import MODELS, small_graph

# One feature, its error, one token: the logit reads feature and error in halves, the feature the
# token alone.
TOY = Edges(
    weight_RS=np.array([[0.0, 0.0, -3.0], [2.0, -2.0, 0.0]]),
    node_R=np.array([0, -1]),
    start_R=np.array([0.0, 1.0]),
    kind_S=np.array([FEATURE, ERROR, TOKEN]),
    error_S=np.array([1, -1, -1]),
)

# Two logits, three features f0 <- t0, f1 <- f0 and t1, f2 <- t1 with an error e0 of f0 and f1.
#                  f0   f1   f2   e0   t0   t1
CHAIN = Edges(
    weight_RS=np.array(
        [
            [0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
            [3.0, 0.0, 0.0, 0.0, 0.0, -1.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.1],
            [0.0, 6.0, 0.0, 3.0, 0.0, 1.0],
            [0.0, 9.0, 1.0, 0.0, 0.0, 0.0],
        ]
    ),
    node_R=np.array([0, 1, 2, -1, -1]),
    start_R=np.array([0.0, 0.0, 0.0, 0.5, 0.25]),
    kind_S=np.array([FEATURE] * 3 + [ERROR] + [TOKEN] * 2),
    error_S=np.array([3, 3, 3, -1, -1, -1]),
)


def test_completeness_of_the_toy_is_four_fifths_over_all_nodes_and_two_thirds_with_inputs():
    scores = influence.scores(TOY)
    assert scores.completeness == pytest.approx(0.8, abs=1e-15)
    assert scores.completeness_with_inputs == pytest.approx(2 / 3, abs=1e-15)
    assert scores.replacement == pytest.approx(0.5, abs=1e-15)


def test_influence_sums_over_all_paths_to_the_logits():
    f1 = 0.5 * 0.6 + 0.25 * 0.9
    f2 = 0.25 * 0.1
    expected = [0.75 * f1, f1, f2, 0.5 * 0.3, 0.75 * f1, 0.5 * 0.1 + 0.25 * f1 + f2]
    np.testing.assert_allclose(influence.influence(CHAIN), expected, rtol=1e-14)
    cycle = CHAIN.weight_RS.copy()
    cycle[0, 1] = 1.0
    with pytest.raises(UsageError, match="has a cycle"):
        influence.influence(dataclasses.replace(CHAIN, weight_RS=cycle))


def test_pruning_keeps_the_fewest_nodes_with_the_share_and_drops_those_without_edges():
    # In order of influence: f1 .525, f0 and t0 .39375, t1 .20625, e0 .15, f2 .025; sum 1.69375.
    pruned = influence.prune(CHAIN, node_threshold=0.8, edge_threshold=1.0)
    assert list(pruned.kept_S) == [True, True, False, False, True, True]
    assert not pruned.kept_RS[2].any() and not pruned.kept_RS[:, [2, 3]].any()
    shares = np.array([0.91875, 0.525, 1.69375, 1.66875, 1.3125, 1.51875]) / 1.69375
    np.testing.assert_allclose(pruned.share_S, shares, rtol=1e-14)
    # Rows are divided by what is left: the first logit reads f1 in 6/7 and t1 in 1/7.
    through_f1 = 0.5 * 6 / 7 + 0.25
    expected = np.zeros((5, 6))
    expected[3, [1, 5]] = 0.5 * 6 / 7, 0.5 / 7
    expected[4, 1] = 0.25
    expected[1, [0, 5]] = 0.75 * through_f1, 0.25 * through_f1
    expected[0, 4] = 0.75 * through_f1
    np.testing.assert_allclose(pruned.score_RS, expected, rtol=1e-14)
    # Scores .509, .509, .429, .25, .170, .071 of 1.938: 80 % are the first four; f1's row and the
    # paths into both logits stay.
    some = influence.prune(CHAIN, node_threshold=0.8, edge_threshold=0.8)
    kept = {(0, 4), (1, 0), (3, 1), (4, 1)}
    assert set(zip(*map(list, np.nonzero(some.kept_RS)), strict=True)) == kept
    # Without an edge into a logit all that led there goes too.
    few = influence.prune(CHAIN, node_threshold=0.8, edge_threshold=0.5)
    assert set(zip(*map(list, np.nonzero(few.kept_RS)), strict=True)) == set()
    assert list(few.kept_S) == [False, False, False, False, True, True]


def test_scores_of_a_pruned_graph_count_what_was_removed_as_error():
    kept = np.array([True, False, True, True, True, True])
    weights = CHAIN.weight_RS.copy()
    weights[:, 3] += weights[:, 1]
    weights[:, 1] = 0.0
    weights[1] = 0.0
    moved = influence.scores(dataclasses.replace(CHAIN, weight_RS=weights))
    assert influence.scores(CHAIN, kept) == moved
    assert moved.replacement < influence.scores(CHAIN).replacement
    # Signed columns are added before absolute values are taken.
    for weight in (2.0, -2.0):
        logit = [weight, -weight, 1.0]
        opposite = dataclasses.replace(TOY, weight_RS=np.array([[0.0, 0.0, 1.0], logit]))
        assert influence.scores(opposite, np.array([False, True, True])).replacement == 1.0


@pytest.mark.parametrize("model", MODELS[:2])
def test_the_pruned_scores_of_all_nodes_are_the_unpruned_ones(model):
    graph = small_graph(*model)
    everything = graph.prune(node_threshold=1.0, edge_threshold=1.0)
    assert everything.kept_S.all() and everything.kept_RS.all()
    scores = graph.scores(everything)
    assert scores.pruned == scores.unpruned
    usual = graph.scores()
    assert usual.unpruned == scores.unpruned
    assert usual.pruned.replacement < usual.unpruned.replacement
    # The errors named by the graph are those at the layer and position of each feature.
    edges, rows = graph.edges(), graph.nodes.to_pylist()
    for i in np.flatnonzero(edges.kind_S == FEATURE):
        error = rows[edges.error_S[i]]
        assert (error["kind"], error["layer"], error["position"]) == (
            *("error", rows[i]["layer"]),
            rows[i]["position"],
        )


@pytest.mark.parametrize("name", ["node_threshold", "edge_threshold"])
@pytest.mark.parametrize("value", [0.0, 1.5, float("nan")])
def test_thresholds_out_of_range_are_refused(name, value):
    with pytest.raises(UsageError, match=name):
        influence.prune(TOY, **{name: value})
