"""Interventions against the columns of graphs, and against runs whose MLPs are set by hand.

Tolerances are those of circuit-tracer's tests: 5e-4 for pre-activations, 1e-5 and 1e-3 of the value
for logits, times how often a source is added.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from lm_jax.model.edits import Add, Replace
from lm_jax.model.sites import keep
from sparse_jax.circuits.agreement import rank_correlation
from sparse_jax.graphs import effects as effects_lib
from sparse_jax.graphs import graph_json, interventions
from tests.sparse_jax.graphs.small_graphs import (
    EACH,
    small_graph,
    small_model,
    small_tokens,
    small_transcoder,
)
from tests.sparse_jax.graphs.test_graph_json import written

FACTORS = (0.0, 2.0, -5.0, -10.0)


def random_sources(graph, count, kinds=("feature", "error", "token")):
    among = np.flatnonzero(np.isin(graph.kinds[: graph.num_sources], kinds))
    rng = np.random.default_rng(0)
    return [int(node) for node in rng.choice(among, min(count, len(among)), replace=False)]


@pytest.mark.parametrize("each", EACH)
def test_with_all_frozen_effects_are_the_columns_of_the_graph(each):
    graph = small_graph(*each)
    chosen = random_sources(graph, 100)
    pairs = [(node, FACTORS[i % len(FACTORS)]) for i, node in enumerate(chosen)]
    effects = interventions.measure(
        small_model(*each[:2]), graph, pairs, modes=("frozen",), batch=50
    )
    times_I1 = np.abs(effects.factors - 1.0)[:, None]
    got, wanted = effects.measured["frozen"], effects.predicted
    features, logits = ~effects.is_logit, effects.is_logit
    error = np.abs(got - wanted)
    assert (error[:, features] <= times_I1 * 5e-4).all()
    assert (error[:, logits] <= times_I1 * 1e-5 + 1e-3 * np.abs(wanted[:, logits])).all()
    assert effects.largest_error() == (error[:, features].max(), error[:, logits].max())
    assert np.abs(wanted[:, features]).max() > 1 and np.abs(wanted[:, logits]).max() > 1
    assert effects.spearman("frozen").estimate > 0.99
    # Where the order differs, effects are equal to rounding.
    order = np.argsort(wanted, axis=None)
    drop = np.maximum.accumulate(got.ravel()[order]) - got.ravel()[order]
    assert drop.max() <= 2 * error.max()


@jax.jit
def one_run(model, edits):
    tokens_BT = jnp.asarray(small_tokens(), jnp.int32)[None]
    sites = dict.fromkeys(("mlp.in", "mlp.out", "attn.pattern"), keep)
    return model.forward(tokens_BT, jnp.ones_like(tokens_BT, bool), edits=edits, record=sites)


def set_by_hand(model, transcoder, graph, nodes, factor, patterns):
    """The run in which features respond, by as many runs with MLP outputs set as there are layers.

    Each sets them to what features of the inputs of the run before write; after L runs, all layers
    are those of the run that sets them. Those of `nodes` that are features are set in all.
    """
    L = model.cfg.num_layers

    def everywhere(value):
        return Replace(value, jnp.ones([L] + [1] * (value.ndim - 1), bool))

    clean = one_run(model, {})
    features_LTF = transcoder.encode(clean.records["mlp.in"][:, 0])
    error_LTD = clean.records["mlp.out"][:, 0] - transcoder.decode(features_LTF)
    edits = {"attn.pattern": everywhere(clean.records["attn.pattern"])} if patterns else {}
    added_BTD = jnp.zeros((1, len(small_tokens()), model.cfg.hidden_size))
    fixed = {}
    for row in graph.nodes.take(nodes).to_pylist():
        layer, at, feature = row["layer"], row["position"], row["feature"]
        if row["kind"] == "feature":
            fixed[layer, at, feature] = factor * features_LTF[layer, at, feature]
        if row["kind"] == "error":
            error_LTD = error_LTD.at[layer, at].multiply(factor)
        if row["kind"] == "token":
            token_D = model.params["embed"]["tokens"][feature] * model.cfg.embed_scale
            added_BTD = added_BTD.at[0, at].add((factor - 1.0) * token_D)
    edits["embed"] = Add(added_BTD)
    last = clean
    for _ in range(L + 1):
        z_LTF = transcoder.encode(last.records["mlp.in"][:, 0])
        for place, value in fixed.items():
            z_LTF = z_LTF.at[place].set(value)
        output_LTD = transcoder.decode(z_LTF) + error_LTD
        last = one_run(model, edits | {"mlp.out": everywhere(output_LTD[:, None])})
    pre_LTF = transcoder.pre_activations(last.records["mlp.in"][:, 0])
    clean_LTF = transcoder.pre_activations(clean.records["mlp.in"][:, 0])
    rows = graph.row_nodes[graph.kinds[graph.row_nodes] == "feature"]
    table = graph.nodes.take(rows)
    places = tuple(np.asarray(table[name]) for name in ("layer", "position", "feature"))
    shift = np.asarray(pre_LTF - clean_LTF)[places]
    logits = np.asarray(last.hidden[0, -1] - clean.hidden[0, -1]) @ graph.directions.T
    return np.concatenate([shift, logits])


@pytest.mark.parametrize("each", [("llama", 0.3, 1), ("pythia", None, None)])
def test_features_attention_and_norms_respond_as_in_runs_set_by_hand(each):
    graph, model = small_graph(*each), small_model(*each[:2])
    transcoder = small_transcoder(each[2])
    chosen = [random_sources(graph, 1, kinds=(kind,))[0] for kind in ("feature", "error", "token")]
    pairs = list(zip(chosen, (-5.0, 0.0, 2.0), strict=True))
    effects = interventions.measure(model, graph, pairs, batch=2)
    for i, (node, factor) in enumerate(pairs):
        for mode in ("attention_frozen", "free"):
            frozen = mode == "attention_frozen"
            wanted = set_by_hand(model, transcoder, graph, [node], factor, frozen)
            got = effects.measured[mode][i]
            np.testing.assert_allclose(got, wanted, atol=5e-4, rtol=1e-3)
    # Farther apart than both tolerances together: no mode passes for another.
    frozen, patterns, free = (effects.measured[mode] for mode in effects_lib.MODES)
    assert np.abs(frozen - patterns).max() > 1e-3 and np.abs(patterns - free).max() > 1e-3


def test_runs_of_a_long_prompt_are_few_at_a_time_and_the_same(monkeypatch):
    graph, model = small_graph("llama"), small_model("llama")
    pairs, sizes = [(0, 0.0), (1, -5.0), (2, 2.0)], []
    together = interventions.measure(model, graph, pairs)
    original = interventions._run

    def counted(*given, size, **options):
        sizes.append(size)
        return original(*given, size=size, **options)

    monkeypatch.setattr(interventions, "_run", counted)
    monkeypatch.setattr(interventions, "_MEMORY", 8 * graph.replacement.error_LTD.size)
    alone = interventions.measure(model, graph, pairs)
    assert set(sizes) == {2}
    for mode in effects_lib.MODES:
        np.testing.assert_allclose(
            alone.measured[mode], together.measured[mode], atol=5e-4, rtol=1e-3
        )


def test_a_factor_of_one_changes_nothing():
    graph, model = small_graph("llama"), small_model("llama")
    effects = interventions.measure(model, graph, [(0, 1.0), (graph.num_sources - 1, 1.0)])
    for mode in effects_lib.MODES:
        assert not effects.measured[mode].any() and effects.spearman(mode) is None


def made_up_effects(sign_I, rows=20):
    """Three factors of each source, measured as predicted times a sign of the source."""
    weight_IR = np.random.default_rng(0).normal(size=(len(sign_I), rows))
    sources, factors = np.repeat(np.arange(len(sign_I)), 3), np.tile(FACTORS[:3], len(sign_I))
    predicted = (factors - 1.0)[:, None] * weight_IR[sources]
    measured = predicted * np.asarray(sign_I)[sources, None]
    no_logit = np.zeros(rows, bool)
    return effects_lib.Effects(
        sources, factors, np.arange(rows), no_logit, predicted, {"free": measured}
    )


def test_the_interval_of_the_rank_correlation_resamples_sources_with_their_factors():
    # Two sources allow no interval.
    two = made_up_effects([1.0, -1.0]).spearman("free")
    assert two.n == 2 and not two.bounded
    # 480 pairs are 8 sources: as independent pairs they would seem several times as precise.
    effects = made_up_effects([1, 1, 1, 1, 1, -1, 1, -1])
    by_source = effects.spearman("free")
    by_pair = rank_correlation(effects.predicted.ravel(), effects.measured["free"].ravel())
    assert by_source.n == 8 and by_source.estimate == by_pair.estimate
    assert by_source.high - by_source.low > 3 * (by_pair.high - by_pair.low)
    assert made_up_effects([1.0]).spearman("free") is None


def test_a_file_lists_the_largest_effects_between_its_nodes():
    graph, model = small_graph("llama"), small_model("llama")
    effects = interventions.measure(model, graph, [(0, -5.0), (1, 2.0)])
    ids = {0: "a", **{int(node): f"n{node}" for node in graph.row_nodes[20:60]}}
    (entry,) = effects_lib.as_json(effects, ids, count=7)
    assert entry["source"] == "a" and entry["factor"] == -5.0
    assert len(entry["effects"]) <= 7 and entry["effects"]
    values = np.stack([effects.predicted[0], *(x[0] for x in effects.measured.values())])
    size = np.abs(values).max(0)
    row = {ids[int(node)]: r for r, node in enumerate(effects.targets) if int(node) in ids}
    listed = [row[each["target"]] for each in entry["effects"]]
    others = [r for r in row.values() if r not in listed]
    assert size[listed].min() >= size[others].max()
    for each, r in zip(entry["effects"], listed, strict=True):
        assert set(each) == {"target", *graph_json.EFFECTS}
        assert each["predicted"] == effects.predicted[0, r]
        assert each["free"] == effects.measured["free"][0, r]
    some = dataclasses.replace(effects, measured={"free": effects.measured["free"]})
    with pytest.raises(UsageError, match="interventions: frozen was not measured"):
        effects_lib.as_json(some, ids)


def test_a_graph_file_holds_the_interventions_on_its_nodes(tmp_path):
    graph, model = small_graph("llama"), small_model("llama")
    pruned = graph.prune()
    kept, left = np.flatnonzero(pruned.kept_S)[0], np.flatnonzero(~pruned.kept_S)[0]
    effects = interventions.measure(model, graph, [(int(kept), 0.0), (int(left), 0.0)])
    graph_json.write(tmp_path / "a.json", written(graph, pruned, effects=effects))
    document = graph_json.read(tmp_path / "a.json")
    (entry,) = document["interventions"]
    assert entry["factor"] == 0.0 and entry["effects"]
    weights = {(link["source"], link["target"]): link["weight"] for link in document["links"]}
    for effect in entry["effects"]:
        weight = weights.get((entry["source"], effect["target"]))
        assert weight is None or effect["predicted"] == -weight


def other_model():
    model = small_model("llama")
    params = jax.tree.map(lambda x: 2 * x, model.params)
    return dataclasses.replace(model, params=params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interventions": []}, "none given"),
        ({"interventions": [(0, float("nan"))]}, "not finite; 0 removes"),
        ({"interventions": [(10**6, 0.0)]}, "interventions: there is no node 1000000"),
        ({"interventions": [(-1, 0.0)]}, "interventions: there is no node -1"),
        ({"modes": ("frosen",)}, "modes: 'frosen' is not one of frozen, attention_frozen, free"),
        ({"model": other_model()}, "logits on the graph's prompt are up to"),
        # The sparse model of the same weights, embeddings included.
        ({"model": small_model("llama", 0.3)}, "give the model that the graph is of"),
        ({"model": small_model("llama").above(1)}, "sizes are not those of the graph's model"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(changes, message):
    given = {"model": small_model("llama"), "interventions": [(0, 0.0)]} | changes
    with pytest.raises(UsageError, match=message):
        interventions.measure(graph=small_graph("llama"), **given)
    graph = small_graph("llama")
    logit = int(graph.row_nodes[-1])
    with pytest.raises(UsageError, match=f"interventions: node {logit} is a logit"):
        interventions.measure(small_model("llama"), graph, [(logit, 0.0)])
