"""Adapters change nothing when they are fresh, merge exactly, and know their base."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.checkpoint.adapters import ADAPTER_FILE, load_adapters, save_adapters
from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.train import optim
from tests import rounding, tiny

U = 2.0**-24
SETTINGS = lora.LoraConfig(rank=3, alpha=6.0)
FAMILIES = {
    "llama": tiny.decoder(vocab_size=32, max_length=16, num_heads=4, num_kv_heads=2),
    "gpt2": tiny.decoder(vocab_size=32, max_length=16, **tiny.GPT2),
}


def model_and_adapters(cfg, *, up=True, settings=SETTINGS):
    """Parameters, and adapters whose updates are zero unless `up`."""
    spec = lm_jax.param_spec(cfg)
    params = tiny.params(cfg)
    adapters = params_lib.init(jax.random.key(1), lora.adapter_spec(spec, settings))
    if up:
        leaves = params_lib.by_path(adapters)
        keys = jax.random.split(jax.random.key(3), len(leaves))
        adapters = params_lib.tree_from_paths(
            {
                path: 0.3 * jax.random.normal(key, leaf.shape)
                for key, (path, leaf) in zip(keys, leaves.items(), strict=True)
            }
        )
    return params, adapters


def logits(params, cfg):
    tokens_BT = jax.random.randint(jax.random.key(2), (2, 12), 0, cfg.vocab_size)
    return tiny.forward(params, tokens_BT, cfg=cfg).logits


@pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)
def test_a_fresh_adapter_changes_no_bit(cfg):
    params, adapters = model_and_adapters(cfg, up=False)
    result = logits(lora.attach(params, adapters, SETTINGS), cfg)
    np.testing.assert_array_equal(result, logits(params, cfg))


def test_float32_adapters_leave_a_bfloat16_model_in_bfloat16():
    """As those of `load_peft` over weights that were loaded in bfloat16."""
    cfg = FAMILIES["gpt2"]
    params, adapters = model_and_adapters(cfg)
    low = params_lib.tree_map(lambda x: x.astype(jnp.bfloat16), params)
    result = logits(lora.attach(low, adapters, SETTINGS), cfg)
    assert result.dtype == logits(low, cfg).dtype
    wanted = logits(lora.attach(params, adapters, SETTINGS), cfg)
    change = np.abs(wanted - logits(params, cfg)).max()
    # Eight bits of mantissa: the adapters' effect is there, within some roundings.
    np.testing.assert_allclose(result, wanted, atol=0.1 * change)


@pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)
def test_merged_is_the_weight_plus_the_product_and_computes_the_same(cfg):
    params, adapters = model_and_adapters(cfg)
    trees = params, adapters
    merged = params_lib.by_path(lora.merge(*trees, SETTINGS))
    wanted = rounding.expected(lambda p, a: lora.merge(p, a, SETTINGS), *trees)
    before, update = params_lib.by_path(params), params_lib.by_path(adapters)
    changed = {path for path in before if not np.array_equal(before[path], merged[path])}
    assert changed == {path.rpartition("/")[0] for path in update}
    for path in changed:
        down, up = (np.asarray(update[f"{path}/{name}"], np.float64) for name in ("down", "up"))
        flat = np.stack(
            [(d.reshape(-1, 3) @ u.reshape(3, -1)) for d, u in zip(down, up, strict=True)]
        )
        want = np.asarray(before[path], np.float64) + 2.0 * flat.reshape(before[path].shape)
        exact, bound = (params_lib.by_path(tree)[path] for tree in wanted)
        np.testing.assert_allclose(exact, want, rtol=1e-12, atol=1e-12)
        rounding.assert_within(merged[path], rounding.Expected(exact, bound))
    of_merged = rounding.expected(lambda p, a: logits(lora.merge(p, a, SETTINGS), cfg), *trees)
    for join in (lora.attach, lora.merge):
        rounding.assert_within(logits(join(*trees, SETTINGS), cfg), of_merged)


@pytest.mark.parametrize("relative", [1e-3, 5e-3, 2e-2])
def test_a_merge_over_bfloat16_rounds_once_and_tells_what_that_loses(relative):
    """Against float64: the sum rounded once, and the norm of the part that rounding loses."""
    rng = np.random.default_rng(0)
    weight, down, up = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((2, 48, 4, 16), (2, 48, 3), (2, 3, 4, 16))
    )
    # alpha / r is 2, and three products of unit variance add up.
    up *= relative / (2.0 * np.sqrt(3.0))
    params = {"blocks": {"mixer": {"q": jnp.asarray(weight, jnp.bfloat16)}}}
    adapters = {"blocks": {"mixer": {"q": {"down": down, "up": up}}}}

    base = np.asarray(params["blocks"]["mixer"]["q"]).astype(np.float64)
    update = 2.0 * np.einsum("ldr,lrnh->ldnh", down.astype(np.float64), up.astype(np.float64))
    (merged,) = jax.tree.leaves(lora.merge(params, adapters, SETTINGS))
    (wide,) = jax.tree.leaves(lora.merge(params, adapters, SETTINGS, dtype=jnp.float32))
    assert (merged.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(merged, wide.astype(jnp.bfloat16))
    # One sum of float32 and a product of three terms before it.
    terms = 2.0 * np.einsum("ldr,lrnh->ldnh", np.abs(down), np.abs(up))
    bound = U * (np.abs(base + update) + 5 * terms)
    assert np.all(np.abs(np.asarray(wide, np.float64) - (base + update)) <= bound)

    lost = np.asarray(merged).astype(np.float64) - (base + update)
    want = np.linalg.norm(lost) / np.linalg.norm(update)
    # Two sums of squares and their roots; and in each term the error of the sum above.
    relative = 2 * update.size * U + np.linalg.norm(bound) / np.linalg.norm(lost)
    assert float(lora.rounding(params, adapters, SETTINGS)) == pytest.approx(want, rel=relative)
    assert float(lora.rounding(params, adapters, SETTINGS, dtype=jnp.float32)) == 0.0
    assert want > 0.05


def test_rounding_takes_the_whole_of_an_update_below_half_a_spacing():
    """Bfloat16 has steps of 2^-7 above 1; ties go to the even neighbour."""
    params = {"blocks": {"mixer": {"q": jnp.ones((1, 1, 1, 2), jnp.bfloat16)}}}

    def share(update):
        pair = {"down": np.ones((1, 1, 1), np.float32), "up": np.full((1, 1, 1, 2), update)}
        settings = lora.LoraConfig(rank=1, alpha=1.0)
        return float(lora.rounding(params, {"blocks": {"mixer": {"q": pair}}}, settings))

    assert [share(x) for x in (0.0, 2.0**-9, 2.0**-8, 2.0**-7)] == [0, 1, 1, 0]
    # Two sums of two, a division and a root.
    assert share(3 * 2.0**-8) == pytest.approx(1 / 3, rel=8 * U)


def test_targets_are_names_or_paths():
    spec = lm_jax.param_spec(FAMILIES["llama"])

    def paths(*targets):
        settings = dataclasses.replace(SETTINGS, targets=targets)
        return {
            path.removeprefix("blocks/").rpartition("/")[0]
            for path in params_lib.by_path(params_lib.abstract(lora.adapter_spec(spec, settings)))
        }

    assert paths("q") == {"mixer/q"}
    assert paths("mlp/*", "k") == {"mlp/up", "mlp/down", "mlp/gate", "mixer/k"}
    assert paths("?") == {"mixer/q", "mixer/k", "mixer/v", "mixer/o"}
    with pytest.raises(UsageError, match=r"no weight matches 'q_proj'; known: down, gate"):
        paths("q_proj")
    with pytest.raises(UsageError, match=r"no weight matches 'gat'; did you mean 'gate'"):
        paths("gat")


def test_gradients_reach_adapters_as_they_reach_the_merged_weight():
    """d/d up of the loss is down^T times the gradient of the merged weight, and so for down."""
    cfg = FAMILIES["llama"]
    params, adapters = model_and_adapters(cfg)

    def weigh(p):
        return jnp.sum(jnp.square(logits(p, cfg)))

    def from_attached(adapters):
        by_adapter = jax.grad(lambda a: weigh(lora.attach(params, a, SETTINGS)))(adapters)
        return by_adapter["blocks"]["mixer"]["q"]

    def from_merged(adapters):
        by_weight = jax.grad(weigh)(lora.merge(params, adapters, SETTINGS))
        g_LDNH, own = by_weight["blocks"]["mixer"]["q"], adapters["blocks"]["mixer"]["q"]
        return {
            "up": 2.0 * jnp.einsum("LDr,LDNH->LrNH", own["down"], g_LDNH),
            "down": 2.0 * jnp.einsum("LrNH,LDNH->LDr", own["up"], g_LDNH),
        }

    exact = rounding.expected(from_merged, adapters)
    rounding.assert_within(jax.jit(from_attached)(adapters), exact)


def test_a_saved_adapter_comes_back_bitwise_and_only_over_its_base(tmp_path):
    _, adapters = model_and_adapters(FAMILIES["llama"])
    path = tmp_path / ADAPTER_FILE
    save_adapters(path, adapters, SETTINGS, base_sha256="a" * 64)
    result, settings = load_adapters(path, base_sha256="a" * 64)
    assert settings == SETTINGS
    want = params_lib.by_path(adapters)
    assert params_lib.by_path(result).keys() == want.keys()
    for name, leaf in params_lib.by_path(result).items():
        np.testing.assert_array_equal(leaf, want[name], err_msg=name)
    with pytest.raises(BadInputError, match="with weights aaaaaaaaaaaa, not bbbbbbbbbbbb"):
        load_adapters(path, base_sha256="b" * 64)
    with pytest.raises(BadInputError, match="is not there"):
        load_adapters(tmp_path / "none", base_sha256="a" * 64)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptError, match="no whole safetensors file"):
        load_adapters(path, base_sha256="a" * 64)
    other = tiny.decoder(vocab_size=32, max_length=16, num_heads=2)
    with pytest.raises(BadInputError, match=r"adapter of blocks/mixer/\w+ gives"):
        lora.attach(tiny.params(other), result, settings)


def test_settings_that_cannot_be():
    with pytest.raises(UsageError, match="rank = 0 must be at least 1; alpha = -1"):
        lora.LoraConfig(rank=0, alpha=-1.0)
    with pytest.raises(UsageError, match="targets must name"):
        lora.LoraConfig(targets=())


@pytest.mark.parametrize("qk_norm", ["each_head", "projection"])
def test_norms_with_weights_by_head_are_no_matrices(qk_norm):
    """Neither adapted nor shrunk by weight decay, though they have two axes in a layer."""
    spec = lm_jax.param_spec(tiny.decoder(qk_norm=qk_norm))
    adapted = params_lib.by_path(lora.adapter_spec(spec, lora.LoraConfig(targets=("*",))))
    assert "blocks/mixer/q/down" in adapted
    scales = {path: leaf for path, leaf in params_lib.leaves(spec) if path.endswith("scale")}
    assert len(scales["blocks/mixer/q_norm/scale"].shape) == 3
    assert not any(f"{path}/down" in adapted for path in scales)
    assert not any(optim.is_weight(path, leaf) for path, leaf in scales.items())
