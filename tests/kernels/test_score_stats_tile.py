"""The tile functions of `score_stats`, by themselves: powers, peak, sums."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.core import dispatch
from iaj_kernels.score_stats import tile
from iaj_kernels.score_stats.config import Config
from polyattn_jax.recipes.diagnostic import relative_error_bound


def _config(degrees=(2, 4, 8, 16), cap=math.inf, scale=1.0, soft_cap=None):
    return Config(degrees, cap, scale, soft_cap, dispatch.INTERPRETER)


def _scores(tiles=5, Q=6, Y=8):
    """Few values, so that the peak has ties within tiles and between them."""
    return np.random.default_rng(0).integers(-4, 4, (Q, tiles * Y)).astype(np.float32)


def _peak_of(z, Y, target=None):
    peak = tile.no_peak((z.shape[0], Y), target is not None)
    for j in range(z.shape[1] // Y):
        key = j * Y + jnp.arange(Y)[None]
        is_target = None if target is None else key == target[:, None]
        peak = tile.raise_peak(peak, jnp.asarray(z[:, j * Y :][:, :Y]), jnp.int32(j), is_target)
    return tile.peak(peak)


@pytest.mark.parametrize("Y", [1, 8, 40])
def test_the_peak_of_tiles_is_the_first_argmax_of_their_row(Y):
    z = _scores()
    top, argmax, star = _peak_of(z, Y)
    np.testing.assert_array_equal(top, z.max(1))
    np.testing.assert_array_equal(argmax, z.argmax(1))
    np.testing.assert_array_equal(star, top)


def test_the_peak_keeps_the_score_of_a_named_target():
    z = _scores()
    z[2, 7] = -math.inf
    target = np.array([3, 39, 7, 0, 40, -1])
    star = _peak_of(z, 8, target)[2]
    np.testing.assert_array_equal(star[:4], z[np.arange(4), target[:4]])
    assert np.isneginf(star[4:]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 9, 39])
def test_one_nan_or_inf_makes_the_peak_of_its_row_inf(bad, place):
    z = _scores()
    z[1, place] = bad
    top = np.asarray(_peak_of(z, 8)[0])
    np.testing.assert_array_equal(np.isposinf(top), np.arange(6) == 1)


@pytest.mark.parametrize("degrees", [(2, 4, 8, 16), (1, 3, 5, 7, 15), (0.5, 1.5, 2.5), (31, 2)])
def test_powers_are_those_of_numpy(degrees):
    x = np.linspace(0, 1.5, 50, dtype=np.float32)
    for p, got in zip(degrees, tile.powers(jnp.asarray(x), degrees), strict=True):
        np.testing.assert_allclose(got, x.astype(np.float64) ** p, rtol=16 * p * 2**-24, atol=1e-38)


def test_degrees_share_their_squarings():
    jaxpr = jax.make_jaxpr(lambda x: tile.powers(x, (2, 4, 8, 16)))(jnp.ones(3)).jaxpr
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["mul"] * 4


@pytest.mark.parametrize("cap", [math.inf, 2.5])
def test_sums_over_tiles_are_those_of_the_row(cap):
    config, bias, Y = _config((1, 2, 3), cap), jnp.float32(0.75), 8
    z = _scores()
    star, target = z.max(1), z.argmax(1)
    weight = tile.target_weight(config, jnp.asarray(star), bias)
    total = None
    for j in range(z.shape[1] // Y):
        is_target = j * Y + np.arange(Y)[None] == target[:, None]
        others = tile.without_target(jnp.asarray(z[:, j * Y :][:, :Y]), jnp.asarray(is_target))
        result = tile.distractors(config, others, jnp.asarray(star), bias, *weight)
        total = result if total is None else jax.tree.map(jnp.add, total, result)
    r = np.clip(z.astype(np.float64) + 0.75, 0, cap)
    np.put_along_axis(distractor := r.copy(), target[:, None], 0.0, axis=1)
    r_star = np.take_along_axis(r, target[:, None], axis=1)
    np.testing.assert_array_equal(total[0], (distractor > 0).sum(1))
    for p, got in zip((1, 2, 3), total[1:], strict=True):
        bound = relative_error_bound(p, z.shape[1])
        np.testing.assert_allclose(got, ((distractor / r_star) ** p).sum(1), rtol=bound)


def test_a_row_without_a_target_weight_gets_none():
    star = jnp.array([-1.0, 0.0, 1e-39, 2.0, -math.inf])
    r_star, inverse = tile.target_weight(_config(), star, jnp.float32(0.0))
    np.testing.assert_array_equal(r_star, [math.inf, math.inf, math.inf, 2.0, math.inf])
    np.testing.assert_array_equal(inverse, [0, 0, 0, 0.5, 0])


def test_scores_are_scaled_capped_and_hidden():
    product = jnp.array([[1.0, -300.0, 40.0]])
    mask = jnp.array([[True, True, False]])
    got = tile.score(_config(scale=0.5, soft_cap=16.0), product, mask)
    want = 16 * np.tanh(np.array([0.5, -150.0]) / 16)
    # A quotient, tanh to 8 units, and two products.
    np.testing.assert_allclose(got[0, :2], want, rtol=(3 + 8 + 2) * 2**-24)
    assert got[0, 2] == -math.inf
