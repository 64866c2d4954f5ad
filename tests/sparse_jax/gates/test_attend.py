"""Gated attention: dense with open gates, equal on scores and in kernels, exact edge counts."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from iaj_kernels.core import dispatch, noise
from iaj_kernels.gated_attention.api import gated_attention
import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.attention import as_pytree, for_layer
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from sparse_jax.gates import attend as attend_module
from sparse_jax.gates.attend import Gated, by_kernels, gated
from tests import rounding, tiny

SIZES = {"vocab_size": 32, "max_length": 24, "num_heads": 4}
FAMILIES = {
    "llama": tiny.decoder(**SIZES, num_kv_heads=2),
    "gpt2": tiny.decoder(**SIZES, **tiny.GPT2),
    "windows": tiny.decoder(**SIZES, windows=(5, None), score_softcap=4.0),
}
KEY = jax.random.key(5)
MODES = {"sample": KEY, "threshold": None, "expected": None, "open": None}
B, T = 2, 17
U = 2.0**-24


def inputs(cfg):
    # Larger than initial ones, so that scores differ from 0.
    params = jax.tree.map(lambda x: 3.0 * x, lm_jax.init_params(jax.random.key(0), cfg))
    return params, jax.random.randint(jax.random.key(1), (B, T), 0, cfg.vocab_size)


def run(cfg, attend):
    params, tokens_BT = inputs(cfg)
    return jax.jit(lambda attend: lm_jax.forward(params, tokens_BT, cfg, attend=attend))(attend)


@pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)
def test_all_gates_open_is_the_dense_model_to_the_bit(cfg):
    dense = run(cfg, as_pytree(lm_jax.softmax))
    for attend in (
        gated(cfg, mode="open"),
        gated(cfg, mode="threshold", bias=1e4),
        gated(cfg, mode="sample", key=KEY, bias=1e4),
    ):
        result = run(cfg, attend)
        np.testing.assert_array_equal(result.logits, dense.logits)
        np.testing.assert_array_equal(
            result.aux["open_edges_BN"],
            np.broadcast_to(result.aux["pairs_B"][..., None], (2, B, 4)),
        )


# With renormalise, a row without an open gate divides 0 by 0, for which there is no error bound:
# tests/kernels compares its kernel with the definition, and test_export tests the trained model.
COMPUTED = [
    *(("llama", mode, {}) for mode in MODES),
    ("llama", "sample", {"raw_gate": True}),
    ("llama", "expected", {"renormalise": True}),
    ("windows", "sample", {}),
    ("windows", "threshold", {}),
]


@pytest.mark.parametrize(
    ("family", "mode", "options"),
    COMPUTED,
    ids=["-".join([family, mode, *options]) for family, mode, options in COMPUTED],
)
def test_kernels_and_scores_agree_with_the_definition_within_rounding(family, mode, options):
    """Logits and edges of a whole model; the two computations round differently."""
    cfg = FAMILIES[family]
    valid_BT = jnp.arange(T)[None] < jnp.array([[T], [11]])
    bias_LN = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
    attend = gated(cfg, mode=mode, key=MODES[mode], bias=bias_LN, valid_BT=valid_BT, **options)
    real = np.asarray(valid_BT)
    params, tokens_BT = inputs(cfg)

    def outputs(attend):
        output = lm_jax.forward(params, tokens_BT, cfg, attend=attend)
        return {"logits": jnp.where(real[..., None], output.logits, 0.0), **output.aux}

    # The definition in float64, with a bound on the rounding error of each entry.
    wanted = rounding.expected(lambda: outputs(attend))
    for computed in (attend, by_kernels(attend)):
        rounding.assert_within(jax.jit(outputs)(computed), wanted)


def test_documents_stay_apart_where_there_is_padding_too():
    """Queries that are no padding once lost their documents in the kernel."""
    cfg = FAMILIES["llama"]
    params, tokens_BT = inputs(cfg)
    document_BT = jnp.broadcast_to(jnp.arange(T) >= 6, (B, T)).astype(jnp.int32)
    valid_BT = jnp.arange(T)[None] < jnp.array([[T], [11]])
    attend = gated(cfg, mode="threshold", bias=1.0, valid_BT=valid_BT)

    def outputs(attend):
        out = lm_jax.forward(params, tokens_BT, cfg, attend=attend, document_BT=document_BT)
        return {"logits": jnp.where(valid_BT[..., None], out.logits, 0.0), **out.aux}

    wanted = rounding.expected(lambda: outputs(attend))
    pairs_B = [sum(range(7)) + sum(range(n + 1)) for n in (T - 6, 5)]
    np.testing.assert_array_equal(wanted.values["pairs_B"], [pairs_B, pairs_B])
    for computed in (attend, by_kernels(attend)):
        rounding.assert_within(jax.jit(outputs)(computed), wanted)


@pytest.mark.parametrize("family", ["llama", "windows"])
def test_on_a_mesh_the_kernel_samples_the_gates_of_one_device(family, monkeypatch):
    """The GPU kernel, interpreted: rows over data and heads over tensor, with some padding."""
    cfg = FAMILIES[family]
    params, tokens_BT = inputs(cfg)
    valid_BT = jnp.arange(T)[None] < jnp.array([[T], [11]])
    attend = gated(cfg, key=KEY, bias=0.3, valid_BT=valid_BT)

    def forward(params, tokens_BT, attend):
        output = lm_jax.forward(params, tokens_BT, cfg, attend=attend)
        return jnp.where(valid_BT[..., None], output.logits, 0.0), output.aux["open_edges_BN"]

    wanted = rounding.expected(lambda: forward(params, tokens_BT, attend))

    mesh = sharding.make_mesh(data=2, tensor=2)
    places = (
        sharding.param_shardings(mesh, lm_jax.param_spec(cfg)),
        sharding.batch_sharding(mesh),
    )
    shapes = []

    def spy(q_BTNH, *rest, **options):
        shapes.append(q_BTNH.shape)
        return gated_attention(q_BTNH, *rest, **options)

    monkeypatch.setattr(attend_module, "gated_attention", spy)
    with dispatch.on(dispatch.INTERPRETER):
        sharded = under_mesh(functools.partial(forward, attend=by_kernels(attend)), mesh)
        other = jax.jit(sharded, in_shardings=places)(params, tokens_BT)
    assert set(shapes) == {(1, T, 2, cfg.head_dim)}
    rounding.assert_within(other, wanted)


def test_edges_of_a_pattern_made_by_hand():
    """Three open pairs, of which causality hides one and padding another."""
    scores_TS = np.full((4, 4), -2.0, np.float32)
    scores_TS[2, 0] = scores_TS[3, 1] = scores_TS[0, 3] = 1.5
    causal_TS = np.tril(np.ones((4, 4), bool))
    scores = jnp.where(causal_TS, scores_TS, -jnp.inf)[None, None]
    data = {"bias_N": jnp.zeros(1), "seed": jnp.uint32(0), "valid_BT": None}
    fn = Gated("threshold", raw_gate=False, scale=1.0)
    pattern, aux = jax.jit(fn)(scores, data)
    assert int(aux["open_edges_BN"][0, 0]) == 2
    assert int(aux["pairs_B"][0]) == 10
    want = 2 * special.expit(1.5) + 8 * special.expit(-2.0)
    # Logistic functions of 8 units, and the sum of ten.
    assert float(aux["expected_edges_BN"][0, 0]) == pytest.approx(want, rel=20 * U)
    assert np.argwhere(np.asarray(pattern[0, 0])).tolist() == [[2, 0], [3, 1]]
    # Without renormalise, the weight is that of the softmax over all visible keys.
    dense = np.exp(1.5) / (np.exp(1.5) + 3 * np.exp(-2.0))
    # Exponentials of 4 units, the sum of four and a quotient.
    assert float(pattern[0, 0, 3, 1]) == pytest.approx(dense, rel=20 * U)

    # With renormalise, the one open key of a query has all the weight, and a closed row none.
    pattern, aux = jax.jit(dataclasses.replace(fn, renormalise=True))(scores, data)
    assert np.asarray(pattern[0, 0]).sum(-1).tolist() == [0, 0, 1, 1]
    assert int(aux["open_edges_BN"][0, 0]) == 2

    padded = data | {"valid_BT": jnp.array([[True, True, True, False]])}
    pattern, aux = jax.jit(fn)(scores, padded)
    assert int(aux["open_edges_BN"][0, 0]) == 1
    assert int(aux["pairs_B"][0]) == 6
    assert not np.any(pattern[0, 0, 3])


def test_the_gradient_is_straight_through_the_relaxed_gate():
    """Against the analytic form, in float64, with the same noise (spec row S5)."""
    N, seed = 2, jnp.uint32(7)
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 1.5, (1, N, 6, 6)).astype(np.float32)
    g = rng.normal(size=scores.shape).astype(np.float32)
    penalty_N = rng.normal(size=N).astype(np.float32)
    causal = np.tril(np.ones((6, 6), bool))
    bias_N = np.array([0.3, -0.7], np.float32)
    fn = Gated("sample", raw_gate=False, scale=1.0)

    def weigh(scores, bias_N):
        data = {"bias_N": bias_N, "seed": seed, "valid_BT": None}
        pattern, aux = fn(jnp.where(causal, scores, -jnp.inf), data)
        edges_N = aux["expected_edges_BN"].sum(0)
        return jnp.sum(pattern * g) + jnp.sum(edges_N * penalty_N)

    slopes, at = jax.grad(weigh, (0, 1)), (jnp.asarray(scores), jnp.asarray(bias_N))
    exact = rounding.expected(slopes, *at)
    rounding.assert_within(jax.jit(slopes)(*at), exact)

    stream_N11 = noise.stream(seed, 0, jnp.arange(N)[:, None, None])
    at = jnp.arange(6)
    u = np.asarray(
        noise.uniform(noise.bits(stream_N11, at[None, :, None], at[None, None])), np.float64
    )
    s = np.where(causal, scores[0].astype(np.float64), -np.inf)
    P = np.exp(s - s.max(-1, keepdims=True))
    P /= P.sum(-1, keepdims=True)
    e = scores[0].astype(np.float64) + bias_N[:, None, None]
    A = (e + np.log(u) - np.log1p(-u) > 0).astype(float)
    relaxed, p = special.expit(e + np.log(u) - np.log1p(-u)), special.expit(e)
    g = np.float64(g[0])
    de = P * g * relaxed * (1 - relaxed) + penalty_N[:, None, None] * p * (1 - p)
    de = np.where(causal, de, 0.0)
    delta = (A * P * g).sum(-1, keepdims=True)
    want = A * P * g - P * delta + de
    assert 0 < A[:, causal].mean() < 1
    by_scores, by_bias = exact.values
    np.testing.assert_allclose(by_scores[0], want, rtol=0, atol=1e-12)
    np.testing.assert_allclose(by_bias, de.sum((1, 2)), rtol=0, atol=1e-12)


@jax.jit
def drawn(attend, layer):
    """Open gates of one layer in which every logit is zero."""
    data = jax.tree.map(lambda x: x[layer], attend.data)
    return for_layer(attend, data)(jnp.zeros((1, 4, 12, 12)))[0] > 0


def test_layers_and_keys_have_independent_noise():
    cfg = FAMILIES["llama"]
    one, other = gated(cfg, key=KEY), gated(cfg, key=jax.random.key(6))
    patterns = [drawn(one, 0), drawn(one, 1), drawn(other, 0)]
    for pair in itertools.combinations(patterns, 2):
        # Two fair coins agree half the time: 576 of them within four standard deviations.
        assert abs(np.equal(*map(np.asarray, pair)).mean() - 0.5) < 4 * 0.5 / 24


def test_invalid_arguments_are_refused():
    cfg = FAMILIES["llama"]
    with pytest.raises(UsageError, match="did you mean 'threshold'"):
        gated(cfg, mode="treshold")
    with pytest.raises(UsageError, match="'sample' needs a key"):
        gated(cfg)
    with pytest.raises(UsageError, match="'expected' samples nothing"):
        gated(cfg, mode="expected", key=KEY)
    capped = FAMILIES["windows"]
    with pytest.raises(UsageError, match="use by_kernels"):
        run(capped, gated(capped, mode="threshold", raw_gate=True))
    with pytest.raises(UsageError, match=r"bias has shape \(3,\); .*\(2, 4\)"):
        gated(cfg, mode="open", bias=jnp.zeros(3))
