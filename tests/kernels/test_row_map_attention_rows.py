"""Properties of a row: streams in any order, invariances of the maps, and dead rows."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels import row_map_attention
from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import dispatch, tuning
from iaj_kernels.row_map_attention import maps, tile
from iaj_kernels.row_map_attention.cases import MAPS
from tests import rounding

ROWS, KEYS = 6, 24


def stream(row_map, scores, v, bias, tiles):
    """The output, and the pattern as the backward pass has it, from tiles of keys in that order."""
    visible = jnp.full((len(scores),), float(scores.shape[1]))
    centre = tile.first_centre(row_map, visible)
    total, out = jnp.zeros(len(scores)), jnp.zeros((len(scores), v.shape[1]))
    for at in tiles:
        u, _ = tile.logits(row_map, scores[:, at], bias, 1.0, None)
        old, centre = centre, tile.moved(row_map, centre, u.largest(1))
        if row_map.normalised:
            shrink = tile.rescale(row_map, old, centre)
            total, out = total * shrink, out * shrink[:, None]
        w = tile.weight(row_map, u, tile.pivot(row_map, centre)[:, None])
        total, out = total + w.sum(1), out + w @ v[at]
    scale, pivot, factor = tile.closed(row_map, centre, total, visible)
    u, _ = tile.logits(row_map, scores, bias, 1.0, None)
    weights = tile.weight_and_slope(row_map, u, pivot[:, None])
    slope = weights.slope * tile.row_slope(row_map, pivot, factor)[:, None]
    return out * scale[:, None], weights.weight * factor[:, None], slope


def sample(size):
    keys = jax.random.split(jax.random.key(0), 2)
    return size * jax.random.normal(keys[0], (ROWS, KEYS)), jax.random.normal(keys[1], (KEYS, 5))


@pytest.mark.parametrize("size", [1.0, 200.0])
@pytest.mark.parametrize("name", MAPS)
def test_streams_of_any_order_and_tile_size_are_the_row(name, size):
    row_map, (scores, v), bias = MAPS[name], sample(size), jnp.float32(0.4)

    def row(scores, v):
        weights = row_map(scores, bias)
        return weights @ v, weights

    wanted = rounding.expected(row, scores, v)
    for width in (1, 3, 8, 24):
        parts = [jnp.arange(i, i + width) for i in range(0, KEYS, width)]
        for order in (parts, parts[::-1]):
            out, pattern, _ = stream(row_map, scores, v, bias, order)
            rounding.assert_within((out, pattern), wanted)


@pytest.mark.parametrize("name", MAPS)
def test_slope_is_the_derivative_of_the_weights(name):
    row_map, (scores, v), bias = MAPS[name], sample(1.0), jnp.float32(0.4)
    everything = [jnp.arange(KEYS)]
    _, pattern, slope = stream(row_map, scores, v, bias, everything)
    g = jax.random.normal(jax.random.key(5), scores.shape)
    mean = (pattern * g).sum(1, keepdims=True) if row_map.normalised else 0.0
    gradient = jax.grad(lambda s: (row_map(s, bias) * g).sum())
    rounding.assert_within(slope * (g - mean), rounding.expected(gradient, scores))


@pytest.mark.parametrize(
    ("row_map", "bias"),
    [(maps.relu_power(16), 100.0), (maps.sigmoid(), -5.0)],
    ids=["relu16_of_large_scores", "sigmoid_of_low_scores"],
)
def test_gradient_by_the_bias_takes_out_the_rounding_of_the_mean(row_map, bias):
    # The gradients by the scores nearly cancel here: their plain sum errs by an error in `mean`.
    bias = jnp.float32(bias)
    scores, v = sample(1.0)
    weights = lambda b: row_map(scores, b)  # noqa: E731
    g = jax.random.normal(jax.random.key(5), scores.shape)
    by_bias = lambda b: jax.vjp(weights, b)[1](g)[0][:, 0]  # noqa: E731
    wanted = rounding.expected(by_bias, jnp.full((ROWS, 1), bias))
    _, pattern, _ = stream(row_map, scores, v, bias, [jnp.arange(KEYS)])
    u, _ = tile.logits(row_map, scores, bias, 1.0, None)
    centre = tile.moved(row_map, tile.first_centre(row_map, jnp.ones(ROWS)), u.largest(1))
    total = tile.weight(row_map, u, tile.pivot(row_map, centre)[:, None]).sum(1)
    _, pivot, factor = tile.closed(row_map, centre, total, jnp.ones(ROWS))
    result = tile.weight_and_slope(row_map, u, pivot[:, None])
    slope = tile.row_slope(row_map, pivot, factor)

    def gradients(error):
        centred_g = g - (pattern * g).sum(1, keepdims=True) - error
        by_score = result.slope * centred_g
        terms = tile.bias_terms(row_map, result, centred_g, by_score)
        assert len(terms) == tile.sums_for_bias(row_map)
        return slope * tile.bias_gradient(*(x.sum(1) for x in terms)), slope * by_score.sum(1)

    def worst(got):
        return float(np.abs(got - wanted.values).max())

    ours, direct = gradients(2e-3)
    assert worst(ours) < 0.1 * worst(direct)
    rounding.assert_within(gradients(0.0)[0], wanted)


def test_folded_share_is_right_to_the_rounding_of_the_scores():
    # The GPU forms r / r_max as one multiply-add with numbers of the row.
    z = jax.random.normal(jax.random.key(0), (64, 128))
    gain, offset = 40.0, jnp.float32(-100.0)
    u = z * gain + offset
    pivot = tile.pivot(maps.relu_power(4), jnp.maximum(u.max(1), 1.0))[:, None]
    exact = tile.EXACT.share(tile.Logits(z, gain, offset), pivot)
    folded = jnp.clip(z * (gain * pivot) + offset * pivot, 0.0, 1.0)
    # Both parts of u are up to 200 in size, and are rounded to 2^-24 of it twice.
    assert float(jnp.abs(folded - exact).max()) <= 4 * 200 * 2.0**-24 * float(pivot.max())


def attend(scores, row_map, bias=0.0, implementation="xla", **options):
    """Attention whose scores are those of one query row each, with the values e_s."""
    k_BSKH = jnp.eye(scores.shape[1])[None, :, None]
    return row_map_attention(
        scores[None, :, None],
        k_BSKH,
        k_BSKH,
        row_map=row_map,
        bias=bias,
        scale=1.0,
        causal=False,
        implementation=implementation,
        **options,
    )


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_what_the_maps_do_not_depend_on(implementation):
    scores, _ = sample(1.0)
    scores = jnp.pad(scores, ((0, 0), (0, 8)))
    with dispatch.on(dispatch.INTERPRETER):

        @functools.partial(jax.jit, static_argnums=1)
        def run(scores, row_map, bias):
            return attend(scores, row_map, bias, implementation).out_BTNH

        def wanted(row_map, bias):
            by_reference = functools.partial(attend, implementation="reference")
            return rounding.expected(lambda scores: by_reference(scores, row_map, bias)[0], scores)

        # relu^p over its sum: the scale of s + b, here a power of two, which rounds nothing.
        for p in (1.0, 2.5, 16.0):
            whole = wanted(maps.relu_power(p), 0.5)
            for size in (1.0, 2.0**-20, 2.0**17):
                got = run(size * scores, maps.relu_power(p), 0.5 * size)
                rounding.assert_within(got, whole, f"{p} {size}")
        # softmax: the bias (Theorem 4.1), bitwise.
        want = run(scores, maps.softmax(), 0.0)
        np.testing.assert_array_equal(run(scores, maps.softmax(), 7.5), want)
        # sigmoid far below its threshold is the exponential, where sigma itself is 0 in float32.
        values, _ = wanted(maps.softmax(), 0.0)
        _, bounds = wanted(maps.sigmoid(), -300.0)
        got = run(scores, maps.sigmoid(), -300.0)
        rounding.assert_within(got, rounding.Expected(values, bounds))


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
@pytest.mark.parametrize("row_map", [maps.relu_power(4), maps.relu_over_length(2, 1.0)])
def test_a_dead_row_gives_zero_and_has_no_gradient(row_map, implementation):
    scores = jnp.stack([jnp.full(16, -1.0), jnp.zeros(16), jnp.linspace(-1.0, 1.0, 16)])

    def loss(scores, bias):
        with dispatch.on(dispatch.INTERPRETER):
            out, dead = attend(scores, row_map, bias, implementation)
        return (out**2).sum(), (out, dead)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (out, dead)), (d_scores, d_bias) = run(scores, jnp.float32(0.0))
    # A score at the threshold has no weight: the second row is dead as well.
    np.testing.assert_array_equal(dead, [[2]])
    np.testing.assert_array_equal(out[0, :2, 0], jnp.zeros((2, 16)))
    np.testing.assert_array_equal(d_scores[:2], jnp.zeros((2, 16)))
    assert np.all(np.isfinite(d_scores)) and np.isfinite(d_bias)
    # Nor do the keys of a live row that are not above it.
    assert np.all(np.asarray(d_scores)[2, :8] == 0) and np.all(np.asarray(d_scores)[2, 9:] != 0)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_with_one_active_key_has_no_gradient(implementation, dtype):
    # The pattern is 1 there for any score; rounding over a tiny score would be a huge slope.
    scores = (
        jnp.full((4, 16), -1.0).at[jnp.arange(4), jnp.arange(4)].set(jnp.array([1e-6] * 3 + [2]))
    )
    g = jax.random.normal(jax.random.key(0), (1, 4, 1, 16)).astype(dtype)
    v_BSKH = jax.random.normal(jax.random.key(1), (1, 16, 1, 16)).astype(dtype)

    def loss(q_BTNH):
        with dispatch.on(dispatch.INTERPRETER):
            out, _ = row_map_attention(
                q_BTNH,
                jnp.eye(16, dtype=dtype)[None, :, None],
                v_BSKH,
                row_map=maps.relu_power(4),
                scale=1.0,
                causal=False,
                implementation=implementation,
            )
        return (out * g).astype(jnp.float32).sum()

    d_q = jax.jit(jax.grad(loss))(scores[None, :, None].astype(dtype))
    np.testing.assert_array_equal(d_q, jnp.zeros_like(d_q))


@pytest.mark.parametrize("name", MAPS)
def test_rows_that_see_no_key_give_zero_and_are_not_dead(name):
    scores, _ = sample(1.0)
    scores = jnp.pad(scores, ((0, 0), (0, 8)))
    segments = (jnp.array([[0, 0, 1, 2, -1, 0]]), jnp.zeros((1, 32), jnp.int32))
    for implementation in ("reference", "xla"):
        run = functools.partial(attend, row_map=MAPS[name], bias=0.5, segment_ids=segments)
        out, dead = jax.jit(functools.partial(run, implementation=implementation))(scores)
        np.testing.assert_array_equal(out[0, 2:5], jnp.zeros((3, 1, 32)))
        assert np.all(np.asarray(out)[0, [0, 1, 5]].sum(-1) > 0)
        np.testing.assert_array_equal(dead, [[0]])


@pytest.mark.parametrize("name", MAPS)
def test_a_nan_score_is_not_hidden(name):
    scores, _ = sample(1.0)
    scores = jnp.pad(scores, ((0, 0), (0, 8))).at[2, 3].set(jnp.nan)
    for implementation in ("reference", "xla"):
        run = functools.partial(attend, row_map=MAPS[name], bias=0.5)
        out, dead = jax.jit(functools.partial(run, implementation=implementation))(scores)
        assert np.all(np.isfinite(np.asarray(out)[0, [0, 1, 3, 4, 5]]))
        assert np.any(np.isnan(np.asarray(out)[0, 2]))
        np.testing.assert_array_equal(dead, [[0]])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_gradients_reach_the_visible_keys_and_no_others(implementation):
    T, window = 37, 20
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, T, 1, 16)) for key in keys)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(k, v, t):
        with dispatch.on(dispatch.INTERPRETER):
            out, _ = row_map_attention(
                q,
                k,
                v,
                row_map=maps.relu_power(2),
                bias=3.0,
                window=window,
                implementation=implementation,
            )
        return out[0, t].sum()

    for t in (12, 36):
        for gradient in gradients(k, v, t):
            reached = np.any(np.asarray(gradient)[0, :, 0] != 0, axis=-1)
            np.testing.assert_array_equal(
                reached, (np.arange(T) <= t) & (np.arange(T) > t - window)
            )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5, 2**31 - 1])
@pytest.mark.parametrize("start", [None, -3, 4])
def test_counted_keys_are_those_of_the_mask(causal, window, start):
    T, S = 7, 12
    visible = visibility("x", 2, T, S, causal=causal, window=window, segment_ids=None, start=start)
    np.testing.assert_array_equal(visible.counts_BT(T, S), visible.mask_BTS(T, S).sum(-1))


def test_tiles_change_nothing():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 70, 1, 16)) for key in keys)

    def results(implementation):
        options = {"row_map": maps.relu_power(4), "bias": 0.5, "window": 40}

        def loss(q, k, v):
            out, _ = row_map_attention(q, k, v, implementation=implementation, **options)
            return (out**2).sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))

    wanted = rounding.expected(results("reference"), q, k, v)
    for queries, keys in [(64, 16), (16, 64), (128, 128)]:
        tiles = {f"{kernel}_queries": queries for kernel in ("forward", "dq", "dkv")}
        tiles |= {f"{kernel}_keys": keys for kernel in ("forward", "dq", "dkv")}

        run = results("pallas")
        with tuning.trying("row_map_attention", tiles), dispatch.on(dispatch.INTERPRETER):
            rounding.assert_within(jax.jit(run)(q, k, v), wanted, f"{queries} {keys}")


def test_maps_refuse_what_is_no_degree():
    for p in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="relu_power has p"):
            maps.relu_power(p)
    with pytest.raises(ValueError, match="alpha"):
        maps.relu_over_length(2, math.inf)
    assert maps.relu_power(4) == maps.relu_power(4.0)
    assert hash(maps.relu_power(4)) == hash(maps.relu_power(4.0))
