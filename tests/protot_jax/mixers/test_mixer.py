"""The prototype mixer equals Eq. 1 and 2 of the paper, is strictly causal, and decodes alike."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.core import cases
import lm_jax
from lm_jax.model.mixers import Layer
from lm_jax.model.sites import Scope
from protot_jax import PrototypeMixer
from tests import rounding, tiny
from tests.protot_jax.rotations import turned

CFG = tiny.decoder(num_layers=3, num_heads=1, num_kv_heads=1, head_dim=16)
MIXER = PrototypeMixer(num_prototypes=5)
# Frequencies are powers of 2, which float32 has, and the fastest pair turns by 1 radian a token.
ROTARY = {"rotary_queries": True, "rotary_values": True, "rotary_theta": 256.0}


# Table 13: six layers of width 256, a vocabulary of 16,000, untied.
PAPER = dataclasses.replace(
    CFG, num_layers=6, num_heads=4, num_kv_heads=4, head_dim=64, hidden_size=256
)


def blocks(mixer):
    """The mixer's parameters of every layer, every scalar away from its start."""
    p = lm_jax.init_params(jax.random.key(0), CFG, mixer=mixer)["blocks"]["mixer"]
    decay_R = np.exp2(-1.0 / np.geomspace(0.3, 60.0, mixer.num_prototypes))
    alpha = np.float32(0.7) if mixer.heads == 1 else np.linspace(0.5, 1.1, mixer.heads)
    spread = {"decay_logit": np.log(decay_R / (1 - decay_R)), "alpha": alpha}
    layers = (CFG.num_layers,)
    spread = {
        name: jnp.asarray(np.broadcast_to(x, layers + np.shape(x)), jnp.float32)
        for name, x in spread.items()
    }
    return p | spread | {"read": p["read"] * 10}


def of_layer(p, layer):
    return jax.tree.map(lambda x: x[layer], p)


def apply(mixer, p, x_BTD, layer, valid_BT=None, cache=None, edits=None):
    text = Layer(
        positions_BT=jnp.zeros(x_BTD.shape[:2], jnp.int32),
        scope=Scope(edits or {}, {}),
        attend=lm_jax.softmax,
        index=layer,
        valid_BT=valid_BT,
    )
    return mixer.apply(p, x_BTD, CFG, text, cache)


def equations(mixer, p, x_BTD, layer):
    """Eq. 1 and 2 with the loops of their sums, in float64."""
    p = {name: np.asarray(value, np.float64) for name, value in p.items()}
    x_BTD = np.asarray(x_BTD, np.float64)
    B, T, D = x_BTD.shape
    value_BTE = x_BTD @ p["value"]
    if layer < mixer.conv_layers:
        taps, values = mixer.conv_kernel, value_BTE.copy()
        for t in range(T):
            past = [
                p["conv"][c] * values[:, t - taps + 1 + c]
                for c in range(max(0, taps - 1 - t), taps)
            ]
            value_BTE[:, t] = 0.5 * values[:, t] + 0.5 * sum(past)

    N, R = mixer.heads, mixer.num_prototypes

    def turn(x_XE, place_X):
        parts = np.split(x_XE, N, -1)
        return np.concatenate([turned(x, place_X, mixer.rotary_theta) for x in parts], -1)

    query_BTD = x_BTD @ p["read"]
    if mixer.rotary_queries:
        query_BTD = turn(query_BTD, np.arange(T))

    def gate(query_D, tau):
        gates = []
        for own_RD, part_D in zip(np.split(p["prototypes"], N), np.split(query_D, N), strict=True):
            logits = own_RD @ part_D / (abs(tau) + 1e-6)
            e = np.exp(logits - logits.max())
            gates.append(e / e.sum())
        return np.concatenate(gates)

    # A head has its own part of the values, and its own alpha.
    E = value_BTE.shape[2] // N
    alpha_E = np.repeat(np.atleast_1d(p["alpha"]) / np.sqrt(N), E)
    decay_R = 1 / (1 + np.exp(-p["decay_logit"]))
    out_BTD = np.zeros((B, T, D))
    for b in range(B):
        write_TR = np.array([gate(x, p["write_tau"]) for x in x_BTD[b]])
        read_TR = np.array([gate(query_D, p["read_tau"]) for query_D in query_BTD[b]])
        if mixer.shared_routing and layer == 0:
            read_TR = write_TR
        for i in range(1, T):
            read_E = np.zeros(N * E)
            value_JE = value_BTE[b, :i]
            if mixer.rotary_values:
                value_JE = turn(value_JE, np.arange(i) - i)
            for r in range(R):
                head_E = np.arange(N * E) // E == r // (R // N)
                weight_J = decay_R[r] ** (i - 1 - np.arange(i)) * write_TR[:i, r]
                # Without the mass the moving average of the released code.
                scale = 1 / weight_J.sum() if mixer.mass_normalisation else 1 - decay_R[r]
                read_E += head_E * read_TR[i, r] * scale * (weight_J @ value_JE)
            out_BTD[b, i] = alpha_E * read_E @ p["out"]
    return out_BTD


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"low_rank": False, "conv_kernel": 4},
        {"mass_normalisation": False},
        {"shared_routing": False, "conv_layers": 1},
        {"rotary_values": True, "rotary_theta": 256.0, "mass_normalisation": False},
        # Whose root is exact in float32.
        ROTARY | {"heads": 4, "num_prototypes": 8},
    ],
    ids=["default", "full-rank", "no-mass", "no-routing", "values", "turned heads"],
)
def test_mixer_is_the_equations(changed):
    mixer = dataclasses.replace(MIXER, **changed)
    p = blocks(mixer)
    x_BTD = jax.random.normal(jax.random.key(1), (2, 11, 16))

    def every_layer(p, x_BTD):
        layers = p, jnp.arange(CFG.num_layers)
        return jax.lax.map(lambda each: apply(mixer, each[0], x_BTD, each[1])[0], layers)

    exact = rounding.expected(every_layer, p, x_BTD)
    rounding.assert_within(jax.jit(every_layer)(p, x_BTD), exact)
    for layer, out_BTD in enumerate(exact.values):
        want_BTD = equations(mixer, of_layer(p, layer), x_BTD, layer)
        np.testing.assert_allclose(out_BTD, want_BTD, rtol=0, atol=1e-12)
        assert np.abs(want_BTD).max() > 1e-4


def test_no_output_depends_on_a_later_token_and_the_first_is_zero():
    p = of_layer(blocks(MIXER), 0)
    x_TD = jax.random.normal(jax.random.key(1), (9, 16))

    @jax.jit
    def outputs(x_TD):
        return apply(MIXER, p, x_TD[None], 0)[0][0]

    jacobian = jax.jit(jax.jacrev(outputs))(x_TD)
    depends_TT = np.abs(np.asarray(jacobian)).sum((1, 3)) > 0
    np.testing.assert_array_equal(depends_TT[1:], np.tril(np.ones((9, 9)))[1:] > 0)
    assert not np.asarray(outputs(x_TD)[0]).any()


def test_an_output_does_not_depend_on_what_its_own_token_writes():
    """Gradient of the output at i to the write gate at i, through an edit of the site."""
    p = of_layer(blocks(MIXER), 2)
    x_BTD = jax.random.normal(jax.random.key(1), (1, 8, 16))

    def outputs(added_BTR):
        edits = {"mixer.write": lm_jax.Add(added_BTR)}
        return apply(MIXER, p, x_BTD, 2, edits=edits)[0][0]

    jacobian = jax.jit(jax.jacrev(outputs))(jnp.zeros((1, 8, 5)))
    depends_TT = np.abs(np.asarray(jacobian)).sum((1, 2, 4)) > 0
    # The first write of all is the whole mean, whatever its size; its gradient may round to zero.
    np.testing.assert_array_equal(depends_TT[:, 1:], np.tril(np.ones((8, 8)), -1)[:, 1:] > 0)


LONG = PrototypeMixer(num_prototypes=8)


def long_params(dtype):
    """Parameters with half-lives from a tenth of a step to a thousand, weights in `dtype`."""
    params = lm_jax.init_params(jax.random.key(0), CFG, mixer=LONG)
    decay_R = np.exp2(-1.0 / np.geomspace(0.1, 1000.0, 8))
    # sigmoid has no float32 logit for a decay so near to 0 that 1 - beta rounds to 1.
    logit_R = np.log(decay_R) - np.log1p(-decay_R)
    params["blocks"]["mixer"]["decay_logit"] = jnp.tile(jnp.asarray(logit_R, jnp.float32), (3, 1))
    # Weights alone: decays, temperatures and alpha are float32 in training as well.
    weights = {name: x.astype(dtype) for name, x in lm_jax.params.by_path(params).items()}
    kept = {name: x for name, x in lm_jax.params.by_path(params).items() if x.ndim <= 2}
    kept = {name: x for name, x in kept.items() if name.startswith("blocks/")}
    return lm_jax.params.tree_from_paths(weights | kept)


@functools.cache
def long_logits():
    """By dtype of the weights: logits of 300 tokens in float64, and how far float32 may be off."""
    wide = [cases.widened(long_params(dtype)) for dtype in ("float32", "bfloat16")]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *wide)
    both = rounding.expected(lambda params: jax.lax.map(read_long, params), stacked)
    of_dtype = (rounding.Expected(*(x[i] for x in both)) for i in (0, 1))
    return dict(zip(("float32", "bfloat16"), of_dtype, strict=True))


def long_tokens():
    return jax.random.randint(jax.random.key(1), (2, 300), 0, 40)


def read_long(params):
    return lm_jax.forward(params, long_tokens(), CFG, mixer=LONG).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_step_by_step_equals_reading_at_once(dtype):
    params = long_params(dtype)

    def step(cache, token_B):
        out = lm_jax.forward(params, token_B[:, None], CFG, mixer=LONG, cache=cache)
        return out.cache, out.logits[:, 0]

    cache = lm_jax.init_cache(CFG, 2, 300, dtype=dtype, mixer=LONG)
    _, got = jax.lax.scan(step, cache, long_tokens().T)
    wanted = long_logits()[dtype]
    for each in (got.swapaxes(0, 1), jax.jit(read_long)(params)):
        if dtype == "float32":
            rounding.assert_within(each, wanted)
        else:
            # Three layers of some eight operations on the way, each off by a unit of bfloat16.
            error, size = (np.sqrt(np.mean(x**2)) for x in (each - wanted.values, wanted.values))
            assert error < np.sqrt(3 * 8) * 2.0**-8 * size


def test_a_cache_is_of_one_size_at_any_length():
    short, long = (lm_jax.init_cache(CFG, 2, n, mixer=MIXER).layers for n in (4, 100_000))
    assert jax.tree.map(jnp.shape, short) == jax.tree.map(jnp.shape, long)
    # Sums and masses of R channels, and four values under the convolution, for each layer.
    floats = sum(x.size for x in jax.tree.leaves(short))
    assert floats == 3 * 2 * (5 * 8 + 5 + 4 * 8)


def test_padding_neither_writes_nor_reads():
    mixer = dataclasses.replace(MIXER, **ROTARY)
    params = lm_jax.init_params(jax.random.key(0), CFG, mixer=mixer)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    alone = [
        lm_jax.generate(params, [each], CFG, max_new_tokens=6, mixer=mixer)[0] for each in prompts
    ]
    together = lm_jax.generate(params, prompts, CFG, max_new_tokens=6, mixer=mixer)
    assert together == alone


@pytest.mark.parametrize(
    "changed", [{"mass_normalisation": False}, ROTARY], ids=["no-mass", "rotary"]
)
def test_the_memory_site_is_what_the_output_reads(changed):
    mixer = dataclasses.replace(MIXER, **changed)
    params = lm_jax.init_params(jax.random.key(0), CFG, mixer=mixer)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 12), 0, 40)
    sites = dict.fromkeys(("mixer.memory", "mixer.read", "attn.out"), lm_jax.keep)
    run = functools.partial(lm_jax.forward, cfg=CFG, mixer=mixer, record=sites)
    out = jax.jit(run)(params, tokens_BT)
    unrecorded = rounding.expected(
        lambda params: lm_jax.forward(params, tokens_BT, CFG, mixer=mixer).logits, params
    )
    rounding.assert_within(out.logits, unrecorded)
    memory, read, written = (out.records[name] for name in sites)
    p = params["blocks"]["mixer"]

    def writes(read, memory, out, alpha):
        read_LBTE = jnp.einsum("LBTR,LBTRE->LBTE", read, memory)
        return alpha[:, None, None, None] * jnp.einsum("LBTE,LED->LBTD", read_LBTE, out)

    wanted = rounding.expected(writes, read, memory, p["out"], p["alpha"])
    rounding.assert_within(written, wanted)
    memory = np.asarray(memory)
    # Nothing was written before the first token, and to every channel before the others.
    assert (memory[:, :, 0] == 0).all()
    assert memory[:, :, 1:].any((0, 1, 2, 4)).all()


def test_a_discount_starts_at_its_setting():
    """beta = sigmoid(decay_logit), 0.9 for every prototype at first."""
    p = lm_jax.init_params(jax.random.key(0), CFG, mixer=MIXER)["blocks"]["mixer"]
    np.testing.assert_allclose(jax.nn.sigmoid(p["decay_logit"]), 0.9, rtol=1e-6)


def test_parameters_that_no_output_depends_on_have_no_gradient():
    cfg = dataclasses.replace(CFG, num_layers=6)
    params = lm_jax.init_params(jax.random.key(0), cfg, mixer=MIXER)
    tokens_BT = jnp.zeros((1, 3), jnp.int32)

    def loss(params):
        return lm_jax.forward(params, tokens_BT, cfg, mixer=MIXER).logits.std()

    gradient = jax.jit(jax.grad(loss))(params)["blocks"]["mixer"]
    untouched = {
        name: int((np.abs(g).sum(tuple(range(1, g.ndim))) == 0).sum())
        for name, g in gradient.items()
    }
    assert untouched["read"] == 1
    assert untouched["read_tau"] == 1
    assert untouched["conv"] == 4
