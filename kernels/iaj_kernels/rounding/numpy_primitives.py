"""JAX's primitives on NumPy arrays, in float64.

A function is evaluated here once, so that compiling it would be most of the cost, and its oracle
then shares no code with what it judges. A primitive that NumPy lacks (erf, gather, sort,
random bits) runs on JAX's CPU.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np


def evaluate(eqn: Any, operands: Sequence[Any]) -> Any:
    """The result of an equation's primitive, or the list of its results, on other operands.

    Args:
      eqn: an equation of a jaxpr.
      operands: arrays, floating ones in float64.

    Returns:
      NumPy arrays, floating ones in float64 whatever dtype the equation names; random keys, which
      NumPy has not, stay JAX arrays.
    """
    rule = RULES.get(eqn.primitive.name)
    if rule is not None:
        result = rule(eqn.params, *operands)
        if result is not NotImplemented:
            return result
    with _on_cpu():
        result = eqn.primitive.bind(*operands, **_wide(eqn.params))
    return [*map(wide, result)] if eqn.primitive.multiple_results else wide(result)


def wide(x: Any, dtype: Any = None) -> Any:
    """A NumPy array, in float64 if it is floating; random keys stay as they are."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    x = np.asarray(x, dtype)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """JAX in float64 and on a CPU whatever is the default: a GPU is not to be its own oracle."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def _wide(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation, with float64 where they name a floating dtype."""
    names = ("dtype", "new_dtype", "preferred_element_type")
    floating = {
        name: jnp.dtype(jnp.float64)
        for name in names
        if params.get(name) is not None and jnp.issubdtype(params[name], jnp.floating)
    }
    return {**params, **floating}


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *operands: np.asarray(function(*operands))


def _divide(params: dict[str, Any], x: Any, y: Any) -> Any:
    return np.asarray(x / y) if x.dtype == np.float64 else NotImplemented


def _select(params: dict[str, Any], which: Any, *choices: Any) -> Any:
    if which.dtype != np.bool_ or len(choices) != 2:
        return NotImplemented
    return np.where(which, choices[1], choices[0])


def _convert(params: dict[str, Any], x: Any) -> Any:
    dtype = params["new_dtype"]
    if jnp.issubdtype(dtype, jnp.floating):
        return x.astype(np.float64)
    # What has no such integer is for XLA to say.
    return NotImplemented if x.dtype == np.float64 and dtype != np.bool_ else x.astype(dtype)


def _bits(params: dict[str, Any], x: Any) -> Any:
    dtype = np.dtype(params["new_dtype"])
    if x.dtype.itemsize != dtype.itemsize:
        return NotImplemented
    return wide(np.ascontiguousarray(x).view(dtype))


def _broadcast(params: dict[str, Any], x: Any, *sizes: Any) -> Any:
    if sizes:
        return NotImplemented
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _reshape(params: dict[str, Any], x: Any, *sizes: Any) -> Any:
    return NotImplemented if sizes or params["dimensions"] else x.reshape(params["new_sizes"])


def _slice(params: dict[str, Any], x: Any) -> Any:
    strides = params["strides"] or (1,) * x.ndim
    ranges = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*each) for each in ranges)]


def _window(x: Any, sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    """Where a window that is moved to within the array lies."""
    firsts = [
        min(max(int(start), 0), full - size)
        for start, size, full in zip(starts, sizes, x.shape, strict=True)
    ]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def _dynamic_slice(params: dict[str, Any], x: Any, *starts: Any) -> Any:
    return x[_window(x, params["slice_sizes"], starts)]


def _dynamic_update_slice(params: dict[str, Any], x: Any, update: Any, *starts: Any) -> Any:
    result = np.array(x)
    result[_window(x, update.shape, starts)] = update
    return result


def _pad(params: dict[str, Any], x: Any, fill: Any) -> Any:
    config = params["padding_config"]
    if any(low < 0 or high < 0 for low, high, _ in config) or not x.size:
        return NotImplemented
    inside = [
        slice(low, low + (size - 1) * (gap + 1) + 1, gap + 1)
        for size, (low, _, gap) in zip(x.shape, config, strict=True)
    ]
    shape = [each.stop + high for each, (_, high, _) in zip(inside, config, strict=True)]
    result = np.full(shape, fill, x.dtype)
    result[tuple(inside)] = x
    return result


def _iota(params: dict[str, Any], *sizes: Any) -> Any:
    if sizes:
        return NotImplemented
    shape, axis = params["shape"], params["dimension"]
    counts = wide(np.arange(shape[axis]), params["dtype"])
    along = [size if i == axis else 1 for i, size in enumerate(shape)]
    return np.broadcast_to(counts.reshape(along), shape)


def _reduced(function: Callable[..., Any], boolean: bool = False) -> Callable[..., Any]:
    def run(params: dict[str, Any], x: Any) -> Any:
        if not x.size or boolean != (x.dtype == np.bool_):
            return NotImplemented
        return np.asarray(function(x, params["axes"]), x.dtype)

    return run


def _scattered(function: Callable[..., Any]) -> Callable[..., Any]:
    # Called again, because the addition in the equation is of float32.
    def run(params: dict[str, Any], *operands: Any) -> Any:
        how = {k: v for k, v in params.items() if not k.startswith("update_")}
        with _on_cpu():
            return np.asarray(function(*operands, **how))

    return run


def _place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: np.asarray(function(x, *params["axes"]), params["index_dtype"])


def _accumulated(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(params: dict[str, Any], x: Any) -> Any:
        axis = params["axis"]
        if not params["reverse"]:
            return function(x, axis, dtype=x.dtype)
        return np.flip(function(np.flip(x, axis), axis, dtype=x.dtype), axis)

    return run


def _dot(params: dict[str, Any], x: Any, y: Any) -> Any:
    """`dot_general`: batch axes, then those of x and those of y that are not contracted."""
    (contracted_x, contracted_y), (batch_x, batch_y) = params["dimension_numbers"]
    free_x, free_y = (
        [i for i in range(z.ndim) if i not in (*contracted, *batch)]
        for z, contracted, batch in ((x, contracted_x, batch_x), (y, contracted_y, batch_y))
    )
    batch = [x.shape[i] for i in batch_x]
    n = math.prod(x.shape[i] for i in contracted_x)
    rows, columns = [x.shape[i] for i in free_x], [y.shape[i] for i in free_y]
    left = x.transpose([*batch_x, *free_x, *contracted_x]).reshape(*batch, math.prod(rows), n)
    right = y.transpose([*batch_y, *contracted_y, *free_y]).reshape(*batch, n, math.prod(columns))
    return np.matmul(left, right).reshape([*batch, *rows, *columns])


RULES: dict[str, Callable[..., Any]] = {
    **{
        name: _elementwise(function)
        for name, function in {
            "abs": np.abs,
            "add": np.add,
            "add_any": np.add,
            "and": np.bitwise_and,
            "ceil": np.ceil,
            "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
            "copy": np.array,
            "copy_p": np.array,
            "cos": np.cos,
            "eq": np.equal,
            "exp": np.exp,
            "exp2": np.exp2,
            "expm1": np.expm1,
            "floor": np.floor,
            "ge": np.greater_equal,
            "gt": np.greater,
            "is_finite": np.isfinite,
            "le": np.less_equal,
            "log": np.log,
            "log1p": np.log1p,
            "log2": np.log2,
            "logistic": lambda x: 1.0 / (1.0 + np.exp(-x)),
            "lt": np.less,
            "max": np.maximum,
            "min": np.minimum,
            "mul": np.multiply,
            "name": np.asarray,
            "ne": np.not_equal,
            "neg": np.negative,
            "not": np.invert,
            "one_minus_square": lambda x: (1.0 - x) * (1.0 + x),
            "or": np.bitwise_or,
            "rsqrt": lambda x: 1.0 / np.sqrt(x),
            "sign": np.sign,
            "sin": np.sin,
            "sqrt": np.sqrt,
            "square": np.square,
            "stop_gradient": np.asarray,
            "sub": np.subtract,
            "tanh": np.tanh,
        }.items()
    },
    "argmax": _place(np.argmax),
    "argmin": _place(np.argmin),
    "bitcast_convert_type": _bits,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
    "convert_element_type": _convert,
    "cummax": _accumulated(np.maximum.accumulate),
    "cummin": _accumulated(np.minimum.accumulate),
    "cumsum": _accumulated(np.cumsum),
    "div": _divide,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": lambda params, x: np.expand_dims(x, params["dimensions"]),
    "integer_pow": lambda params, x: np.asarray(x ** params["y"]),
    "iota": _iota,
    "pad": _pad,
    "reduce_and": _reduced(np.all, boolean=True),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_or": _reduced(np.any, boolean=True),
    "reduce_sum": _reduced(np.sum),
    "reshape": _reshape,
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "scatter": _scattered(lax.scatter),
    "scatter-add": _scattered(lax.scatter_add),
    "select_n": _select,
    "slice": _slice,
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
}
