"""Transcoders against sums over features written out, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from sparse_jax.graphs.basis import writes
from sparse_jax.transcoders import activations, transcoder
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig
from tests import rounding, tiny

L, D, F, X = 4, 6, 10, 5
WINDOWS = [None, 1, 2]


def drawn(window=None, kind="jumprelu", seed=0):
    cfg = TranscoderConfig(L, D, F, kind=kind, window=window, threshold=0.3)
    params = params_lib.init(jax.random.key(seed), transcoder.spec(cfg))
    key = jax.random.key(seed + 1)
    for name in ("encoder_bias", "decoder_bias"):
        params[name] = 0.1 * jax.random.normal(key, params[name].shape)
    if kind != "relu":
        params["log_threshold"] += 0.2 * jax.random.normal(key, (L, F))
    return Transcoder(params, cfg)


def normal(shape, seed=2):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_layer_is_written_by_the_features_of_its_window(window):
    model = drawn(window)
    z_LXF = jax.nn.relu(normal((L, X, F)))

    def written_out(params, z_LXF):
        outputs = []
        for target in range(L):
            y_XD = jnp.broadcast_to(params["decoder_bias"][target], (X, D))
            first = 0 if window is None else max(target - window + 1, 0)
            for source in range(first, target + 1):
                w_FD = params["decoder"][f"to_{target}"][source - first]
                y_XD = y_XD + z_LXF[source] @ w_FD
            outputs.append(y_XD)
        return jnp.stack(outputs)

    wanted = rounding.expected(written_out, model.params, z_LXF)
    rounding.assert_within(model.decode(z_LXF), wanted)
    for source in range(L):
        assert list(model.cfg.targets(source)) == [
            target for target in range(L) if source in model.cfg.sources(target)
        ]


@pytest.mark.parametrize("kind", ["relu", "jumprelu"])
def test_features_are_open_strictly_above_their_threshold(kind):
    model = drawn(kind=kind)
    x_LXD = normal((L, X, D))
    wide = [np.asarray(a, np.float64) for a in (x_LXD, model.params["encoder"])]
    pre = np.einsum("lxd,lfd->lxf", *wide)
    pre += np.asarray(model.params["encoder_bias"], np.float64)[:, None]
    theta = np.zeros((L, 1, F)) if kind == "relu" else np.asarray(model.theta_LF)[:, None]
    # No pre-activation is so near to its threshold that rounding decides.
    assert np.abs(pre - theta).min() > 1e-4

    def pre_activations(params, x_LXD):
        return Transcoder(params, model.cfg).pre_activations(x_LXD)

    wanted = rounding.expected(pre_activations, model.params, x_LXD)
    z_LXF = model.encode(x_LXD)
    rounding.assert_within(
        z_LXF,
        rounding.Expected(np.where(pre > theta, wanted.values, 0.0), wanted.bounds),
    )
    # A few features alone.
    at = np.array([3, 0, 0, 2]), np.array([1, 9, 4, 1])
    some_XY = model.encode_some(x_LXD, *at)
    values, bounds = (np.asarray(x)[at[0], :, at[1]].T for x in (wanted.values, wanted.bounds))
    is_open_XY = (pre > theta)[at[0], :, at[1]].T
    rounding.assert_within(some_XY, rounding.Expected(np.where(is_open_XY, values, 0.0), bounds))
    assert is_open_XY.any() and np.asarray(some_XY)[is_open_XY].all()
    assert 0 < (z_LXF > 0).mean() < 1
    at_threshold = model.activate(jnp.broadcast_to(jnp.asarray(theta, jnp.float32), (L, 1, F)))
    assert not at_threshold.any()


def test_the_derivative_of_jumprelu_is_that_of_a_step_smoothed_in_a_band():
    theta, width = jnp.array([0.5, 0.5, 0.5, 0.5, 2.0]), 0.4
    x = jnp.array([0.1, 0.31, 0.69, 0.9, 2.1])
    g = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])
    _, pull = jax.vjp(lambda x, t: activations.jumprelu(x, t, width), x, theta)
    g_x, g_theta = pull(g)
    np.testing.assert_array_equal(g_x, [0.0, 0.0, 3.0, 4.0, 5.0])
    inside = np.array([0, 1, 1, 0, 1])
    np.testing.assert_allclose(g_theta, -inside * theta / width * g, rtol=4e-7)
    # Summed over the tokens that share a threshold.
    stacked = jnp.stack([x, x])[:, None]
    _, pull = jax.vjp(lambda t: activations.jumprelu(stacked, t[None], width), theta[None])
    np.testing.assert_allclose(
        pull(jnp.ones((2, 1, 5)))[0][0], -2 * inside * theta / width, rtol=4e-7
    )


@pytest.mark.parametrize("count", [1, 7, 40])
def test_batch_topk_keeps_the_largest_positive_entries(count):
    x = normal((3, 4, 5))
    kept, theta = activations.batch_topk(x, count)
    ordered = np.sort(np.asarray(x).ravel())[::-1]
    largest = ordered[: min(count, (ordered > 0).sum())]
    np.testing.assert_array_equal(np.sort(np.asarray(kept).ravel())[::-1][: largest.size], largest)
    assert (kept > 0).sum() == largest.size
    assert theta < largest[-1]
    # The gradient is that of the entries that are kept.
    g = jax.grad(lambda x: activations.batch_topk(x, count)[0].sum())(x)
    np.testing.assert_array_equal(g, (np.asarray(kept) > 0).astype(np.float32))


def test_folding_scales_gives_the_same_function_of_raw_activations():
    model = drawn()
    s_in, s_out = jnp.array([0.5, 2.0, 3.0, 1.5]), jnp.array([4.0, 0.25, 1.25, 0.75])
    x_LXD = normal((L, X, D))

    def scaled(params, x_LXD):
        inner = Transcoder(params, model.cfg)
        z_LXF = inner.encode(x_LXD * s_in[:, None, None])
        return inner.decode(z_LXF) / s_out[:, None, None]

    def folded(params, x_LXD):
        outer = Transcoder(params, model.cfg).folded(s_in, s_out)
        return outer.decode(outer.encode(x_LXD))

    wanted = rounding.expected(scaled, model.params, x_LXD)
    rounding.assert_same(jax.jit(folded)(model.params, x_LXD), scaled(model.params, x_LXD), wanted)
    swapped = model.folded(s_out, s_in)
    other = swapped.decode(swapped.encode(x_LXD))
    assert np.abs(other - scaled(model.params, x_LXD)).max() > 0.1


@pytest.mark.parametrize("window", WINDOWS)
def test_a_feature_writes_its_decoders_into_every_layer_of_its_window(window):
    model = drawn(window)
    layer_X, feature_X = np.divmod(np.arange(L * F), F)
    z_X = np.asarray(normal((L * F,)))
    written_LXD = np.zeros((L, L * F, D), np.float32)
    for target in range(L):
        first = 0 if window is None else max(target - window + 1, 0)
        weights = np.asarray(model.params["decoder"][f"to_{target}"])
        for source in range(first, target + 1):
            own_X = layer_X == source
            written_LXD[target, own_X] = weights[source - first] * z_X[own_X, None]
    # One product each.
    np.testing.assert_array_equal(writes(model, layer_X, feature_X, z_X), written_LXD)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_norm_of_a_feature_is_over_all_its_targets(window):
    model = drawn(window)
    norms_LF = np.zeros((L, F))
    for target in range(L):
        first = 0 if window is None else max(target - window + 1, 0)
        weights = np.asarray(model.params["decoder"][f"to_{target}"], np.float64)
        for source in range(first, target + 1):
            norms_LF[source] += (weights[source - first] ** 2).sum(-1)
    # At most L D squares are added and one root is taken.
    np.testing.assert_allclose(
        model.decoder_norms(), np.sqrt(norms_LF), rtol=(L * D + 2) * 2.0**-24
    )


def test_initial_weights_are_uniform_in_the_bounds_of_the_paper():
    model = transcoder.init(
        jax.random.key(0), tiny.decoder(num_layers=3, hidden_size=16), features=512
    )
    p = model.params
    for weights, bound in [
        (p["encoder"], 512**-0.5),
        *((w, (3 * 16) ** -0.5) for w in p["decoder"].values()),
    ]:
        w = np.asarray(weights).ravel()
        assert np.abs(w).max() <= bound and np.abs(w).max() > 0.99 * bound
        # The standard error of a variance of n uniform numbers is below 1 / sqrt(n) of it.
        assert abs(w.var() / (bound**2 / 3) - 1) < 4 * w.size**-0.5
    assert model.cfg.num_layers == 3 and p["decoder"]["to_2"].shape == (3, 512, 16)
    np.testing.assert_allclose(model.theta_LF, 0.03, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "jumprelo"}, "did you mean 'jumprelu'"),
        ({"window": 0}, "window = 0"),
        ({"features": 0}, "features = 0"),
    ],
)
def test_wrong_sizes_are_named(changes, said):
    with pytest.raises(UsageError, match=said):
        TranscoderConfig(**{"num_layers": 2, "hidden_size": 4, "features": 8} | changes)
