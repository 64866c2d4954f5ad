"""Rankings against sorting, and circuits whose metric is known: none, all, and a planted head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from sparse_jax.circuits import ablation, curves, discover, patching
from sparse_jax.circuits.runs import Batch, CircuitModel, map_in_batches, measure
from sparse_jax.circuits.tasks import make_task
from sparse_jax.gates.model import constant_gates
from tests import rounding, tiny
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer


@pytest.fixture(scope="module")
def batch():
    return Batch.of(make_task("ioi", word_tokenizer(), count=3, seed=0))


@pytest.fixture(scope="module")
def model():
    cfg = tiny.decoder(
        vocab_size=word_tokenizer().vocab_size, num_heads=4, num_kv_heads=2, family="llama"
    )
    params = lm_jax.init_params(jax.random.key(1), cfg)
    return CircuitModel(jax.tree.map(lambda x: 3.0 * x, params), cfg)


def test_ranks_sort_each_prompt_or_the_mean_of_all():
    importance = np.random.default_rng(0).normal(size=(2, 3, 4))
    result = discover.ranks(importance)
    for b in range(3):
        order = np.argsort(result[:, b], axis=None)
        assert (np.diff(importance[:, b].ravel()[order]) <= 0).all()
    shared = discover.ranks(importance, whole_task=True)
    assert (shared == shared[:, :1]).all()
    order = np.argsort(shared[:, 0], axis=None)
    assert (np.diff(importance.mean(1).ravel()[order]) <= 0).all()


@pytest.mark.parametrize(("count", "at_once"), [(7, 3), (6, 3), (2, 8), (1, 1)])
def test_circuits_are_run_in_batches_of_one_program(count, at_once):
    """A remainder is no second program: compiling one takes longer than a few more circuits."""
    traced = []

    def function(x):
        traced.append(x)
        return 2 * x

    program = jax.jit(jax.vmap(function))
    result = map_in_batches(program, jnp.arange(count), at_once)
    assert result.tolist() == list(range(0, 2 * count, 2)) and len(traced) == 1


def test_visible_edges_are_those_with_weight(model, batch):
    windowed = dataclasses.replace(
        model, cfg=dataclasses.replace(model.cfg, windows=(3, None), family="")
    )
    for each in (model, windowed):
        mask = discover.visible_edges(each, batch)
        pattern = np.asarray(patching.activations(each, batch, batch.clean_BT).pattern_LBNTS)
        real = np.asarray(batch.valid_BT)[None, :, None, :, None]
        assert ((pattern > 0) & real == mask).all()


def ends(model, batch):
    """The metric of the model, and with all heads as on the corrupt prompts."""

    def run(model):
        _, other = measure(model, batch, batch.corrupt_BT, record={"attn.z": lm_jax.keep})
        everywhere = lm_jax.Replace(other["attn.z"], jnp.ones((2, 1, 1, 1, 1), bool))
        empty, _ = measure(model, batch, batch.clean_BT, edits={"attn.z": everywhere})
        return measure(model, batch, batch.clean_BT)[0], empty

    both = oracle.expected(run, model)
    return oracle.part(both, 0), oracle.part(both, 1)


def assert_explains_everything(curve, whole, *, last=False):
    """All circuits, or the last one, have the metric of the model to rounding."""
    rounding.assert_within(curve.whole_B, whole)
    for metric_B in curve.metric_KB[-1:] if last else curve.metric_KB:
        rounding.assert_within(metric_B, whole)
    # f - 1 is the mean of a difference of two such metrics, over that of whole and empty.
    off = 2 * whole.bounds.mean() / np.abs((curve.whole_B - curve.empty_B).mean())
    explained = curve.explained[-1:] if last else curve.explained
    assert (np.abs(explained - 1) <= off + len(whole.bounds) * 2.0**-50).all() and off < 0.1


@pytest.mark.parametrize("bias", [None, 0.3])
def test_no_component_and_all_of_them(model, batch, bias):
    """All heads or all edges of the corrupt run give one metric; all kept give the clean one."""
    if bias is not None:
        model = dataclasses.replace(model, gates=constant_gates(model.cfg, bias))
    whole, empty = ends(model, batch)
    heads = discover.ranks(-np.asarray(patching.head_effects(model, batch)).swapaxes(1, 2))
    mask = discover.visible_edges(model, batch)
    scores = np.where(mask, -np.asarray(patching.edge_attributions(model, batch)), -np.inf)
    edges = discover.ranks(scores)
    head_curve = discover.head_curve(model, batch, heads, "counterfactual")
    count = int(mask.sum((0, 2, 3, 4)).max())
    edge_curve = discover.edge_curve(model, batch, edges, "counterfactual", sizes=[10, count])

    for curve in (head_curve, edge_curve):
        rounding.assert_within(curve.empty_B, empty)
        assert_explains_everything(curve, whole, last=True)
        assert np.abs(curve.whole_B - curve.empty_B).max() > 0.1


def test_padding_changes_no_mean(model, batch):
    """Of heads, token edges and writers, as curves read them, in rows that end in padding."""
    T = batch.clean_BT.shape[1]
    wide = dataclasses.replace(
        batch,
        **{
            field: jnp.pad(getattr(batch, field), [(0, 0), (0, 3)])
            for field in ("clean_BT", "corrupt_BT", "valid_BT")
        },
    )
    visible = jnp.asarray(discover.visible_edges(model, batch))

    def ablated(model):
        runs = [
            patching.activations(model, batch, tokens)
            for tokens in (batch.clean_BT, batch.corrupt_BT)
        ]
        heads = ablation.head_values("mean", *runs, batch.valid_BT)
        edges = ablation.edge_values("mean", *runs, visible)
        everything = (
            ablation.keep_heads(jnp.zeros(visible.shape[:3], bool), heads),
            ablation.keep_edges(jnp.zeros(visible.shape, bool), edges, visible),
        )
        metrics = [measure(model, batch, batch.clean_BT, edits=each)[0] for each in everything]
        return discover.component_values(model, batch, "mean"), metrics

    exact = oracle.expected(ablated, model)
    values = discover.component_values(model, wide, "mean")
    rounding.assert_within(values[:, :, :T], oracle.part(exact, 0))
    ranks = np.zeros(discover.visible_edges(model, wide).shape, np.int32)
    empty = [
        discover.head_curve(model, wide, ranks[:, :, :, 0, 0], "mean", sizes=[1]).empty_B,
        discover.edge_curve(model, wide, ranks, "mean", sizes=[1]).empty_B,
    ]
    rounding.assert_within(empty, oracle.part(exact, 1))


def test_one_planted_head_explains_everything(model, batch):
    """Only head 1.2 writes to the residual stream, so it is the circuit, by every measure."""
    mixer = model.params["blocks"]["mixer"]
    mixer = mixer | {"o": jnp.zeros_like(mixer["o"]).at[1, 2].set(mixer["o"][1, 2])}
    params = model.params | {"blocks": model.params["blocks"] | {"mixer": mixer}}
    planted = dataclasses.replace(model, params=params)

    whole, _ = ends(planted, batch)
    wanted = oracle.expected(lambda m: patching.head_effects(m, batch), planted)
    effects = np.asarray(patching.head_effects(planted, batch))
    rounding.assert_within(effects, wanted)
    others = np.ones(effects.shape[:2], bool)
    others[1, 2] = False
    assert np.abs(effects[1, 2]).min() > 1e-3
    assert np.abs(wanted.values[others]).max() <= oracle.in_float64(wanted.bounds.max())

    importance = np.abs(effects).swapaxes(1, 2)
    for whole_task in (False, True):
        ranks = discover.ranks(importance, whole_task=whole_task)
        assert (ranks[1, :, 2] == 0).all()
        for name in ("zero", "counterfactual", "mean"):
            curve = discover.head_curve(planted, batch, ranks, name)
            assert_explains_everything(curve, whole)
            assert curves.crossing(curve.sizes, curve.explained) == 1

    edges = np.abs(np.asarray(patching.edge_attributions(planted, batch)))
    assert (edges[0] == 0).all() and (edges[1][:, [0, 1, 3]] == 0).all()
    visible = discover.visible_edges(planted, batch)
    ranks = discover.ranks(np.where(visible, edges, -np.inf))
    T = edges.shape[-1]
    curve = discover.edge_curve(planted, batch, ranks, "counterfactual", sizes=[T * (T + 1) // 2])
    assert_explains_everything(curve, whole)


def test_circuits_of_repeated_prompts_are_resampled_from_other_prompts(model, batch):
    """Of two prompts, one of which has two pairs: each takes the other, whatever the key."""
    one, other = batch.clean_BT[:1], batch.clean_BT[1:2]
    again = dataclasses.replace(
        batch,
        clean_BT=jnp.concatenate([one, one, other]),
        valid_BT=jnp.ones_like(batch.valid_BT),
    )
    assert again.prompt_B.tolist() == [0, 0, 1]
    ranks = discover.ranks(np.ones((2, 3, 4)))
    curves_of = [
        discover.head_curve(model, again, ranks, "resample", sizes=[1], key=jax.random.key(seed))
        for seed in range(4)
    ]
    first, *others = (curve.empty_B for curve in curves_of)
    for empty_B in others:
        np.testing.assert_array_equal(empty_B, first)
