"""Model of rounding, and the pair of a value and its error that rules pass on.

The rules for single primitives are in `error_rules.py` and, for comparisons and choices, in
`error_choices.py`; `error_bound.py` applies them to a whole function.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from iaj_kernels.rounding.numpy_primitives import evaluate

# The least normal number of float32 and bfloat16.
TINY = 2.0**-126


class Pair(NamedTuple):
    """A value and a bound of its error; of a boolean, whether it is in doubt; None where exact."""

    value: Any
    error: Any = None


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How results are rounded.

    Attributes:
      unit: u, the unit roundoff of results; 2^-24 for float32.
      operand_unit: the unit roundoff to which operands of products are rounded first unless they
        are exact, 0 for none; 2^-8 where bfloat16 matrices are multiplied with float32 sums.
      statistical: errors are independent and random, not the worst case.
    """

    unit: float = 2.0**-24
    operand_unit: float = 0.0
    statistical: bool = False

    def together(self, *errors: Any) -> Any:
        """The error of a sum from those of its terms."""
        known = [e for e in errors if e is not None]
        if self.statistical:
            return np.sqrt(sum(np.square(e) for e in known))
        return sum(known)

    def summed(self, errors: Any, axes: Sequence[int]) -> Any:
        """The error of a sum over axes."""
        if self.statistical:
            return np.sqrt(np.sum(np.square(errors), tuple(axes)))
        return np.sum(errors, tuple(axes))

    def rounding(self, value: Any, units: float = 1.0) -> Any:
        """The error of rounding a result; 0 is exact."""
        return np.where(value == 0, 0.0, units * self.unit * magnitude(value) + TINY)

    def of_terms(self, n: int) -> float:
        """The error of adding n terms, relative to the sum of their sizes."""
        return self.unit * (math.sqrt(n) if self.statistical else n)


Rule = Callable[[Arithmetic, Any, list[Pair]], Any]


def magnitude(x: Any) -> Any:
    """|x|, and 0 where x is infinite: an infinite result is exact."""
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def error_of(pair: Pair) -> Any:
    """The error as an array: float64 of numbers, bool of booleans."""
    if pair.error is not None:
        return pair.error
    boolean = pair.value.dtype == np.bool_
    return np.zeros(np.shape(pair.value), np.bool_ if boolean else np.float64)


def is_float(x: Any) -> bool:
    """Whether an array holds floating numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def exact(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Any:
    """Integers, random bits and shapes of exact operands."""
    del arithmetic
    result = evaluate(eqn, [pair.value for pair in operands])
    return [Pair(x) for x in result] if eqn.primitive.multiple_results else Pair(result)
