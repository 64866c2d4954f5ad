"""Four devices compute the results of one, and every device holds only its part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.parallel import sharding
from lm_jax.weights import fill
from tests import rounding, tiny
from tools import make_goldens

CFG = lm_jax.DecoderConfig(
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    hidden_size=20,
    mlp_size=28,
    vocab_size=40,
    max_length=32,
    qk_norm="head",
    windows=(None, 4, None),
)
TOKENS_BT = np.random.default_rng(0).integers(0, CFG.vocab_size, (4, 9))
PUSH_L = np.linspace(0.5, 1.5, CFG.num_layers, dtype=np.float32)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [5]]
# data, fsdp, tensor. K = 2 heads do not divide over tensor = 4 and stay whole, N = 4 do.
MESHES = [(4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]


def mesh_of(sizes):
    return sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True)))


@functools.partial(jax.jit, static_argnums=0)
def edited(cfg, params, tokens_BT, push_L):
    """Logits and records of an edited pass."""
    out = lm_jax.forward(
        params,
        tokens_BT,
        cfg,
        edits={
            "attn.pattern": lm_jax.Scale(push_L[:, None, None, None, None]),
            "mlp.out": lm_jax.Add(push_L[:, None, None, None]),
        },
        record={"attn.z": lm_jax.keep, "attn.scores": lambda s: s[..., -1].max(-1)},
    )
    return out.logits, out.records


def everything(params, tokens_BT):
    out = edited(CFG, params, tokens_BT, PUSH_L)
    return out, lm_jax.generate(params, PROMPTS, CFG, max_new_tokens=5)


@pytest.fixture(scope="module")
def one_device():
    params = tiny.params(CFG)
    _, text = everything(params, TOKENS_BT)
    return params, rounding.expected(lambda p: edited(CFG, p, TOKENS_BT, PUSH_L), params), text


@pytest.mark.parametrize("sizes", MESHES)
def test_every_mesh_gives_what_one_device_gives(one_device, sizes):
    params, wanted, text = one_device
    mesh = mesh_of(sizes)
    placed = jax.device_put(params, sharding.param_shardings(mesh, lm_jax.param_spec(CFG)))
    out, generated = everything(placed, sharding.shard_batch(mesh, TOKENS_BT))
    rounding.assert_within(out, wanted)
    assert generated == text


@pytest.mark.parametrize(
    ("sizes", "path", "part"),
    [
        ((4, 1, 1), "blocks/mixer/q", (3, 20, 4, 6)),
        ((1, 4, 1), "blocks/mixer/q", (3, 5, 4, 6)),
        ((1, 2, 2), "blocks/mixer/q", (3, 10, 2, 6)),
        ((1, 2, 2), "blocks/mixer/k", (3, 10, 1, 6)),
        ((1, 1, 4), "blocks/mixer/q", (3, 20, 1, 6)),
        ((1, 1, 4), "blocks/mixer/k", (3, 20, 2, 6)),
        ((1, 1, 4), "blocks/mixer/o", (3, 1, 6, 20)),
        ((1, 1, 4), "blocks/mlp/up", (3, 20, 7)),
        ((1, 2, 2), "blocks/mlp/down", (3, 14, 10)),
        ((1, 2, 2), "embed/tokens", (20, 10)),
        ((1, 2, 2), "unembed", (10, 20)),
        ((1, 2, 2), "blocks/ln1/scale", (3, 10)),
        ((1, 2, 2), "blocks/mixer/q_norm/scale", (3, 6)),
    ],
)
def test_each_device_holds_its_part(one_device, sizes, path, part):
    whole = lm_jax.params.by_path(one_device[0])[path]
    place = sharding.named(mesh_of(sizes), dict(lm_jax.params.leaves(lm_jax.param_spec(CFG)))[path])
    placed = jax.device_put(whole, place)
    assert [shard.data.shape for shard in placed.addressable_shards] == [part] * 4
    rebuilt = np.full(whole.shape, np.nan, np.float32)
    for shard in placed.addressable_shards:
        rebuilt[shard.index] = shard.data
    np.testing.assert_array_equal(rebuilt, whole)


def test_two_axes_never_share_a_mesh_axis():
    square = lm_jax.ParamSpec((3, 8, 8), "LDD")
    assert sharding.partition(mesh_of((1, 4, 1)), square) == jax.P(None, "fsdp", None)
    # The first axis of the pair does not divide, the second takes its place.
    assert sharding.partition(mesh_of((1, 4, 1)), lm_jax.ParamSpec((6, 8), "DD")) == jax.P(
        None, "fsdp"
    )


@pytest.mark.parametrize(
    ("case", "dtype", "small"),
    [
        ("llama_gqa", jnp.float32, 2**20),
        # As stacks of large models are read: each layer is written into its place.
        ("gpt2", jnp.bfloat16, 0),
        ("gemma4", jnp.float32, 0),
    ],
)
def test_weights_load_straight_into_their_shards(case, dtype, small, monkeypatch):
    folder = make_goldens.GOLDEN / case
    unsharded = lm_jax.load_pretrained(folder, dtype=dtype)
    monkeypatch.setattr(fill, "_SMALL_STACK", small)
    by_layer = lm_jax.load_pretrained(folder, dtype=dtype).params
    jax.tree.map(np.testing.assert_array_equal, by_layer, unsharded.params)
    mesh = mesh_of((1, 2, 2))
    wanted = sharding.param_shardings(mesh, lm_jax.param_spec(unsharded.cfg))

    def whole(*args, **kwargs):
        raise AssertionError("a whole parameter was put on one device and then moved")

    monkeypatch.setattr(jax, "device_put", whole)
    placed = lm_jax.load_pretrained(folder, dtype=dtype, mesh=mesh).params
    for path, leaf in lm_jax.params.by_path(placed).items():
        assert leaf.sharding == lm_jax.params.by_path(wanted)[path], path
        np.testing.assert_array_equal(
            leaf, lm_jax.params.by_path(unsharded.params)[path], err_msg=path
        )


def test_saving_gathers_the_shards(tmp_path):
    mesh = mesh_of((1, 2, 2))
    folder = make_goldens.GOLDEN / "gpt2"
    model = lm_jax.load_pretrained(folder, mesh=mesh)
    lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params)
    again = lm_jax.load_pretrained(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, None),
        ({"data": 3}, None),
        ({"data": 2, "tensor": 4}, None),
        ({"data": 0}, None),
        ({"data": 3, "fsdp": -1}, None),
        ({"data": -1, "fsdp": -1}, None),
        ({"data": -2, "fsdp": -2}, None),
        ({"data": -1}, (4, 1, 1)),
        ({"fsdp": 2, "tensor": -1}, (1, 2, 2)),
        ({"data": 2, "fsdp": 2, "tensor": -1}, (2, 2, 1)),
    ],
)
def test_the_sizes_of_a_mesh(sizes, shape):
    if shape is None:
        with pytest.raises(UsageError, match="do not multiply to the 4 devices; set one"):
            sharding.make_mesh(**sizes)
    else:
        mesh = sharding.make_mesh(**sizes)
        assert tuple(mesh.shape.values()) == shape
        assert mesh.axis_names == sharding.AXES


def test_a_mesh_over_some_of_the_devices():
    mesh = sharding.make_mesh(tensor=2, devices=jax.devices()[2:])
    assert list(mesh.devices.flat) == jax.devices()[2:]


@pytest.mark.parametrize(("sizes", "ways"), [((4, 1, 1), 4), ((1, 4, 1), 4), ((2, 1, 2), 2)])
def test_a_batch_that_does_not_divide(sizes, ways):
    mesh = mesh_of(sizes)
    batch = {"tokens": np.zeros((4, 3), np.int32), "length": np.zeros(3, np.int32)}
    with pytest.raises(UsageError, match=f"batch of 3 does not divide over .* = {ways} devices"):
        sharding.shard_batch(mesh, batch)
    batch["length"] = np.arange(4)
    placed = sharding.shard_batch(mesh, batch)
    assert placed["length"].addressable_shards[0].data.shape == (4 // ways,)


def test_the_abstract_tree_names_where_arrays_go():
    spec = lm_jax.param_spec(CFG)
    alone = lm_jax.params.by_path(sharding.abstract(spec, jnp.bfloat16))
    assert {leaf.dtype for leaf in alone.values()} == {jnp.dtype(jnp.bfloat16)}
    assert all(leaf.sharding.device_set == {jax.devices()[0]} for leaf in alone.values())
    mesh = mesh_of((1, 2, 2))
    split = lm_jax.params.by_path(sharding.abstract(spec, jnp.float32, mesh))
    wanted = lm_jax.params.by_path(sharding.param_shardings(mesh, spec))
    assert {name: leaf.sharding for name, leaf in split.items()} == wanted
