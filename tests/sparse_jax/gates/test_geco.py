"""The dual converges to the known multiplier of a closed-form problem, and survives a spike."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.gates import geco
from sparse_jax.gates.geco import GecoConfig
from sparse_jax.studies.posttrain import limits

U = 2.0**-24


def descend(settings, steps, *, spike=None):
    """Minimises e^-x + s x over x with dual updates; the "loss" is e^-x, the "edges" x.

    With the loss at tau, x = -ln tau, and where the gradient is zero e^-x = s: so s = tau.
    """

    def step(carry, k):
        x, dual = carry
        loss = jnp.exp(-x)
        measured = loss if spike is None else jnp.where(k == spike, loss + 50.0, loss)
        g = jax.grad(lambda x: geco.lagrangian(jnp.exp(-x), x, dual))(x)
        dual = geco.update(dual, measured, settings)
        return (x - 0.2 * g, dual), (dual.strength, loss)

    start = (jnp.float32(0.5), geco.init(settings))
    return jax.lax.scan(step, start, jnp.arange(steps))


def rounding_bound(settings):
    """Bound on the rounding error of x, ln s and the average of the loss at the solution.

    Near the solution a step is linear, z <- A z + e with the rounding errors e of one step. They
    move z by at most sum_k |A^k| e, whatever their signs; the sum ends once A^k is negligible.
    """
    tau, rate, decay = settings.target, settings.dual_rate, settings.decay
    step = np.array(
        [
            [1 - 0.2 * tau, -0.2 * tau, 0],
            [rate * (1 - decay) * tau, 1, -rate * decay],
            [-(1 - decay) * tau, 0, decay],
        ]
    )
    # Exponentials of 4 units in the loss, the gradient and the strength; a quotient, and sums.
    average = 8 * U * tau
    size = abs(math.log(tau))
    of_strength = U * size + rate * (average + 4 * U * tau)
    once = np.array([U * size + 0.2 * 10 * U * tau, of_strength, average])
    power, moved = np.eye(3), np.zeros(3)
    for _ in range(6000):
        moved += np.abs(power) @ once
        power = step @ power
    assert np.abs(power).max() < U
    return moved


@pytest.mark.parametrize("target", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_it_converges_to_the_known_multiplier(target, decay):
    settings = GecoConfig(target=target, dual_rate=0.05, decay=decay)
    (x, dual), _ = descend(settings, 6000)
    of_x, of_strength, of_average = rounding_bound(settings)
    assert float(x) == pytest.approx(-math.log(target), abs=of_x)
    # The exponential of ln s has 4 units more.
    assert float(dual.strength) == pytest.approx(target, rel=of_strength + 4 * U)
    assert float(dual.average) == pytest.approx(target, abs=of_average + 4 * U * target)


def test_it_recovers_from_a_spike_of_the_loss():
    settings = GecoConfig(target=0.3, dual_rate=0.05, decay=0.9)
    (_, dual), (strength_K, loss_K) = descend(settings, 6000, spike=3000)
    # The exponential of ln s has 4 units more.
    rounding = rounding_bound(settings)[1] + 4 * U
    before = float(strength_K[2999])
    assert before == pytest.approx(0.3, rel=rounding)
    # The strength reacts, by a bounded step at a time, and recovers.
    assert float(strength_K[3005]) < 0.8 * before
    log_K = np.log(np.float64(strength_K))
    # Two strengths of 4 units each, and the rounding of a sum.
    assert np.abs(np.diff(log_K)).max() <= settings.longest + (8 + 2 * np.abs(log_K).max()) * U
    assert float(dual.strength) == pytest.approx(0.3, rel=rounding)
    assert np.isfinite(loss_K).all()


def test_the_average_has_no_bias_from_its_start():
    settings = GecoConfig(target=1.0, decay=0.99)
    dual = geco.init(settings)
    assert math.isnan(float(dual.average))
    losses = [3.0, 5.0, 4.0]
    for loss in losses:
        dual = geco.update(dual, jnp.float32(loss), settings)
    weights = [0.99**2, 0.99, 1.0]
    want = np.average(losses, weights=weights)
    # Each sum takes three constants, two products and two additions; their quotient 3 units more.
    assert float(dual.average) == pytest.approx(want, rel=(7 + 7 + 3) * U)


def test_strength_rises_below_the_bound_and_stays_within_its_limits():
    settings = GecoConfig(target=2.0, dual_rate=1.0, decay=0.0, least=0.5, most=1.5, longest=10.0)
    push = functools.partial(geco.update, settings=settings)
    loss = np.float32(1.9)
    dual = push(geco.init(settings), jnp.float32(loss))
    # A quotient of 3 units and a product near 1.9, taken from 2, and an exponential of 4.
    of_exp = 4 * U
    want = math.exp(2 - float(loss))
    assert float(dual.strength) == pytest.approx(want, rel=4 * 1.9 * U + of_exp)
    # A constant below 1 is rounded first.
    assert float(push(dual, jnp.float32(-9.0)).strength) == pytest.approx(1.5, rel=U + of_exp)
    assert float(push(dual, jnp.float32(99.0)).strength) == pytest.approx(0.5, rel=U + of_exp)


def test_the_step_settles_linearly_to_zero():
    """Whole steps of ln 2 while half of the updates are left, then shares of it."""
    settings = GecoConfig(
        target=1.0, dual_rate=math.log(2), decay=0.0, longest=9.0, settle=0.5, steps=6
    )
    dual, steps = geco.init(settings), []
    for _ in range(7):
        after = geco.update(dual, jnp.float32(0.0), settings)
        steps.append(float(after.log_strength - dual.log_strength) / math.log(2))
        dual = after
    # Sums below 4 and a few products: 8 units.
    assert steps == pytest.approx([1, 1, 1, 1, 2 / 3, 1 / 3, 0], abs=8 * 4 * U)


def test_the_proportional_term_is_the_change_of_the_error():
    """ln s against the sum by hand, in float64: of each error, and of its change from update 2."""
    settings = GecoConfig(
        target=0.5, dual_rate=0.25, decay=0.5, start=1.0, longest=9.0, proportional=2.0
    )
    dual, losses = geco.init(settings), [0.75, 0.25, 1.0, 0.5]
    average, before, log_strength = 0.0, None, 0.0
    for number, loss in enumerate(losses):
        dual = geco.update(dual, jnp.float32(loss), settings)
        total = sum(0.5 ** (number - k) * losses[k] for k in range(number + 1))
        average = total / sum(0.5**k for k in range(number + 1))
        error = settings.target - average
        log_strength += 0.25 * error
        if before is not None:
            log_strength += 2.0 * (error - before)
        before = error
        # A quotient of 3 units, sums and products of numbers below 4.
        assert float(dual.log_strength) == pytest.approx(
            log_strength, abs=(number + 1) * 16 * 4 * U
        )
    without = dataclasses.replace(settings, proportional=0.0)
    first = geco.update(geco.init(settings), jnp.float32(0.75), settings)
    plain = geco.update(geco.init(without), jnp.float32(0.75), without)
    # There is no change before the second update.
    assert float(first.log_strength) == float(plain.log_strength)


def test_a_reference_is_taken_from_both_errors_of_the_proportional_term():
    settings = GecoConfig(target=0.25, dual_rate=0.125, decay=0.0, proportional=1.0, longest=9.0)
    dual = geco.init(settings, reference=(3.0, 2.0))
    for loss in (3.5, 3.0):
        dual = geco.update(dual, jnp.float32(loss), settings)
    # Errors of -0.25 and -0.75; all numbers are sums of powers of two.
    assert float(dual.log_strength) == 0.125 * -0.25 + 0.125 * -0.75 + 1.0 * -0.5


# A model of edges that answer late: the share of closed ones follows what the strength asks for,
# which saturates at all of them, as 1 / LAG of the difference an update; they cost 0.5 c^2 nats.
LAG, HALF, BOUND = 40, 0.1, 0.03


def answers_late(proportional):
    """The divergence and the strength at each of 800 updates."""
    settings = GecoConfig(
        target=BOUND, dual_rate=1.0, decay=0.9, start=0.003, proportional=proportional
    )

    def step(carry, _):
        closed, dual = carry
        closed += (1 / (1 + (HALF / dual.strength) ** 2) - closed) / LAG
        cost = 0.5 * closed**2
        dual = geco.update(dual, cost, settings)
        return (closed, dual), (cost, dual.strength)

    start = (jnp.float32(0), geco.init(settings))
    return (np.asarray(x) for x in jax.lax.scan(step, start, length=800)[1])


def test_integral_control_of_edges_that_answer_late_overshoots_and_the_proportional_term_damps():
    """The figures of a float64 simulation, with a margin: 2.28 and 1.23 bounds, 3.8 and 1.5."""
    integral_K, strength_K = answers_late(0.0)
    assert integral_K.max() > 2 * BOUND and limits.swing(strength_K) > 3
    damped_K, damped_strength_K = answers_late(20.0)
    assert damped_K.max() < 1.4 * BOUND and limits.swing(damped_strength_K) < 2
    # One is at its bound from update 300 on, the other still swings around it.
    assert np.abs(damped_K[300:] - BOUND).max() < 0.05 * BOUND
    assert np.abs(integral_K[300:] - BOUND).max() > 0.3 * BOUND


def test_the_strength_is_a_constant_to_the_parameters():
    dual = geco.init(GecoConfig(target=1.0, start=3.0))

    def of(dual):
        return geco.lagrangian(jnp.float32(1.0), jnp.float32(2.0), dual)

    # ln 3 is rounded, its exponential has 4 units and the sum one.
    assert float(of(dual)) == pytest.approx(7.0, rel=(math.log(3) + 4 + 1) * U)
    assert not np.any(np.asarray(jax.grad(of, allow_int=True)(dual).log_strength))


def test_a_loss_that_is_not_finite_is_not_hidden():
    settings = GecoConfig(target=1.0)
    dual = geco.update(geco.init(settings), jnp.float32(jnp.nan), settings)
    assert math.isnan(float(dual.strength))


def test_invalid_settings_are_refused():
    with pytest.raises(
        UsageError, match=r"dual_rate = 0 must .*; GECO: target = nan must be finite"
    ):
        GecoConfig(target=math.nan, dual_rate=0)
    with pytest.raises(UsageError, match=r"start = 1\.0 must be between least and most"):
        GecoConfig(target=1.0, least=2.0)
