"""Rounding rules of comparisons and selections: both outcomes count where rounding may decide.

    x < y          in doubt where the sides are nearer than their errors together
    where c, a, b  the error of the selected side, and |a - b| as well where c is in doubt
    argmax         an infinite error where another entry may be the largest
    top_k          the same for each place; the k-th largest moves no more than the entries do
    max            the larger error

`not`, `and` and `or` are in doubt where no side that is sure decides them.
"""

from typing import Any

import numpy as np

from iaj_kernels.rounding.error_model import Arithmetic, Pair, Rule, error_of
from iaj_kernels.rounding.numpy_primitives import evaluate


def _extreme(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    x, y = operands
    value = evaluate(eqn, [x.value, y.value])
    if x.error is None and y.error is None:
        return Pair(value)
    return Pair(value, np.maximum(error_of(x), error_of(y)))


def _clamped(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    return Pair(evaluate(eqn, [x.value for x in operands]), operands[1].error)


def _signed(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    (x,) = operands
    value = evaluate(eqn, [x.value])
    if x.error is None:
        return Pair(value)
    return Pair(value, np.where((np.abs(x.value) <= x.error) & (x.error > 0), 2.0, 0.0))


def _extreme_of(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    (x,) = operands
    value = evaluate(eqn, [x.value])
    if x.error is None:
        return Pair(value)
    above, below = (evaluate(eqn, [_end(x.value, x.error, sign)]) for sign in (1, -1))
    error = np.maximum(above - value, value - below)
    return Pair(value, np.where(np.isfinite(value), error, 0.0))


def _end(value: Any, error: Any, sign: int) -> Any:
    """The largest number that a value may be, or with -1 the least.

    A masked entry, -inf, may be any number where its mask is in doubt.
    """
    return np.where(np.isinf(error), sign * np.inf, value + sign * error)


def _where_largest(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    """The index, with an infinite error where another entry may be the extreme one."""
    (x,) = operands
    value = evaluate(eqn, [x.value])
    if x.error is None:
        return Pair(value)
    (axis,) = eqn.params["axes"]
    signed = x.value if eqn.primitive.name == "argmax" else -x.value
    own = np.zeros(x.value.shape, np.bool_)
    np.put_along_axis(own, np.expand_dims(value, axis), True, axis)
    least = np.sum(np.where(own, _end(signed, x.error, -1), 0.0), axis)
    other = np.max(np.where(own, -np.inf, _end(signed, x.error, 1)), axis)
    return Pair(value, np.where(other >= least, np.inf, 0.0))


def _largest(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> list[Pair]:
    """Values and places, a place with an infinite error where it may change with another."""
    (x,) = operands
    axis = eqn.params.get("axis", x.value.ndim - 1)
    values, places = evaluate(eqn, [x.value])
    if x.error is None:
        return [Pair(values), Pair(places)]
    order = np.flip(np.argsort(x.value, axis, stable=True), axis)
    own, error = (np.take_along_axis(part, order, axis) for part in (x.value, x.error))
    least, most = (np.moveaxis(_end(own, error, sign), axis, -1) for sign in (-1, 1))
    # Any that comes after it, not only its neighbour, may be so far off.
    most_after = np.flip(np.maximum.accumulate(np.flip(most, -1), -1), -1)[..., 1:]
    least_before = np.minimum.accumulate(least, -1)[..., :-1]
    end = np.zeros((*least.shape[:-1], 1), np.bool_)
    overtaken = np.concatenate([least[..., :-1] <= most_after, end], -1)
    doubt = overtaken | np.concatenate([end, most[..., 1:] >= least_before], -1)
    doubt = np.moveaxis(doubt[..., : values.shape[axis]], -1, axis)
    moved = np.broadcast_to(np.max(x.error, axis, keepdims=True), values.shape)
    return [Pair(values, moved), Pair(places, np.where(doubt, np.inf, 0.0))]


def _selected(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    which, *choices = operands
    value = evaluate(eqn, [pair.value for pair in operands])
    if all(pair.error is None for pair in operands):
        return Pair(value)
    errors = [error_of(pair) for pair in choices]
    error = evaluate(eqn, [which.value, *errors])
    if which.error is not None:
        boolean = errors[0].dtype == np.bool_
        for choice, its_error in zip(choices, errors, strict=True):
            if boolean:
                error = error | which.error & (its_error | (choice.value != value))
            else:
                same = choice.value == value
                apart = np.where(same, 0.0, np.abs(choice.value - value)) + its_error
                error = np.where(which.error, np.maximum(error, apart), error)
    return Pair(value, error)


def _compared(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    x, y = operands
    value = evaluate(eqn, [x.value, y.value])
    # x != x tests for NaN.
    if (x.error is None and y.error is None) or eqn.invars[0] is eqn.invars[1]:
        return Pair(value)
    if x.value.dtype == np.bool_:
        return Pair(value, error_of(x) | error_of(y))
    reach = error_of(x) + error_of(y)
    same = x.value == y.value
    apart = np.where(same, 0.0, np.abs(1.0 * x.value - y.value))
    return Pair(value, (apart <= reach) & (reach > 0))


def _and(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    return _decided_by(False, eqn, operands)


def _or(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    return _decided_by(True, eqn, operands)


def _decided_by(decisive: bool, eqn: Any, operands: list[Pair]) -> Pair:
    x, y = operands
    value = evaluate(eqn, [x.value, y.value])
    if x.error is None and y.error is None:
        return Pair(value)
    # One side decides where it surely is False for `and`, True for `or`.
    sure = [(pair.value == decisive) & ~error_of(pair) for pair in operands]
    return Pair(value, (error_of(x) | error_of(y)) & ~sure[0] & ~sure[1])


def _any_or_all(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    (x,) = operands
    value = evaluate(eqn, [x.value])
    if x.error is None:
        return Pair(value)
    decisive = eqn.primitive.name == "reduce_or"
    axes = eqn.params["axes"]
    sure = np.any((x.value == decisive) & ~x.error, axes)
    return Pair(value, np.any(x.error, axes) & ~sure)


def _finite(arithmetic: Arithmetic, eqn: Any, operands: list[Pair]) -> Pair:
    """The result counts as exact: one that overflows in float32 alone exceeds any bound."""
    return Pair(evaluate(eqn, [operands[0].value]))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("reduce_max", "reduce_min", "cummax", "cummin"), _extreme_of),
    **dict.fromkeys(("argmax", "argmin"), _where_largest),
    "top_k": _largest,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compared),
    **dict.fromkeys(("reduce_or", "reduce_and"), _any_or_all),
    "clamp": _clamped,
    "is_finite": _finite,
    "sign": _signed,
    "select_n": _selected,
    "and": _and,
    "or": _or,
}
