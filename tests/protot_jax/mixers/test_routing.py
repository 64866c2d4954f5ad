"""Options of the prototype mixer, off by default: gates, hidden prototypes, heads, losses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.train.objective import LanguageModelling
from protot_jax import PrototypeMixer
from protot_jax.mixers import routing
from protot_jax.training.routing_loss import RoutedLanguageModelling, adds_routing_loss, gate_losses
from tests import rounding, tiny

U = 2.0**-24
CFG = tiny.decoder(num_heads=1, num_kv_heads=1, head_dim=16)
OPTIONS = {
    "sparsemax": PrototypeMixer(num_prototypes=6, routing="sparsemax"),
    "values": PrototypeMixer(num_prototypes=6, rotary_values=True, rotary_theta=256.0),
    "all": PrototypeMixer(
        num_prototypes=8,
        heads=2,
        routing="top_k",
        top_k=2,
        rotary_queries=True,
        rotary_values=True,
        rotary_theta=256.0,
    ),
}
every_option = pytest.mark.parametrize("mixer", OPTIONS.values(), ids=OPTIONS)


def nearest_on_the_simplex(x_R):
    """By its sort, in float64: the largest support whose threshold is below its least entry."""
    ordered = np.sort(np.float64(x_R))[::-1]
    for size in range(len(ordered), 0, -1):
        threshold = (ordered[:size].sum() - 1) / size
        if ordered[size - 1] > threshold:
            return np.maximum(x_R - threshold, 0)
    raise AssertionError("one entry alone is always a support")


def test_sparsemax_is_the_nearest_point_of_the_simplex():
    x_XR = np.float32(np.random.default_rng(0).normal(size=(200, 7)))
    x_XR[:50] *= 0.1
    x_XR[50:60] = 0.5
    x_XR[60:70, 2] = -np.inf
    got_XR = np.asarray(routing.sparsemax(jnp.asarray(x_XR)))
    wanted_XR = np.stack([nearest_on_the_simplex(x_R) for x_R in x_XR])
    # A threshold is a sum of seven numbers and their quotient.
    largest = np.abs(x_XR[np.isfinite(x_XR)]).max()
    bound = 9 * 7 * U * largest
    np.testing.assert_allclose(got_XR, wanted_XR, rtol=0, atol=bound)
    np.testing.assert_allclose(got_XR.sum(-1), 1.0, rtol=0, atol=7 * bound)
    sizes = (got_XR > 0).sum(-1)
    assert {1, 2, 3, 7} <= set(sizes.tolist()) and not got_XR[60:70, 2].any()


def test_the_gradient_of_sparsemax_is_the_projection_on_its_support():
    x_R = jnp.array([0.9, 0.4, -2.0, 0.7, -jnp.inf])
    jacobian = np.asarray(jax.jacrev(routing.sparsemax)(x_R))
    s_R = np.asarray(routing.sparsemax(x_R) > 0, np.float64)
    assert s_R.tolist() == [1, 1, 0, 1, 0]
    wanted = np.diag(s_R) - np.outer(s_R, s_R) / s_R.sum()
    np.testing.assert_allclose(jacobian, wanted, rtol=0, atol=8 * U)


def test_top_k_is_the_softmax_of_the_k_largest():
    logits = jax.random.normal(jax.random.key(0), (2, 30, 8))
    # Equal ones, of which the first count.
    logits = logits.at[0, 0].set(0.0)
    for k in (1, 3, 8):
        gates = np.asarray(routing.gates(logits, "top_k", top_k=k))
        assert ((gates > 0).sum(-1) == k).all()
        order = np.argsort(-np.asarray(logits), axis=-1, kind="stable")[..., :k]
        kept = np.take_along_axis(np.float64(logits), order, -1)
        np.testing.assert_allclose(
            np.take_along_axis(gates, order, -1), special.softmax(kept, -1), rtol=40 * U
        )
    whole = jax.nn.softmax(logits, -1)
    np.testing.assert_array_equal(routing.gates(logits, "top_k", top_k=8), whole)
    np.testing.assert_array_equal(routing.gates(logits, "softmax"), whole)


def test_gates_of_heads_are_those_of_each_alone():
    logits = jax.random.normal(jax.random.key(0), (2, 5, 12))
    for name in ("softmax", "top_k", "sparsemax"):
        k = 2 if name == "top_k" else 0
        apart = [routing.gates(own, name, top_k=k) for own in jnp.split(logits, 3, -1)]
        together = routing.gates(logits, name, heads=3, top_k=k)
        np.testing.assert_allclose(together, np.concatenate(apart, -1), rtol=8 * U)


def test_hidden_prototypes_are_the_same_for_every_token_and_both_gates():
    logits = jax.random.normal(jax.random.key(0), (400, 3, 10))
    key = jax.random.key(1)
    hidden = np.isinf(routing.hide(logits, 0.3, key, heads=2))
    assert (hidden == hidden[:, :1]).all()
    np.testing.assert_array_equal(hidden, np.isinf(routing.hide(-logits, 0.3, key, heads=2)))
    # 4,000 draws, within four deviations.
    assert abs(hidden[:, 0].mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 4000)
    # A head keeps all where it would keep none.
    few = np.isinf(routing.hide(logits, 0.9, key, heads=2))[:, 0].reshape(400, 2, 5)
    assert not few.all(-1).any() and (few.sum(-1) == 0).mean() > 0.9**5 / 2
    for rate, rng in ((0.3, None), (0.0, key)):
        assert routing.hide(logits, rate, rng) is logits


@every_option
def test_decoding_step_by_step_equals_reading_at_once(mixer):
    params = lm_jax.init_params(jax.random.key(0), CFG, mixer=mixer)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, 40), 0, 40)

    def step(cache, token_B):
        out = lm_jax.forward(params, token_B[:, None], CFG, mixer=mixer, cache=cache)
        return out.cache, out.logits[:, 0]

    cache = lm_jax.init_cache(CFG, 2, 40, mixer=mixer)
    # R sums of the width of a head's values, R masses and four values under the convolution; rotary
    # positions count tokens.
    R, counted = mixer.num_prototypes, int(mixer.rotary_queries or mixer.rotary_values)
    floats = sum(x.size for x in jax.tree.leaves(cache.layers))
    assert floats == 2 * 2 * (R * 8 // mixer.heads + R + 4 * 8 + counted)
    _, got = jax.lax.scan(step, cache, tokens_BT.T)

    def read(params, **options):
        return lm_jax.forward(params, tokens_BT, CFG, mixer=mixer, **options).logits

    # The memory that can be recorded is the one that is read.
    recorded = jax.jit(functools.partial(read, record={"mixer.memory": lm_jax.keep}))(params)
    if mixer.routing == "sparsemax":
        # A sort has no derived bound: some hundred roundings on the way through two layers.
        wanted = jax.jit(read)(params)
        wanted = rounding.Expected(wanted, np.full(wanted.shape, 256 * U * np.abs(wanted).max()))
    else:
        wanted = rounding.expected(read, params)
    for each in (got.swapaxes(0, 1), recorded):
        rounding.assert_within(each, wanted)


def reference_losses(gates_XTR, heads):
    """Entropy and balance by loops over heads, in float64."""
    entropies, divergences = [], []
    for gates_TR in gates_XTR:
        for own_TR in np.split(np.float64(gates_TR), heads, -1):
            entropies += [special.entr(g).sum() for g in own_TR]
            divergences.append(np.log(own_TR.shape[1]) - special.entr(own_TR.mean(0)).sum())
    return np.mean(entropies), np.mean(divergences)


def test_the_losses_are_entropy_and_divergence_from_equal_use():
    logits = 3 * jax.random.normal(jax.random.key(0), (2, 3, 4, 5, 8))
    gates = jax.nn.softmax(logits.reshape(2, 3, 4, 5, 2, 4), -1).reshape(logits.shape)
    counted = np.arange(20).reshape(4, 5) % 3 > 0
    chosen = np.asarray(gates)[:, :, counted].reshape(6, -1, 8)
    wanted = reference_losses(chosen, 2)
    # Sums of a few hundred terms below 1.5.
    np.testing.assert_allclose(gate_losses(gates, counted, 2), wanted, rtol=300 * U)
    everywhere = np.ones((4, 5), bool)
    same = jnp.broadcast_to(jnp.eye(8)[2], gates.shape)
    np.testing.assert_allclose(gate_losses(same, everywhere, 1), (0, np.log(8)), atol=300 * U)
    even = jnp.full(gates.shape, 1 / 8)
    np.testing.assert_allclose(gate_losses(even, everywhere, 1), (np.log(8), 0), atol=300 * U)
    turns = jnp.tile(jnp.eye(5), (2, 3, 4, 1, 1))
    np.testing.assert_allclose(gate_losses(turns, everywhere, 1), (0, 0), atol=300 * U)
    assert gate_losses(gates, ~everywhere, 2) == (0, 0)


ROWS = np.random.default_rng(0).integers(1, 40, (4, 12)).astype(np.int32)
ROWS[2, 7:] = 0


def test_the_objective_adds_its_losses_to_that_of_the_text():
    mixer = PrototypeMixer(num_prototypes=6, entropy_weight=0.5, balance_weight=2.0)
    assert adds_routing_loss(mixer) and not adds_routing_loss(PrototypeMixer())
    routed, plain = RoutedLanguageModelling(CFG, mixer), LanguageModelling(CFG, mixer)
    params = lm_jax.init_params(jax.random.key(0), CFG, mixer=mixer)
    key = jax.random.key(1)

    @jax.jit
    def terms(rows, normalizers):
        return routed.loss_terms(params, (), None, rows, normalizers, key)

    whole = routed.normalizers(ROWS)
    minimised, parts = terms(ROWS, whole)
    loss, _ = plain.loss_terms(params, (), None, ROWS, whole, key)
    assert float(parts["loss"]) == pytest.approx(float(loss), rel=1e-6)
    added = 0.5 * parts["gate_entropy"] + 2.0 * parts["gate_balance"]
    assert float(minimised - parts["loss"]) == pytest.approx(float(added), rel=1e-5)
    assert 0 < parts["gate_entropy"] <= np.log(6) and 0 < parts["gate_balance"] < np.log(6)
    # Of micro-batches the entropies add up; the evaluation knows the text alone.
    halves = [terms(rows, whole)[1]["gate_entropy"] for rows in np.split(ROWS, 2)]
    assert float(sum(halves)) == pytest.approx(float(parts["gate_entropy"]), rel=1e-5)
    results = [each.evaluate(params, (), ROWS) for each in (routed, plain)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("weights", "column"),
    [({"entropy_weight": 1.0}, "gate_entropy"), ({"balance_weight": 1.0}, "gate_balance")],
)
def test_a_step_against_the_gradient_of_a_loss_lowers_it(weights, column):
    mixer = PrototypeMixer(num_prototypes=6, **weights)
    objective = RoutedLanguageModelling(CFG, mixer)
    params = lm_jax.init_params(jax.random.key(0), CFG, mixer=mixer)
    normalizers, key = objective.normalizers(ROWS), jax.random.key(1)

    @jax.jit
    def added(params):
        minimised, parts = objective.loss_terms(params, (), None, ROWS, normalizers, key)
        return minimised - parts["loss"], parts[column]

    gradient, before = jax.grad(added, has_aux=True)(params)
    squared = sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(gradient))
    step = 1e-3 / np.sqrt(squared)
    moved = jax.tree.map(lambda p, g: p - step * g, params, gradient)
    # To first order by the step times the squared norm.
    fall = float(before - added(moved)[1])
    assert fall == pytest.approx(step * squared, rel=0.2)


def test_hidden_prototypes_change_the_loss_in_training_alone():
    mixer = PrototypeMixer(num_prototypes=6, prototype_dropout=0.5)
    dense = dataclasses.replace(mixer, prototype_dropout=0.0)
    params = lm_jax.init_params(jax.random.key(0), CFG, mixer=mixer)
    results = {}
    for name, each in (("dropped", mixer), ("dense", dense)):
        objective = LanguageModelling(CFG, each)
        normalizers = objective.normalizers(ROWS)
        for seed in (1, 2):
            loss, _ = objective.loss_terms(
                params, (), None, ROWS, normalizers, jax.random.key(seed)
            )
            results[name, seed] = float(loss)
        results[name, "evaluated"] = float(objective.evaluate(params, (), ROWS)["loss"])
    assert results["dropped", "evaluated"] == results["dense", "evaluated"]
    assert results["dense", 1] == results["dense", 2]
    assert len({results["dropped", 1], results["dropped", 2], results["dense", 1]}) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3}, "heads = 3 must divide num_prototypes = 32"),
        ({"heads": 0}, "heads = 0 must divide"),
        ({"top_k": 3}, "top_k = 3 must be from 1 to the 32 prototypes"),
        ({"routing": "top_k"}, "top_k = 0 must be from 1"),
        ({"routing": "top_k", "top_k": 17, "heads": 2}, "from 1 to the 16 prototypes"),
        ({"prototype_dropout": 1.0}, r"prototype_dropout = 1\.0 must be"),
        ({"rotary_theta": 1.0}, r"rotary_theta = 1\.0 must be above 1"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        PrototypeMixer(**fields)


def test_heads_that_do_not_divide_the_widths_are_refused():
    cfg = tiny.decoder(num_heads=1, num_kv_heads=1, head_dim=18, hidden_size=18)
    mixer = PrototypeMixer(num_prototypes=8, heads=4)
    with pytest.raises(UsageError, match="must divide the width 18 and the width of the values, 9"):
        lm_jax.param_spec(cfg, mixer)
    with pytest.raises(UsageError, match="models with one head alone"):
        mixer.freeze({}, {})
    for name, turned in (("values", 9), ("queries", 3)):
        heads = {"values": 1, "queries": 6}[name]
        odd = PrototypeMixer(
            num_prototypes=6, low_rank=heads == 1, heads=heads, **{f"rotary_{name}": True}
        )
        with pytest.raises(UsageError, match=f"rotary_{name} turns pairs .* a head has {turned}:"):
            lm_jax.param_spec(cfg, odd)
