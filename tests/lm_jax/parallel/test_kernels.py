"""A sharded function equals the whole one, and every device computes its own part alone."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import shard_kernel, under_mesh
from tests import rounding

DRAWN = np.random.default_rng(0)
X_BTN = DRAWN.normal(size=(4, 3, 6)).astype(np.float32)
W_N = DRAWN.normal(size=6).astype(np.float32)
# data, fsdp, tensor; rows, heads of one device. Six heads do not divide over four.
MESHES = [
    ((4, 1, 1), 1, 6),
    ((2, 2, 1), 1, 6),
    ((2, 1, 2), 2, 3),
    ((1, 2, 2), 2, 3),
    ((1, 1, 4), 4, 6),
]


def mesh_of(sizes):
    return sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True)))


def compiled(fn, mesh):
    return jax.jit(under_mesh(fn, mesh), in_shardings=sharding.replicated(mesh))


class Numbered:
    """Cumulative sums over T, of rows and heads with their indices; records its arguments."""

    def __init__(self):
        self.shapes = []

    def __call__(self, x_BTN, w_N, extra=None):
        return shard_kernel(
            self.run, (x_BTN, w_N, extra), ("BTN", "N", ""), {"sum": "BTN", "at": "BN"}, split="BN"
        )

    def run(self, first, x_BTN, w_N, extra):
        assert extra is None
        self.shapes.append(x_BTN.shape)
        B, _, N = x_BTN.shape
        row_B1 = first["B"] + jnp.arange(B)[:, None]
        at_BN = 100 * row_B1 + first["N"] + jnp.arange(N)[None]
        return {"sum": jnp.cumsum(jnp.sin(x_BTN * w_N[None, None]), 1), "at": at_BN}


def value_and_gradients(fn, mesh, x_BTN=X_BTN, w_N=W_N):
    """On a mesh; without one in float64, with how far float32 may be off."""

    def loss(x_BTN, w_N):
        outputs = fn(x_BTN, w_N)
        weighted = outputs["sum"] * jnp.cos(outputs["at"])[:, None]
        return weighted.sum(), outputs

    differentiate = jax.value_and_grad(loss, (0, 1), has_aux=True)
    if mesh is None:
        return rounding.expected(differentiate, x_BTN, w_N)
    return compiled(differentiate, mesh)(x_BTN, w_N)


@pytest.mark.parametrize(("sizes", "rows", "heads"), MESHES)
def test_values_gradients_and_numbers_are_those_of_the_whole(sizes, rows, heads):
    parts = Numbered()
    got = value_and_gradients(parts, mesh_of(sizes))
    assert set(parts.shapes) == {(rows, 3, heads)}
    at_BN = got[0][1]["at"]
    np.testing.assert_array_equal(at_BN, 100 * np.arange(4)[:, None] + np.arange(6)[None])
    # The gradient of w_N is a sum over the rows of all devices.
    rounding.assert_within(got, value_and_gradients(Numbered(), None))


def test_rows_that_do_not_divide_stay_whole_while_heads_are_split():
    parts = Numbered()
    outputs = compiled(parts, mesh_of((2, 1, 2)))(X_BTN[:3], W_N)
    assert parts.shapes == [(3, 3, 3)]
    np.testing.assert_array_equal(outputs["at"][2], 200 + np.arange(6))


@pytest.mark.parametrize("rows", [3, 4])
def test_the_gradient_of_what_is_computed_twice_is_counted_once(rows):
    """Rows stay whole on two data devices, or heads on two tensor devices."""
    x_BTN, w_N = (X_BTN[:3], W_N) if rows == 3 else (X_BTN[..., :5], W_N[:5])
    parts = Numbered()
    got = value_and_gradients(parts, mesh_of((2, 1, 2)), x_BTN, w_N)
    assert set(parts.shapes) == {(3, 3, 3) if rows == 3 else (2, 3, 5)}
    rounding.assert_within(got, value_and_gradients(Numbered(), None, x_BTN, w_N))


def test_on_a_mesh_that_is_not_ours_nothing_is_split():
    parts, mesh = Numbered(), jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    outputs = compiled(parts, mesh)(X_BTN, W_N)
    assert parts.shapes == [X_BTN.shape]
    np.testing.assert_array_equal(outputs["at"][1], 100 + np.arange(6))


def test_within_a_shard_map_of_the_caller_nothing_is_split_again():
    parts, mesh = Numbered(), mesh_of((4, 1, 1))
    rows = PartitionSpec("data")

    def outer(x_BTN, w_N):
        return jax.shard_map(
            parts,
            in_specs=(rows, PartitionSpec()),
            out_specs={"sum": rows, "at": rows},
            check_vma=False,
        )(x_BTN, w_N)

    outputs = compiled(outer, mesh)(X_BTN, W_N)
    assert parts.shapes == [(1, 3, 6)]
    np.testing.assert_array_equal(outputs["at"], np.tile(np.arange(6), (4, 1)))


def test_under_a_scan_and_rematerialised_it_still_splits():
    parts = Numbered()

    @jax.checkpoint
    def layer(x_BTN, w_N):
        return parts(x_BTN, w_N)["sum"], None

    def layers(x_BTN, w_LN):
        return jax.lax.scan(layer, x_BTN, w_LN)[0]

    w_LN = np.stack([W_N, 2 * W_N])
    wanted = rounding.expected(layers, X_BTN, w_LN)
    parts.shapes.clear()
    got = compiled(layers, mesh_of((2, 1, 2)))(X_BTN, w_LN)
    assert set(parts.shapes) == {(2, 3, 3)}
    rounding.assert_within(got, wanted)
