"""Component edges: exact patches against runs edited at other sites, and values of writers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model import layers
from lm_jax.model.sites import Scope
from sparse_jax.circuits import components
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.patching import sides
from sparse_jax.circuits.runs import measure
from tests import rounding
from tests.sparse_jax.circuits import oracle
from tests.sparse_jax.circuits.small_models import both_ways, circuit_model, ioi_batch, some_edges

RECORDED = ("embed", "resid_pre", "resid_post", "attn.z", "attn.out", "mlp.out")


@pytest.fixture(scope="module")
def batch():
    return ioi_batch()


@functools.cache
def model_of(blocks, bias=None):
    return circuit_model(blocks, bias=bias)


MODELS = [("llama", 0.3), ("gpt2", None), ("gemma", None), ("pythia", None), ("olmo2", None)]


@jax.jit
def records_of(model, batch, tokens_BT):
    names = [*RECORDED, "attn.q", "attn.k", "attn.v"]
    names += [] if model.cfg.parallel_residual else ["resid_mid"]
    names += ["ln1_post.scale"] if "ln1_post" in model.cfg.norm_names else []
    return measure(model, batch, tokens_BT, record=dict.fromkeys(names, lm_jax.keep))[1]


def written(model, records, writer):
    """Value of a writer, computed from records of other sites in float64."""
    cfg, N = model.cfg, model.cfg.num_heads
    if writer == 0:
        return np.asarray(records["embed"], np.float64)
    layer, head = divmod(writer - 1, N + 1)
    if head == N:
        return np.asarray(records["mlp.out"][layer], np.float64)
    z = np.asarray(records["attn.z"][layer, :, :, head], np.float64)
    block = jax.tree.map(lambda x: np.asarray(x[layer], np.float64), model.params["blocks"])
    value = z @ block["mixer"]["o"][head]
    if "ln1_post" in cfg.norm_names:
        divisor = np.asarray(records["ln1_post.scale"][layer], np.float64)
        value = value / divisor * (block["ln1_post"]["scale"] + cfg.norm_offset)
    return value


def read(model, records, reader, change):
    """What a reader computes of its changed input, by layer functions: site, layer, head, value."""
    cfg, params = model.cfg, model.params
    graph = ComponentGraph.of(cfg)
    scope = Scope({}, {})
    if reader == graph.num_readers - 1:
        x = records["resid_post"][-1] + change
        x = layers.norm(params.get("final", {}), x, cfg, scope, "final")
        return "logits", 0, None, layers.unembed(params, x, cfg)
    layer, index = divmod(reader, graph.layer_readers)
    block = jax.tree.map(lambda x: x[layer], params["blocks"])
    if index == graph.layer_readers - 1:
        mid = records["resid_pre" if cfg.parallel_residual else "resid_mid"][layer]
        h = normalised(block, "ln2", mid + change, cfg)
        out = layers.mlp(block["mlp"], h, cfg, scope)
        if "ln2_post" in cfg.norm_names:
            out = layers.norm(block["ln2_post"], out, cfg, scope, "ln2_post")
        return "mlp.out", layer, None, out
    heads = [("q", n) for n in range(cfg.num_heads)]
    heads += [(name, k) for name in "kv" for k in range(cfg.num_kv_heads)]
    name, head = heads[index]
    h = normalised(block, "ln1", records["resid_pre"][layer] + change, cfg)
    projected = jnp.einsum("BTD,DH->BTH", h, block["mixer"][name][:, head])
    if name + "_bias" in block["mixer"]:
        projected = projected + block["mixer"][name + "_bias"][head][None, None]
    return "attn." + name, layer, head, projected


def normalised(block, name, x, cfg):
    """After the norm before a mixer or an MLP, where there is one."""
    return layers.norm(block[name], x, cfg, Scope({}, {}), name) if name in block else x


@jax.jit
def metric_with(model, batch, tokens_BT, records, masks):
    """The metric with recorded values written where a mask is true: one program for all sites."""
    edits = {site: lm_jax.Replace(records[site], mask) for site, mask in masks.items()}
    return measure(model, batch, tokens_BT, edits=edits)[0]


def effect_by_hand(model, batch, tokens_BT, records, reader, change):
    before = metric_with(model, batch, tokens_BT, records, no_masks(records))
    site, layer, head, value = read(model, records, reader, change)
    if site == "logits":
        rows = np.arange(len(before))
        logits = np.asarray(value)[rows, np.asarray(batch.at_B2)[:, 0]]
        sides = batch.continuations.right_BA, batch.continuations.wrong_BA
        right, wrong = (logits[rows, np.asarray(ids)[:, 0]] for ids in sides)
        return right - wrong - np.asarray(before)
    written = np.array(records[site])
    place = (layer,) if head is None else (layer, slice(None), slice(None), head)
    written[place] = value
    masks = no_masks(records)
    masks[site][layer] = True
    return metric_with(model, batch, tokens_BT, records | {site: written}, masks) - before


def no_masks(records):
    sites = ("attn.q", "attn.k", "attn.v", "mlp.out")
    return {site: np.zeros((2,) + (1,) * (records[site].ndim - 1), bool) for site in sites}


# The tests below run every family; what each reader computes, the two that are least alike.
@pytest.mark.parametrize(
    ("blocks", "bias"),
    [
        model if model[0] in ("llama", "gemma") else pytest.param(*model, marks=pytest.mark.slow)
        for model in MODELS
    ],
)
def test_effects_are_those_of_editing_what_the_reader_computes(batch, blocks, bias):
    model = model_of(blocks, bias)
    runs = [(tokens, records_of(model, batch, tokens)) for tokens in sides(batch, "noising")]
    graph = ComponentGraph.of(model.cfg)
    edges = some_edges(graph)
    exact = oracle.expected(
        lambda m: both_ways(lambda b: components.component_effects(m, b, edges), batch), model
    )
    for i, (direction, order) in enumerate((("noising", runs), ("denoising", runs[::-1]))):
        (here, own), (_, other) = order
        result = np.asarray(
            components.component_effects(model, batch, edges, direction=direction, at_once=5)
        )
        rounding.assert_within(result, oracle.part(exact, i), direction)
        by_hand = []
        for writer, reader in edges:
            change = written(model, other, writer) - written(model, own, writer)
            change = jnp.asarray(change, jnp.float32)
            by_hand.append(effect_by_hand(model, batch, here, own, reader, change))
        rounding.assert_within(np.stack(by_hand), oracle.part(exact, i), f"{direction} by hand")
        assert np.abs(result).max() > 0.1
        assert (np.abs(result) > 2 * exact.bounds[i]).any(1).mean() > 0.4


def test_a_patch_of_equal_values_has_effect_zero_exactly(batch):
    same = dataclasses.replace(batch, corrupt_BT=batch.clean_BT)
    model = model_of("llama", 0.3)
    edges = some_edges(ComponentGraph.of(model.cfg))
    assert (np.asarray(components.component_effects(model, same, edges, at_once=5)) == 0).all()


@pytest.mark.parametrize(("blocks", "bias"), MODELS)
def test_writers_sum_to_what_the_logits_read(batch, blocks, bias):
    model = model_of(blocks, bias)

    def run(model):
        record = {"resid_post": lm_jax.keep}
        _, records = measure(model, batch, batch.clean_BT, record=record)
        total = components.writer_values(model, batch, batch.clean_BT).sum(0)
        if "o_bias" in model.params["blocks"]["mixer"]:
            total += layers.add_axes(model.params["blocks"]["mixer"]["o_bias"].sum(0), total.ndim)
        return total, records["resid_post"][-1]

    exact = oracle.expected(run, model)
    total, stream = (oracle.part(exact, i) for i in range(2))
    oracle.assert_equal(stream.values, total)
    result = np.asarray(components.writer_values(model, batch, batch.clean_BT)).sum(0)
    constant = model.params["blocks"]["mixer"].get("o_bias")
    if constant is not None:
        result += np.asarray(constant).sum(0)
    rounding.assert_within(result, total)


def test_other_prompts_and_weights_compile_nothing_more(batch):
    model = model_of("llama", 0.3)
    edges = some_edges(ComponentGraph.of(model.cfg))
    other = dataclasses.replace(batch, clean_BT=batch.corrupt_BT, corrupt_BT=batch.clean_BT)
    wanted = oracle.expected(lambda m: components.component_effects(m, batch, edges), model)
    first = components.component_effects(model, batch, edges, at_once=5)
    size = components._patch_edges._cache_size()
    second = components.component_effects(
        model, other, edges[::-1], direction="denoising", at_once=5
    )
    assert components._patch_edges._cache_size() == size
    # The same patches in other calls, which may begin at another layer.
    rounding.assert_same(first, second[::-1], wanted)


@pytest.mark.parametrize(
    ("edge", "message"),
    [((1, 0), r"a0\.h0<q> does not read a0\.h0"), ((99, 0), r"edge \(99, 0\) is outside 11")],
)
def test_pairs_that_are_no_edge_are_refused(batch, edge, message):
    with pytest.raises(UsageError, match=message):
        components.component_effects(model_of("llama"), batch, [edge])
