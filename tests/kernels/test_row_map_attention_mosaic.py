"""The Mosaic kernel of `row_map_attention`: its tiles, its schedule interpreted, its machine code.

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

from iaj_kernels.attention import mosaic_pipeline
from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import cases, dispatch
from iaj_kernels.row_map_attention import maps, mosaic, tile
from iaj_kernels.row_map_attention.api import row_map_attention
from iaj_kernels.row_map_attention.cases import MAPS
from iaj_kernels.row_map_attention.config import Call, Config
from tests import rounding
from tests.kernels import comparison, mosaic_code
from tools.gpu_code import target

H200, B200 = target.TARGET, dispatch.Target("gpu", "NVIDIA B200")


def _config(row_map, on=dispatch.INTERPRETER):
    return Config(
        row_map=row_map,
        scale=0.125,
        soft_cap=None,
        first=0,
        bias_moves=True,
        target=on,
    )


def _inputs(B=1, T=256, N=2, K=1, H=64, size=1.0):
    """q, k, v and a bias under which some causal rows die."""
    keys = jax.random.split(jax.random.key(3), 3)
    q, k, v = (
        jax.random.normal(key, (B, T, heads, H)) for key, heads in zip(keys, (N, K, K), strict=True)
    )
    q, k, v = ((each * times).astype(jnp.bfloat16) for each, times in ((q, size), (k, 1), (v, 1)))
    return q, k, v, jnp.linspace(-1.5, 1.0, N)


@pytest.mark.parametrize("size", [1.0, 1000.0])
@pytest.mark.parametrize("name", MAPS)
def test_a_stream_of_tiles_is_the_row(name, size):
    config, X, Y = _config(MAPS[name]), 16, 96
    keys = jax.random.split(jax.random.key(0), 2)
    raw_XY, v_YH = size * jax.random.normal(keys[0], (X, Y)), jax.random.normal(keys[1], (Y, 5))
    query_X, key_Y = jnp.arange(X) + 60, jnp.arange(Y)
    mask_XY = key_Y[None] <= query_X[:, None]
    place = mosaic_pipeline.Place(jnp.int32(0), 1, query_X, query_X + 1)
    # Two standard deviations of the scores: some rows have an active key, and some none.
    bias_N = jnp.array([9.0, -0.25 * size])

    stream = mosaic._stream(config, place, bias_N)
    rows, sum_XH = stream.rows, jnp.zeros((X, 5))
    for at in (slice(0, 32), slice(32, 64), slice(64, 96)):
        masked_XY = jnp.where(mask_XY[:, at], raw_XY[:, at], -jnp.inf)
        rows, weight_XY, shrink_X = stream.absorb(rows, masked_XY, key_Y[at])
        assert (shrink_X is None) == (not config.row_map.normalised)
        sum_XH = sum_XH * (1.0 if shrink_X is None else shrink_X[:, None]) + weight_XY @ v_YH[at]
    scale_X, (pivot_X, factor_X) = stream.finish(rows)

    def rows_of_reference(raw_XY, v_YH):
        pattern_XY = config.row_map(jnp.where(mask_XY, config.scale * raw_XY, -jnp.inf), bias_N[1])
        return pattern_XY @ v_YH, pattern_XY

    wanted = rounding.expected(rows_of_reference, raw_XY, v_YH)
    u_XY, _ = tile.logits(config.row_map, raw_XY, bias_N[1], config.scale, None)
    pattern_XY = tile.weight(config.row_map, u_XY.hidden(mask_XY), pivot_X[:, None])
    result = sum_XH * scale_X[:, None], pattern_XY * factor_X[:, None]
    rounding.assert_within(result, wanted)
    live_X = wanted.values[1].any(1)
    assert live_X.all() or (name.startswith("relu") and live_X.sum() > X // 2)


def _folded(row_map, u_XY):
    """Shares as the instruction saturates them, NaN to 0, and those of the tile function."""
    first_X = tile.first_centre(row_map, jnp.ones(len(u_XY.z)))
    pivot_X = tile.pivot(row_map, tile.moved(row_map, first_X, u_XY.largest(1)))
    pivot_XY = jnp.broadcast_to(pivot_X[:, None], u_XY.z.shape)
    folded_XY = jnp.nan_to_num(jnp.clip(tile.folded(u_XY, pivot_XY), 0.0, 1.0), nan=0.0)
    return folded_XY, tile.EXACT.share(u_XY, pivot_XY)


def test_numbers_of_a_row_multiplied_first_give_its_shares():
    raw_XY = 10 * jax.random.normal(jax.random.key(0), (8, 64))
    row_map, raw_XY = maps.relu_power(4), raw_XY.at[:, 0].set(-jnp.inf)
    u_XY, _ = tile.logits(row_map, raw_XY, jnp.float32(0.3), 0.125, None)
    folded_XY, share_XY = _folded(row_map, u_XY)
    # Both parts of u are below 6, are rounded twice, and the largest u of a row is above 1.
    assert float(u_XY.largest(1).min()) > 1
    np.testing.assert_allclose(folded_XY, share_XY, atol=4 * 6 * 2**-24)
    np.testing.assert_array_equal(folded_XY.max(1), 1.0)


def test_a_row_without_an_active_key_is_dead_at_any_scale():
    # Its pivot is 2^126, and 8 times that no float32 holds.
    row_map, raw_XY = (
        maps.relu_power(4),
        jnp.array([[0.1, -0.1, 0.0, -jnp.inf], [0.1, 0.2, 1.0, 2.0]]),
    )
    u_XY, _ = tile.logits(row_map, raw_XY, jnp.float32(-1.0), 8.0, None)
    folded_XY, share_XY = _folded(row_map, u_XY)
    np.testing.assert_array_equal(folded_XY[0], 0.0)
    # As above: both parts of u are at most 16, and the largest is 15.
    np.testing.assert_allclose(folded_XY, share_XY, atol=4 * 16 / 15 * 2**-24)


REFUSED = {
    "soft_cap or heads": ({"soft_cap": 30.0}, (128, 64)),
    "or heads": ({"heads": jnp.array([True, False])}, (128, 64)),
    "segment_ids": ({"segment_ids": jnp.zeros((1, 128), jnp.int32)}, (128, 64)),
    "from position 0": ({"start": 1}, (128, 64)),
    "as many queries as keys": ({"S": 256}, (128, 64)),
    "T to be a multiple of 128, and T = 192": ({}, (192, 64)),
    "a head width of 64 or 128, and H = 32": ({}, (128, 32)),
    "bfloat16 arrays, and q is float32": ({"dtype": jnp.float32}, (128, 64)),
    "Hopper GPU and this is NVIDIA B200": (
        {"on": dispatch.Target("gpu", "NVIDIA B200")},
        (128, 64),
    ),
    "needs an NVIDIA GPU and this is cpu": ({"on": dispatch.Target("cpu", "cpu")}, (128, 64)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_an_unsupported_call_has_its_reason(reason):
    options, (T, H) = REFUSED[reason]
    arguments = {"dtype": jnp.bfloat16, "S": T, "on": H200} | options
    dtype, S, on = (arguments.pop(name) for name in ("dtype", "S", "on"))
    q, k = (jnp.zeros((1, rows, 2, H), dtype) for rows in (T, S))
    with dispatch.on(on), pytest.raises(dispatch.UnavailableError, match=reason):
        row_map_attention(q, k, k, row_map=maps.SOFTMAX, implementation="mosaic", **arguments)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 7}])
@pytest.mark.parametrize("H", [64, 128])
def test_a_supported_call_has_no_reason(H, options):
    q = jnp.zeros((1, 256, 2, H), jnp.bfloat16)
    arguments = {"causal": True, "window": None, "segment_ids": None, "start": None} | options
    visible = visibility("row_map_attention", 1, 256, 256, **arguments)
    call = Call(q, q, q, jnp.zeros(2), None, visible)
    assert not mosaic.unsupported_reason(_config(maps.SOFTMAX, on=H200), call)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax before 0.12 does not interpret the kernel"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        *((name, {}, {}) for name in MAPS),
        # Three tiles of keys: the ring is filled again.
        ("relu4", {"B": 2, "T": 384, "N": 4, "K": 2, "H": 128}, {}),
        ("relu4", {}, {"causal": False}),
        # The first tile is hidden from the last queries, and the second cut.
        ("relu4", {"T": 384, "N": 1}, {"window": 200}),
        ("softmax", {"T": 384, "N": 1}, {"window": 20}),
        ("relu2_over_root", {"T": 384, "N": 1}, {"window": 200, "causal": False}),
        ("ramapuram", {"N": 1}, {"window": 2**31 - 1}),
        # Scores of 2000, whose 16th power no float32 holds.
        ("relu16", {"size": 500.0}, {}),
    ],
)
def test_value_and_gradients_interpreted_equal_the_reference(name, sizes, options):
    arrays = _inputs(**sizes)
    d_out = jax.random.normal(jax.random.key(9), arrays[0].shape).astype(jnp.bfloat16)

    def outputs_and_gradients(implementation):
        def of_floats(q, k, v, bias):
            with dispatch.on(dispatch.INTERPRETER):
                arguments = {"row_map": MAPS[name], "bias": bias, "implementation": implementation}
                return tuple(row_map_attention(q, k, v, **arguments, **options))

        (out, dead), pull = jax.vjp(of_floats, *arrays)
        return out, dead, pull((d_out, np.zeros(dead.shape, jax.dtypes.float0)))

    def attend(v):
        q, k, bias = cases.widened((*arrays[:2], arrays[3]))
        arguments = {"row_map": MAPS[name], "bias": bias, "implementation": "reference"}
        return row_map_attention(q, k, v, **arguments, **options)[0]

    out, dead, gradients = jax.jit(lambda: outputs_and_gradients("mosaic"))()
    _, want_dead, exact = jax.jit(lambda: outputs_and_gradients("reference"))()
    _, _, by_triton = jax.jit(lambda: outputs_and_gradients("pallas"))()
    wanted = comparison.of_bfloat16_weights(attend, arrays[2], d_out)
    rounding.assert_within((out, gradients[2]), wanted)
    np.testing.assert_array_equal(dead, want_dead)
    if name.startswith("relu") and not options and "size" not in sizes:
        assert int(dead.sum()) > 0
    for mine, theirs in zip(gradients[:2], exact[:2], strict=True):
        assert cases.relative_error(mine, theirs) <= 2**-6
    # That of the bias is a small sum of large numbers, and holds the rounding of the output.
    assert cases.relative_error(gradients[3], by_triton[3]) <= 2**-9


def _forward(name, H):
    arguments = jax.eval_shape(functools.partial(_inputs, 2, 2048, 4, 2, H))

    def run(q, k, v, bias, implementation="mosaic"):
        return row_map_attention(
            q, k, v, row_map=MAPS[name], bias=bias, implementation=implementation
        )

    return run, arguments


def test_it_lowers_for_a_hopper_gpu_and_is_never_chosen_by_itself():
    run, arguments = _forward("relu4", 64)
    assert "mosaic_gpu" in target.lower(run, *arguments).as_text()
    chosen = target.lower(functools.partial(run, implementation=None), *arguments).as_text()
    assert "mosaic_gpu" not in chosen and "triton" in chosen


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "H", "most"),
    [
        ("softmax", 64, 6.6),
        ("softmax", 128, 7.3),
        ("relu4", 64, 8.1),
        ("relu4", 128, 8.8),
        ("sigmoid", 64, 8.7),
        ("relu2.5", 64, 11.3),
        ("ramapuram", 64, 7.4),
    ],
)
def test_machine_code_keeps_its_budget(name, H, most, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    run, arguments = _forward(name, H)
    code = mosaic_code.compiled(run, *arguments, H=H, folder=tmp_path)
    assert code.spills == "0 bytes spill stores, 0 bytes spill loads"
    assert code.instructions_per_element <= most
