"""`gated_attention`: its definition in float64, its gradient, its implementations, its refusals."""

import functools

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels import gated_attention
from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import dispatch, noise
from lm_jax.model.attention import softmax
from tests import rounding

SEED = 7
IMPLEMENTATIONS = ["reference", "xla"]


def _inputs(B=2, T=9, S=None, N=4, K=2, H=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    S = S or T
    return (
        jax.random.normal(keys[0], (B, T, N, H)),
        jax.random.normal(keys[1], (B, S, K, H)),
        jax.random.normal(keys[2], (B, S, K, H)),
        jax.random.normal(keys[3], (N,)),
    )


def _call(q, k, v, bias, seed=SEED, *, mode="sample", **options):
    seed = seed if mode == "sample" else None
    return gated_attention(q, k, v, gate_bias=bias, mode=mode, seed=seed, **options)


def _jitted(**options):
    """`(q, k, v, bias[, seed]) -> GatedAttention`, compiled."""
    return jax.jit(functools.partial(_call, **options))


def _definition(
    q, k, v, bias, *, mask_BTS, mode="sample", scale=None, gate_scale=None, soft_cap=None
):
    """Eq. 1-3 for queries at positions 0, 1, ...: every map, and the outputs."""
    B, T, N, H = q.shape
    k, v = (jnp.repeat(x, N // k.shape[2], axis=2) for x in (k, v))
    raw = jnp.einsum("btnh,bsnh->bnts", q, k)
    score = raw * (H**-0.5 if scale is None else scale)
    if soft_cap is not None:
        score = soft_cap * jnp.tanh(score / soft_cap)
    e = (score if gate_scale is None else gate_scale * raw) + bias[None, :, None, None]
    batch, head, query, key = np.ogrid[:B, :N, :T, : k.shape[1]]
    u = noise.uniform(noise.bits(noise.stream(jnp.uint32(SEED), batch, head), query, key))
    drawn = jnp.log(u) - jnp.log1p(-u) if mode == "sample" else jnp.zeros_like(u)
    probability, relaxed = 1 / (1 + jnp.exp(-e)), 1 / (1 + jnp.exp(-e - drawn))
    gate = {"open": jnp.ones_like(e), "expected": probability}.get(mode, (e + drawn > 0) * 1.0)
    mask = np.asarray(mask_BTS)[:, None]
    top = jax.lax.stop_gradient(score.max(-1, keepdims=True))
    weight = jnp.where(mask, jnp.exp(score - top), 0.0)
    total = weight.sum(-1, keepdims=True)
    softmax_ = weight / jnp.where(total == 0, 1.0, total)
    return {
        "P": softmax_,
        "A": gate,
        "relaxed": probability if mode == "expected" else relaxed,
        "v": v,
        "out": jnp.einsum("bnts,bsnh->btnh", gate * softmax_, v),
        "expected": (probability * mask).sum((2, 3)),
        "opened": ((gate > 0.5) & mask).sum((2, 3)),
    }


VARIANTS = {
    "sample": {},
    "sample_unscaled_gate": {"gate_scale": 1.0, "scale": 0.2},
    "threshold_soft_cap": {"mode": "threshold", "soft_cap": 1.5},
    "expected_both": {"mode": "expected", "gate_scale": 0.3, "soft_cap": 0.7},
    "open": {"mode": "open"},
}


T = 9
HIDDEN = {
    "causal": True,
    "window": 5,
    "segment_ids": jnp.asarray([[0] * 4 + [1] * 4 + [-1], [0] * T]),
    "start": None,
}


@functools.cache
def _variant(name):
    """Arrays, cotangents, the reference's outputs and gradients, and the definition to hold."""
    options = VARIANTS[name]
    arrays = _inputs(T=T)
    key = jax.random.key(5)
    cotangents = jax.random.normal(key, (2, T, 4, 8)), jax.random.normal(key, (2, 4))

    @jax.jit
    def run(*arrays):
        def differentiable(*arrays):
            got = _call(*arrays, **HIDDEN, **options, implementation="reference")
            return got[:2], got

        _, pull, got = jax.vjp(differentiable, *arrays, has_aux=True)
        return got, pull(cotangents)

    mask_BTS = visibility("test", 2, T, T, **HIDDEN).mask_BTS(T, T)
    define = functools.partial(_definition, mask_BTS=mask_BTS, **options)
    return arrays, cotangents, *run(*arrays), define


@pytest.mark.parametrize("name", VARIANTS)
def test_the_reference_is_the_definition_in_float64(name):
    arrays, _, got, _, define = _variant(name)
    names = ("out", "expected", "opened")
    wanted = rounding.expected(lambda *arrays: [define(*arrays)[n] for n in names], *arrays)
    rounding.assert_within([got.out_BTNH, got.expected_edges_BN, got.open_edges_BN], wanted)
    np.testing.assert_array_equal(got.open_edges_BN, wanted.values[-1])
    assert got.open_edges_BN.dtype == jnp.int32 and got.edges is None


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_is_that_of_the_relaxed_gate(name):
    # The loss is linear in the gates, so its straight-through gradient is the gradient of
    #   sum_ij A_ij P_ij(x) c_i . v_j(x) + sum_ij P_ij c_i . v_j relaxed_ij(x) + d . expected(x)
    # with A, and the first factors of the second sum, held; in mode "open" the second is absent.
    arrays, (out_BTNH, expected_BN), _, gradients, define = _variant(name)

    def surrogate(*arrays):
        now = define(*arrays)
        g = jnp.einsum("btnh,bsnh->bnts", out_BTNH, now["v"])
        held_g = jax.lax.stop_gradient(now["P"] * g)
        through_gate = 0.0 if name == "open" else (held_g * now["relaxed"]).sum()
        through_p = (jax.lax.stop_gradient(now["A"]) * now["P"] * g).sum()
        return through_p + through_gate + (now["expected"] * expected_BN).sum()

    wanted = rounding.expected(jax.grad(surrogate, (0, 1, 2, 3)), *arrays)
    rounding.assert_within(gradients, wanted)


def test_renormalised_weights_sum_to_one_where_a_gate_is_open():
    q, k, v, bias = _inputs(T=40)
    options = {"implementation": "xla", "edge_capacity": 40 * 41 * 4}
    arrays = (q, k, jnp.ones_like(v), bias - 1.0)
    got = _jitted(renormalise=True, **options)(*arrays)
    unchanged = _jitted(implementation="xla")(*arrays)
    some_open_BTNH = unchanged.out_BTNH > 0
    assert 0.5 < float(some_open_BTNH.mean()) < 1.0
    # Sums of 40 weights over sums of them; a dozen operations for each.
    bound = 2 * (40 + 12) * 2**-24
    np.testing.assert_allclose(got.out_BTNH, some_open_BTNH, rtol=bound)
    sums = np.zeros((2, 4, 40))
    batch, head, query, _, weight, count, overflow = (np.asarray(x) for x in got.edges)
    np.add.at(sums, (batch[:count], head[:count], query[:count]), weight[:count])
    assert not overflow
    np.testing.assert_allclose(sums, some_open_BTNH[..., 0].swapaxes(1, 2), rtol=bound)


def _dense(q_BTNH, k_BSKH, v_BSKH):
    """Causal softmax attention with the row map of the decoder."""
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    k_BSNH, v_BSNH = (jnp.repeat(x, 2, axis=2) for x in (k_BSKH, v_BSKH))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, precision="highest") * H**-0.5
    causal = jnp.tril(jnp.ones((T, T), bool))[None, None]
    pattern_BNTS = softmax(jnp.where(causal, scores_BNTS, -jnp.inf))
    return jnp.einsum("BNTS,BSNH->BTNH", pattern_BNTS, v_BSNH, precision="highest")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_with_all_gates_open_it_is_dense_attention(implementation):
    arrays = (*_inputs(T=50, H=16)[:3], jnp.full((4,), 1e4))
    sampled = _jitted(implementation=implementation)(*arrays)
    opened = _jitted(mode="open", implementation=implementation)(*arrays)
    np.testing.assert_array_equal(sampled.out_BTNH, opened.out_BTNH)
    np.testing.assert_array_equal(sampled.open_edges_BN, opened.open_edges_BN)
    assert (sampled.open_edges_BN == 50 * 51 // 2).all()
    assert (sampled.expected_edges_BN == 50 * 51 // 2).all()
    rounding.assert_within(opened.out_BTNH, rounding.expected(_dense, *arrays[:3]))


def test_with_all_gates_open_its_gradient_is_that_of_dense_attention():
    arrays = _inputs(T=50, H=16)[:3]

    def gradients(attend):
        return jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))

    got = jax.jit(gradients(lambda *x: _call(*x, 1e4, implementation="xla").out_BTNH))(*arrays)
    rounding.assert_within(got, rounding.expected(gradients(_dense), *arrays))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_without_a_key_are_zero_and_have_finite_gradients(implementation):
    q, k, v, bias = _inputs(T=6)
    # Row 0 sees no key; in row 1 the queries before position 0 see none.
    segments = (jnp.asarray([[1] * 6, [0] * 6]), jnp.asarray([[0] * 6, [0] * 6]))

    def loss(*arrays):
        got = _call(*arrays, segment_ids=segments, start=-2, implementation=implementation)
        return (got.out_BTNH**2).sum() + got.expected_edges_BN.sum(), got

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
    (_, got), gradients = run(q, k, v, bias)
    assert (got.out_BTNH[0] == 0).all() and (got.out_BTNH[1, :2] == 0).all()
    assert (got.out_BTNH[1, 2:] != 0).any()
    assert (got.expected_edges_BN[0] == 0).all() and (got.open_edges_BN[0] == 0).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    for gradient in gradients[:3]:
        assert (gradient[0] == 0).all()


def test_what_padding_holds_changes_no_bit_and_gets_no_gradient():
    q, k, v, bias = _inputs(T=12)
    segments = jnp.where(jnp.arange(12)[None] < jnp.asarray([[12], [7]]), 0, -1)
    padded = (segments < 0)[:, :, None, None]

    @jax.jit
    def both(q, k, v, bias):
        def outputs(*arrays):
            got = _call(*arrays, segment_ids=segments, implementation="xla")
            return got.out_BTNH, got.expected_edges_BN

        out, pull = jax.vjp(outputs, q, k, v, bias)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    # Its products overflow to infinity and NaN; the numbers themselves are finite.
    poisoned = (jnp.where(padded, 1e30, x) for x in (q, k, v))
    (out, d_arrays), (out_poisoned, d_poisoned) = both(q, k, v, bias), both(*poisoned, bias)
    np.testing.assert_array_equal(out[0], out_poisoned[0])
    np.testing.assert_array_equal(out[1], out_poisoned[1])
    for clean, dirty in zip(d_arrays, d_poisoned, strict=True):
        np.testing.assert_array_equal(clean, dirty)
    for gradient in d_poisoned[:3]:
        assert (jnp.where(padded, gradient, 0.0) == 0).all()


def test_one_step_of_decoding_is_the_last_row_of_the_whole():
    q, k, v, bias = _inputs(T=33)
    run = functools.partial(_call, implementation="reference")
    whole = rounding.expected(lambda *arrays: run(*arrays).out_BTNH, q, k, v, bias)
    # Rows of unequal length in one cache: row 0 is at position 32, row 1 at position 20.
    start = jnp.asarray([32, 20])
    step = jax.jit(
        lambda q, start: _call(q, k, v, bias, start=start, implementation="xla").out_BTNH
    )
    got = step(jnp.stack([q[0, 32:33], q[1, 20:21]]), start)
    last = rounding.Expected(*(np.stack([x[0, 32:33], x[1, 20:21]]) for x in whole))
    rounding.assert_within(got, last)


def test_vmap_and_checkpoint_change_nothing():
    q, k, v, bias = _inputs(B=3, T=20)
    wave = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def outputs(*arrays, implementation="xla"):
        got = _call(*arrays, implementation=implementation)
        return got.out_BTNH, got.expected_edges_BN

    def pulled(outputs, *arrays):
        # With cotangents of its own, so that no loss is compiled along.
        results, pull = jax.vjp(outputs, *arrays)
        return results, pull((wave, jnp.ones_like(results[1])))[:4]

    seeds = jnp.arange(2, dtype=jnp.uint32)
    two = tuple(jnp.stack([x, x[::-1]]) for x in (q, k, v))

    def mapped(outputs):
        return jax.vmap(functools.partial(pulled, outputs), (0, 0, 0, None, 0))

    wanted = rounding.expected(
        mapped(functools.partial(outputs, implementation="reference")), *two, bias, seeds
    )
    rounding.assert_within(jax.jit(mapped(jax.checkpoint(outputs)))(*two, bias, seeds), wanted)


def test_a_cotangent_of_one_output_alone_is_enough():
    q, k, v, bias = _inputs()

    def expected(v, bias):
        return _call(q, k, v, bias).expected_edges_BN.sum()

    d_v, d_bias = jax.jit(jax.grad(expected, (0, 1)))(v, bias)
    assert (d_v == 0).all() and (d_bias > 0).all()
    d_scalar = jax.jit(jax.grad(expected, 1))(v, 0.5)
    assert d_scalar.shape == () and d_scalar > 0


def test_the_exported_xla_path_is_the_same_function():
    arrays = _inputs()

    def run(*arrays):
        got = _call(*arrays, implementation="xla")
        return got.out_BTNH, got.expected_edges_BN, got.open_edges_BN

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    exported = export.export(jax.jit(run))(*shapes, jax.ShapeDtypeStruct((), jnp.uint32))
    got = jax.jit(exported.call)(*arrays, jnp.uint32(SEED))
    for mine, theirs in zip(got, jax.jit(run)(*arrays, jnp.uint32(SEED)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_second_derivatives_and_forward_mode_are_refused_but_of_the_reference():
    arrays = _inputs(T=3)

    def loss(q, implementation="xla"):
        return (_call(q, *arrays[1:], implementation=implementation).out_BTNH ** 2).sum()

    remedy = r"gated_attention: .* implementation='reference'"
    with pytest.raises(NotImplementedError, match=remedy):
        jax.eval_shape(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum()), arrays[0])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda q: jax.jvp(loss, (q,), (q,))).lower(arrays[0])
    # The derivative of a gradient along a direction.
    dense = functools.partial(loss, implementation="reference")
    _, moved = jax.jit(lambda q: jax.jvp(jax.grad(dense), (q,), (q,)))(arrays[0])
    assert np.isfinite(moved).all() and (moved != 0).any()


def test_seeds_of_every_integer_type_draw_the_same():
    q, k, v, bias = _inputs(T=3)
    run = _jitted()
    outs = [run(q, k, v, bias, seed).out_BTNH for seed in (np.uint32(3), jnp.int32(3))]
    outs.append(jax.jit(lambda *x: _call(*x, 3).out_BTNH)(q, k, v, bias))
    for each in outs:
        np.testing.assert_array_equal(each, outs[0])
    assert (run(q, k, v, bias, jnp.uint32(4)).out_BTNH != outs[0]).any()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"seed": None}, ValueError, "mode='sample' needs a seed"),
        ({"mode": "threshold"}, ValueError, "mode='threshold' draws nothing; pass seed=None"),
        ({"seed": -1}, ValueError, r"seed is -1; pass an integer in \[0, 2\^32\)"),
        ({"mode": "hard"}, ValueError, "mode='hard' is none of sample, threshold, expected, open"),
        ({"gate_bias": jnp.zeros((3,))}, ValueError, r"gate_bias has shape \(3,\)"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap is 0.0"),
        ({"implementation": "pallas"}, dispatch.UnavailableError, "needs an NVIDIA GPU"),
    ],
)
def test_an_option_out_of_range_is_named(changed, error, message):
    q, k, v, _ = _inputs()
    with pytest.raises(error, match=f"gated_attention: .*{message}"):
        gated_attention(q, k, v, **({"seed": 0} | changed))


@pytest.mark.parametrize(
    ("at", "replace", "error", "message"),
    [
        (0, jnp.zeros((2, 9, 3, 8)), ValueError, "N = 3 heads, no multiple of the K = 2"),
        (0, jnp.zeros((2, 9, 8)), ValueError, r"q has shape \(2, 9, 8\); expected \[B, T, N, H\]"),
        (1, jnp.zeros((2, 9, 2, 4)), ValueError, "H = 4"),
        (2, jnp.zeros((2, 8, 2, 8)), ValueError, "S = 8"),
        (2, jnp.zeros((2, 9, 2, 8), jnp.bfloat16), TypeError, "cast them to one dtype"),
        (0, jnp.zeros((2, 9, 4, 8), jnp.float16), TypeError, "q is float16"),
        (0, jnp.zeros((2, 0, 4, 8)), ValueError, "T = 0"),
    ],
)
def test_an_array_that_does_not_fit_is_named(at, replace, error, message):
    arrays = list(_inputs()[:3])
    arrays[at] = replace
    with pytest.raises(error, match=f"gated_attention: .*{message}"):
        gated_attention(*arrays, seed=0)


def test_pallas_does_not_serve_the_renormalised_ablation():
    q, k, v, _ = _inputs()
    with (
        dispatch.on(dispatch.INTERPRETER),
        pytest.raises(dispatch.UnavailableError, match="renormalise"),
    ):
        gated_attention(q, k, v, seed=0, renormalise=True, implementation="pallas")
