"""Circuits of component edges against runs composed writer by writer, and planted circuits."""

import dataclasses
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from sparse_jax.circuits import agreement, components, curves, discover, edge_pruning
from sparse_jax.circuits.component_ablation import ablate_edges
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.runs import measure
from tests import rounding
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch


@pytest.fixture(scope="module")
def batch():
    return ioi_batch()


@functools.cache
def model_of(blocks, bias=None):
    return circuit_model(blocks, bias=bias)


def constant(x):
    """As float32 holds it."""
    return np.float64(np.float32(x))


def layer_norm(weights, x, cfg):
    x = x - x.mean(-1, keepdims=True)
    divisor = np.sqrt((x**2).mean(-1, keepdims=True) + constant(cfg.norm_eps))
    return x / divisor * weights["scale"] + weights["bias"]


def mlp(weights, x):
    h = x @ weights["up"] + weights["up_bias"]
    inner = constant(np.sqrt(2 / np.pi)) * (h + constant(0.044715) * h**3)
    h = 0.5 * h * (1 + np.tanh(inner))
    return h @ weights["down"] + weights["down_bias"]


def final_inputs_by_composition(model, embed, kept_UR, values):
    """The stream that the logits read, every component run by itself on the sum of what it reads.

    In float64. Nothing here has a residual stream: each reader's input is composed of kept and
    ablated writers.
    """
    cfg = model.cfg
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    N, K, T = cfg.num_heads, cfg.num_kv_heads, embed.shape[1]
    graph = ComponentGraph.of(cfg)
    writers = [embed]
    biases = np.zeros(cfg.hidden_size)

    def read(r):
        return biases + sum(
            (own if kept_UR[u, r] else values[u])
            for u, own in enumerate(writers)
            if graph.mask_UR[u, r]
        )

    mask = np.tril(np.ones((T, T), bool))
    for layer in range(cfg.num_layers):
        block = jax.tree.map(lambda x, layer=layer: x[layer], params["blocks"])
        mixer, first = block["mixer"], layer * graph.layer_readers

        def project(name, heads, offset, block=block, mixer=mixer, first=first):
            inputs = [layer_norm(block["ln1"], read(first + offset + n), cfg) for n in range(heads)]
            return [x @ mixer[name][:, n] + mixer[name + "_bias"][n] for n, x in enumerate(inputs)]

        q, k, v = project("q", N, 0), project("k", K, N), project("v", K, N + K)
        heads = []
        for n in range(N):
            scores = np.einsum("BTH,BSH->BTS", q[n], k[n * K // N]) * constant(cfg.scale)
            pattern = special.softmax(np.where(mask, scores, -np.inf), -1)
            heads.append(pattern @ v[n * K // N] @ mixer["o"][n])
        if cfg.parallel_residual:
            mlp_input = read(first + graph.layer_readers - 1)
        writers += heads
        biases = biases + mixer["o_bias"]
        if not cfg.parallel_residual:
            mlp_input = read(first + graph.layer_readers - 1)
        writers.append(mlp(block["mlp"], layer_norm(block["ln2"], mlp_input, cfg)))
    return read(graph.num_readers - 1)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_random_circuit_is_every_component_run_on_what_it_reads(batch, parallel):
    model = circuit_model(
        "gpt2", num_heads=4, num_kv_heads=2, parallel_residual=parallel, family=""
    )
    graph = ComponentGraph.of(model.cfg)
    kept = np.random.default_rng(3).random(graph.mask_UR.shape) < 0.5
    ablate = jnp.broadcast_to(~kept[:, None], (len(kept), 3, kept.shape[1]))

    def run(model):
        values = components.writer_values(model, batch, batch.corrupt_BT)
        edits = ablate_edges(model, ablate, values)
        record = dict.fromkeys(("embed", "final_input"), lm_jax.keep)
        return measure(model, batch, batch.clean_BT, edits=edits, record=record)[1], values

    exact = oracle.expected(run, model)
    records, values = exact.values
    by_hand = final_inputs_by_composition(model, records["embed"], kept, values)
    oracle.assert_equal(by_hand, oracle.part(exact, 0, "final_input"))
    rounding.assert_within(jax.jit(run)(model), exact)
    whole = final_inputs_by_composition(model, records["embed"], kept | True, values)
    assert np.abs(whole - by_hand).max() > 0.5


def one_edges(graph):
    """Into a query head, a shared value and the logits."""
    names, head = graph.writer_names, graph.num_heads // 2
    value = graph.layer_readers + graph.num_heads + graph.num_kv_heads
    readers = {"input": 0, f"a0.h{head}": value, "m1": graph.num_readers - 1}
    return np.array([(names.index(writer), reader) for writer, reader in readers.items()])


@functools.cache
def ablated_metrics(blocks, bias):
    """In float64: of the corrupt and the clean run, and with all, no and single edges ablated."""
    model, batch = model_of(blocks, bias), ioi_batch()
    graph = ComponentGraph.of(model.cfg)
    shape = (graph.num_writers, 3, graph.num_readers)
    masks = [np.ones(shape, bool), np.zeros(shape, bool)]
    for writer, reader in one_edges(graph):
        masks.append(np.zeros(shape, bool))
        masks[-1][writer, :, reader] = True

    def metrics(model):
        values = components.writer_values(model, batch, batch.corrupt_BT)

        def ablated(mask):
            edits = ablate_edges(model, mask, values)
            return measure(model, batch, batch.clean_BT, edits=edits)[0]

        runs = jnp.stack([batch.corrupt_BT, batch.clean_BT])
        plain = jax.lax.map(lambda tokens: measure(model, batch, tokens)[0], runs)
        return {"plain": plain, "ablated": jax.lax.map(ablated, jnp.stack(masks))}

    return oracle.expected(metrics, model)


@pytest.mark.parametrize(("blocks", "bias"), [("llama", 0.3), ("gemma", None), ("pythia", None)])
def test_no_edge_is_the_corrupt_run_and_all_edges_the_clean_one(batch, blocks, bias):
    model = model_of(blocks, bias)
    exact = ablated_metrics(blocks, bias)
    ends = oracle.part(exact, "ablated")
    ends = rounding.Expected(ends.values[:2], ends.bounds[:2])
    oracle.assert_equal(exact.values["plain"], ends)

    graph = ComponentGraph.of(model.cfg)
    exists = discover.component_edges(model, batch)
    ranks = discover.ranks(discover.random_importance(exists, 0))
    sizes = [graph.num_edges // 2, graph.num_edges]
    curve = discover.component_curve(model, batch, ranks, "counterfactual", sizes=sizes)
    rounding.assert_within(np.stack([curve.empty_B, curve.metric_KB[-1]]), ends)
    rounding.assert_within(curve.whole_B, oracle.part(exact, "plain", 1))
    assert np.abs(curve.metric_KB[0] - curve.whole_B).max() > 1e-2
    assert np.abs(curve.whole_B - curve.empty_B).max() > 0.1


def test_one_ablated_edge_is_its_exact_patch(batch):
    """In float64; that float32 is as near as it can be is tested for both elsewhere."""
    model = model_of("gemma")
    edges = one_edges(ComponentGraph.of(model.cfg))
    effects = oracle.expected(lambda m: components.component_effects(m, batch, edges), model)
    _, before, *after = ablated_metrics("gemma", None).values["ablated"]
    _, error, *errors = ablated_metrics("gemma", None).bounds["ablated"]
    bounds = effects.bounds + error + np.stack(errors)
    oracle.assert_equal(np.stack(after) - before, rounding.Expected(effects.values, bounds))
    assert (np.abs(effects.values).max(1) > 10 * bounds.max(1)).all()


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
    sizes = [3, 20, graph.num_edges]
    curve = discover.component_curve(model, batch, ranks, "counterfactual", sizes=sizes)
    # Other writers write zeros, so ablating them adds exact zeros: not a bit of the metric moves.
    np.testing.assert_array_equal(curve.metric_KB, curve.metric_KB[-1:].repeat(3, 0))
    assert curves.crossing(curve.sizes, curve.explained) == 3

    drawn = discover.ranks(discover.random_importance(exists, 0), whole_task=True)
    again = discover.ranks(discover.random_importance(exists, 0), whole_task=True)
    other = discover.ranks(discover.random_importance(exists, 1), whole_task=True)
    assert (drawn == again).all() and (drawn != other).any()
    assert (drawn[exists].reshape(-1) < graph.num_edges).all()
    random = discover.component_curve(model, batch, drawn, "counterfactual", sizes=sizes)
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
    # A mask is 0 where sigmoid((noise + log alpha) / temperature) is at most 1/12. Of evenly spaced
    # draws as many are below a threshold as its probability says, to half a step; rounding moves
    # the threshold by far less than the other half.
    share = (masks > 0).mean(0)
    wanted = edge_pruning.probability_open(log_alpha)
    np.testing.assert_allclose(share, wanted, rtol=0, atol=1 / 20_000)


def test_the_warm_start_is_the_ranking(batch):
    model = model_of("gemma")
    graph = ComponentGraph.of(model.cfg)
    importance = np.random.default_rng(0).normal(size=graph.mask_UR.shape)
    first = edge_pruning._first(graph, importance, edge_pruning.EdgePruningConfig())
    edges = first[graph.mask_UR]
    assert (np.argsort(edges) == np.argsort(importance[graph.mask_UR])).all()
    # Normal scores, each rounded once.
    places = (np.arange(len(edges)) + 0.5) / len(edges)
    wanted = [2 + statistics.NormalDist().inv_cdf(place) for place in places]
    np.testing.assert_allclose(np.sort(edges), wanted, rtol=2.0**-23)


def test_attributions_agree_with_patching_where_the_model_is_linear_enough(batch):
    """In a planted circuit all exact effects are known: most are zero, and so are the scores."""
    model, batch = planted_model(), answer_moves(batch)
    scores = components.component_attributions(model, batch, steps=4)
    result = agreement.rank_agreement(model, batch, "component_edges", scores, count=10_000)
    graph = ComponentGraph.of(model.cfg)
    assert result.count == graph.num_edges and result.least == 0 and result.largest > 0.1
    assert result.correlation.estimate > 0.99 and result.correlation.n == result.count
    opposite = agreement.rank_agreement(model, batch, "component_edges", -scores, count=10_000)
    assert opposite.correlation.estimate < -0.99
