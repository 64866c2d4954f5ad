"""Curves, crossings, CPR and CMD against closed forms."""

import math

import numpy as np
import pytest

from sparse_jax.circuits import curves


def test_explained_effect_of_the_whole_is_one_and_of_nothing_zero():
    rng = np.random.default_rng(0)
    empty, whole = rng.normal(0, 1, 20), rng.normal(4, 1, 20)
    halfway = 0.25 * empty + 0.75 * whole
    result = curves.explained(np.stack([empty, halfway, whole]), empty, whole)
    np.testing.assert_allclose(result, [0, 0.75, 1], atol=1e-12)
    error, interval = curves.explained_intervals(
        np.stack([empty, halfway, whole]), empty, whole, resamples=200
    )
    # The same share of every prompt: no prompt says otherwise.
    np.testing.assert_allclose(error, 0, atol=1e-12)
    np.testing.assert_allclose(interval, [[0, 0], [0.75, 0.75], [1, 1]], atol=1e-12)


def test_the_standard_error_is_that_of_a_mean():
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 1, (1, 400))
    error, interval = curves.explained_intervals(noise + 5, np.zeros(400), np.full(400, 10.0))
    wanted = noise.std(ddof=1) / 10 / math.sqrt(400)
    assert error[0] == pytest.approx(wanted)
    # 2,000 resamples give an end of the interval to a twentieth, two of which are allowed for.
    assert abs((interval[0, 1] - interval[0, 0]) / (2 * 1.96 * wanted) - 1) < 0.12


def test_the_standard_error_is_the_spread_over_samples_of_prompts():
    # The effect to explain differs between prompts, as does what is explained of it.
    change = np.random.default_rng(2).normal(4, 2, (400, 200))
    found = 0.5 * change + np.random.default_rng(3).normal(0, 1, change.shape)
    empty = np.zeros(200)
    shares = [
        curves.explained(one[None], empty, whole)[0]
        for one, whole in zip(found, change, strict=True)
    ]
    errors = [
        curves.explained_intervals(one[None], empty, whole, resamples=1)[0][0]
        for one, whole in zip(found, change, strict=True)
    ]
    # The spread of 400 is known to 3.5 %, three of which are allowed for.
    assert np.mean(errors) == pytest.approx(np.std(shares, ddof=1), rel=0.11)


def test_the_standard_error_is_finite_where_a_resample_has_next_to_no_effect_to_explain():
    # The second and third weigh up the first, and almost nothing is left.
    change = np.array([-3.001, 1.0, 2.0, 2.0, 2.0, 2.001])
    error, _ = curves.explained_intervals(np.full((1, 6), 0.5), np.zeros(6), change)
    # Their mean is 1, so that f is a half.
    assert error[0] == pytest.approx(np.std(0.5 * change, ddof=1) / math.sqrt(6))


def test_a_crossing_is_interpolated_in_the_logarithm():
    sizes = np.array([1, 10, 100])
    assert curves.crossing(sizes, np.array([0.0, 0.8, 1.0])) == pytest.approx(10**1.5)
    assert curves.crossing(sizes, np.array([0.95, 0.8, 1.0])) == 1
    assert curves.crossing(sizes, np.array([0.0, 1.8, 0.2])) == pytest.approx(10**0.5)
    assert math.isnan(curves.crossing(sizes, np.array([0.0, 0.8, 0.89])))
    assert curves.crossing(sizes, np.array([0.0, 0.5, 1.0]), 0.5) == pytest.approx(10)


def test_sizes_begin_at_one_and_end_at_all():
    for count in (1, 2, 36, 19_584):
        result = curves.sizes(count)
        assert result[0] == 1 and result[-1] == count
        assert (np.diff(result) > 0).all() and len(result) <= 24


def test_a_perfect_circuit_and_the_sum_of_both_areas():
    """MIB, evaluation.py: 0.999 and 0; and for one ranking both sum to 0.999 or more."""
    fractions = curves.MIB_FRACTIONS
    assert curves.cpr_cmd(fractions, [1.0] * 10) == pytest.approx((0.999, 0.0), abs=1e-12)
    assert curves.cpr_cmd(fractions, [0.0] * 10) == pytest.approx((0.0, 0.999), abs=1e-12)
    rng = np.random.default_rng(2)
    for _ in range(200):
        values = rng.normal(0.7, 0.6, 10)
        cpr, cmd = curves.cpr_cmd(fractions, values)
        assert cpr + cmd >= 0.999 - 1e-12
        steps = np.diff(fractions)
        assert cpr == pytest.approx((steps * (values[1:] + values[:-1]) / 2).sum())
        off = np.abs(1 - values)
        assert cmd == pytest.approx((steps * (off[1:] + off[:-1]) / 2).sum())
    assert curves.log_area(fractions, [0.4] * 10) == pytest.approx(0.4)


@pytest.mark.parametrize("fractions", [(0.1,), (0.1, 0.1), (0.2, 0.1), (0.1, 0.2, 0.3)])
def test_fractions_that_do_not_rise_are_refused(fractions):
    with pytest.raises(ValueError, match="rising fractions"):
        curves.cpr_cmd(fractions, [0.5, 0.6])
