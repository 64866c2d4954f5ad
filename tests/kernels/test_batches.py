"""A batch cut into groups gives what the whole batch gives."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

from iaj_kernels.attention import batches
from iaj_kernels.gated_attention.api import gated_attention
from iaj_kernels.row_map_attention.api import row_map_attention
from iaj_kernels.row_map_attention.maps import SOFTMAX


@pytest.mark.parametrize(
    ("B", "elements", "rows"),
    [(32, 1 << 16, 4), (32, 1 << 12, 32), (6, 1 << 16, 3), (7, 1 << 16, 1), (4, 1 << 19, 1)],
)
def test_rows_within_is_the_largest_divisor_that_fits(B, elements, rows):
    assert batches.rows_within(B, elements) == rows


B, T, N, K, H = 6, 12, 4, 2, 8
# A padded row and rows of two documents.
SEGMENTS = np.zeros((B, T), np.int32)
SEGMENTS[1, 9:] = -1
SEGMENTS[2:4, 5:] = 1


def arrays():
    """Products of queries and keys are exact, so that no gate depends on an order of summation."""
    rng = np.random.default_rng(0)
    shapes = {"q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, H), "bias": (N,)}
    return {
        name: rng.integers(-2, 3, shape).astype(np.float32) / 4 for name, shape in shapes.items()
    }


def gated(q, k, v, bias, **options):
    result = gated_attention(q, k, v, gate_bias=bias, seed=3, implementation="xla", **options)
    return result.out_BTNH, result.expected_edges_BN, result.open_edges_BN


def mapped(q, k, v, bias, **options):
    result = row_map_attention(q, k, v, bias=bias, row_map=SOFTMAX, implementation="xla", **options)
    return result.out_BTNH, jnp.zeros(()), result.dead_rows_BN


@pytest.mark.parametrize("operation", [gated, mapped])
@pytest.mark.parametrize(
    "options", [{}, {"segment_ids": SEGMENTS}, {"window": 3}, {"start": np.arange(B) * 2}]
)
def test_values_and_gradients_do_not_depend_on_the_groups(monkeypatch, operation, options):
    """The same gates of each batch row, its own segments and start; gradients of shared
    arguments are summed over the groups."""

    def loss(args):
        out, expected, counts = operation(**args, **options)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum() + expected.sum(), (
            out,
            counts,
        )

    def outcome(elements):
        monkeypatch.setattr(batches, "CACHED_ELEMENTS", elements)
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays())

    (_, (out, counts)), gradients = outcome(1 << 18)
    (_, (out_in_groups, counts_in_groups)), gradients_in_groups = outcome(2 * N * T * T)
    np.testing.assert_array_equal(counts, counts_in_groups)
    # One order of summation within a batch row; groups may be fused differently by the compiler.
    np.testing.assert_allclose(out, out_in_groups, rtol=0, atol=1e-6)
    for name in ("q", "k", "v", "bias"):
        np.testing.assert_allclose(
            gradients[name], gradients_in_groups[name], rtol=1e-5, atol=1e-5, err_msg=name
        )


def loops(jaxpr) -> int:
    return str(jaxpr).count("scan[")


def test_a_batch_that_the_compiler_partitions_stays_whole(monkeypatch):
    monkeypatch.setattr(batches, "CACHED_ELEMENTS", 2 * N * T * T)
    args = arrays()
    run = functools.partial(mapped)
    alone = loops(jax.make_jaxpr(lambda args: run(**args))(args))
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        on_mesh = loops(jax.make_jaxpr(lambda args: run(**args))(args))
    assert alone == on_mesh + 1
