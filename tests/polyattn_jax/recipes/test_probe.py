"""The probe's reports against float64, and against a substitution in one head of a whole model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.attention.visibility import visibility
import lm_jax
from lm_jax.model.attention import attention
from lm_jax.model.sites import Scope
from polyattn_jax.audit import measure
from polyattn_jax.recipes import probe, row_maps
from polyattn_jax.recipes.diagnostic import softmax_error_bound
from polyattn_jax.recipes.fused import NAME as KERNELS
from polyattn_jax.recipes.probe import DEGREES, Probe
from polyattn_jax.recipes.substitute import substitute
from tests import tiny

L, N, K, B, T, H = 2, 4, 2, 2, 23, 6
U = 2.0**-24
CAP, WINDOW = 8.0, 17
BIASES = np.float32([0.0, 0.7])


def inputs(seed=0):
    """Queries, keys and values; head 3 of the last prompt scores below zero everywhere."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal((B, T, heads, H)).astype(np.float32) * size
        for heads, size in ((N, 2.0), (K, 2.0), (K, 1.0))
    )
    q[-1, :, 3], k[-1, :, 1, 0] = 0.0, np.abs(k[-1, :, 1, 0]) + 1
    q[-1, :, 3, 0] = -6.0
    return q, k, v


def float64_scores(q, k, b, n, t):
    """The scores that query t sees, with a bound on what rounding to float32 may change."""
    keys = k[b, max(0, t - WINDOW + 1) : t + 1, n // (N // K)].astype(np.float64)
    query = q[b, t, n].astype(np.float64)
    z = CAP * np.tanh(keys @ query / np.sqrt(H) / CAP)
    # H + 3 roundings of a product of H terms; tanh is taken to be right within 16 ulp.
    error = (H + 3) * U * (np.abs(keys) @ np.abs(query)).max() / np.sqrt(H) + 36 * U * CAP
    return z, error


def power_weights(z, p, bias):
    r = np.maximum(z + np.float64(bias), 0) ** p
    return r / r.sum() if r.sum() else r


def softmax_weights(z):
    weight = np.exp(z - z.max())
    return weight / weight.sum()


@pytest.mark.parametrize("implementation", [probe.DENSE, KERNELS])
def test_control_and_change_of_the_output_match_float64(implementation):
    q, k, v = inputs()
    queries_BQ, answers_BQ = np.array([[T - 1, 4], [T - 3, 9]]), np.array([[8, -1], [11, 9]])
    row_probe = Probe(jnp.asarray(queries_BQ), jnp.asarray(answers_BQ), jnp.asarray(BIASES))
    scope = Scope({}, {})
    visible = visibility(
        "test", B, T, T, causal=True, window=WINDOW, segment_ids=None, start=jnp.zeros(B, int)
    )
    attend = lm_jax.fused(row_probe, implementation)
    options = {"scale": H**-0.5, "cap": CAP, "scope": scope}
    attention(*map(jnp.asarray, (q, k, v)), visible, attend=attend, **options)
    result = jax.tree.map(np.asarray, scope.aux)
    dead = 0
    for b, i, n in np.ndindex(B, 2, N):
        t, answer = queries_BQ[b, i], answers_BQ[b, i]
        z, error = float64_scores(q, k, b, n, t)
        first = t + 1 - len(z)
        for name, at in (("argmax", z.argmax()), ("answer", answer - first)):
            got = result["softmax"][name][b, n, i]
            if answer < 0 and name == "answer":
                assert got == np.inf
                continue
            want = np.exp(np.delete(z, at) - z[at]).sum()
            # Two scores off by `error` each; the target need not be the argmax.
            rtol = np.expm1(2 * error) + softmax_error_bound(T) + 2 * U * (z.max() - z[at])
            np.testing.assert_allclose(got, want, rtol=rtol)
        values = v[b, first : t + 1, n // (N // K)].astype(np.float64)
        soft = softmax_weights(z)
        out, size = soft @ values, np.abs(values).sum(-1).max()
        for x, bias in enumerate(BIASES):
            r_star = max(z.max() + bias, 0.0)
            # No score is so near the threshold that rounding could decide it.
            assert r_star > 0.01 or z.max() + bias < -0.01
            dead += r_star == 0
            for d, p in enumerate(DEGREES):
                moved = power_weights(z, p, bias) @ values - out
                want = np.linalg.norm(moved) / np.linalg.norm(out)
                # sum_j |dw_j| is at most 2 p n error / r_* for r^p (the slope of w_j in all scores
                # is below 2 p w_j / r_j, and w_j / r_j <= 1 / r_*), 2 error for softmax; then the
                # roundings of weights and sums themselves.
                weights = 2 * error * (1 + p * len(z) / r_star if r_star else 1)
                weights += (7 * p + 50 + 4 * len(z) + H) * U
                atol = weights * size * (1 + want) / np.linalg.norm(out)
                np.testing.assert_allclose(result["change"][x, b, n, i, d], want, atol=atol)
                if r_star == 0:
                    np.testing.assert_allclose(want, 1.0)
    assert dead > 0


def test_a_head_without_output_changes_by_nothing_or_by_infinitely_much():
    flat = jnp.float32([1.0, 1.0, 0.5]).reshape(1, 1, 1, 3)
    no_bias = jnp.zeros(1)
    change = probe.output_change(flat, jnp.zeros((1, 3, 1, 2)), no_bias)
    np.testing.assert_array_equal(change, np.zeros((1, 1, 1, 1, 4)))
    # Softmax reads nothing of a key far below, a value of 0 elsewhere; so does the recipe.
    values = jnp.float32([0.0, 0.0, 1.0]).reshape(1, 3, 1, 1)
    far = jnp.float32([0.0, 0.0, -1e4]).reshape(1, 1, 1, 3)
    np.testing.assert_array_equal(probe.output_change(far, values, jnp.full(1, 1.0)), 0.0)
    # A bias that lets it in gives the head an output that it did not have.
    assert np.isinf(probe.output_change(far, values, jnp.full(1, 2e4))).all()


CFG = dataclasses.replace(tiny.GROUPED, max_length=64, windows=(None, 9))


@pytest.fixture(scope="module")
def params():
    params = tiny.params(CFG)
    # Larger weights than at initialisation, so that attention is far from uniform.
    blocks = jax.tree.map(lambda a: a * 6 if a.ndim > 2 else a, params["blocks"])
    return params | {"blocks": blocks}


@pytest.fixture(scope="module")
def tokens_BT():
    return jax.random.randint(jax.random.key(1), (B, T), 0, CFG.vocab_size)


def test_the_change_is_that_of_a_substitution_in_this_head_alone(params, tokens_BT):
    queries_BQ = jnp.array([[T - 1], [T - 5]])
    nowhere = jnp.full((B, 1), -1)
    maps = (row_maps.softmax, *map(row_maps.relu_power, DEGREES))
    places = (jnp.arange(B)[:, None], queries_BQ)

    def outputs(index, bias, heads_LN):
        attend = substitute(maps, index, bias, heads_LN, jnp.ones((B, T), bool))
        record = dict.fromkeys(("attn.z", "attn.v"), lm_jax.keep)
        return lm_jax.forward(params, tokens_BT, CFG, attend=attend, record=record).records

    # Operation by operation every run sees the same inputs to the last bit.
    with jax.disable_jit():
        result = measure.diagnose(
            params, tokens_BT, queries_BQ, nowhere, jnp.asarray(BIASES), cfg=CFG
        )
        baseline = outputs(0, 0.0, jnp.zeros((L, N), bool))
        size = float(np.abs(baseline["attn.v"]).max())
        for layer, head, i, j in ((0, 1, 0, 0), (0, 2, 1, 3), (1, 3, 0, 1), (1, 0, 1, 2)):
            heads_LN = jnp.zeros((L, N), bool).at[layer, head].set(True)
            base = np.asarray(baseline["attn.z"][layer][places][:, 0, head])
            z = outputs(1 + j, BIASES[i], heads_LN)["attn.z"][layer][places][:, 0, head]
            norm = np.linalg.norm(base, axis=-1)
            want = np.linalg.norm(z - base, axis=-1) / norm
            # Sums over T keys, once with softmax and once with the recipe, in another order.
            atol = 4 * (T + H) * U * size * np.sqrt(H) * (1 + want) / norm
            got = np.asarray(result.change[layer, i, :, head, 0, j])
            assert (np.abs(got - want) <= atol).all()
            assert want.max() > 0.05


def test_probing_leaves_the_forward_as_it_is(params, tokens_BT):
    queries_BQ = jnp.full((B, 1), T - 1)
    row_probe = lm_jax.fused(Probe(queries_BQ, queries_BQ, jnp.asarray(BIASES)), probe.DENSE)
    with jax.disable_jit():
        baseline = lm_jax.forward(params, tokens_BT, CFG).logits
        probed = lm_jax.forward(params, tokens_BT, CFG, attend=row_probe).logits
    np.testing.assert_array_equal(probed, baseline)
