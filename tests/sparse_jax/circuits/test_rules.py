"""Gradient rules: values stay as they are, gradients are formulae written out by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.layers import add_axes
from sparse_jax.circuits import patching
from sparse_jax.circuits.components import component_attributions
from sparse_jax.circuits.rules import EXACT, RULES, GradientRules, find_rules
from sparse_jax.circuits.runs import measure
from sparse_jax.gates.model import constant_gates
from tests import rounding, tiny
from tests.sparse_jax.circuits import oracle
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


@functools.partial(jax.jit, static_argnames="rules")
def slopes(model, batch, rules):
    """Gradient of the metric by a change at each site, of the last layer where it is in layers."""
    record = dict.fromkeys(SITES, lm_jax.keep)
    shapes = jax.eval_shape(lambda: measure(model, batch, batch.clean_BT, record=record)[1])

    def run(added):
        edits = {name: lm_jax.Add(value) for name, value in added.items()}
        return measure(model, batch, batch.clean_BT, edits=edits, rules=rules)[0].sum()

    zeros = {name: jnp.zeros(each.shape, each.dtype) for name, each in shapes.items()}
    result = jax.grad(run)(zeros)
    return {name: g if name == "final_input" else g[1] for name, g in result.items()}


@functools.cache
def gradients(rules):
    return jax.device_get(slopes(model(), ioi_batch(2), rules))


def rms(x):
    return jnp.sqrt((x**2).mean(-1, keepdims=True) + model().cfg.norm_eps)


def silu(x):
    share = 1 / (1 + jnp.exp(-x))
    return x * share, share * (1 + x * (1 - share))


def by_hand(rules, params, x, batch):
    """All gradients of the last layer under rules that freeze norms, from recorded values."""
    cfg = model().cfg
    block = jax.tree.map(lambda x: x[1], params["blocks"])
    half = 0.5 if rules.half_products else 1.0
    B, T = batch.clean_BT.shape
    rows = np.arange(B)
    right, wrong = (
        np.asarray(ids)[:, 0]
        for ids in (batch.continuations.right_BA, batch.continuations.wrong_BA)
    )
    unembed = params["unembed"].T
    read = np.zeros((B, T, 1), bool)
    read[rows, np.asarray(batch.at_B2)[:, 0]] = True
    g_final = jnp.where(read, (unembed[right] - unembed[wrong])[:, None], 0.0)
    g_final *= add_axes(params["final"]["scale"], 3) / rms(x["resid_post"])

    mid = x["resid_mid"]
    scale = add_axes(block["ln2"]["scale"], 3) / rms(mid)
    up, gate = mid * scale @ block["mlp"]["up"], mid * scale @ block["mlp"]["gate"]
    act, slope = silu(gate)
    g_post = half * (g_final @ block["mlp"]["down"].T)
    g_mlp = (g_post * act) @ block["mlp"]["up"].T + (g_post * up * slope) @ block["mlp"]["gate"].T
    g_mlp = g_mlp * scale
    g_out = g_final + g_mlp

    N, G = cfg.num_heads, cfg.num_heads // cfg.num_kv_heads
    g_z = jnp.einsum("BTD,NHD->BTNH", g_out, block["mixer"]["o"])
    k, v = (jnp.repeat(x[name], G, axis=2) for name in ("attn.k", "attn.v"))
    g_v = half * jnp.einsum("BNTS,BTNH->BSNH", x["attn.pattern"], g_z)
    g_pattern = half * jnp.einsum("BTNH,BSNH->BNTS", g_z, v)
    scores = jnp.einsum("BTNH,BSNH->BNTS", x["attn.q"], k) * cfg.scale / rules.softmax_temperature
    scores = jnp.where(np.tril(np.ones((1, 1, T, T), bool)), scores, -np.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    g_scores = weights * (g_pattern - (weights * g_pattern).sum(-1, keepdims=True))
    g_scores *= half * cfg.scale * (not rules.frozen_patterns)
    g_q = jnp.einsum("BNTS,BSNH->BTNH", g_scores, k)
    g_k = jnp.einsum("BNTS,BTNH->BSNH", g_scores, x["attn.q"])

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


def without_mlp():
    """Halves of the MLP's products are not on the way then."""
    blocks = dict(model().params["blocks"])
    blocks["mlp"] = jax.tree.map(jnp.zeros_like, blocks["mlp"])
    return dataclasses.replace(model(), params=model().params | {"blocks": blocks})


@pytest.fixture(scope="module")
def formulae(batch):
    """The gradients by hand in float64, from a run in float64, with bounds of their rounding."""

    def all_by_hand(whole, bare):
        def run(each, cases):
            record = dict.fromkeys(VALUES, lm_jax.keep)
            _, records = measure(each, batch, batch.clean_BT, record=record)
            x = {name: value[1] for name, value in records.items()}
            return {name: by_hand(rules, each.params, x, batch) for name, rules in cases.items()}

        return run(whole, CASES), run(bare, {"norms": CASES["norms"]})

    values, bounds = oracle.expected(all_by_hand, model(), without_mlp())
    return [
        {name: rounding.Expected(values[i][name], bounds[i][name]) for name in values[i]}
        for i in range(2)
    ]


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_are_the_formulae(formulae, name):
    wanted, exact = formulae[0][name], gradients(EXACT)
    rounding.assert_within(gradients(CASES[name]), wanted)
    for site in SITES:
        values, bounds = wanted.values[site], wanted.bounds[site]
        assert np.abs(values).max() > 1e-2 or (name == "frozen" and site in ("attn.q", "attn.k"))
        assert (np.abs(values - exact[site]) > 10 * bounds).any()


def test_gim_gives_queries_and_keys_a_quarter_at_temperature_one(batch, formulae):
    """Halves of two products in a row, where the temperature is 1; values get one half."""
    exact = formulae[1]["norms"]
    full = jax.device_get(slopes(without_mlp(), batch, CASES["norms"]))
    rounding.assert_within(full, exact)
    rules = dataclasses.replace(RULES["gim"], softmax_temperature=1.0)
    part = jax.device_get(slopes(without_mlp(), batch, rules))
    for site, factor in (("attn.q", 0.25), ("attn.k", 0.25), ("attn.v", 0.5)):
        # A half is exact, so the bounds are those of the full gradient times the factor.
        wanted = rounding.Expected(factor * exact.values[site], factor * exact.bounds[site])
        rounding.assert_within(part[site], wanted, site)
        assert np.abs(full[site]).max() > 1e-3


@pytest.mark.parametrize("bias", [None, 0.3])
def test_no_rule_changes_a_value(batch, bias):
    each = circuit_model("gemma" if bias is None else "llama", bias=bias)
    record = dict.fromkeys(("attn.pattern", "attn.z", "resid_post"), lm_jax.keep)
    run = jax.jit(functools.partial(measure, record=record), static_argnames="rules")
    wanted = run(each, batch, batch.clean_BT, rules=EXACT)
    for rules in RULES.values():
        result = run(each, batch, batch.clean_BT, rules=rules)
        jax.tree.map(np.testing.assert_array_equal, result, wanted)


def test_closed_gates_pass_no_gradient_at_any_temperature(batch):
    """Heads whose gates are all shut read nothing from values, whatever the softmax's derivative.

    The heads of the other group have all gates open.
    """
    each = circuit_model("llama", bias=0.0)
    bias_LN = np.broadcast_to(np.float32([-1e6, -1e6, 1e6, 1e6]), (2, 4))
    each = dataclasses.replace(each, gates=dataclasses.replace(each.gates, bias_LN=bias_LN))
    result = slopes(each, batch, RULES["gim"])
    for site in ("attn.q", "attn.k", "attn.v"):
        closed, opened = np.split(np.asarray(result[site]), 2, axis=2)
        assert (closed == 0).all() and np.abs(opened).max() > 1e-3, site


@pytest.mark.parametrize(("apart", "rules"), [(200.0, "temperature"), (150.0, "gim")])
def test_a_saturated_softmax_has_the_slope_of_its_temperature(apart, rules):
    """Also where the weight itself underflows, which is where the temperature is needed."""
    rules = CASES[rules]
    scores = np.float32([[[[0.0, -apart, -1.0, -np.inf]]]])
    g = np.float32([[[[0.5, 2.0, -1.0, 3.0]]]])
    value, pull = jax.vjp(rules.attend(None), jnp.asarray(scores))
    assert value[0, 0, 0, 1] == 0
    weights = np.exp(scores.astype(np.float64) / rules.softmax_temperature)
    weights /= weights.sum(-1, keepdims=True)
    wanted = weights * (g - (weights * g).sum(-1, keepdims=True))
    # The exponent is rounded to half a unit of its size, and a dozen further roundings; the
    # difference is of terms no larger than 3.
    bound = (apart / rules.softmax_temperature + 16) * 2.0**-24 * 2 * 3 * weights
    (result,) = pull(jnp.asarray(g))
    assert (np.abs(result - wanted) <= bound).all() and result[0, 0, 0, 1] > 0


@pytest.mark.parametrize("renormalise", [False, True])
def test_gates_are_constants_of_the_derivative(renormalise):
    """The Jacobian of open weights by hand in float64, most logits being near the threshold."""
    rng = np.random.default_rng(0)
    shape = (2, 4, 5, 7)
    scores, g = rng.normal(size=(2, *shape)).astype(np.float32)
    bias_LN = np.float32([[-0.3, 0.0, 0.2, 0.5]])
    cfg = tiny.decoder(num_layers=1, num_heads=4, num_kv_heads=4)
    gates = dataclasses.replace(constant_gates(cfg, 0.0, renormalise=renormalise), bias_LN=bias_LN)
    attend = EXACT.attend(gates.attend(cfg))
    data = jax.tree.map(lambda leaf: leaf[0], attend.data)
    value, pull = jax.vjp(lambda scores: attend.fn(scores, data)[0], jnp.asarray(scores))
    np.testing.assert_array_equal(value, gates.attend(cfg).fn(jnp.asarray(scores), data)[0])

    is_open = scores + bias_LN[0][:, None, None] > 0
    assert 0.3 < is_open.mean() < 0.7 and is_open.any(-1).mean() > 0.9
    weights = np.exp(scores.astype(np.float64)) * (is_open if renormalise else 1)
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total > 0, total, 1)
    reads = g * is_open
    wanted = weights * (reads - (weights * reads).sum(-1, keepdims=True))
    # Sums over S weights, each of an exponential and a quotient, and a dozen other roundings of
    # terms no larger than the greatest cotangent times the weight.
    bound = (2 * shape[-1] + 24) * 2.0**-24 * 2 * np.abs(g).max()
    np.testing.assert_allclose(pull(jnp.asarray(g))[0], wanted, rtol=0, atol=bound)
    assert np.abs(wanted).max() > 0.1 > 1e3 * bound


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
