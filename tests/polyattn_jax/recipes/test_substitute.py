"""Substitution puts the right map into the right heads, counts dead rows and compiles once."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.attention import as_pytree
from polyattn_jax.audit import measure
from polyattn_jax.recipes import row_maps
from polyattn_jax.recipes.diagnostic import relative_error_bound, softmax_error_bound
from polyattn_jax.recipes.row_maps import RECIPES
from polyattn_jax.recipes.substitute import PerHeadRowMap, recipe, substitute
from tests import rounding, tiny

L, N, B, T = 3, 4, 2, 9
CFG = lm_jax.DecoderConfig(
    num_layers=L,
    num_heads=N,
    num_kv_heads=2,
    head_dim=6,
    hidden_size=20,
    mlp_size=28,
    vocab_size=40,
    max_length=32,
    windows=(None, 4, None),
)
MAPS = (row_maps.softmax, row_maps.relu_power(4.0), row_maps.sigmoid, row_maps.relu_power(2.0))
RELU4 = 1
SOFTMAX = as_pytree(lm_jax.softmax)
NO_HEADS = np.zeros((L, N), bool)
EVERY_QUERY = np.ones((B, T), bool)


@pytest.fixture(scope="module")
def params():
    params = tiny.params(CFG)
    # Larger weights than at initialisation, so that attention is far from uniform.
    blocks = jax.tree.map(lambda a: a * 6 if a.ndim > 2 else a, params["blocks"])
    return params | {"blocks": blocks}


@pytest.fixture(scope="module")
def tokens_BT():
    return jax.random.randint(jax.random.key(1), (B, T), 0, CFG.vocab_size)


def one_head(layer, head):
    heads_LN = NO_HEADS.copy()
    heads_LN[layer, head] = True
    return heads_LN


@jax.jit
def run(params, tokens_BT, attend):
    names = ("attn.scores", "attn.pattern", "attn.v", "attn.z")
    return lm_jax.forward(
        params, tokens_BT, CFG, attend=attend, record=dict.fromkeys(names, lm_jax.keep)
    )


def algorithm_1(row, p, bias):
    """The paper's Algorithm 1, one key after the other, on the unmasked scores of one row."""
    r = [max(float(z) + bias, 0.0) if z > -np.inf else 0.0 for z in row]
    total = sum(x**p for x in r)
    return [x**p / total if total > 0.0 else 0.0 for x in r]


def softmax_row(row):
    weights = np.exp(np.asarray(row, float) - max(row))
    return weights / weights.sum()


def test_chosen_heads_follow_algorithm_1_and_all_others_softmax(params, tokens_BT):
    heads_LN = np.array([[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 1, 1]], bool)
    out = run(params, tokens_BT, substitute(MAPS, RELU4, -0.25, heads_LN, EVERY_QUERY))
    # A weight is one term over the sum of all: the bound of a sum of such terms, and a quotient.
    bound = max(relative_error_bound(4, T), softmax_error_bound(T)) + 2 * 2**-24
    scores, pattern = out.records["attn.scores"], np.asarray(out.records["attn.pattern"])
    dead_LB = np.zeros((L, B), int)
    for layer, b, head, query in np.ndindex(L, B, N, T):
        row = np.asarray(scores[layer, b, head, query])
        chosen = heads_LN[layer, head]
        expected = algorithm_1(row, 4, -0.25) if chosen else softmax_row(row)
        np.testing.assert_allclose(pattern[layer, b, head, query], expected, rtol=bound, atol=1e-37)
        dead_LB[layer, b] += sum(expected) == 0.0
    assert dead_LB.sum() > 0
    np.testing.assert_array_equal(out.aux["dead_rows_B"], dead_LB)
    v_LBSNH = np.repeat(np.float64(out.records["attn.v"]), N // CFG.num_kv_heads, axis=3)
    products = functools.partial(np.einsum, "LBNTS,LBSNH->LBTNH", pattern)
    error = np.abs(out.records["attn.z"] - products(v_LBSNH))
    assert (error <= T * 2**-24 * products(np.abs(v_LBSNH))).all()


@pytest.mark.parametrize("name", ["relu_p16_bauto", "sigmoid_b0", "relu_p1_over_sqrtL"])
def test_a_recipe_everywhere_is_its_map_switched_on_in_every_head(params, tokens_BT, name):
    attend = recipe(name, bias=0.7)
    maps = tuple(dict.fromkeys(r.map for r in RECIPES.values()))
    index = maps.index(attend.map)
    switched = substitute(maps, index, attend.bias, ~NO_HEADS, EVERY_QUERY)
    logits = run(params, tokens_BT, attend).logits
    forward = lambda: lm_jax.forward(params, tokens_BT, CFG, attend=attend).logits  # noqa: E731
    wanted = rounding.expected(forward)
    rounding.assert_within(logits, wanted)
    rounding.assert_within(run(params, tokens_BT, switched).logits, wanted)
    assert np.abs(logits - run(params, tokens_BT, SOFTMAX).logits).max() > 1e-3


# As Llama and Gemma 3 with windows, as Gemma 2 with a cap of the scores, as Pythia.
SETTINGS = {
    "windows": {},
    "cap": {"score_softcap": 4.0},
    "neox": {"parallel_residual": True, "norm": "layer", "qkv_bias": True, "windows": ()},
}


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_no_head_is_bitwise_softmax(tokens_BT, changes):
    cfg = dataclasses.replace(CFG, **changes)
    params = tiny.params(cfg)
    forward = jax.jit(lm_jax.forward, static_argnames="cfg")
    baseline = forward(params, tokens_BT, cfg=cfg).logits
    for index in range(len(MAPS)):
        attend = substitute(MAPS, index, 0.3, NO_HEADS, EVERY_QUERY)
        out = forward(params, tokens_BT, cfg=cfg, attend=attend)
        np.testing.assert_array_equal(out.logits, baseline)
        assert not np.asarray(out.aux["dead_rows_B"]).any()


def test_each_single_head_of_each_layer_gives_an_output_of_its_own(params, tokens_BT):
    outputs = {
        (layer, head): np.asarray(
            run(
                params, tokens_BT, substitute(MAPS, RELU4, 0.1, one_head(layer, head), EVERY_QUERY)
            ).logits
        )
        for layer, head in np.ndindex(L, N)
    }
    outputs["softmax"] = np.asarray(run(params, tokens_BT, SOFTMAX).logits)
    for (a, first), (b, second) in itertools.combinations(outputs.items(), 2):
        assert np.abs(first - second).max() > 1e-4, (a, b)


def test_rows_that_die_are_counted_and_write_zeros(params, tokens_BT):
    lengths_B = np.array([T, 5])
    valid_BT = np.arange(T) < lengths_B[:, None]
    out = run(params, tokens_BT, substitute(MAPS, RELU4, -1e6, ~NO_HEADS, valid_BT))
    assert not np.asarray(out.records["attn.z"]).any()
    # Padding is no row of the prompt, so that its dead rows do not count.
    np.testing.assert_array_equal(out.aux["dead_rows_B"], np.tile(N * lengths_B, (L, 1)))
    dead = measure.evaluate(
        params,
        tokens_BT,
        jnp.asarray(lengths_B),
        jnp.zeros(B, jnp.int32),
        jnp.int32(RELU4),
        jnp.float32(-1e6),
        jnp.asarray(one_head(1, 2) | one_head(2, 0)),
        cfg=CFG,
        maps=MAPS,
    )["dead_rows"]
    np.testing.assert_array_equal(dead, 2 * lengths_B)


def test_dead_rows_of_a_hand_written_case():
    masked = -np.inf
    head = [[-2.0, masked, masked], [-2.0, -1.0, masked], [-3.0, 0.5, 2.5]]
    scores_BNTS = jnp.array([[head, head]])
    data = {
        "index": jnp.int32(0),
        "bias": jnp.float32(0.5),
        "heads_N": jnp.array([True, False]),
        "valid_BT": jnp.ones((1, 3), bool),
    }
    pattern_BNTS, aux = PerHeadRowMap((row_maps.relu_power(2.0),))(scores_BNTS, data)
    # Shifted by 0.5 the first two rows have no positive score; the third has 1 and 3.
    bound = relative_error_bound(2, 3) + 2 * 2**-24
    want = [[0, 0, 0], [0, 0, 0], [0, 0.1, 0.9]]
    np.testing.assert_allclose(pattern_BNTS[0, 0], want, rtol=bound)
    # Three weights over the sum of three, a dozen operations for each.
    np.testing.assert_allclose(pattern_BNTS[0, 1].sum(-1), 1.0, rtol=2 * (3 + 12) * 2**-24)
    np.testing.assert_array_equal(aux["dead_rows_B"], [2])


def test_a_sweep_over_recipes_biases_and_heads_compiles_once_per_shape(params, tokens_BT):
    def answer(tokens_BT, index, bias, heads_LN):
        size, length = tokens_BT.shape
        return measure.evaluate(
            params,
            tokens_BT,
            jnp.full(size, length),
            jnp.zeros(size, jnp.int32),
            jnp.int32(index),
            jnp.float32(bias),
            jnp.asarray(heads_LN),
            cfg=CFG,
            maps=MAPS,
        )["loss"]

    measure.evaluate.clear_cache()
    losses = {
        np.asarray(answer(tokens_BT[:, :7], index, bias, heads_LN)).tobytes()
        for index in (1, 2, 3)
        for bias in (0.0, 0.5)
        for heads_LN in (~NO_HEADS, one_head(0, 0), one_head(2, 3))
    }
    assert len(losses) == 3 * 2 * 3
    assert measure.evaluate._cache_size() == 1
    answer(tokens_BT[:1, :7], 1, 0.0, NO_HEADS)
    assert measure.evaluate._cache_size() == 2


def test_what_cannot_be_substituted_is_refused():
    with pytest.raises(UsageError, match="b=auto needs a calibrated bias"):
        recipe("relu:p=4,b=auto")
    with pytest.raises(UsageError, match="did you mean 'relu_p4_bauto'"):
        recipe("relu_p4_bato")
    with pytest.raises(UsageError, match=r"heads_LN has shape \(4,\)"):
        substitute(MAPS, 0, 0.0, np.ones(N, bool), EVERY_QUERY)
