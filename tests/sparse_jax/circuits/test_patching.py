"""Effects of patches against runs edited one by one, attributions against their definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from sparse_jax.circuits import patching
from sparse_jax.circuits.runs import Batch, CircuitModel, measure
from sparse_jax.circuits.tasks import make_task
from sparse_jax.model import constant_gates
from tests import tiny
from tests.sparse_jax.circuits.small_models import circuit_model
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer

EPS = float(np.finfo(np.float32).eps)
DIRECTIONS = ("noising", "denoising")


@pytest.fixture(scope="module")
def batch():
    return Batch.of(make_task("ioi", word_tokenizer(), count=4, seed=0))


@pytest.fixture(scope="module")
def dense(batch):
    """Random weights, large enough that attention is not uniform; two query heads a key head."""
    del batch
    cfg = tiny.decoder(
        vocab_size=word_tokenizer().vocab_size, num_heads=4, num_kv_heads=2, family="llama"
    )
    params = lm_jax.init_params(jax.random.key(1), cfg)
    return CircuitModel(jax.tree.map(lambda x: 3.0 * x, params), cfg)


def with_gates(model, bias):
    return dataclasses.replace(model, gates=constant_gates(model.cfg, bias))


def sides(batch, direction):
    pair = (batch.clean_BT, batch.corrupt_BT)
    return pair if direction == "noising" else pair[::-1]


def run(model, batch, tokens_BT, **options):
    """Metric of each prompt in float64, and records, by a call of its own."""
    output = model.forward(tokens_BT, batch.valid_BT, **options)
    logits = np.asarray(output.logits, np.float64)
    rows = np.arange(len(tokens_BT))
    ids = [
        np.asarray(side)[:, 0]
        for side in (batch.continuations.right_BA, batch.continuations.wrong_BA)
    ]
    at = np.asarray(batch.at_B2)[:, 0]
    right, wrong = (logits[rows, at, each] for each in ids)
    return right - wrong, output.records


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bias", [None, 0.3])
def test_head_effects_are_those_of_patching_one_by_one(dense, batch, direction, bias):
    model = dense if bias is None else with_gates(dense, bias)
    here, there = sides(batch, direction)
    before, _ = run(model, batch, here)
    _, other = run(model, batch, there, record={"attn.z": lm_jax.keep})
    L, N = model.cfg.num_layers, model.cfg.num_heads
    result = np.asarray(patching.head_effects(model, batch, direction=direction, at_once=3))
    for layer in range(L):
        for head in range(N):
            mask = jnp.zeros((1, 1, N, 1), bool).at[..., head, :].set(True)
            patch = lm_jax.Replace(other["attn.z"][layer], mask)
            after, _ = run(model, batch, here, edits={"attn.z": lm_jax.OneLayer(layer, patch)})
            np.testing.assert_allclose(result[layer, head], after - before, atol=2e-4)
    assert np.ptp(result) > 0.1


def test_stacks_of_layers_give_the_same_effects(batch):
    """With windows and gates that differ by layer, so that a stack must take those of its own."""
    model = circuit_model("gemma", num_layers=4, windows=(4, None, 2, None))
    bias_LN = np.linspace(-0.5, 2.0, 16, dtype=np.float32).reshape(4, 4)
    gates = dataclasses.replace(constant_gates(model.cfg, 0.0), bias_LN=bias_LN)
    for each in (model, dataclasses.replace(model, gates=gates)):
        whole = np.asarray(patching.head_effects(each, batch, stacks=1))
        cut = np.asarray(patching.head_effects(each, batch, stacks=3, at_once=3))
        np.testing.assert_allclose(cut, whole, atol=2e-4)
        assert np.ptp(whole, axis=(1, 2)).min() > 1e-2
    with pytest.raises(UsageError, match="stacks = 5 must be from 1 to the 4 layers"):
        patching.head_effects(model, batch, stacks=5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_edge_effects_are_those_of_adding_the_change_by_hand(dense, batch, direction):
    here, there = sides(batch, direction)
    record = dict.fromkeys(("attn.z", "attn.pattern", "attn.v"), lm_jax.keep)
    before, own = run(dense, batch, here, record=record)
    _, other = run(dense, batch, there, record=record)
    edges = [(0, 0, 5, 2), (0, 3, 7, 7), (1, 1, 12, 4), (1, 2, 3, 0)]
    result = np.asarray(patching.edge_effects(dense, batch, np.array(edges), direction=direction))
    for effect, (layer, head, query, key) in zip(result, edges, strict=True):
        z = np.array(own["attn.z"], np.float64)
        for side, sign in ((other, 1.0), (own, -1.0)):
            weight = np.asarray(side["attn.pattern"])[layer, :, head, query, key]
            value = np.asarray(side["attn.v"])[layer, :, key, head // 2]
            z[layer, :, query, head] += sign * weight[:, None] * value
        mask = jnp.zeros(z.shape, bool).at[layer, :, query, head].set(True)
        patch = lm_jax.Replace(jnp.asarray(z, jnp.float32), mask)
        after, _ = run(dense, batch, here, edits={"attn.z": patch})
        np.testing.assert_allclose(effect, after - before, atol=2e-4)
    assert np.abs(result).max() > 1e-2


def test_the_edges_of_a_head_sum_to_it(dense, batch):
    """Contributions to z, and attributions to those of heads, with two query heads a key head."""
    for model in (dense, with_gates(dense, 0.3)):
        own = patching.activations(model, batch, batch.clean_BT)
        whole = own.contributions_LBTNH(jnp.ones_like(own.pattern_LBNTS))
        np.testing.assert_allclose(whole, own.z_LBTNH, atol=50 * EPS * np.abs(own.z_LBTNH).max())
        heads = np.asarray(patching.head_attributions(model, batch))
        edges = np.asarray(patching.edge_attributions(model, batch))
        assert edges.shape == own.pattern_LBNTS.shape
        np.testing.assert_allclose(
            edges.sum((3, 4)).swapaxes(1, 2), heads, atol=1e3 * EPS * np.abs(heads).max()
        )
        assert np.ptp(heads) > 0.1


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_attributions_are_slopes_towards_the_other_value(dense, batch, direction):
    """Central differences of the metric along z' - z of one head."""
    here, there = sides(batch, direction)
    _, own = run(dense, batch, here, record={"attn.z": lm_jax.keep})
    _, other = run(dense, batch, there, record={"attn.z": lm_jax.keep})
    change = other["attn.z"] - own["attn.z"]
    result = np.asarray(patching.head_attributions(dense, batch, direction=direction))
    step = 1e-2
    for layer, head in ((0, 0), (0, 3), (1, 2)):
        mask = jnp.zeros(change.shape, bool).at[layer, :, :, head].set(True)

        def at(size, mask=mask):
            edit = lm_jax.Add(jnp.where(mask, size * change, 0.0))
            return run(dense, batch, here, edits={"attn.z": edit})[0]

        slope = (at(step) - at(-step)) / (2 * step)
        # The error of the difference: its curvature, and rounding of logits divided by the step.
        other_slope = (at(2 * step) - at(-2 * step)) / (4 * step)
        bound = np.abs(slope - other_slope) + 2e-4 / step
        assert (np.abs(result[layer, head] - slope) < bound).all()
        assert np.abs(slope).max() > 10 * bound.max() or np.abs(slope).max() < 0.1


def test_open_gates_are_the_dense_model(dense, batch):
    opened = with_gates(dense, 1e6)
    for function in (patching.head_effects, patching.head_attributions, patching.edge_attributions):
        np.testing.assert_allclose(function(opened, batch), function(dense, batch), atol=1e-4)


def test_a_closed_edge_has_no_attribution(dense, batch):
    model = with_gates(dense, 0.0)
    patterns = [
        np.asarray(patching.activations(model, batch, tokens).pattern_LBNTS)
        for tokens in (batch.clean_BT, batch.corrupt_BT)
    ]
    closed = (patterns[0] == 0) & (patterns[1] == 0)
    T = closed.shape[-1]
    visible = np.tril(np.ones((T, T), bool))
    assert 0.1 < closed[..., visible].mean() < 0.9
    result = np.asarray(patching.edge_attributions(model, batch))
    assert (result[closed] == 0).all() and (result[~closed] != 0).any()


def test_other_prompts_weights_and_directions_compile_nothing_more(dense, batch):
    swapped = dataclasses.replace(batch, clean_BT=batch.corrupt_BT, corrupt_BT=batch.clean_BT)
    scaled = dataclasses.replace(dense, params=jax.tree.map(lambda x: 1.1 * x, dense.params))
    for name in ("head_effects", "edge_attributions"):
        function, compiled = (getattr(patching, prefix + name) for prefix in ("", "_"))
        first = function(dense, batch)
        size = compiled._cache_size()
        second = function(scaled, swapped, direction="denoising")
        assert compiled._cache_size() == size
        assert not np.allclose(first, second)


def test_an_unknown_direction_is_refused(dense, batch):
    with pytest.raises(UsageError, match=r"no direction 'noise'.*'noising'"):
        patching.head_effects(dense, batch, direction="noise")


def test_measure_is_the_metric_of_the_logits(dense, batch):
    for tokens_BT in (batch.clean_BT, batch.corrupt_BT):
        result, _ = measure(dense, batch, tokens_BT)
        np.testing.assert_allclose(result, run(dense, batch, tokens_BT)[0], atol=1e-4)
