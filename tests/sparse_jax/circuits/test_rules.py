"""Gradient rules: values stay as they are, gradients are formulae written out by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from sparse_jax.circuits import patching
from sparse_jax.circuits.components import component_attributions
from sparse_jax.circuits.rules import EXACT, RULES, GradientRules, find_rules
from sparse_jax.circuits.runs import measure
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch

SITES = ("attn.q", "attn.k", "attn.v", "mlp_input", "final_input")
VALUES = ("attn.q", "attn.k", "attn.v", "attn.pattern", "resid_mid", "resid_post")


@pytest.fixture(scope="module")
def batch():
    return ioi_batch(2)


@functools.cache
def model():
    """A gated MLP, RMS norms, and no rotation between projections and scores."""
    return circuit_model("llama", rope=None, family="")


@functools.cache
def gradients(rules, gated=None):
    """Gradient of the metric by a change at each site of the last layer, and recorded values."""
    each = model() if gated is None else circuit_model("llama", bias=gated)
    batch = ioi_batch(2)
    record = dict.fromkeys(VALUES, lm_jax.keep)
    _, records = measure(each, batch, batch.clean_BT, record=record)
    zeros = {name: jnp.zeros_like(records[name]) for name in ("attn.q", "attn.k", "attn.v")}
    zeros["mlp_input"] = jnp.zeros_like(records["resid_mid"])
    zeros["final_input"] = jnp.zeros_like(records["resid_post"][0])

    @jax.jit
    def run(added):
        edits = {name: lm_jax.Add(value) for name, value in added.items()}
        return measure(each, batch, batch.clean_BT, edits=edits, rules=rules)[0].sum()

    slopes = jax.grad(run)(zeros)
    return {
        name: np.asarray(g if name == "final_input" else g[1], np.float64)
        for name, g in slopes.items()
    }, {name: np.asarray(x[1], np.float64) for name, x in records.items()}


def rms(x):
    return np.sqrt((x**2).mean(-1, keepdims=True) + model().cfg.norm_eps)


def silu(x):
    share = 1 / (1 + np.exp(-x))
    return x * share, share * (1 + x * (1 - share))


def by_hand(rules, batch):
    """All gradients of the last layer under rules that freeze norms, in float64."""
    params, cfg = model().params, model().cfg
    block = jax.tree.map(lambda x: np.asarray(x[1], np.float64), params["blocks"])
    _, x = gradients(EXACT)
    half = 0.5 if rules.half_products else 1.0
    B, T = batch.clean_BT.shape
    rows = np.arange(B)
    right, wrong = (
        np.asarray(ids)[:, 0]
        for ids in (batch.continuations.right_BA, batch.continuations.wrong_BA)
    )
    unembed = np.asarray(params["unembed"], np.float64).T
    g_final = np.zeros((B, T, cfg.hidden_size))
    g_final[rows, np.asarray(batch.at_B2)[:, 0]] = unembed[right] - unembed[wrong]
    g_final *= np.asarray(params["final"]["scale"]) / rms(x["resid_post"])

    mid = x["resid_mid"]
    scale = block["ln2"]["scale"] / rms(mid)
    up, gate = mid * scale @ block["mlp"]["up"], mid * scale @ block["mlp"]["gate"]
    act, slope = silu(gate)
    g_post = half * (g_final @ block["mlp"]["down"].T)
    g_mlp = (g_post * act) @ block["mlp"]["up"].T + (g_post * up * slope) @ block["mlp"]["gate"].T
    g_mlp = g_mlp * scale
    g_out = g_final + g_mlp

    N, G = cfg.num_heads, cfg.num_heads // cfg.num_kv_heads
    g_z = np.einsum("BTD,NHD->BTNH", g_out, block["mixer"]["o"])
    k, v = (np.repeat(x[name], G, axis=2) for name in ("attn.k", "attn.v"))
    g_v = half * np.einsum("BNTS,BTNH->BSNH", x["attn.pattern"], g_z)
    g_pattern = half * np.einsum("BTNH,BSNH->BNTS", g_z, v)
    scores = np.einsum("BTNH,BSNH->BNTS", x["attn.q"], k) * cfg.scale / rules.softmax_temperature
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    g_scores = weights * (g_pattern - (weights * g_pattern).sum(-1, keepdims=True))
    g_scores *= half * cfg.scale * (not rules.frozen_patterns)
    g_q = np.einsum("BNTS,BSNH->BTNH", g_scores, k)
    g_k = np.einsum("BNTS,BTNH->BSNH", g_scores, x["attn.q"])

    def grouped(g_BSNH):
        return g_BSNH.reshape(B, T, N // G, G, -1).sum(3)

    results = (g_q, grouped(g_k), grouped(g_v), g_mlp, g_final)
    return dict(zip(SITES, results, strict=True))


CASES = {
    "norms": GradientRules(frozen_norms=True),
    "temperature": GradientRules(frozen_norms=True, softmax_temperature=3.0),
    # The rule for activations is in `test_relp.py`.
    **{name: rules for name, rules in RULES.items() if name not in ("exact", "relp")},
}


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_are_the_formulae(batch, name):
    wanted = by_hand(CASES[name], batch)
    result, _ = gradients(CASES[name])
    exact, _ = gradients(EXACT)
    for site in SITES:
        largest = np.abs(wanted[site]).max()
        np.testing.assert_allclose(result[site], wanted[site], atol=2e-5 * max(largest, 1.0))
        assert largest > 1e-2 or (name == "frozen" and site in ("attn.q", "attn.k"))
        assert not np.allclose(wanted[site], exact[site], atol=1e-4 * largest)


def test_gim_gives_queries_and_keys_a_quarter_at_temperature_one():
    """Halves of two products in a row, where the temperature is 1; values get one half."""
    model_, batch = model(), ioi_batch(2)
    # Without an MLP, whose products are halved too, on the way.
    no_mlp = model_.params["blocks"] | {
        "mlp": jax.tree.map(jnp.zeros_like, model_.params["blocks"]["mlp"])
    }
    bare = dataclasses.replace(model_, params=model_.params | {"blocks": no_mlp})

    def slope(rules, site):
        shape = gradients(EXACT)[1][site].shape

        @jax.jit
        def run(added):
            edits = {site: lm_jax.Add(added)}
            return measure(bare, batch, batch.clean_BT, edits=edits, rules=rules)[0].sum()

        return np.asarray(jax.grad(run)(jnp.zeros((2, *shape))))[1]

    for site, factor in (("attn.q", 0.25), ("attn.k", 0.25), ("attn.v", 0.5)):
        full = slope(CASES["norms"], site)
        quarter = slope(dataclasses.replace(RULES["gim"], softmax_temperature=1.0), site)
        np.testing.assert_allclose(quarter, factor * full, atol=1e-6 * np.abs(full).max())
        assert np.abs(full).max() > 1e-3


@pytest.mark.parametrize("bias", [None, 0.3])
def test_no_rule_changes_a_value(batch, bias):
    each = circuit_model("gemma" if bias is None else "llama", bias=bias)
    record = dict.fromkeys(("attn.pattern", "attn.z", "resid_post"), lm_jax.keep)
    wanted = measure(each, batch, batch.clean_BT, record=record)
    for rules in RULES.values():
        result = measure(each, batch, batch.clean_BT, record=record, rules=rules)
        jax.tree.map(np.testing.assert_array_equal, result, wanted)


def test_closed_gates_pass_no_gradient_at_any_temperature():
    """With all gates shut nothing is read from values, whatever the softmax's derivative."""
    result, _ = gradients(RULES["gim"], gated=-1e6)
    for site in ("attn.q", "attn.k", "attn.v"):
        assert (result[site] == 0).all()
    opened, _ = gradients(RULES["gim"], gated=1e6)
    assert np.abs(opened["attn.q"]).max() > 1e-3


def test_all_attributions_take_rules(batch):
    """Heads, token edges and component edges; the default is the true gradient."""
    each = circuit_model("llama")
    functions = (patching.head_attributions, patching.edge_attributions, component_attributions)
    for function in functions:
        exact, gim = (
            np.asarray(function(each, batch, rules=find_rules(name))) for name in ("exact", "gim")
        )
        np.testing.assert_array_equal(exact, function(each, batch))
        assert np.abs(gim - exact).max() > 1e-3 * np.abs(exact).max()
    frozen = np.asarray(component_attributions(each, batch, rules=RULES["frozen"]))
    layers = frozen[:, :, :-1].reshape(*frozen.shape[:2], 2, -1)
    assert (layers[..., :6] == 0).all() and (layers[..., 6:] != 0).any()


def test_unknown_rules_are_refused():
    with pytest.raises(UsageError, match=r"no gradient rules 'gimm'.*'gim'"):
        find_rules("gimm")
    with pytest.raises(UsageError, match=r"softmax_temperature = 0 must be above 0"):
        GradientRules(softmax_temperature=0)
