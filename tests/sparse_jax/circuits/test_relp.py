"""RelP's rules: the derivative of activations by hand in float64, and the linearity it implies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model import layers
from lm_jax.model.edits import Quotient
from lm_jax.model.sites import Scope
from sparse_jax.circuits.rules import EXACT, RULES, GradientRules
from sparse_jax.circuits.runs import measure
from tests import rounding, tiny
from tests.sparse_jax.circuits.small_models import circuit_model, ioi_batch

RELP = RULES["relp"]


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize(("activation", "by_hand"), [("silu", silu), ("gelu_tanh", gelu_tanh)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_gradient_of_an_mlp_is_the_formula_in_float64(activation, by_hand, gated):
    cfg = tiny.decoder(activation=activation, gated_mlp=gated, mlp_size=12)
    rng = np.random.default_rng(0)
    D, F = cfg.hidden_size, cfg.mlp_size
    p = {name: rng.normal(size=(D, F)) for name in ("up", "gate")[: 1 + gated]}
    p["down"] = rng.normal(size=(F, D))
    x_BTD, g_BTD = rng.normal(size=(2, 2, 3, D))
    edits = {name: edit for name, edit in RELP.edits(cfg).items() if name.startswith("mlp.")}

    def value(x_BTD, edits):
        return layers.mlp(p, x_BTD, cfg, Scope(edits, {}))

    with jax.enable_x64(True):
        _, pull = jax.vjp(functools.partial(value, edits=edits), jnp.asarray(x_BTD))
        (result,) = pull(jnp.asarray(g_BTD))
        (exact,) = jax.vjp(functools.partial(value, edits={}), jnp.asarray(x_BTD))[1](g_BTD)

    pre = x_BTD @ p["gate" if gated else "up"]
    quotient = by_hand(pre) / pre
    g_post = g_BTD @ p["down"].T
    if gated:
        up = x_BTD @ p["up"]
        parts = [(g_post * up * quotient / 2, p["gate"]), (g_post * by_hand(pre) / 2, p["up"])]
    else:
        parts = [(g_post * quotient, p["up"])]
    want = sum(part @ weight.T for part, weight in parts)
    # Sums of D, D and F terms and fewer than 32 other roundings, of numbers no larger than these.
    most = sum(np.abs(part).max() * np.abs(weight).max() * F for part, weight in parts)
    np.testing.assert_allclose(result, want, rtol=0, atol=(2 * D + F + 32) * 2**-52 * D * most)
    assert np.abs(result - exact).max() > 0.1


def test_at_zero_the_derivative_is_the_true_one():
    """f(x) / x converges to f'(0); the value is f(x) everywhere."""
    x = jnp.array([-2.0, -0.0, 0.0, 1e-30, 3.0])
    for f, at_zero in ((jax.nn.silu, 0.5), (jax.nn.relu, 0.0)):
        y, pull = jax.vjp(functools.partial(Quotient().apply, f), x)
        np.testing.assert_array_equal(y, f(x))
        (slope,) = pull(jnp.ones_like(x))
        assert slope[1] == slope[2] == at_zero
        np.testing.assert_allclose(slope[3:], f(x[3:]) / x[3:], rtol=4 * 2**-24)


def completeness(rules, batch, each):
    """The metric, and the sum of embedding times gradient, of every prompt."""

    def run(params):
        model = each.replace(params=params)

        def metric(added):
            edits = {"embed": lm_jax.Add(added)}
            record = {"embed": lm_jax.keep}
            values, records = measure(
                model, batch, batch.clean_BT, edits=edits, record=record, rules=rules
            )
            return values.sum(), (values, records["embed"])

        zeros = jnp.zeros((*batch.clean_BT.shape, each.cfg.hidden_size))
        slope, (values, embed) = jax.grad(metric, has_aux=True)(zeros)
        return values, (embed * slope).sum((1, 2))

    return run


@pytest.mark.parametrize(
    "changes", [{}, {"gated_mlp": False, "activation": "gelu"}], ids=["gated", "ungated"]
)
def test_embedding_times_gradient_sums_to_the_metric(changes):
    """Without biases every rule leaves a linear map, so that nothing of the metric is lost."""
    each, batch = circuit_model("llama", scale=4.0, **changes), ioi_batch(2)
    run = completeness(RELP, batch, each)
    wanted = rounding.expected(run, each.params)
    result = jax.jit(run)(each.params)
    rounding.assert_within(result, wanted)
    metric, total = result
    assert (np.abs(total - metric) <= sum(wanted.bounds)).all()
    assert max(map(np.max, wanted.bounds)) < 0.01 * np.abs(metric).min()
    without = GradientRules(frozen_norms=True, frozen_patterns=True, half_products=True)
    for rules in (EXACT, without):
        metric, total = jax.jit(completeness(rules, batch, each))(each.params)
        assert np.abs(total - metric).max() > 100 * np.max(wanted.bounds)


def test_values_do_not_change_and_only_relp_edits_activations():
    each, batch = circuit_model("pythia"), ioi_batch(2)
    record = dict.fromkeys(("mlp.act", "mlp.post", "resid_post"), lm_jax.keep)
    wanted = measure(each, batch, batch.clean_BT, record=record)
    result = measure(each, batch, batch.clean_BT, record=record, rules=RELP)
    jax.tree.map(np.testing.assert_array_equal, result, wanted)
    assert [name for name, rules in RULES.items() if rules.linear_activations] == ["relp"]


def test_another_edit_of_the_activation_beside_the_rule_is_refused():
    each, batch = circuit_model("llama"), ioi_batch(2)
    edits = {"mlp.act": lm_jax.Scale(jnp.ones((each.cfg.num_layers, 1, 1, 1)))}
    with pytest.raises(UsageError, match="Quotient edits a function, not an array"):
        measure(each, batch, batch.clean_BT, edits=edits, rules=RELP)
