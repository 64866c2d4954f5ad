"""Layers that differ in shape: addressed by their number, sharing what they say they share."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.model import frozen, layers
from lm_jax.model.mixers import ATTENTION
from lm_jax.run.config import canonical_json, from_plain
from tests import tiny

# Layers 2 and 3 read the keys and values of layers 0 and 1.
CFG = lm_jax.DecoderConfig(
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    hidden_size=12,
    mlp_size=10,
    vocab_size=20,
    max_length=16,
    norm_placement="both",
    qk_norm="head_and_value",
    windows=(3, None, 3, None),
    layers=(
        lm_jax.LayerShape(),
        lm_jax.LayerShape(head_dim=8, kv="tied"),
        lm_jax.LayerShape(mlp_size=14, kv=0),
        lm_jax.LayerShape(head_dim=8, mlp_size=14, kv=1),
    ),
    block_end=lm_jax.BlockEnd(3),
)
TOKENS_BT = np.array([[3, 1, 4, 1, 5, 9, 2]])


@functools.cache
def params():
    return tiny.params(CFG)


@functools.partial(jax.jit, static_argnames="sites")
def records(params, edits, sites):
    """The largest entry of every position's vector at each site."""
    record = {site: lambda x: jnp.abs(x).max(-1) for site in sites}
    return lm_jax.forward(params, TOKENS_BT, CFG, edits=edits, record=record).records


def traced(**arguments):
    """A forward pass of shapes alone."""
    return jax.eval_shape(lambda p: lm_jax.forward(p, TOKENS_BT, CFG, **arguments), params())


def test_every_layer_has_parameters_of_its_shape():
    blocks = params()["blocks"]
    assert sorted(blocks) == ["0", "1", "2", "3"]
    assert blocks["1"]["mixer"]["q"].shape == (1, 12, 2, 8)
    assert blocks["2"]["mlp"]["up"].shape == (1, 12, 14)
    parts = [set(blocks[name]["mixer"]) for name in sorted(blocks)]
    own, shared = {"q", "k", "o", "q_norm", "k_norm"}, {"q", "o", "q_norm"}
    assert parts == [own | {"v"}, own, shared, shared]


def test_equal_layers_in_a_row_are_one_stack():
    wide = lm_jax.LayerShape(head_dim=8)
    cfg = dataclasses.replace(
        CFG, num_layers=5, windows=(), layers=(*[lm_jax.LayerShape()] * 3, wide, wide)
    )
    assert [list(stack.layers) for stack in cfg.stacks] == [[0, 1, 2], [3, 4]]
    # One that lends its keys is a stack of its own.
    cfg = dataclasses.replace(cfg, layers=(*cfg.layers[:4], lm_jax.LayerShape(head_dim=8, kv=3)))
    assert [list(stack.layers) for stack in cfg.stacks] == [[0, 1, 2], [3], [4]]
    assert [stack.lends for stack in cfg.stacks] == [False, True, False]


@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_is_edited_under_its_number(layer):
    """Heads without output, by an edit or by their weights."""

    @jax.jit
    def logits(params, factor):
        edit = lm_jax.Scale(jnp.full((1, 1, 1, 1), factor))
        edits = {"attn.z": lm_jax.OneLayer(layer, edit)}
        return lm_jax.forward(params, TOKENS_BT, CFG, edits=edits).logits

    changed = jax.tree.map(lambda a: a, params())
    mixer = changed["blocks"][str(layer)]["mixer"]
    mixer["o"] = jnp.zeros_like(mixer["o"])
    edited = logits(params(), 0.0)
    np.testing.assert_array_equal(edited, logits(changed, 1.0))
    assert not np.array_equal(edited, logits(params(), 1.0))


@pytest.mark.parametrize(("closed", "silent"), [(0, [0, 2]), (1, [1, 3]), (2, [2]), (3, [3])])
def test_values_that_are_lent_reach_the_layers_that_share_them(closed, silent):
    open_L1111 = jnp.ones((4, 1, 1, 1, 1)).at[closed].set(0)
    z_LBTN = records(params(), {"attn.v": lm_jax.Scale(open_L1111)}, ("attn.z",))["attn.z"]
    assert [layer for layer in range(4) if not z_LBTN[layer].any()] == silent


def test_the_scalar_of_a_layer_multiplies_the_stream_that_leaves_it():
    doubled = jax.tree.map(lambda a: a, params())
    doubled["blocks"]["3"]["end"]["scalar"] = jnp.full(1, 2.0)
    before, after = (records(p, {}, ("resid_post",))["resid_post"] for p in (params(), doubled))
    np.testing.assert_array_equal(after[3], 2 * before[3])
    np.testing.assert_array_equal(after[:3], before[:3])


def test_records_and_edits_that_not_all_layers_can_have():
    with pytest.raises(UsageError, match=r"attn\.z has other shapes in other layers"):
        traced(record={"attn.z": lm_jax.keep})
    out = traced(record={"attn.z": lambda z: z.sum(-1), "attn.pattern": lm_jax.keep})
    assert out.records["attn.z"].shape == (4, 1, 7, 2)
    assert out.records["attn.pattern"].shape == (4, 1, 2, 7, 7)
    with pytest.raises(UsageError, match=r"record: layers 2\.\.2 .* no site 'attn.k'"):
        traced(record={"attn.k": jnp.sum})
    with pytest.raises(UsageError, match=r"edits: layers 1\.\.1 .* no site 'v_input'"):
        traced(edits={"v_input": lm_jax.Scale(jnp.ones((4, 1, 1, 1, 1)))})
    with pytest.raises(UsageError, match="H = 6; expected 1 or 8"):
        traced(edits={"attn.z": lm_jax.Add(jnp.ones((4, 1, 1, 1, 6)))})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": CFG.layers[:3]}, "layers has 3 entries for num_layers = 4"),
        ({"layers": (*CFG.layers[:3], lm_jax.LayerShape(kv=1))}, r"layers\[3\].kv = 1 must be"),
        ({"layers": (*CFG.layers[:3], lm_jax.LayerShape(kv=2))}, r"layers\[3\].kv = 2 must be"),
        ({"layers": (*CFG.layers[:3], lm_jax.LayerShape(head_dim=7))}, "rotary width of 7"),
        ({"block_end": lm_jax.BlockEnd(-1)}, "block_end.input_size = -1"),
    ],
)
def test_configs_of_layers_that_cannot_be(changes, words):
    with pytest.raises(BadInputError, match=words):
        dataclasses.replace(CFG, **changes)


def test_a_stored_config_is_read_back():
    assert from_plain(json.loads(canonical_json(CFG)), lm_jax.DecoderConfig) == CFG


def test_keys_of_no_other_layer():
    cfg = dataclasses.replace(CFG, layers=(), kv=0)
    spec = lm_jax.params.abstract(lm_jax.param_spec(cfg))
    with pytest.raises(UsageError, match=r"config.kv = 0.*name it in config.layers"):
        jax.eval_shape(lambda p: lm_jax.forward(p, TOKENS_BT, cfg), spec)


def test_what_needs_equal_layers_refuses_others():
    with pytest.raises(UsageError, match="frozen form cannot take family"):
        frozen.frozen_sites(CFG, ATTENTION)


def test_proportional_frequencies_against_scalar_arithmetic():
    rope = lm_jax.Rope(theta=1e6, scaling=lm_jax.ProportionalScaling(0.25, factor=2.0))
    wanted = [1e6 ** (-2 * i / 24) / 2 if i < 3 else 0.0 for i in range(12)]
    # In float64, and rounded.
    np.testing.assert_allclose(
        layers.inverse_frequencies(rope, 24), wanted, rtol=1.001 * 2.0**-24, atol=0
    )
    with pytest.raises(BadInputError, match=r"scaling\.rotated = 1\.5 must be at most 1"):
        lm_jax.Rope(scaling=lm_jax.ProportionalScaling(1.5))
