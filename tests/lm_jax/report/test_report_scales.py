"""Ticks, scales, label placement and number formats that the report's plots stand on."""

import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from lm_jax.report.markup import number
from lm_jax.report.scales import Scale, linear_ticks, log_ticks, spread, tick_labels


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (41666, "41,666"),
        (-0.78, "−0.780"),
        (1.2e-5, "1.20 × 10⁻⁵"),
        (9999.6, "1.00 × 10⁴"),
        (999.6, "1,000"),
        (np.float32(0.5), "0.500"),
        (np.int64(-3), "−3"),
        (0.0, "0"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
        (None, "–"),
        (True, "True"),
        ("text", "text"),
    ],
)
def test_numbers_print_as_people_read_them(value, text):
    assert number(value) == text


_FINITE = st.floats(-1e12, 1e12)


@hypothesis.given(_FINITE, st.floats(1e-6, 1e12), st.integers(4, 10))
@hypothesis.settings(max_examples=200, deadline=None)
def test_linear_ticks_are_a_few_multiples_of_a_nice_step_inside_the_range(low, width, count):
    high = low + width
    hypothesis.assume(high - low > 1e-9 * max(abs(low), abs(high)))
    ticks = linear_ticks(low, high, count)
    slack = 1e-6 * (high - low)
    assert 2 <= ticks.size <= count
    assert low - slack <= ticks[0] and ticks[-1] <= high + slack
    step = (ticks[-1] - ticks[0]) / (ticks.size - 1)
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(mantissa - nice) for nice in (1, 2, 2.5, 5)) < 1e-3 * mantissa


@hypothesis.given(st.floats(-12, 12), st.floats(0.01, 20), st.integers(4, 8))
@hypothesis.settings(max_examples=200, deadline=None)
def test_log_ticks_are_a_few_inside_the_range(exponent, decades, count):
    low, high = 10**exponent, 10 ** (exponent + decades)
    ticks = log_ticks(low, high, count)
    assert 2 <= ticks.size <= count
    assert (np.diff(ticks) > 0).all()
    assert low * (1 - 1e-6) <= ticks[0] and ticks[-1] <= high * (1 + 1e-6)


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0, 0.5, 1], ["0.0", "0.5", "1.0"]),
        ([-2000, 0, 2000], ["−2,000", "0", "2,000"]),
        ([0.01, 1, 100, 10_000], ["0.01", "1", "100", "10,000"]),
        ([1e-5, 1e5], ["10⁻⁵", "10⁵"]),
        ([0, 2e6], ["0", "2·10⁶"]),
    ],
)
def test_tick_labels_are_short_and_alike(ticks, labels):
    assert tick_labels(ticks) == labels


def test_a_scale_is_exact_at_its_ends_and_blind_to_what_a_log_cannot_show():
    scale = Scale(0.1, 1000, 50, 250, log=True)
    np.testing.assert_allclose(scale([0.1, 10, 1000]), [50, 150, 250])
    assert np.isnan(scale([0.0, -1.0, np.nan])).all()


@hypothesis.given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.floats(0.1, 30))
@hypothesis.settings(max_examples=200, deadline=None)
def test_spread_labels_keep_order_distance_and_bounds(wanted, gap):
    placed = np.array(spread(wanted, gap, 0, 100))
    order = np.argsort(wanted, kind="stable")
    gap = min(gap, 100 / max(len(wanted) - 1, 1))
    assert (np.diff(placed[order]) >= gap - 1e-6).all()
    assert placed.min() >= -1e-6 and placed.max() <= 100 + 1e-6
    if (np.diff(np.sort(wanted)) >= gap).all():
        np.testing.assert_allclose(placed, wanted, atol=1e-6)
