"""Where the released code's arithmetic of the prefix mean loses its discount, and ours does not."""

import functools
import json

import numpy as np
import pytest

from tests.kernels import prefix_mean_oracle as oracle
from tests.kernels import released_prefix_mean
from tests.kernels.released_prefix_mean import HALF_LIVES, POSITIONS

CURVES = range(len(HALF_LIVES))


@functools.cache
def _data() -> dict:
    return released_prefix_mean.figure_data()


def _curve(form: str, index: int, name: str) -> np.ndarray:
    return np.array(_data()["curves"][form][index][name], float)


def _rounding_of_ours(index: int) -> float:
    """A product for every step of the half-life, and a dozen for the powers of whole chunks."""
    return 2 * (round(HALF_LIVES[index]) + 12) * 2**-24


def test_the_released_arithmetic_is_right_for_twenty_half_lives():
    rng = np.random.default_rng(0)
    T, decay_R = 60, np.exp2(-1.0 / np.array([3.0, 30.0]))
    drawn = (rng.random((2, T, 2)), rng.standard_normal((2, T, 3)), decay_R, rng.random((2, T, 2)))
    write, value, decay, read = (np.float64(np.float32(x)) for x in drawn)
    result = released_prefix_mean.released(write, value, decay, read)
    error = np.abs(result - oracle.filtered(write, value, decay, read))
    # Two sums of T terms, a dozen other operations, and the 1e-12 that is added to 2^-20 or more.
    bound = (2 * T + 12) * 2**-24 + 2 * 1e-12 * 2**20
    assert (error <= bound * oracle.filtered(write, np.abs(value), decay, read)).all()


@pytest.mark.parametrize("index", CURVES)
def test_it_stops_discounting_after_forty_half_lives(index):
    """beta^j = 1e-12 after 39.9: from there on the write a half-life back weighs as the last."""
    error = _curve("released", index, "discount_error")
    position = np.array(POSITIONS)
    first_wrong = position[np.abs(error) > 0.1][0]
    assert 36 <= first_wrong <= 41
    undiscounted = (position >= 48) & ~np.isnan(error)
    assert undiscounted.any()
    lost = 2.0 ** (round(HALF_LIVES[index]) / HALF_LIVES[index]) - 1.0
    np.testing.assert_allclose(error[undiscounted], lost, atol=0.05)


@pytest.mark.parametrize("index", CURVES)
def test_it_then_forgets_everything(index):
    """The clamp takes over near beta^i = 1e-18, and beta^i itself underflows after 150."""
    ones, position = _curve("released", index, "mean_of_ones"), np.array(POSITIONS)
    np.testing.assert_allclose(ones[position <= 40], 1.0, atol=1e-3)
    assert 40 < position[ones < 0.5][0] <= 70
    assert not ones[position >= 154].any()


@pytest.mark.parametrize("index", CURVES)
def test_ours_keeps_discounting(index):
    error = _curve("ours", index, "discount_error")
    np.testing.assert_allclose(error, 0.0, atol=_rounding_of_ours(index))
    # To the three digits that are kept.
    np.testing.assert_array_equal(_curve("ours", index, "mean_of_ones"), 1.0)


def test_the_committed_figure_data_is_what_the_code_gives():
    committed = json.loads(released_prefix_mean.DATA.read_text("utf-8"))
    assert committed.keys() == _data().keys()
    for name in ("half_lives", "position_in_half_lives"):
        assert committed[name] == _data()[name]
    for form in ("released", "ours"):
        for index in CURVES:
            stored = committed["curves"][form][index]
            for name, curve in stored.items():
                # Three digits are kept; numpy adds the released sums in one order everywhere.
                np.testing.assert_allclose(
                    np.array(curve, float),
                    _curve(form, index, name),
                    rtol=0.02,
                    atol=2 * _rounding_of_ours(index),
                )
