"""The edge list of `gated_attention` against the dense map of open gates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels import gated_attention
from tests import rounding

B, T, N, K, H = 2, 150, 4, 2, 160


@pytest.fixture(scope="module")
def arrays():
    """The values are the identity: the output is the map A P."""
    keys = jax.random.split(jax.random.key(0), 2)
    q_BTNH = jax.random.normal(keys[0], (B, T, N, H)) * 2
    k_BSKH = jax.random.normal(keys[1], (B, T, K, H))
    return q_BTNH, k_BSKH, jnp.broadcast_to(jnp.eye(T, H)[None, :, None], (B, T, K, H))


def _run(arrays, **options):
    return jax.jit(functools.partial(gated_attention, **options))(*arrays)


def _assert_weights(edges, arrays, **options):
    """The weights of the list are those of the reference's map."""
    run = functools.partial(gated_attention, implementation="reference", **options)
    wanted = rounding.expected(lambda *arrays: run(*arrays).out_BTNH, *arrays)
    batch, head, query, key, weight = (np.asarray(x)[: int(edges.count)] for x in edges[:5])
    at = batch, query, head, key
    rounding.assert_within(weight, rounding.Expected(*(x[at] for x in wanted)))


@pytest.mark.parametrize("mode", ["sample", "threshold"])
def test_the_list_is_the_open_part_of_the_map(arrays, mode):
    segments = jnp.where(jnp.arange(T)[None] < jnp.asarray([[T], [140]]), 0, -1)
    options = {
        "mode": mode,
        "seed": 1 if mode == "sample" else None,
        "gate_bias": jnp.asarray([-3.0, -6.0, -2.0, -4.0]),
        "window": 130,
        "segment_ids": segments,
    }
    got = _run(arrays, edge_capacity=12_000, **options)
    edges, map_BNTS = got.edges, np.asarray(got.out_BTNH).transpose(0, 2, 1, 3)
    # numpy lists in the same order, the last axis fastest.
    batch, head, query, key = np.nonzero(map_BNTS)
    count = len(batch)
    assert 1_000 < count < 12_000 and int(edges.count) == count and not edges.overflow
    assert count == int(got.open_edges_BN.sum())
    for mine, theirs in zip(edges, (batch, head, query, key), strict=False):
        np.testing.assert_array_equal(mine[:count], theirs)
        assert mine.dtype == jnp.int32 and (mine[count:] == -1).all()
    _assert_weights(edges, arrays, **options)
    assert (edges.weight[count:] == 0).all()


def test_a_list_that_is_too_short_says_so_and_holds_the_first_edges(arrays):
    whole, part = (
        _run(arrays, seed=1, gate_bias=-4.0, edge_capacity=capacity).edges
        for capacity in (20_000, 777)
    )
    assert part.overflow and not whole.overflow
    assert int(part.count) == int(whole.count) > 777
    for mine, theirs in zip(part[:5], whole[:5], strict=True):
        np.testing.assert_array_equal(mine, theirs[:777])


def test_modes_without_a_closed_gate_list_what_they_count(arrays):
    short = [x[:1, :20] for x in arrays]
    opened = _run(short, mode="open", edge_capacity=N * 20 * 21 // 2)
    assert int(opened.edges.count) == N * 20 * 21 // 2 == int(opened.open_edges_BN.sum())
    rows = np.zeros((N, 20))
    np.add.at(rows, (opened.edges.head, opened.edges.query), opened.edges.weight)
    # Twenty weights over the sum of twenty, a dozen operations for each.
    np.testing.assert_allclose(rows, 1.0, rtol=2 * (20 + 12) * 2**-24)
    expected = _run(short, mode="expected", edge_capacity=N * 20 * 21 // 2)
    assert int(expected.edges.count) == int(expected.open_edges_BN.sum())
    _assert_weights(expected.edges, short, mode="expected")


def test_the_list_has_no_gradient(arrays):
    short = [x[:1, :20] for x in arrays]

    def loss(q, k, v):
        return gated_attention(q, k, v, seed=1, edge_capacity=500).edges.weight.sum()

    for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(*short):
        assert (gradient == 0).all()


def test_no_array_of_the_program_is_as_large_as_the_map():
    # 2 rows, 3 heads, 700 x 700: the whole map has 2.9 M entries, one block of it 90 k.
    shape = jax.ShapeDtypeStruct((2, 700, 3, 16), jnp.float32)

    def run(q, k, v):
        result = gated_attention(q, k, v, seed=1, edge_capacity=1_000, implementation="xla")
        return result.out_BTNH, result.edges

    used = jax.jit(run).lower(shape, shape, shape).compile().memory_analysis()
    assert used.temp_size_in_bytes < 4 * 2 * 3 * 700 * 700 / 2
