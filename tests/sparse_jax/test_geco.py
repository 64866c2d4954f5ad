"""The dual finds the known multiplier of a closed-form problem, and outlives a spike."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax import geco
from sparse_jax.geco import GecoSettings


def descend(settings, steps, *, spike=None):
    """Minimises e^-x + s x over x while the dual moves; the "loss" is e^-x, the "edges" x.

    With the loss held at tau, x = -ln tau, and where the gradient is zero e^-x = s: so s = tau.
    """

    def step(carry, k):
        x, dual = carry
        loss = jnp.exp(-x)
        seen = loss if spike is None else jnp.where(k == spike, loss + 50.0, loss)
        g = jax.grad(lambda x: geco.lagrangian(jnp.exp(-x), x, dual))(x)
        dual = geco.update(dual, seen, settings)
        return (x - 0.2 * g, dual), (dual.strength, loss)

    start = (jnp.float32(0.5), geco.init(settings))
    return jax.lax.scan(step, start, jnp.arange(steps))


@pytest.mark.parametrize("target", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_it_converges_to_the_known_multiplier(target, decay):
    settings = GecoSettings(target=target, dual_rate=0.05, decay=decay)
    (x, dual), _ = descend(settings, 6000)
    assert float(dual.strength) == pytest.approx(target, rel=2e-3)
    assert float(x) == pytest.approx(-math.log(target), abs=2e-3)
    assert float(dual.average) == pytest.approx(target, rel=2e-3)


def test_it_recovers_from_a_spike_of_the_loss():
    settings = GecoSettings(target=0.3, dual_rate=0.05, decay=0.9)
    (_, dual), (strength_K, loss_K) = descend(settings, 6000, spike=3000)
    before = float(strength_K[2999])
    assert before == pytest.approx(0.3, rel=5e-3)
    # Seen, bounded at every step, and undone.
    assert float(strength_K[3005]) < 0.8 * before
    assert np.abs(np.diff(np.log(strength_K))).max() <= settings.longest * (1 + 1e-4)
    assert float(dual.strength) == pytest.approx(0.3, rel=5e-3)
    assert np.isfinite(loss_K).all()


def test_the_average_is_free_of_its_start():
    settings = GecoSettings(target=1.0, decay=0.99)
    dual = geco.init(settings)
    assert math.isnan(float(dual.average))
    losses = [3.0, 5.0, 4.0]
    for loss in losses:
        dual = geco.update(dual, jnp.float32(loss), settings)
    weights = [0.99**2, 0.99, 1.0]
    want = np.average(losses, weights=weights)
    assert float(dual.average) == pytest.approx(want, rel=1e-5)


def test_strength_rises_with_loss_to_spare_and_stays_in_its_bounds():
    settings = GecoSettings(target=2.0, dual_rate=1.0, decay=0.0, least=0.5, most=1.5, longest=10.0)
    push = functools.partial(geco.update, settings=settings)
    dual = push(geco.init(settings), jnp.float32(1.9))
    assert float(dual.strength) == pytest.approx(math.exp(0.1), rel=1e-5)
    assert float(push(dual, jnp.float32(-9.0)).strength) == pytest.approx(1.5)
    assert float(push(dual, jnp.float32(99.0)).strength) == pytest.approx(0.5)


def test_the_strength_is_a_constant_to_the_parameters():
    dual = geco.init(GecoSettings(target=1.0, start=3.0))

    def of(dual):
        return geco.lagrangian(jnp.float32(1.0), jnp.float32(2.0), dual)

    assert float(of(dual)) == pytest.approx(7.0)
    assert not np.any(np.asarray(jax.grad(of)(dual).log_strength))


def test_a_loss_that_is_not_finite_is_not_hidden():
    settings = GecoSettings(target=1.0)
    dual = geco.update(geco.init(settings), jnp.float32(jnp.nan), settings)
    assert math.isnan(float(dual.strength))


def test_settings_that_cannot_be():
    with pytest.raises(UsageError, match=r"target = nan must be finite; dual_rate = 0"):
        GecoSettings(target=math.nan, dual_rate=0)
    with pytest.raises(UsageError, match=r"start = 1\.0 must be between least and most"):
        GecoSettings(target=1.0, least=2.0)
