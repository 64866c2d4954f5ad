"""Recurrent mixers look back only, decode as they read, and take up no padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model.mixers import Layer
from lm_jax.model.sites import Scope
from protot_jax.mixers.deltanet import DeltaNetMixer
from protot_jax.mixers.gated_deltanet import GatedDeltaNetMixer
from protot_jax.mixers.mamba import MambaMixer
from protot_jax.mixers.slots import GatedSlotMixer, RavenMixer
from tests import rounding, tiny

CFG = tiny.decoder()
MODELS = {
    "mamba": (dataclasses.replace(CFG, mlp_size=0), MambaMixer(state_size=5, dt_rank=3)),
    "deltanet": (CFG, DeltaNetMixer()),
    "gated_deltanet": (CFG, GatedDeltaNetMixer()),
    "gated_slots": (CFG, GatedSlotMixer(num_slots=5)),
    "raven": (CFG, RavenMixer(num_slots=5, written=2)),
}
every_model = pytest.mark.parametrize(("cfg", "mixer"), MODELS.values(), ids=MODELS)
FAMILIES = ("mamba", "gated_deltanet", "raven")
each_family = pytest.mark.parametrize(
    ("cfg", "mixer"), [MODELS[name] for name in FAMILIES], ids=FAMILIES
)


def parameters(cfg, mixer):
    """Every scalar away from its start, the weights so large that tokens move the state."""
    rng = np.random.default_rng(0)

    def draw(spec):
        return jnp.asarray(0.3 * rng.normal(size=spec.shape), jnp.float32)

    params = lm_jax.params.tree_map(draw, lm_jax.param_spec(cfg, mixer))
    if isinstance(mixer, MambaMixer | GatedDeltaNetMixer | RavenMixer):
        # Steps so short that a state outlives tens of tokens.
        params["blocks"]["mixer"]["step_bias"] -= 3.0
    return params


def block(cfg, mixer):
    return jax.tree.map(lambda x: x[0], parameters(cfg, mixer)["blocks"]["mixer"])


compiled = functools.partial(jax.jit, static_argnames=("cfg", "mixer"))


@compiled
def apply(cfg, mixer, p, x_BTD, valid_BT=None, cache=None):
    text = Layer(
        positions_BT=jnp.zeros(x_BTD.shape[:2], jnp.int32),
        scope=Scope({}, {}),
        attend=lm_jax.softmax,
        valid_BT=valid_BT,
    )
    return mixer.apply(p, x_BTD, cfg, text, cache)


@every_model
def test_an_output_depends_on_its_own_token_and_every_earlier_one(cfg, mixer):
    p = block(cfg, mixer)
    x_TD = jax.random.normal(jax.random.key(1), (9, 16))
    weights_D = jax.random.normal(jax.random.key(2), (16, 1))

    def outputs(x_TD):
        return (apply(cfg, mixer, p, x_TD[None])[0][0] @ weights_D)[:, 0]

    jacobian = jax.jit(jax.jacrev(outputs))(x_TD)
    depends_TT = np.abs(np.asarray(jacobian)).sum(-1) > 0
    np.testing.assert_array_equal(depends_TT, np.tril(np.ones((9, 9))) > 0)


@compiled
def read(cfg, mixer, params, tokens_BT):
    return lm_jax.forward(params, tokens_BT, cfg, mixer=mixer).logits


@compiled
def decoded(cfg, mixer, params, tokens_BT):
    """Logits of the same tokens, given one at a time."""

    def step(cache, token_B):
        out = lm_jax.forward(params, token_B[:, None], cfg, mixer=mixer, cache=cache)
        return out.cache, out.logits[:, 0]

    dtype = params["embed"]["tokens"].dtype
    cache = lm_jax.init_cache(cfg, *tokens_BT.shape, dtype=dtype, mixer=mixer)
    return jax.lax.scan(step, cache, tokens_BT.T)[1].swapaxes(0, 1)


@every_model
def test_decoding_step_by_step_equals_reading_at_once(cfg, mixer):
    params = parameters(cfg, mixer)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 150), 0, 40)
    wanted = rounding.expected(lambda p: read(cfg, mixer, p, tokens_BT), params)
    for run in (read, decoded):
        rounding.assert_within(run(cfg, mixer, params, tokens_BT), wanted)


@every_model
def test_decoding_in_bfloat16_is_as_near_to_float32_as_reading_at_once(cfg, mixer):
    params = jax.tree.map(lambda x: x.astype("bfloat16"), parameters(cfg, mixer))
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 150), 0, 40)
    exact = read(cfg, mixer, jax.tree.map(lambda x: x.astype("float32"), params), tokens_BT)
    # The last third, where errors of the state would have added up.
    error, at_once = (
        np.sqrt(np.mean((run(cfg, mixer, params, tokens_BT) - exact)[:, 100:] ** 2))
        for run in (decoded, read)
    )
    assert at_once < 0.05 * np.std(exact)
    assert error < 1.25 * at_once


@each_family
def test_a_prompt_in_two_parts_leaves_what_it_leaves_in_one(cfg, mixer):
    p = block(cfg, mixer)
    x_BTD = jax.random.normal(jax.random.key(1), (2, 38, 16))
    empty = mixer.init_cache(cfg, 2, 0, jnp.float32)
    wanted = rounding.expected(lambda p, x: apply(cfg, mixer, p, x, cache=empty), p, x_BTD)
    rounding.assert_within(apply(cfg, mixer, p, x_BTD, cache=empty), wanted)
    head_BTD, cache = apply(cfg, mixer, p, x_BTD[:, :19], cache=empty)
    tail_BTD, got = apply(cfg, mixer, p, x_BTD[:, 19:], cache=cache)
    rounding.assert_within((jnp.concatenate([head_BTD, tail_BTD], 1), got), wanted)


@each_family
def test_padding_leaves_the_state_as_it_is(cfg, mixer):
    p = block(cfg, mixer)
    x_BTD = jax.random.normal(jax.random.key(1), (2, 11, 16))
    before = mixer.init_cache(cfg, 2, 0, jnp.float32)
    before["state"] = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(2), x.shape), before["state"]
    )
    _, after = apply(cfg, mixer, p, x_BTD, valid_BT=jnp.zeros((2, 11), bool), cache=before)
    jax.tree.map(np.testing.assert_array_equal, after["state"], before["state"])
    _, moved = apply(cfg, mixer, p, x_BTD, valid_BT=jnp.ones((2, 11), bool), cache=before)
    for now, held in zip(*map(jax.tree.leaves, (moved["state"], before["state"])), strict=True):
        assert np.abs(now - held).max() > 1e-3


@every_model
def test_what_stands_in_the_padding_changes_no_bit(cfg, mixer):
    params = parameters(cfg, mixer)
    valid_BT = jnp.arange(9)[None] >= jnp.array([[0], [4]])
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 9), 0, 40)
    others_BT = jnp.where(valid_BT, tokens_BT, 39 - tokens_BT)
    run = jax.jit(lambda t: lm_jax.forward(params, t, cfg, mixer=mixer, valid_BT=valid_BT).logits)
    one, other = run(tokens_BT), run(others_BT)
    np.testing.assert_array_equal(np.asarray(one)[valid_BT], np.asarray(other)[valid_BT])
    alone = rounding.expected(lambda p: read(cfg, mixer, p, tokens_BT[1:, 4:])[0], params)
    rounding.assert_within(one[1, 4:], alone)


@each_family
def test_prompts_of_unlike_length_go_on_as_each_alone(cfg, mixer):
    params = parameters(cfg, mixer)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    options = {"max_new_tokens": 6, "mixer": mixer}
    alone = [lm_jax.generate(params, [each], cfg, **options)[0] for each in prompts]
    assert lm_jax.generate(params, prompts, cfg, **options) == alone


@pytest.mark.parametrize(
    ("name", "floats"),
    [
        # 32 channels of 5 and three inputs.
        ("mamba", 32 * 5 + 3 * 32),
        # Two 8 x 8 matrices, and three inputs of each of three convolutions.
        ("deltanet", 2 * 8 * 8 + 3 * 3 * 16),
        ("gated_deltanet", 2 * 8 * 8 + 3 * 3 * 16),
        # Keys and values of five slots in two heads.
        ("gated_slots", 2 * 2 * 5 * 8),
        ("raven", 2 * 2 * 5 * 8),
    ],
)
def test_a_cache_is_of_one_size_at_any_length(name, floats):
    cfg, mixer = MODELS[name]
    for length in (4, 100_000):
        cache = lm_jax.init_cache(cfg, 3, length, mixer=mixer)
        assert sum(x.size for x in jax.tree.leaves(cache.layers)) == 2 * 3 * floats
