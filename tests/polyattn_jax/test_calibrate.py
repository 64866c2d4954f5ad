"""b_auto by streaming brackets equals b_auto by sorting, and obeys the 5 % rule it stands for."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import BadInputError, CorruptError, UsageError
from polyattn_jax import calibrate
from polyattn_jax.calibrate import MassBelow


def causal(scores):
    T, S = scores.shape[-2:]
    return np.where(np.arange(S) <= np.arange(T)[:, None] + (S - T), scores, -np.inf)


def numpy_measure(scores):
    """M(t) in float64, straight from its definition."""
    z = scores.reshape(-1, scores.shape[-1]).astype(np.float64)
    z = z[(z > -np.inf).any(-1)]
    weight = np.exp(z - z.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return lambda thresholds_M: MassBelow(
        np.array([weight[z < t].sum() for t in thresholds_M]), np.int64(len(z))
    )


def heads(seed, scale=2.0, offset=0.0, shape=(3, 2, 2, 16, 16)):
    rng = np.random.default_rng(seed)
    return causal(rng.standard_normal(shape) * scale + offset).astype(np.float32)


@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    offset=st.floats(-200, 200),
    rounding=st.booleans(),
    budget=st.sampled_from([0.0, 0.0113, 0.0517, 0.317, 0.973]),
)
def test_streaming_equals_sorting(seed, scale, offset, rounding, budget):
    scores = heads(seed, scale, offset, (2, 5, 6))
    if rounding:  # bfloat16 scores tie often
        scores = np.asarray(jnp.asarray(scores, jnp.bfloat16), np.float32)
    got = calibrate.calibrate(numpy_measure(scores), budget=budget, num_thresholds=64)
    assert got.bias == calibrate.exact_bias(scores, budget=budget)
    assert -got.bias in scores


def test_the_rule_holds_at_the_bias_and_fails_just_below_it():
    scores = heads(4)
    got = calibrate.calibrate(numpy_measure(scores))
    step = np.nextafter(np.float32(-got.bias), np.float32(np.inf))
    at, past = numpy_measure(scores)([-got.bias, step]).total_M / got.rows
    assert at <= 0.05 < past
    np.testing.assert_allclose(got.mass, at)


@pytest.mark.parametrize("num_thresholds", [1, 7, 256, 1023])
def test_layers_reduced_in_jax_give_the_same_bias_in_few_passes(num_thresholds):
    scores = heads(5)
    calls = []

    @jax.jit
    def one_pass(thresholds_M):
        calls.append(None)
        return jax.lax.map(lambda layer: calibrate.mass_below(layer, thresholds_M), scores)

    got = calibrate.calibrate(one_pass, num_thresholds=num_thresholds)
    assert got.bias == calibrate.exact_bias(scores)
    assert got.rows == 3 * 2 * 2 * 16
    assert got.passes <= {1: 33, 7: 11, 256: 4, 1023: 4}[num_thresholds]
    assert len(calls) == 1


def test_mass_below_is_strict_and_skips_rows_without_keys():
    scores = jnp.float32([[1, 1, 2, -np.inf], [-np.inf] * 4])
    got = calibrate.mass_below(scores, jnp.float32([0.5, 1, 1.5, 2, 2.5]))
    tied = 2 / (2 + np.e)
    np.testing.assert_allclose(got.total_M, [0, 0, tied, tied, 1], rtol=1e-6)
    assert got.rows == 1


def test_mass_below_matches_the_definition():
    scores = heads(6)
    thresholds = np.linspace(-6, 6, 41).astype(np.float32)
    want = numpy_measure(scores)(thresholds)
    got = jax.jit(calibrate.mass_below)(scores, thresholds)
    np.testing.assert_allclose(got.total_M, want.total_M, rtol=1e-6, atol=1e-5)
    assert got.rows == want.rows


@pytest.mark.parametrize(("budget", "threshold"), [(0.0, -2), (0.2, -2), (0.25, 0), (0.5, 1)])
def test_ties_and_a_budget_met_exactly(budget, threshold):
    # Four rows of one key each: every score carries a quarter of the mass.
    scores = np.float32([[-2], [0], [1], [1]])
    got = calibrate.calibrate(lambda t: calibrate.mass_below(jnp.asarray(scores), t), budget=budget)
    assert got.bias == calibrate.exact_bias(scores, budget=budget) == -threshold
    assert not np.signbit(got.bias) or got.bias != 0


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38, 3.4028235e38, 1.2e-38])
def test_extreme_scores_are_found_exactly(value):
    scores = np.full((2, 3), value, np.float32)
    got = calibrate.calibrate(numpy_measure(scores))
    assert np.float32(-got.bias) == np.float32(value)


@pytest.mark.parametrize("budget", [-0.1, 1.0, float("nan")])
def test_impossible_budgets_are_refused(budget):
    with pytest.raises(UsageError, match="budget"):
        calibrate.calibrate(numpy_measure(heads(0)), budget=budget)


def test_no_thresholds_and_no_rows_and_nan_scores_are_refused():
    with pytest.raises(UsageError, match="num_thresholds"):
        calibrate.calibrate(numpy_measure(heads(0)), num_thresholds=0)
    for fill, message in ((-np.inf, "no row has an unmasked key"), (np.nan, "not finite")):
        scores = jnp.full((2, 3), fill)
        with pytest.raises(BadInputError, match=message):
            calibrate.calibrate(lambda t, z=scores: calibrate.mass_below(z, t))


def test_calibration_text_is_the_shipped_one(monkeypatch):
    text = calibrate.calibration_text()
    assert hashlib.sha256(text.encode()).hexdigest() == calibrate.CALIBRATION_TEXT_SHA256
    assert 1200 < len(text.split()) < 1600
    monkeypatch.setattr(calibrate, "CALIBRATION_TEXT_SHA256", "0" * 64)
    with pytest.raises(CorruptError, match="reinstall"):
        calibrate.calibration_text()
