"""Ranges, label placement and number formats of the report's charts."""

import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from lm_jax.report.markup import number
from lm_jax.report.scales import extent, pixels, showable, spread


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


def test_what_is_rounded_to_zero_has_no_minus():
    assert number(-0.004, ".2f") == number(0.004, ".2f") == "0.00"
    assert number(-0.004, "+.2f") == number(-0.0, "+.2f") == "+0.00"
    assert number(-0.006, "+.2f") == "−0.01" and number(-10.0, ".0f") == "−10"


@pytest.mark.parametrize("log", [False, True])
def test_pixels_are_exact_at_the_ends_and_in_the_middle_and_blind_to_what_a_log_cannot_show(log):
    middle = 10 if log else 500.05
    np.testing.assert_allclose(
        pixels([0.1, middle, 1000], 0.1, 1000, 200, log=log), [200, 100, 0], atol=1e-9
    )
    assert np.isnan(pixels([0.0, -1.0, np.nan], 0.1, 1000, 200, log=True)).all()


@hypothesis.given(st.lists(st.floats(-1e300, 1e300), min_size=1), st.booleans())
@hypothesis.settings(max_examples=200, deadline=None)
def test_an_extent_holds_every_value_that_its_axis_can_show(values, log):
    low, high = extent([values], log=log)
    assert low < high and math.isfinite(low) and math.isfinite(high)
    visible = np.array(values)[showable(values, log)]
    slack = 1e-9 * (high - low)
    assert all(low - slack <= value <= high + slack for value in visible)


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
