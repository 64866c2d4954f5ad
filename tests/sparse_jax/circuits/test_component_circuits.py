"""Circuits of component edges against runs composed writer by writer, and planted circuits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model import layers
from lm_jax.model.sites import Scope
from sparse_jax.circuits import agreement, components, curves, discover, edge_pruning
from sparse_jax.circuits.component_ablation import ablate_edges
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.runs import measure
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch


@pytest.fixture(scope="module")
def batch():
    return ioi_batch()


@functools.cache
def model_of(blocks, bias=None):
    return circuit_model(blocks, bias=bias)


def final_inputs_by_composition(model, batch, kept_UR, values):
    """The stream that the logits read, every component run by itself on the sum of what it reads.

    Nothing here has a residual stream: each reader's input is composed of kept and ablated writers.
    """
    cfg, params = model.cfg, model.params
    N, K, T = cfg.num_heads, cfg.num_kv_heads, batch.clean_BT.shape[1]
    graph = ComponentGraph.of(cfg)
    scope = Scope({}, {})
    _, records = measure(model, batch, batch.clean_BT, record={"embed": lm_jax.keep})
    writers = [np.asarray(records["embed"])]
    constant = np.zeros(cfg.hidden_size, np.float32)

    def read(r):
        total = constant + sum(
            (own if kept_UR[u, r] else values[u])
            for u, own in enumerate(writers)
            if graph.mask_UR[u, r]
        )
        return jnp.asarray(total)

    mask = np.tril(np.ones((T, T), bool))
    for layer in range(cfg.num_layers):
        block = jax.tree.map(lambda x, layer=layer: x[layer], params["blocks"])
        mixer, first = block["mixer"], layer * graph.layer_readers

        def project(name, heads, offset, block=block, mixer=mixer, first=first):
            inputs = [
                layers.norm(block["ln1"], read(first + offset + n), cfg, scope, "ln1")
                for n in range(heads)
            ]
            return np.stack(
                [
                    np.asarray(x) @ np.asarray(mixer[name][:, n])
                    + np.asarray(mixer[name + "_bias"][n])
                    for n, x in enumerate(inputs)
                ]
            )

        q, k, v = project("q", N, 0), project("k", K, N), project("v", K, N + K)
        heads = []
        for n in range(N):
            scores = np.einsum("BTH,BSH->BTS", q[n], k[n * K // N]) * cfg.scale
            pattern = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
            z = np.einsum("BTS,BSH->BTH", pattern, v[n * K // N])
            heads.append(z @ np.asarray(mixer["o"][n]))
        bias = np.asarray(mixer["o_bias"])
        if cfg.parallel_residual:
            mlp_input = read(first + graph.layer_readers - 1)
            writers += heads
            constant = constant + bias
        else:
            writers += heads
            constant = constant + bias
            mlp_input = read(first + graph.layer_readers - 1)
        h = layers.norm(block["ln2"], mlp_input, cfg, scope, "ln2")
        writers.append(np.asarray(layers.mlp(block["mlp"], h, cfg, scope)))
    return read(graph.num_readers - 1)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_random_circuit_is_every_component_run_on_what_it_reads(batch, parallel):
    model = circuit_model(
        "gpt2", num_heads=4, num_kv_heads=2, parallel_residual=parallel, family=""
    )
    graph = ComponentGraph.of(model.cfg)
    kept = np.random.default_rng(3).random(graph.mask_UR.shape) < 0.5
    values = components.writer_values(model, batch, batch.corrupt_BT)
    wanted = final_inputs_by_composition(model, batch, kept, np.asarray(values))
    ablate = jnp.broadcast_to(~kept[:, None], (len(kept), 3, kept.shape[1]))
    edits = ablate_edges(model, ablate, values)
    _, records = measure(
        model, batch, batch.clean_BT, edits=edits, record={"final_input": lm_jax.keep}
    )
    np.testing.assert_allclose(records["final_input"], wanted, atol=1e-3)
    whole = np.asarray(final_inputs_by_composition(model, batch, kept | True, values))
    assert np.abs(whole - np.asarray(wanted)).max() > 0.5


@pytest.mark.parametrize(("blocks", "bias"), [("llama", 0.3), ("gemma", None), ("pythia", None)])
def test_no_edge_is_the_corrupt_run_and_all_edges_the_clean_one(batch, blocks, bias):
    model = model_of(blocks, bias)
    graph = ComponentGraph.of(model.cfg)
    scores = -np.asarray(components.component_attributions(model, batch, steps=2))
    exists = discover.component_edges(model, batch)
    ranks = discover.ranks(np.where(exists, scores, -np.inf))
    sizes = [graph.num_edges // 2, graph.num_edges]
    curve = discover.component_curve(model, batch, ranks, "counterfactual", sizes=sizes)
    corrupt, _ = measure(model, batch, batch.corrupt_BT)
    np.testing.assert_allclose(curve.empty_B, corrupt, atol=1e-3)
    np.testing.assert_allclose(curve.metric_KB[-1], curve.whole_B, atol=1e-3)
    assert np.abs(curve.metric_KB[0] - curve.whole_B).max() > 1e-2
    assert np.abs(curve.whole_B - curve.empty_B).max() > 0.1


def test_one_ablated_edge_is_its_exact_patch(batch):
    model = model_of("gemma")
    graph = ComponentGraph.of(model.cfg)
    values = discover.component_values(model, batch, "counterfactual")
    before, _ = measure(model, batch, batch.clean_BT)
    for name, reader in (("input", 0), ("a0.h2", graph.layer_readers + 5), ("m0", -1)):
        writer, reader = graph.writer_names.index(name), range(graph.num_readers)[reader]
        one = np.zeros((graph.num_writers, 3, graph.num_readers), bool)
        one[writer, :, reader] = True
        after, _ = measure(
            model, batch, batch.clean_BT, edits=ablate_edges(model, jnp.asarray(one), values)
        )
        effect = components.component_effects(model, batch, [(writer, reader)])[0]
        np.testing.assert_allclose(after - before, effect, atol=1e-4)


def planted_model():
    """Of the layers only m0 writes, so three edges matter: into m0, and both to the logits."""
    model = circuit_model("llama")
    blocks = dict(model.params["blocks"])
    blocks["mixer"] = blocks["mixer"] | {"o": jnp.zeros_like(blocks["mixer"]["o"])}
    blocks["mlp"] = blocks["mlp"] | {"down": blocks["mlp"]["down"].at[1].set(0.0)}
    return dataclasses.replace(model, params=model.params | {"blocks": blocks})


def planted_edges(graph):
    names, readers = graph.writer_names, graph.reader_names
    pairs = [("input", "m0"), ("input", "logits"), ("m0", "logits")]
    return {(names.index(u), readers.index(r)) for u, r in pairs}


def answer_moves(batch):
    """The same pairs with another last token in the corrupt prompt, so that it matters itself."""
    last = batch.clean_BT[:, -1:] + 1
    return dataclasses.replace(batch, corrupt_BT=batch.corrupt_BT.at[:, -1:].set(last))


def test_a_planted_circuit_is_found_by_every_ranking_but_the_random_one(batch):
    model, batch = planted_model(), answer_moves(batch)
    graph = ComponentGraph.of(model.cfg)
    wanted = planted_edges(graph)
    scores = np.abs(np.asarray(components.component_attributions(model, batch, steps=4)))
    exists = discover.component_edges(model, batch)
    ranks = discover.ranks(np.where(exists, scores, -np.inf), whole_task=True)
    found = {tuple(place) for place in np.argwhere(ranks[:, 0] < 3).tolist()}
    assert found == wanted
    curve = discover.component_curve(model, batch, ranks, "counterfactual", sizes=[3, 20])
    np.testing.assert_allclose(curve.explained, 1, atol=1e-3)
    assert curves.crossing(curve.sizes, curve.explained) == 3

    drawn = discover.ranks(discover.random_importance(exists, 0), whole_task=True)
    again = discover.ranks(discover.random_importance(exists, 0), whole_task=True)
    other = discover.ranks(discover.random_importance(exists, 1), whole_task=True)
    assert (drawn == again).all() and (drawn != other).any()
    assert (drawn[exists].reshape(-1) < graph.num_edges).all()
    random = discover.component_curve(model, batch, drawn, "counterfactual", sizes=[3])
    assert abs(random.explained[0] - 1) > 0.1


def test_edge_pruning_finds_the_planted_circuit(batch):
    """From a start without any ranking; with exactly as many edges as asked for."""
    model, batch = planted_model(), answer_moves(batch)
    graph = ComponentGraph.of(model.cfg)
    config = edge_pruning.EdgePruningConfig(steps=150, spread=0.0, learning_rate=0.2)
    result = edge_pruning.prune_edges(
        model, batch, np.zeros(graph.mask_UR.shape), count=3, config=config
    )
    assert result.kept_UR.sum() == 3
    assert {tuple(place) for place in np.argwhere(result.kept_UR).tolist()} == planted_edges(graph)
    target = 3 / graph.num_edges
    assert result.share[0] > 0.9 and result.share[-1] < 0.15
    assert abs(result.share[-1] - target) < 0.1


def test_masks_have_the_closed_form_of_the_hard_concrete_distribution():
    log_alpha = jnp.asarray([-2.0, 0.0, 3.0])
    uniform = (jnp.arange(20_000) + 0.5)[:, None] / 20_000
    masks = np.asarray(edge_pruning.mask_of(log_alpha[None], uniform))
    assert masks.min() == 0 and masks.max() == 1
    # A mask is 0 where sigmoid((noise + log alpha) / temperature) is at most 1/12.
    share = (masks > 0).mean(0)
    np.testing.assert_allclose(share, edge_pruning.probability_open(log_alpha), atol=1e-4)


def test_the_warm_start_is_the_ranking(batch):
    model = model_of("gemma")
    graph = ComponentGraph.of(model.cfg)
    importance = np.random.default_rng(0).normal(size=graph.mask_UR.shape)
    first = edge_pruning._first(graph, importance, edge_pruning.EdgePruningConfig())
    edges = first[graph.mask_UR]
    assert (np.argsort(edges) == np.argsort(importance[graph.mask_UR])).all()
    assert np.median(edges) == pytest.approx(2.0, abs=0.1)
    assert edges.std() == pytest.approx(1.0, abs=0.1)


def test_attributions_agree_with_patching_where_the_model_is_linear_enough(batch):
    """In a planted circuit all exact effects are known: most are zero, and so are the scores."""
    model, batch = planted_model(), answer_moves(batch)
    scores = components.component_attributions(model, batch, steps=8)
    result = agreement.rank_agreement(model, batch, "component_edges", scores, count=10_000)
    graph = ComponentGraph.of(model.cfg)
    assert result.count == graph.num_edges and result.least == 0 and result.largest > 0.1
    assert result.correlation.estimate > 0.99 and result.correlation.n == result.count
    opposite = agreement.rank_agreement(model, batch, "component_edges", -scores, count=10_000)
    assert opposite.correlation.estimate < -0.99
