"""Groups of sources: sums of columns with all frozen, runs set by hand where features respond.

Tolerances are those of `test_interventions`, for as many sources as a group has.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.graphs import interventions, scale_groups, score_groups
from sparse_jax.graphs.effects import MODES
from sparse_jax.transcoders.substitution import substitute
from tests.sparse_jax.graphs.small_graphs import (
    EACH,
    small_graph,
    small_model,
    small_tokens,
    small_transcoder,
)
from tests.sparse_jax.graphs.test_interventions import random_sources, set_by_hand

FACTORS = (0.0, -5.0, -10.0)


def mixed_group(graph, features):
    """Features of all layers, an error and a token."""
    others = [random_sources(graph, 1, kinds=(kind,))[0] for kind in ("error", "token")]
    return random_sources(graph, features, kinds=("feature",)) + others


@pytest.mark.parametrize("each", EACH)
def test_with_all_frozen_the_effect_of_a_group_is_the_sum_of_its_columns(each):
    graph = small_graph(*each)
    groups = [random_sources(graph, 3), mixed_group(graph, 6), random_sources(graph, 1)]
    effects = scale_groups(
        small_model(*each[:2]), graph, groups, factors=FACTORS, modes=("frozen",), batch=4
    )
    weight_KS = graph.adjacency[-len(graph.probabilities) :].astype(np.float64)
    for g, group in enumerate(groups):
        for f, factor in enumerate(FACTORS):
            wanted_K = (factor - 1.0) * weight_KS[:, group].sum(1)
            np.testing.assert_allclose(effects.predicted_GFK[g, f], wanted_K, rtol=1e-12)
            got_K = effects.outcomes["frozen"].change_GFK[g, f]
            size_K = np.abs(weight_KS[:, group]).sum(1)
            times = abs(factor - 1.0)
            assert (np.abs(got_K - wanted_K) <= times * (len(group) * 1e-5 + 1e-3 * size_K)).all()
    assert np.abs(effects.predicted_GFK).max() > 1


@pytest.mark.parametrize("each", [("llama", 0.3, 1)])
def test_members_are_set_and_all_others_respond(each):
    graph, model, transcoder = small_graph(*each), small_model(*each[:2]), small_transcoder(each[2])
    group = mixed_group(graph, 6)
    layers = {graph.nodes["layer"][node].as_py() for node in group if graph.kinds[node] != "token"}
    assert len(layers) > 1
    effects = scale_groups(model, graph, [group, group[:2]], factors=(-5.0, 0.0), batch=3)
    found = []
    for mode in ("attention_frozen", "free"):
        outcome = effects.outcomes[mode]
        for f, factor in enumerate(effects.factors):
            frozen = mode == "attention_frozen"
            wanted_R = set_by_hand(model, transcoder, graph, group, factor, frozen)
            wanted_K = wanted_R[-len(graph.probabilities) :]
            got_K = outcome.change_GFK[0, f]
            np.testing.assert_allclose(got_K, wanted_K, atol=5e-4, rtol=1e-3)
            found.append(got_K)
        # Probabilities are those of the model's logits, of which nodes have the demeaned ones.
        np.testing.assert_allclose(outcome.clean_probability_K, graph.probabilities, rtol=1e-4)
        odds_K = np.log(outcome.probability_GFK[0, 0] / outcome.clean_probability_K)
        shift_K = odds_K - outcome.change_GFK[0, 0]
        np.testing.assert_allclose(shift_K, shift_K[0], atol=1e-3)
        assert (np.diff(outcome.top_probability_GFn) <= 0).all()
    # No mode and no factor passes for another.
    for i, one in enumerate(found):
        for other in found[:i]:
            assert np.abs(one - other).max() > 2e-3


def test_a_factor_of_one_changes_no_bit():
    graph, model = small_graph("llama", 0.3, 1), small_model("llama", 0.3)
    effects = scale_groups(
        model, graph, [mixed_group(graph, 6), random_sources(graph, 3)], factors=(1.0, -5.0)
    )
    assert not effects.predicted_GFK[:, 0].any()
    for outcome in effects.outcomes.values():
        assert not outcome.change_GFK[:, 0].any()
        clean_GK = np.broadcast_to(outcome.clean_probability_K, outcome.probability_GFK[:, 0].shape)
        np.testing.assert_array_equal(outcome.probability_GFK[:, 0], clean_GK)
        assert outcome.change_GFK[:, 1].all()


@jax.jit
def _last_hidden(model, transcoder, error_LTD):
    """Of the model whose MLPs are a transcoder and errors."""
    tokens_BT = jnp.asarray(small_tokens(), jnp.int32)[None]
    edits = substitute(transcoder, jnp.ones(tokens_BT.shape, bool), written_LBTD=error_LTD[:, None])
    run = model.forward(tokens_BT, jnp.ones_like(tokens_BT, bool), edits=edits)
    return run.hidden[0, -1], run.logits[0, -1]


def test_a_factor_of_zero_is_the_transcoder_without_these_features():
    graph, model = small_graph("llama", 0.3, 1), small_model("llama", 0.3)
    transcoder = small_transcoder(1)
    # In the first layer no feature depends on another: elsewhere these stay inactive.
    rows = graph.nodes.slice(0, int((graph.kinds == "feature").sum())).to_pylist()
    first = [row["feature"] for row in rows if row["layer"] == 0]
    some = sorted(set(first))[:2]
    group = [i for i, row in enumerate(rows) if row["layer"] == 0 and row["feature"] in some]
    assert len(group) > 2
    theta_LF = transcoder.params["log_threshold"].at[0, jnp.asarray(some)].set(50.0)
    without = dataclasses.replace(
        transcoder, params={**transcoder.params, "log_threshold": theta_LF}
    )
    runs = [
        [np.asarray(x) for x in _last_hidden(model, own, graph.replacement.error_LTD)]
        for own in (transcoder, without)
    ]
    wanted_K = (runs[1][0] - runs[0][0]) @ graph.directions.T
    effects = scale_groups(model, graph, [group], factors=(0.0,), modes=("free",), top=3)
    outcome = effects.outcomes["free"]
    np.testing.assert_allclose(outcome.change_GFK[0, 0], wanted_K, atol=5e-4, rtol=1e-3)
    assert np.abs(wanted_K).max() > 0.01
    probability_V = np.asarray(jax.nn.softmax(runs[1][1]))
    top = np.argsort(-probability_V)[:3]
    assert outcome.top_GFn[0, 0].tolist() == top.tolist()
    np.testing.assert_allclose(outcome.top_probability_GFn[0, 0], probability_V[top], rtol=1e-3)


def test_one_member_is_an_intervention_on_it_and_twice_named_counts_once():
    graph, model = small_graph("llama", 0.3, 1), small_model("llama", 0.3)
    node = random_sources(graph, 1, kinds=("feature",))[0]
    effects = scale_groups(model, graph, [[node], [node, node]], factors=(-5.0,), batch=2)
    assert effects.groups == ((node,), (node,))
    alone = interventions.measure(model, graph, [(node, -5.0)] * 2, batch=2)
    for mode in MODES:
        change_GK = effects.outcomes[mode].change_GFK[:, 0]
        np.testing.assert_array_equal(change_GK[0], change_GK[1])
        np.testing.assert_array_equal(change_GK, alone.measured[mode][:, alone.is_logit])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": []}, "groups: none to scale"),
        ({"groups": [[0], []]}, "groups: group 1 has no member"),
        ({"groups": [[0, 10**6]]}, "groups: there is no node 1000000"),
        ({"factors": ()}, "groups: none to scale"),
        ({"factors": (float("inf"),)}, "a factor is not finite"),
        ({"modes": ("all",)}, "modes: 'all' is not one of"),
        ({"model": small_model("llama").above(1)}, "sizes are not those of the graph's model"),
    ],
)
def test_bad_groups_are_refused_with_the_remedy(changes, message):
    given = {"model": small_model("llama"), "groups": [[0]], "modes": ("free",)} | changes
    with pytest.raises(UsageError, match=message):
        scale_groups(graph=small_graph("llama"), **given)


def test_scores_are_those_of_runs_set_by_hand():
    each = ("llama", 0.3, 1)
    graph, model, transcoder = small_graph(*each), small_model(*each[:2]), small_transcoder(each[2])
    chosen = random_sources(graph, 5, kinds=("feature",))
    group, other = chosen[:3], chosen[3:]
    kept_R = np.arange(len(graph.row_nodes)) % 2 == 0
    (score,) = score_groups(model, graph, [group], others=[other], rows=kept_R, batch=4)

    size_R = np.abs(graph.adjacency.astype(np.float64)).sum(1)
    # A row that nothing enters shifts by nothing.
    size_R[size_R == 0] = np.inf

    def effect(nodes):
        shift_R = set_by_hand(model, transcoder, graph, nodes, 0.0, False) / size_R
        # What is written behind the last reading changes nothing but rounding.
        return np.where(np.abs(shift_R) > 1e-5, shift_R, 0.0)[kept_R]

    own, others = (
        [shift_R for node in nodes if (shift_R := effect([node])).any()] for nodes in (group, other)
    )
    assert len(own) == 3 and len(others) == 1
    cosines = [cosine(a, b) for i, a in enumerate(own) for b in own[:i]]
    assert score.members == 3
    assert score.within == pytest.approx(np.mean(cosines), abs=2e-3)
    outside = np.mean([cosine(a, b) for a in own for b in others])
    assert score.outside == pytest.approx(outside, abs=2e-3)
    assert abs(score.within - score.outside) > 2e-2
    together = effect(group)
    off = np.linalg.norm(together - sum(own)) / np.linalg.norm(sum(own))
    assert score.off == pytest.approx(off, abs=2e-3)
    assert score.off > 1e-2


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def test_members_that_write_alike_act_alike_and_add_up():
    # Of a last layer, with nothing between a feature and the logits but the last norm.
    each = ("llama", None, None)
    graph, model = small_graph(*each), small_model(*each[:2])
    rows = graph.nodes.slice(0, int((graph.kinds == "feature").sum())).to_pylist()
    last = max(row["position"] for row in rows)
    top = [
        i
        for i, row in enumerate(rows)
        if row["layer"] == graph.replacement.error_LTD.shape[0] - 1 and row["position"] == last
    ]
    logits_R = graph.kinds[graph.row_nodes] == "logit"
    weight_KS = graph.adjacency[logits_R].astype(np.float64)
    size_K1 = np.abs(weight_KS).sum(1, keepdims=True)
    wanted = [[cosine(*(weight_KS / size_K1)[:, [a, b]].T) for a in top] for b in top]
    a, b = np.unravel_index(np.argmax(np.triu(wanted, 1)), (len(top), len(top)))
    least = int(np.argmin(wanted[a]))
    (score,) = score_groups(model, graph, [[top[a], top[b]]], others=[[top[least]]], rows=logits_R)
    assert score.within > score.outside
    assert np.sign(score.within) == np.sign(wanted[a][b])
    # The last norm alone is between what they add up to and what they do together.
    assert 0 < score.off < 0.2


def test_scores_refuse_what_does_not_fit():
    graph, model = small_graph("llama", 0.3, 1), small_model("llama", 0.3)
    a, b, c = random_sources(graph, 3, kinds=("feature",))
    assert score_groups(model, graph, [], others=[]) == []
    with pytest.raises(UsageError, match="fewer than two members"):
        score_groups(model, graph, [[a, a]], others=[[c]])
    with pytest.raises(UsageError, match="0 lists for 1 groups"):
        score_groups(model, graph, [[a, b]], others=[])
    with pytest.raises(UsageError, match="is a member of group 0"):
        score_groups(model, graph, [[a, b]], others=[[b]])
    with pytest.raises(UsageError, match=r"others: node \d+ is a logit"):
        score_groups(model, graph, [[a, b]], others=[[int(graph.row_nodes[-1])]])
