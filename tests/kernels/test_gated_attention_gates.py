"""The gates of `gated_attention`: the same in every implementation, tiling and sharding, and fair.

Where a test requires equal bits, queries and keys are multiples of 1/4: their products are exact in
float32 in any order of summation, so a gate cannot differ by the rounding of its score.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from iaj_kernels import gated_attention
from iaj_kernels.attention.visibility import visibility
from iaj_kernels.core import dispatch, noise
from iaj_kernels.gated_attention import tile, xla
from iaj_kernels.gated_attention.config import Call, Config
from tests import rounding

B, T, N, K, H = 4, 64, 4, 2, 64


@pytest.fixture(scope="module")
def exact():
    """q, k, and a v that is the identity: the output is the map A P itself."""
    keys = jax.random.split(jax.random.key(1), 2)
    q_BTNH, k_BSKH = (
        jax.random.randint(key, (B, T, heads, H), -2, 3) / 4.0
        for key, heads in zip(keys, (N, K), strict=True)
    )
    return q_BTNH, k_BSKH, jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, K, H))


def _map(*arrays, implementation="xla", **options):
    """A P, `[B, T, N, S]`, zero exactly where a gate is closed; expected and open edges."""
    result = gated_attention(*arrays, seed=5, implementation=implementation, **options)
    return result.out_BTNH, result.expected_edges_BN, result.open_edges_BN


@pytest.fixture(scope="module")
def gates(exact):
    """Which gates the reference opens."""
    out, _, opened = jax.jit(functools.partial(_map, implementation="reference"))(*exact)
    assert 0.3 < float((out > 0).sum() / (B * N * T * (T + 1) // 2)) < 0.7
    np.testing.assert_array_equal((out > 0).sum((1, 3)), opened)
    return np.asarray(out > 0)


@pytest.mark.parametrize("blocks", [None, (16, 32), (7, 13), (64, 1)])
def test_every_tiling_draws_the_gates_of_the_reference(exact, gates, blocks):
    config = Config("sample", 1 / 8, dispatch.target(), blocks=blocks)
    visible = visibility("test", B, T, T, causal=True, window=None, segment_ids=None, start=None)
    rest = (jnp.zeros((N,)), jnp.uint32(5), jnp.zeros((2,), jnp.int32), visible)
    out, _, opened = jax.jit(functools.partial(xla.run, config))(Call(*exact, *rest))
    np.testing.assert_array_equal(out > 0, gates)
    np.testing.assert_array_equal(opened, gates.sum((1, 3)))


def test_a_mesh_of_batch_rows_and_heads_draws_the_gates_of_one_device(exact, gates):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=auto)

    def shard(q_BTNH, k_BSKH, v_BSKH):
        rows, heads = q_BTNH.shape[0], q_BTNH.shape[2]
        origin = (jax.lax.axis_index("data") * rows, jax.lax.axis_index("model") * heads)
        return _map(q_BTNH, k_BSKH, v_BSKH, origin=origin)

    of_arrays = PartitionSpec("data", None, "model", None)
    of_edges = PartitionSpec("data", "model")
    sharded = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(of_arrays,) * 3,
        out_specs=(of_arrays, of_edges, of_edges),
        check_vma=False,
    )

    def gradients_and_map(run, *arrays):
        def loss(q, k, v):
            out, expected, _ = run(q, k, v)
            return (out * jnp.cos(jnp.arange(H))[None, None, None]).sum() + expected.sum(), out

        return jax.grad(loss, (0, 1), has_aux=True)(*arrays)

    got = jax.jit(functools.partial(gradients_and_map, sharded))(*exact)
    np.testing.assert_array_equal(got[1] > 0, gates)
    reference = functools.partial(_map, implementation="reference")
    wanted = rounding.expected(functools.partial(gradients_and_map, reference), *exact)
    rounding.assert_within(got, wanted)


def test_shards_of_the_queries_draw_the_gates_of_the_whole(exact, gates):
    q_BTNH, k_BSKH, v_BSKH = exact
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=auto)
    spec = PartitionSpec(None, "sequence")

    def shard(q_BTNH, k_BSKH, v_BSKH):
        start = jax.lax.axis_index("sequence") * q_BTNH.shape[1]
        return _map(q_BTNH, k_BSKH, v_BSKH, start=start)[0]

    sharded = jax.shard_map(
        shard, mesh=mesh, in_specs=(spec, None, None), out_specs=spec, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(sharded)(q_BTNH, k_BSKH, v_BSKH) > 0, gates)


def test_rows_of_a_batch_that_start_elsewhere_draw_the_gates_of_their_positions(exact, gates):
    q_BTNH, k_BSKH, v_BSKH = exact
    start = np.asarray([0, 5, 17, 48])
    window_BTNH = jnp.stack([q_BTNH[b, at : at + 16] for b, at in enumerate(start)])
    out = jax.jit(_map)(window_BTNH, k_BSKH, v_BSKH, start=jnp.asarray(start))[0]
    for b, at in enumerate(start):
        np.testing.assert_array_equal(out[b] > 0, gates[b, at : at + 16])


def test_a_gate_and_its_slopes_are_those_of_logistic_noise():
    config = Config("sample", 1.0, dispatch.target())
    e = np.concatenate([np.linspace(-60, 60, 4001), [1e4, -1e4, 1e38, -1e38, 0.0]])[:, None]
    e = e.astype(np.float32)
    bits = noise.bits(noise.stream(jnp.uint32(0), 0, 0), jnp.arange(len(e))[:, None], 0)

    def gates(e):
        result = tile.gate(config, e * tile.LOG2_E, bits)
        return result.probability, result.slope, result.probability_slope

    e64, u = np.float64(e), np.asarray(noise.uniform(bits), np.float64)
    drawn = e64 + np.log(u) - np.log1p(-u)
    clear = np.abs(drawn) > 1e-4
    is_open = np.asarray(tile.gate(config, e * tile.LOG2_E, bits).is_open)
    np.testing.assert_array_equal(is_open[clear], (drawn > 0)[clear])
    with np.errstate(over="ignore"):
        opened, relaxed = 1 / (1 + np.exp(-e64)), 1 / (1 + np.exp(-drawn))
        slopes = relaxed / (1 + np.exp(drawn)), opened / (1 + np.exp(e64))
    wanted = rounding.expected(gates, e)._replace(values=(opened, *slopes))
    rounding.assert_within(gates(e), wanted)


def test_gates_open_as_often_as_they_should():
    # One head per bias, scores all zero: an open count is binomial with p = sigma(bias).
    bias = jnp.asarray([-12.0, -7.0, -3.0, -0.5, 0.0, 1.0, 5.0, 12.0])
    zeros = jnp.zeros((2, 512, 8, 4))
    options = {"gate_bias": bias, "causal": False, "seed": 3}
    got = jax.jit(functools.partial(gated_attention, **options))(zeros, zeros, zeros)
    n, p = 2 * 512 * 512, 1 / (1 + np.exp(-np.asarray(bias, np.float64)))
    # Eight counts; beyond 4 standard deviations once in 2,000.
    scores = (np.asarray(got.open_edges_BN).sum(0) - n * p) / np.sqrt(n * p * (1 - p))
    assert np.abs(scores).max() < 4.0, scores
    # In any order: ten standard deviations of the rounding of one sum of 512^2 terms.
    expected = np.asarray(got.expected_edges_BN, np.float64).sum(0)
    np.testing.assert_allclose(expected, n * p, rtol=10 * 512 * 2**-24)


def test_the_mean_over_seeds_is_the_expected_mode():
    keys = jax.random.split(jax.random.key(2), 3)
    q, k, v = (jax.random.normal(key, (1, 12, 2, 8)) for key in keys)
    runs = 1024

    @jax.jit
    def both():
        drawn = jax.lax.map(
            lambda seed: gated_attention(q, k, v, seed=seed).out_BTNH,
            jnp.arange(runs, dtype=jnp.uint32),
        )
        return drawn, gated_attention(q, k, v, mode="expected").out_BTNH

    drawn, expected = (np.asarray(x, np.float64) for x in both())
    scores = (drawn.mean(0) - expected) / (drawn.std(0) / np.sqrt(runs))
    # 192 correlated, nearly normal means: beyond 4.5 once in 700.
    assert np.abs(scores).max() < 4.5
    assert np.abs(scores).mean() < 1.2


def test_a_gate_bias_of_large_size_opens_or_closes_every_gate(exact):
    for bias, share in ((1e4, 1), (-1e4, 0)):
        out, expected, opened = jax.jit(functools.partial(_map, gate_bias=bias))(*exact)
        np.testing.assert_array_equal(opened, share * T * (T + 1) // 2)
        np.testing.assert_array_equal(expected, share * T * (T + 1) // 2)
        assert ((out > 0).sum() == opened.sum()) and np.isfinite(out).all()
