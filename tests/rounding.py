"""Comparisons of float32 results with float64, entry by entry within what rounding can do.

The bounds come out of the formula (`iaj_kernels.rounding.error_bound`), not out of trying, and so
hold on processors that add in another order or have no fused multiply-add.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from iaj_kernels.core import cases
from iaj_kernels.rounding import error_bound
from iaj_kernels.rounding.error_model import Arithmetic

RANDOM_ERRORS = Arithmetic(statistical=True)


class Expected(NamedTuple):
    """Trees of one structure: values in float64, and how far an entry may be off."""

    values: Any
    bounds: Any


def expected(
    function: Callable[..., Any], *arguments: Any, arithmetic: Arithmetic = RANDOM_ERRORS
) -> Expected:
    """What `function(*arguments)` is, and how far float32 may be off."""
    values, errors = error_bound.value_and_error(function, *arguments, arithmetic=arithmetic)
    return Expected(values, jax.tree.map(lambda e: error_bound.DEVIATIONS * e, errors))


def assert_within(got: Any, wanted: Expected, message: str = "") -> None:
    """Every entry of the tree `got` is within its bound."""
    _check(got, wanted.values, wanted.bounds, message)


def assert_same(got: Any, want: Any, wanted: Expected, message: str = "") -> None:
    """Two float32 results of one computation differ by no more than both together may be off."""
    _check(got, want, jax.tree.map(lambda bound: 2 * bound, wanted.bounds), message)


def _check(got: Any, want: Any, bounds: Any, message: str) -> None:
    result = jax.tree_util.tree_map_with_path(
        lambda path, *given: cases.deviation(jax.tree_util.keystr(path), *given), got, want, bounds
    )
    result = jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, cases.Deviation))
    assert result, "nothing was compared"
    for bound in jax.tree.leaves(bounds):
        assert not np.size(bound) or not np.isinf(bound).all(), "a bound is infinite everywhere"
    red = [each for each in result if not each.ok]
    assert not red, f"{message}: {red}"
    assert all(np.isfinite(each.error) for each in result), result
