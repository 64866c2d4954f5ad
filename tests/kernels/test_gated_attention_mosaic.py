"""The Mosaic kernel of `gated_attention`: its tile, its schedule interpreted, its machine code.

The interpreter runs the warpgroups as threads, fills shared memory with NaN, and raises at two
accesses that no barrier orders, so a test that passes also shows that the kernel waits where it
must.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels import gated_attention
from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import cases, dispatch, noise
from iaj_kernels.gated_attention import mosaic, reference, tile
from iaj_kernels.gated_attention.config import MODES, Call, Config
from tests import rounding
from tests.kernels import comparison, mosaic_code
from tools.gpu_code import target

H200 = target.TARGET


def _config(mode="sample", H=64, on=dispatch.INTERPRETER, **options):
    return Config(mode=mode, scale=H**-0.5, target=on, **options)


def _visibility(B=1, T=128, S=None, **options):
    arguments = {"causal": True, "window": None, "segment_ids": None, "start": None} | options
    return visibility("gated_attention", B, T, S or T, **arguments)


def _call(q, k, visible):
    """A call of these queries, keys and visibility; the values are of the shape of the keys."""
    return Call(q, k, k, jnp.zeros(q.shape[2]), jnp.uint32(0), jnp.zeros(2, jnp.int32), visible)


def _inputs(B=1, T=256, N=2, K=1, H=64):
    """q, k, v, bias, seed and origin."""
    keys = jax.random.split(jax.random.key(3), 3)
    q, k, v = (
        jax.random.normal(key, (B, T, heads, H)).astype(jnp.bfloat16)
        for key, heads in zip(keys, (N, K, K), strict=True)
    )
    return q, k, v, jnp.linspace(-0.5, 1.0, N), jnp.uint32(5), jnp.array([1, 2], jnp.int32)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_tile_is_absorbed_as_by_the_tile_function(mode, hidden):
    config, X, Y = _config(mode), 16, 32
    keys = jax.random.split(jax.random.key(0), 4)
    raw_XY = 20 * jax.random.normal(keys[0], (X, Y))
    rows = tile.Rows(*(jax.random.uniform(key, (X,)) for key in jax.random.split(keys[1], 4)))
    query_X, key_Y, bias = jnp.arange(X) + 8, jnp.arange(Y), jnp.float32(0.3)
    mask_XY = key_Y[None] <= query_X[:, None] if hidden else None
    word_X = noise.row(noise.stream(jnp.uint32(1), 0, 0), query_X)
    bits_XY = noise.bits_of_row(word_X[:, None], key_Y[None])

    masked_XY = raw_XY if mask_XY is None else jnp.where(mask_XY, raw_XY, -jnp.inf)
    got = mosaic._absorb(config, rows, masked_XY, bias, word_X, key_Y)

    def by_tile(rows, raw_XY):
        return tile.absorb(config, rows, raw_XY, bias, bits_XY, mask_XY)

    want = by_tile(rows, raw_XY)
    rounding.assert_same(got, want, rounding.expected(by_tile, rows, raw_XY))
    np.testing.assert_array_equal(got[0].opened, want[0].opened)


def test_the_comparison_of_a_gate_is_exact_in_float32():
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits = np.concatenate([bits, np.uint32([0, 2**9, 2**32 - 1])])
    u = np.asarray(noise.uniform(bits))
    edge = np.float32(1.0) - u
    below, above = (np.nextafter(edge, np.float32(to)) for to in (0.0, 1.0))
    for probability in (edge, below, above, np.zeros_like(u), np.ones_like(u), u):
        is_open = np.asarray(noise.from_one(bits)) + probability >= np.float32(2.0)
        exact = u.astype(np.float64) + probability.astype(np.float64) >= 1.0
        np.testing.assert_array_equal(is_open, exact)


REFUSED = {
    "soft_cap": (_config(on=H200, soft_cap=30.0), (128, 64), {}),
    "gate_scale": (_config(on=H200, gate_scale=1.0), (128, 64), {}),
    "renormalise": (_config(on=H200, renormalise=True), (128, 64), {}),
    "segment_ids": (_config(on=H200), (128, 64), {"segment_ids": jnp.zeros((1, 128), jnp.int32)}),
    "from position 0": (_config(on=H200), (128, 64), {"start": 1}),
    "as many queries as keys": (_config(on=H200), (128, 64), {"S": 256}),
    "T to be a multiple of 128, and T = 192": (_config(on=H200), (192, 64), {}),
    "a head width of 64 or 128, and H = 32": (_config(on=H200), (128, 32), {}),
    "bfloat16 arrays, and q is float32": (_config(on=H200), (128, 64), {"dtype": jnp.float32}),
    "Hopper GPU and this is NVIDIA B200": (
        _config(on=dispatch.Target("gpu", "NVIDIA B200")),
        (128, 64),
        {},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_an_unsupported_call_has_its_reason(reason):
    config, (T, H), options = REFUSED[reason]
    options = dict(options)
    dtype, S = options.pop("dtype", jnp.bfloat16), options.get("S", T)
    q, k = (jax.ShapeDtypeStruct((1, rows, 2, H), dtype) for rows in (T, S))
    assert reason in mosaic.unsupported_reason(config, _call(q, k, _visibility(T=T, **options)))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 7}])
@pytest.mark.parametrize("H", [64, 128])
def test_a_supported_call_has_no_reason(H, options):
    q = jax.ShapeDtypeStruct((1, 256, 2, H), jnp.bfloat16)
    assert not mosaic.unsupported_reason(
        _config(on=H200), _call(q, q, _visibility(T=256, **options))
    )


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax before 0.12 does not interpret the kernel"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "B", "T", "N", "K", "H", "options"),
    [
        ("sample", 1, 256, 2, 1, 64, {}),
        # Three tiles of keys: the ring is filled again.
        ("sample", 2, 384, 2, 2, 128, {}),
        ("threshold", 1, 256, 4, 2, 64, {}),
        ("open", 1, 128, 1, 1, 64, {}),
        ("sample", 1, 256, 2, 1, 64, {"causal": False}),
        # The first tile is hidden from the last queries, and the second cut.
        ("sample", 1, 384, 1, 1, 64, {"window": 200}),
    ],
)
def test_value_and_gradients_interpreted_equal_the_reference(mode, B, T, N, K, H, options):
    arrays, config = _inputs(B, T, N, K, H), _config(mode, H)
    visible = _visibility(B, T, **options)
    key = jax.random.key(9)
    cotangents = (
        jax.random.normal(key, (B, T, N, H)).astype(jnp.bfloat16),
        jax.random.normal(key, (B, N)),
        np.zeros((B, N), jax.dtypes.float0),
    )

    def outputs_and_gradients(run):
        def of_floats(*floats):
            return run(config, Call(*floats, *arrays[4:], visible))

        outputs, pull = jax.vjp(of_floats, *arrays[:4])
        return outputs, pull(cotangents)

    q, k, _, bias = cases.widened(arrays[:4])

    def attend(v):
        return reference.run(config, Call(q, k, v, bias, *arrays[4:], visible))[0]

    def expected_edges(q, k):
        return reference.run(config, Call(q, k, arrays[2], bias, *arrays[4:], visible))[1]

    got, gradients = jax.jit(lambda: outputs_and_gradients(mosaic.run))()
    want, exact = jax.jit(lambda: outputs_and_gradients(reference.run))()
    wanted = comparison.of_bfloat16_weights(attend, arrays[2], cotangents[0])
    rounding.assert_within((got[0], gradients[2]), wanted)
    rounding.assert_within(got[1], rounding.expected(expected_edges, q, k))
    np.testing.assert_array_equal(got[2], want[2])
    for i in (0, 1, 3):
        assert cases.relative_error(gradients[i], exact[i]) <= 2**-6


def _forward(H):
    q, k, v, *rest = jax.eval_shape(functools.partial(_inputs, 2, 2048, 4, 2, H))

    def run(*inputs):
        return mosaic.run(_config(H=H, on=H200), Call(*inputs, _visibility(2, 2048)))

    return run, (q, k, v, *rest)


def test_the_public_function_runs_it_where_named_and_supported():
    q, k, v, bias, seed, _ = jax.eval_shape(functools.partial(_inputs, 2, 2048, 4, 2, 64))

    def run(q, k, v, bias, seed, **options):
        return gated_attention(
            q, k, v, gate_bias=bias, seed=seed, implementation="mosaic", **options
        )[:3]

    with dispatch.on(H200):
        text = target.lower(run, q, k, v, bias, seed).as_text()
        assert "mosaic_gpu" in text
        with pytest.raises(dispatch.UnavailableError, match="'mosaic' does not support gate_scale"):
            jax.eval_shape(functools.partial(run, soft_cap=30.0), q, k, v, bias, seed)
    with pytest.raises(dispatch.UnavailableError, match="needs an NVIDIA GPU and this is cpu"):
        jax.eval_shape(run, q, k, v, bias, seed)


def test_it_lowers_for_a_hopper_gpu():
    run, arguments = _forward(64)
    text = target.lower(run, *arguments).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(("H", "most"), [(64, 27.5), (128, 28.0)])
def test_machine_code_keeps_its_budget(H, most, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    run, arguments = _forward(H)
    code = mosaic_code.compiled(run, *arguments, H=H, folder=tmp_path)
    assert code.spills == "0 bytes spill stores, 0 bytes spill loads"
    assert code.instructions_per_element <= most
