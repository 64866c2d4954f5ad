"""Rounding errors of each primitive, from the errors of its operands.

A rule takes values in float64 with bounds of their errors and returns the same of its result. The
model is the standard one, fl(x op y) = (x op y)(1 + d) with |d| <= u, and sums in any order
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 2.2, 3.1 and 4.2):

    x + y          e_x + e_y + u |x + y|
    x y            |x| e_y + |y| e_x + e_x e_y + u |x y|
    sum of n       sum e_i + n u sum |x_i|
    dot of n       |x| . e_y + e_x . |y| + e_x . e_y + n u |x| . |y|
    f monotone     max |f(x +- e) - f(x)| + ULPS[f] u |f(x)|

Results below `TINY` may be flushed to zero. With `statistical`, errors are standard deviations and
add up in squares, as independent random ones do (Higham and Mary, A new approach to probabilistic
rounding error analysis, 2019): the worst case of every operation at once does not occur.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from iaj_kernels.rounding.error_model import (
    Arithmetic,
    Pair,
    Rule,
    error_of,
    exact,
    is_float,
    magnitude,
)
from iaj_kernels.rounding.numpy_primitives import evaluate

# Errors of elementary functions in units of u |f|. XLA's approximations stay within a few units
# with and without fused multiply-add.
ULPS = {
    "exp": 4.0,
    "exp2": 4.0,
    "expm1": 8.0,
    "log": 4.0,
    "log2": 4.0,
    "log1p": 8.0,
    "tanh": 8.0,
    "logistic": 8.0,
    "sqrt": 2.0,
    "rsqrt": 4.0,
    "erf": 8.0,
    "erfc": 8.0,
    "sin": 4.0,
    "cos": 4.0,
}


def _moved(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Any:
    """The rule of primitives that move numbers: errors move as the values do."""
    if all(pair.error is None for pair in operands):
        return exact(arithmetic, eqn, operands)
    name = eqn.primitive.name
    values = evaluate(eqn, [pair.value for pair in operands])
    numbers = {"dynamic_slice": 1, "dynamic_update_slice": 2, "gather": 1}.get(name, len(operands))
    errors = [error_of(x) if i < numbers else x.value for i, x in enumerate(operands)]
    moved = evaluate(eqn, errors)
    if name == "gather":
        # Fills NaN out of range, which is no error.
        moved = np.where(np.isnan(values), 0.0, moved)
    if eqn.primitive.multiple_results:
        return [Pair(*each) for each in zip(values, moved, strict=True)]
    return Pair(values, moved)


def _same(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    return Pair(evaluate(eqn, [x.value for x in operands]), operands[0].error)


def _barrier(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> list[Pair]:
    return operands


def _added(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    x, y = operands
    value = evaluate(eqn, [x.value, y.value])
    if not is_float(value):
        both_exact = x.error is None and y.error is None
        return Pair(value, None if both_exact else arithmetic.together(x.error, y.error))
    return Pair(value, arithmetic.together(x.error, y.error, arithmetic.rounding(value)))


def _multiplied(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    x, y = operands
    value = evaluate(eqn, [x.value, y.value])
    if not is_float(value):
        return Pair(value)
    error_x, error_y = (_operand_error(arithmetic, pair) for pair in operands)
    terms = [arithmetic.rounding(value)]
    if error_x is not None:
        terms.append(_times(magnitude(y.value), error_x))
    if error_y is not None:
        terms.append(_times(magnitude(x.value), error_y))
    if error_x is not None and error_y is not None:
        terms.append(_times(error_x, error_y))
    return Pair(value, arithmetic.together(*terms))


def _times(size: Any, error: Any) -> Any:
    """The product, 0 where either factor is: zero times an unknown number is zero."""
    return np.where((size == 0) | (error == 0), 0.0, size * error)


def _squared(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    return _integer_power(arithmetic, eqn, operands, 2)


def _one_minus_square(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    """1 - x^2, in the derivative of tanh from jax 0.11 on."""
    value = evaluate(eqn, [operands[0].value])
    square = _squared(arithmetic, eqn, operands)
    return Pair(value, arithmetic.together(square.error, arithmetic.rounding(value)))


def _divided(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    x, y = operands
    value = evaluate(eqn, [x.value, y.value])
    if not is_float(value):
        return Pair(value)
    # A reciprocal and a product where there is no division.
    rounding = arithmetic.rounding(value, 3.0)
    if x.error is None and y.error is None:
        return Pair(value, rounding)
    divisor = np.maximum(np.abs(y.value) - error_of(y), 0.0)
    error = arithmetic.together(error_of(x), magnitude(value) * error_of(y))
    # No error from 0 / 0, which is selected away, nor from exact operands.
    error = np.where(error == 0, 0.0, error / divisor)
    return Pair(value, arithmetic.together(error, rounding))


def _integer_power(
    arithmetic: Arithmetic, eqn: Any, operands: list[Pair], y: int | None = None
) -> Pair:
    (x,) = operands
    y = eqn.params["y"] if y is None else y
    value = x.value**y
    largest = magnitude(x.value) + error_of(x)
    if y < 0:
        largest = np.maximum(magnitude(x.value) - error_of(x), 0.0)
    moved = np.abs(largest**y - magnitude(x.value) ** y)
    moved = np.where(error_of(x) == 0, 0.0, moved)
    return Pair(value, arithmetic.together(moved, arithmetic.rounding(value, float(abs(y)))))


def _power(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    """x^y for x >= 0, as exp(y log x)."""
    x, y = operands
    value = np.power(x.value, y.value)
    e = error_of(x)
    ends = [np.power(end, y.value) for end in (x.value + e, np.maximum(x.value - e, 0.0))]
    moved = np.where(e == 0, 0.0, np.maximum(*(np.abs(end - value) for end in ends)))
    logarithm = np.abs(np.log(np.where(x.value > 0, x.value, 1.0)))
    by_exponent = None if y.error is None else magnitude(value) * logarithm * y.error
    units = ULPS["exp"] + ULPS["log"] * (1.0 + np.abs(y.value) * logarithm)
    return Pair(value, arithmetic.together(moved, by_exponent, units * arithmetic.rounding(value)))


def _monotone(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    (x,) = operands
    name = eqn.primitive.name
    value = evaluate(eqn, [x.value])
    rounding = arithmetic.rounding(value, ULPS[name])
    if name == "erfc":
        # Its tail is an exponential of -x^2, which is rounded first.
        rounding = rounding * (1.0 + np.square(x.value))
    if x.error is None:
        return Pair(value, rounding)
    below = x.value - x.error
    if name in ("log", "sqrt", "rsqrt"):
        below = np.maximum(below, 0.0)
    if name == "log1p":
        below = np.maximum(below, -1.0)
    ends = [np.abs(evaluate(eqn, [end]) - value) for end in (x.value + x.error, below)]
    moved = np.where(x.error == 0, 0.0, np.maximum(*ends))
    return Pair(value, arithmetic.together(moved, rounding))


def _wave(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    (x,) = operands
    value = evaluate(eqn, [x.value])
    rounding = arithmetic.rounding(np.ones_like(value), ULPS[eqn.primitive.name])
    return Pair(value, arithmetic.together(x.error, rounding))


def _next(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    """The neighbour in float32, which float64 does not have: the number itself, and a spacing."""
    value = operands[0].value
    return Pair(value, arithmetic.together(operands[0].error, 2 * arithmetic.rounding(value)))


def _summed(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    (x,) = operands
    axes = eqn.params["axes"]
    value = np.sum(x.value, axes, dtype=x.value.dtype)
    error = None if x.error is None else arithmetic.summed(x.error, axes)
    if not is_float(x.value):
        return Pair(value, error)
    n = math.prod(x.value.shape[axis] for axis in axes)
    adding = arithmetic.of_terms(n) * np.sum(magnitude(x.value), axes) if n > 1 else None
    return Pair(value, None if error is adding is None else arithmetic.together(error, adding))


def _cumulative(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    (x,) = operands
    axis = eqn.params["axis"]
    value = evaluate(eqn, [x.value])
    adding = arithmetic.of_terms(x.value.shape[axis]) * evaluate(eqn, [magnitude(x.value)])
    if x.error is None:
        return Pair(value, adding)
    squares = arithmetic.statistical
    passed = evaluate(eqn, [np.square(x.error) if squares else x.error])
    return Pair(value, arithmetic.together(np.sqrt(passed) if squares else passed, adding))


def _dot(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    x, y = operands
    contracted, _ = eqn.params["dimension_numbers"]
    n = math.prod(x.value.shape[axis] for axis in contracted[0])

    def product(left: Any, right: Any) -> Any:
        if arithmetic.statistical:
            return np.sqrt(evaluate(eqn, [np.square(left), np.square(right)]))
        return evaluate(eqn, [left, right])

    value = evaluate(eqn, [x.value, y.value])
    if not is_float(value):
        return Pair(value)
    size_x, size_y = magnitude(x.value), magnitude(y.value)
    error_x, error_y = (_operand_error(arithmetic, pair) for pair in operands)
    # Partial sums of random signs are as large as their root mean square, others as their sum.
    terms = [
        arithmetic.of_terms(n) * arithmetic.together(product(size_x, size_y), magnitude(value))
    ]
    if not arithmetic.statistical:
        terms = [arithmetic.of_terms(n) * product(size_x, size_y)]
    if error_x is not None:
        terms.append(product(error_x, size_y))
    if error_y is not None:
        terms.append(product(size_x, error_y))
    if error_x is not None and error_y is not None:
        terms.append(product(error_x, error_y))
    return Pair(value, arithmetic.together(*terms))


def _operand_error(arithmetic: Arithmetic, pair: Pair) -> Any:
    if pair.error is None or not arithmetic.operand_unit:
        return pair.error
    return arithmetic.together(pair.error, arithmetic.operand_unit * magnitude(pair.value))


def _converted(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    (x,) = operands
    dtype = jnp.dtype(eqn.params["new_dtype"])
    value = evaluate(eqn, [x.value])
    error = x.error
    if x.value.dtype == np.bool_ and error is not None:
        error = error.astype(np.float64)
    if dtype == np.bool_ and error is not None:
        error = (np.abs(x.value) <= error) & (error > 0)
    if is_float(x.value) and jnp.issubdtype(dtype, np.integer) and error is not None:
        error = np.where(error > 0, np.ceil(error), 0.0)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nmant < 23 and is_float(x.value):
        rounding = 2.0 ** -(jnp.finfo(dtype).nmant + 1) * magnitude(value)
        error = arithmetic.together(error, rounding)
    return Pair(value, error)


def _bits_to_float(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    (x,) = operands
    if x.error is not None or is_float(x.value):
        raise NotImplementedError("bitcast_convert_type of a number with an error has no rule")
    return Pair(evaluate(eqn, [x.value]))


def _scattered(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    into, index, updates = operands

    def scatter(x: Any, y: Any) -> Any:
        return evaluate(eqn, [x, index.value, y])

    value = scatter(into.value, updates.value)
    count = scatter(np.ones_like(into.value), np.ones_like(updates.value))
    sizes = scatter(magnitude(into.value), magnitude(updates.value))
    if arithmetic.statistical:
        passed = np.sqrt(scatter(np.square(error_of(into)), np.square(error_of(updates))))
        adding = arithmetic.unit * np.sqrt(count) * sizes
    else:
        passed = scatter(error_of(into), error_of(updates))
        adding = arithmetic.unit * count * sizes
    return Pair(value, arithmetic.together(passed, np.where(count > 1, adding, 0.0)))


def _written(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    into, index, updates = operands
    value = evaluate(eqn, [into.value, index.value, updates.value])
    if into.error is None and updates.error is None:
        return Pair(value)
    return Pair(value, evaluate(eqn, [error_of(into), index.value, error_of(updates)]))


def _solved(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    """X of A X = B, A a triangle: |A^-1| (e_B + e_A |X| + n u |A| |X|) (Higham, section 8.2).

    X of X A = B likewise, from the other side.
    """
    a, b = operands
    value = evaluate(eqn, [a.value, b.value])
    n = a.value.shape[-1]
    unit = np.broadcast_to(np.eye(n), a.value.shape)
    half = np.tril if eqn.params["lower"] else np.triu
    size = np.abs(half(a.value))
    off = half(error_of(a))
    if eqn.params["unit_diagonal"]:
        size, off = np.where(unit == 1, 1.0, size), np.where(unit == 1, 0.0, off)
    if eqn.params["transpose_a"]:
        size, off = size.mT, off.mT
    inverse = np.abs(evaluate(eqn, [a.value, unit]))

    def product(left: Any, right: Any) -> Any:
        left, right = (left, right) if eqn.params["left_side"] else (right, left)
        if arithmetic.statistical:
            return np.sqrt(np.square(left) @ np.square(right))
        return left @ right

    residual = arithmetic.together(
        b.error,
        product(off, np.abs(value)),
        arithmetic.of_terms(n) * product(size, np.abs(value)),
    )
    return Pair(value, product(inverse, residual))


MOVING = (
    "broadcast_in_dim",
    "concatenate",
    "copy",
    "copy_p",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "name",
    "pad",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "stack",
    "stop_gradient",
    "transpose",
    "unstack",
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(MOVING, _moved),
    **dict.fromkeys(("neg", "abs", "reduce_precision"), _same),
    **dict.fromkeys(("add", "sub", "add_any"), _added),
    **dict.fromkeys((name for name in ULPS if name not in ("sin", "cos")), _monotone),
    **dict.fromkeys(("sin", "cos"), _wave),
    "optimization_barrier": _barrier,
    "mul": _multiplied,
    "square": _squared,
    "one_minus_square": _one_minus_square,
    "div": _divided,
    "integer_pow": _integer_power,
    "pow": _power,
    "nextafter": _next,
    "reduce_sum": _summed,
    "cumsum": _cumulative,
    "dot_general": _dot,
    "not": _same,
    "convert_element_type": _converted,
    "bitcast_convert_type": _bits_to_float,
    "scatter": _written,
    "scatter-add": _scattered,
    "triangular_solve": _solved,
}
