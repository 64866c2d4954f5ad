"""The decoder's own arithmetic: causality, drivers, caches, masks, norms, positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.rounding import error_bound
from iaj_kernels.rounding.error_model import Arithmetic
import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.model import layers
from lm_jax.model.linen import Decoder
from tests import rounding, tiny

SIZE = {
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "hidden_size": 20,
    "mlp_size": 28,
    "vocab_size": 40,
    "max_length": 32,
}
CONFIGS = {
    "llama": lm_jax.DecoderConfig(**SIZE),
    "gpt2": lm_jax.DecoderConfig(
        **SIZE,
        norm="layer",
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rope=None,
        tie_embeddings=True,
    ),
    "neox": lm_jax.DecoderConfig(
        **SIZE, norm="layer", parallel_residual=True, rope=lm_jax.Rope(fraction=0.34)
    ),
    "gemma": lm_jax.DecoderConfig(
        **SIZE,
        norm_offset=1.0,
        norm_placement="both",
        qk_norm="head",
        windows=(3, None, 5),
        local_rope=lm_jax.Rope(theta=100.0),
        embed_scale=4.5,
        score_softcap=3.0,
        logit_softcap=2.0,
    ),
}
CONFIGS |= {
    "olmo2": lm_jax.DecoderConfig(**SIZE, norm_placement="post", qk_norm="projection"),
    "stablelm": lm_jax.DecoderConfig(
        **SIZE, norm="layer", qk_norm="each_head", rope=lm_jax.Rope(fraction=0.34)
    ),
    # Layers of three shapes: the last reads the keys and values of the first.
    "gemma4": lm_jax.DecoderConfig(
        **SIZE,
        norm_placement="both",
        qk_norm="head_and_value",
        windows=(3, None, 3),
        rope=lm_jax.Rope(theta=100.0, scaling=lm_jax.ProportionalScaling(0.5)),
        local_rope=lm_jax.Rope(theta=50.0),
        layers=(
            lm_jax.LayerShape(),
            lm_jax.LayerShape(head_dim=8, num_kv_heads=1, kv="tied"),
            lm_jax.LayerShape(mlp_size=12, kv=0),
        ),
        block_end=lm_jax.BlockEnd(4),
        attention_scale=1.0,
    ),
}
B, T = 2, 9
ALL = pytest.mark.parametrize("name", CONFIGS)
U = 2.0**-24


@functools.cache
def drawn(cfg):
    return tiny.params(cfg)


def model(cfg):
    """Parameters whose dicts are the caller's own."""
    return jax.tree.map(lambda a: a, drawn(cfg))


def tokens(seed=1, length=T):
    return jax.random.randint(jax.random.key(seed), (B, length), 0, 40)


@functools.cache
def wanted(name):
    """Logits of `tokens()` in float64, and how far float32 may be off."""
    cfg = CONFIGS[name]
    return rounding.expected(lambda p: lm_jax.forward(p, tokens(), cfg).logits, model(cfg))


# What a position sees goes by masks, windows, positions, and keys that layers lend. The steps below
# hold each of the others to it as well.
@pytest.mark.parametrize("name", ["gpt2", "gemma", "gemma4"])
def test_no_position_depends_on_a_later_one(name):
    cfg = CONFIGS[name]
    params = model(cfg)
    params["blocks"] = jax.tree.map(lambda a: a * 5 if a.ndim > 2 else a, params["blocks"])

    def logits_of(embedded):
        edits = {"embed": lm_jax.Add(embedded)}
        return lm_jax.forward(params, tokens(), cfg, edits=edits).logits.sum((0, 2))

    reach = np.abs(jax.jit(jax.jacrev(logits_of))(jnp.zeros((B, T, 20)))).max((1, 3))
    later = np.triu(np.ones((T, T), bool), 1)
    assert (reach[later] == 0.0).all()
    assert (reach[np.eye(T, dtype=bool)] > 0.0).all()


@ALL
def test_scanned_and_unrolled_are_equal(name):
    cfg = CONFIGS[name]
    # Unrolled where layers differ, and where they do not.
    for unroll in (False, True) if name in ("llama", "gemma", "gemma4") else (False,):
        out = tiny.forward(model(cfg), tokens(), cfg=cfg, unroll=unroll)
        rounding.assert_within(out.logits, wanted(name))


@ALL
def test_prefill_and_steps_equal_the_parallel_forward(name):
    cfg, params = CONFIGS[name], model(CONFIGS[name])
    cache = lm_jax.init_cache(cfg, B, T + 3)
    parts = []
    for piece in (slice(0, 4), slice(4, 5), slice(5, 9)):
        out = tiny.forward(params, tokens()[:, piece], cfg=cfg, cache=cache)
        cache, parts = out.cache, [*parts, out.logits]
    rounding.assert_within(jnp.concatenate(parts, 1), wanted(name))
    np.testing.assert_array_equal(cache.length_B, T)


@pytest.mark.parametrize("name", ["gpt2", "gemma", "gemma4"])
def test_padding_on_the_right_changes_nothing(name):
    cfg = CONFIGS[name]
    valid_BT = jnp.broadcast_to(jnp.arange(T) < 5, (B, T))
    padded_BT = jnp.where(valid_BT, tokens(), tokens(seed=2))
    out = tiny.forward(model(cfg), padded_BT, cfg=cfg, valid_BT=valid_BT)
    first = rounding.Expected(*(x[:, :5] for x in wanted(name)))
    rounding.assert_within(out.logits[:, :5], first)


def test_logits_at_picks_the_rows_that_all_logits_hold():
    cfg, params = CONFIGS["gemma"], model(CONFIGS["gemma"])
    at_BQ = jnp.array([[0, 8], [3, 3]])
    some = tiny.forward(params, tokens(), cfg=cfg, logits_at=at_BQ).logits
    picked = (np.take_along_axis(x, at_BQ[..., None], 1) for x in wanted("gemma"))
    rounding.assert_within(some, rounding.Expected(*picked))


@pytest.mark.parametrize("name", ["gpt2", "gemma"])
def test_layers_from_one_on_go_on_from_what_enters_it(name):
    """One program for every first layer; from behind the last, only the last norm is left."""
    cfg, params = CONFIGS[name], model(CONFIGS[name])
    record = {"resid_pre": lm_jax.keep, "final_input": lm_jax.keep}
    records = lm_jax.forward(params, tokens(), cfg, record=record).records
    stream_LBTD = jnp.concatenate([records["resid_pre"], records["final_input"][None]])

    @jax.jit
    def from_layer(first):
        entering = lm_jax.Replace(stream_LBTD[first], jnp.ones((1, 1, 1), bool))
        edits = {"embed": entering}
        return lm_jax.forward(params, tokens(), cfg, edits=edits, first_layer=first).logits

    for first in range(cfg.num_layers + 1):
        rounding.assert_within(from_layer(first), wanted(name), f"from layer {first}")
    assert from_layer._cache_size() == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"record": {"attn.z": lm_jax.keep}}, "attn.z of layers that are not run"),
        ("llama", {"cache": True}, "a cache needs every layer"),
        ("gemma4", {}, "this model's layers differ in shape"),
    ],
)
def test_a_first_layer_that_cannot_be_is_refused(name, options, message):
    cfg = CONFIGS[name]
    if "cache" in options:
        options = {"cache": lm_jax.init_cache(cfg, B, T)}
    with pytest.raises(UsageError, match=message):
        lm_jax.forward(model(cfg), tokens(), cfg, first_layer=1, **options)


def test_window_of_the_whole_past_is_no_window():
    cfg = CONFIGS["llama"]
    wide = dataclasses.replace(cfg, windows=(T, None, T))
    narrow = dataclasses.replace(cfg, windows=(T - 1, None, T))
    params, (full, bound) = model(cfg), wanted("llama")
    rounding.assert_within(tiny.forward(params, tokens(), cfg=wide).logits, wanted("llama"))
    cut = np.asarray(tiny.forward(params, tokens(), cfg=narrow).logits)
    within = np.abs(cut - full) <= bound
    assert within[:, :-1].all() and not within[:, -1].any(-1).all()


def test_score_softcap_against_its_formula():
    cfg = dataclasses.replace(CONFIGS["llama"], score_softcap=0.05)
    params = model(cfg)
    names = ("attn.rot_q", "attn.rot_k", "attn.scores")
    out = lm_jax.forward(params, tokens(), cfg, record=dict.fromkeys(names, lm_jax.keep))
    q, k, scores = (out.records[n] for n in names)

    def capped(q, k):
        raw = jnp.einsum("lbtnh,lbsnh->lbnts", q, k.repeat(2, 3)) / np.sqrt(6)
        return (0.05 * jnp.tanh(raw / 0.05))[..., past]

    past = np.tril(np.ones((T, T), bool))
    rounding.assert_within(scores[..., past], rounding.expected(capped, q, k))
    assert np.isneginf(scores[..., ~past]).all()


def test_softmax_of_a_row_without_keys_is_zero_with_finite_gradient():
    scores = jnp.array([[[[-jnp.inf, -jnp.inf], [1.0, -jnp.inf], [0.0, jnp.log(3.0)]]]])
    # A logarithm, an exponential, a sum and a division, of 4, 4, 1 and 3 units, in either term.
    np.testing.assert_allclose(
        lm_jax.softmax(scores)[0, 0], [[0, 0], [1, 0], [0.25, 0.75]], rtol=20 * U
    )
    assert np.isfinite(jax.grad(lambda s: lm_jax.softmax(s)[..., 0].sum())(scores)).all()


def test_llama3_frequencies_against_scalar_arithmetic():
    scaling = lm_jax.Llama3Scaling(8.0, 1.0, 4.0, 8192)
    got = layers.inverse_frequencies(lm_jax.Rope(theta=5e5, scaling=scaling), 64)
    for i, value in enumerate(got):
        freq = 5e5 ** (-2 * i / 64)
        turns = 8192 * freq / (2 * np.pi)
        if turns < 1.0:
            want = freq / 8
        elif turns > 4.0:
            want = freq
        else:
            mix = (turns - 1.0) / 3.0
            want = (1 - mix) * freq / 8 + mix * freq
        # In float64, and rounded.
        np.testing.assert_allclose(value, want, rtol=1.001 * U)


def test_yarn_frequencies_against_scalar_arithmetic():
    scaling = lm_jax.YarnScaling(4.0, 4096, attention_factor=1.5)
    rope = lm_jax.Rope(theta=1e4, scaling=scaling)
    got = layers.inverse_frequencies(rope, 64)
    turns = [4096 * 1e4 ** (-2 * i / 64) / (2 * np.pi) for i in range(32)]
    first = max(i for i in range(32) if turns[i] >= 32.0)
    last = min(i for i in range(32) if turns[i] <= 1.0)
    assert 0 < first < last < 31
    for i, value in enumerate(got):
        slowed = min(max((i - first) / (last - first), 0.0), 1.0)
        freq = 1e4 ** (-2 * i / 64)
        # In float64, and rounded.
        np.testing.assert_allclose(value, (1 - slowed) * freq + slowed * freq / 4, rtol=1.001 * U)
    plain, scaled = (
        layers.rope_tables(r, 64, jnp.zeros((1, 1), jnp.int32))
        for r in (dataclasses.replace(rope, scaling=None), rope)
    )
    np.testing.assert_array_equal(scaled[0], 1.5 * plain[0])


def test_longrope_and_dynamic_frequencies_against_scalar_arithmetic():
    short, long = tuple(np.linspace(1, 2, 8)), tuple(np.linspace(1, 30, 8))
    longrope = lm_jax.Rope(
        theta=1e4, scaling=lm_jax.LongRopeScaling(short, long, 4096, attention_factor=1.2)
    )
    dynamic = lm_jax.Rope(theta=1e4, scaling=lm_jax.DynamicScaling(4.0, 4096))
    for length, factors, slowest in ((4096, short, 1.0), (4097, long, 1.0 + 4 / 4096)):
        of_pairs = layers.inverse_frequencies(longrope, 16, length)
        of_base = layers.inverse_frequencies(dynamic, 16, length)
        for i in range(8):
            # In float64, and rounded.
            want = 1e4 ** (-2 * i / 16) / factors[i]
            np.testing.assert_allclose(of_pairs[i], want, rtol=1.001 * U)
            want = (1e4 * slowest ** (16 / 14)) ** (-2 * i / 16)
            np.testing.assert_allclose(of_base[i], want, rtol=1.001 * U)
    positions_BT = jnp.arange(3)[None]
    plain = layers.rope_tables(lm_jax.Rope(theta=1e4), 16, positions_BT)
    scaled = layers.rope_tables(longrope, 16, positions_BT, 4096)
    np.testing.assert_array_equal(scaled[0][..., 0], np.float32(1.2) * plain[0][..., 0])


@pytest.mark.parametrize(
    "scaling",
    [
        lm_jax.LongRopeScaling((1.0, 1.5, 2.0), (1.2, 3.0, 9.0), 6, 1.3),
        lm_jax.DynamicScaling(4.0, 6),
    ],
)
def test_decoding_past_the_first_context_rotates_what_it_holds_alike(scaling):
    rope = lm_jax.Rope(theta=100.0, scaling=scaling)
    # Layers above the first would keep what they made of the first four tokens.
    cfg = dataclasses.replace(CONFIGS["llama"], rope=rope, num_layers=1)
    params = model(cfg)
    tokens_BT = jnp.arange(10)[None] % cfg.vocab_size

    def in_one(params):
        # The first four are read before there are too many for the first context.
        first = lm_jax.forward(params, tokens_BT[:, :4], cfg)
        return jnp.concatenate(
            [first.logits, lm_jax.forward(params, tokens_BT, cfg).logits[:, 4:]], 1
        )

    def in_two(params):
        cache = lm_jax.init_cache(cfg, 1, 10)
        first = lm_jax.forward(params, tokens_BT[:, :4], cfg, cache=cache)
        rest = lm_jax.forward(params, tokens_BT[:, 4:], cfg, cache=first.cache)
        return jnp.concatenate([first.logits, rest.logits], 1)

    rounding.assert_within(jax.jit(in_two)(params), rounding.expected(in_one, params))


def test_rotation_makes_scores_depend_on_distance_alone():
    rope = lm_jax.Rope(theta=100.0)
    q, k = (jax.random.normal(jax.random.key(s), (1, 1, 1, 8)) for s in (0, 1))

    def score(query_at, key_at):
        at = [layers.rope_tables(rope, 8, jnp.array([[p]])) for p in (query_at, key_at)]
        return (layers.rotate(q, at[0]) * layers.rotate(k, at[1])).sum()

    far = rounding.expected(score, 103, 100)
    for places in ((7, 4), (103, 100)):
        rounding.assert_within(score(*places), far)
    assert abs(score(7, 4) - score(7, 3)) > 1e-3


def test_bfloat16_stays_near_float32():
    cfg = CONFIGS["llama"]
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), model(cfg))
    rough = tiny.forward(half, tokens(), cfg=cfg).logits
    assert rough.dtype == jnp.float32
    # Every operation rounded to the eight bits of bfloat16, of which norms and scores have more.
    exact, bound = rounding.expected(
        lambda p: lm_jax.forward(p, tokens(), cfg).logits,
        jax.tree.map(lambda a: a.astype(jnp.float32), half),
        arithmetic=Arithmetic(unit=2.0**-8, statistical=True),
    )
    deviations = error_bound.DEVIATIONS * (rough - exact) / bound
    assert 0.01 < np.sqrt(np.mean(deviations**2)) < 1.0


@pytest.mark.parametrize("bad", [40, -1])
def test_id_outside_the_vocabulary_gives_nan_not_another_row(bad):
    cfg = CONFIGS["llama"]
    out = tiny.forward(model(cfg), tokens().at[0, 3].set(bad), cfg=cfg).logits
    assert np.isnan(out[0, 3:]).all() and np.isfinite(out[1]).all()


def test_linen_module_is_the_same_function():
    cfg = CONFIGS["gpt2"]
    module = Decoder(cfg)
    variables = module.init(jax.random.key(3), tokens())
    params = variables["params"]["decoder"]
    record = {"attn.z": lm_jax.keep}
    ours = lm_jax.forward(params, tokens(), cfg, record=record)
    theirs = module.apply(variables, tokens(), record=record)
    np.testing.assert_array_equal(theirs.logits, ours.logits)
    np.testing.assert_array_equal(theirs.records["attn.z"], ours.records["attn.z"])


def test_param_count_is_the_sum_over_arrays():
    for cfg in CONFIGS.values():
        total = sum(leaf.size for leaf in jax.tree.leaves(drawn(cfg)))
        assert lm_jax.count_params(cfg) == total


def test_initial_values_depend_on_the_path_alone():
    cfg = CONFIGS["llama"]
    with_bias = dataclasses.replace(cfg, qkv_bias=True)
    np.testing.assert_array_equal(
        model(with_bias)["blocks"]["mlp"]["up"], model(cfg)["blocks"]["mlp"]["up"]
    )


def test_unusable_configs_name_every_field():
    with pytest.raises(BadInputError, match=r"num_heads = 5 is not a multiple.*windows has 2"):
        dataclasses.replace(CONFIGS["llama"], num_heads=5, windows=(1, None))
    with pytest.raises(BadInputError, match=r"norm_placement = 'after'.*qk_norm = True must be"):
        dataclasses.replace(CONFIGS["llama"], norm_placement="after", qk_norm=True)
    with pytest.raises(BadInputError, match="num_layers = -1"):
        dataclasses.replace(CONFIGS["llama"], num_layers=-1)


def test_parameters_that_do_not_fit_are_all_listed():
    cfg, params = CONFIGS["llama"], model(CONFIGS["llama"])
    params["blocks"]["mlp"]["extra"] = params["blocks"]["mlp"].pop("gate")
    params["final"]["scale"] = jnp.ones(3)
    with pytest.raises(
        BadInputError, match=r"missing blocks/mlp/gate.*extra.*final/scale has shape"
    ):
        lm_jax.params.check(params, lm_jax.param_spec(cfg))
