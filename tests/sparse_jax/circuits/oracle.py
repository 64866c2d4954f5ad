"""What functions of a model are in float64, and how far float32 may be off, gates included."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax

from sparse_jax.gates import model as sparse_model
from tests import rounding
from tests.rounding import Expected

# The errors of float64 are those of float32 times the ratio of their units, to first order.
_FLOAT64 = 2.0**-53 / 2.0**-24


def expected(function: Callable[..., Any], *arguments: Any) -> Expected:
    """`rounding.expected` with gates on scores, for loops of the kernels have no rounding rule."""
    on_scores = mock.patch.object(sparse_model, "by_kernels", lambda attend: attend)
    # Under another setting jit does not reuse what it traced with kernels.
    with on_scores, jax.default_matmul_precision("highest"):
        return rounding.expected(function, *arguments)


def in_float64(bounds: Any) -> Any:
    """How far two computations in float64 may be apart, from the bounds of one in float32."""
    return jax.tree.map(lambda bound: 2 * _FLOAT64 * bound, bounds)


def assert_equal(got: Any, wanted: Expected, message: str = "") -> None:
    """Another computation in float64: between the two is no more than float64's rounding."""
    rounding.assert_within(got, Expected(wanted.values, in_float64(wanted.bounds)), message)


def part(wanted: Expected, *keys: Any) -> Expected:
    """The values and bounds at these keys of the tree, or places of its arrays."""
    values, bounds = wanted
    for key in keys:
        values, bounds = values[key], bounds[key]
    return Expected(values, bounds)
