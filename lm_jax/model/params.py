"""Parameters are nested dicts of arrays, declared once as a tree of `ParamSpec`.

The same tree gives initial values, shardings, counts and the check of a loaded checkpoint, so that
no shape is written twice. Axes are named by the letters of the dimension key; `sharding.py` maps
letters to mesh axes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any
import zlib

from flax import traverse_util
import jax
import jax.numpy as jnp

from lm_jax.errors import BadInputError

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
ParamTree = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One array: its shape, the letter of each axis, and `init(key, shape, dtype)`."""

    shape: tuple[int, ...]
    axes: str
    init: Initializer = jax.nn.initializers.normal(0.02)

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes!r} differ in length")

    def stacked(self, num_layers: int) -> "ParamSpec":
        """The same array once per layer: a leading axis L, each layer initialised alone."""

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            keys = jax.random.split(key, shape[0])
            return jax.vmap(lambda k: self.init(k, shape[1:], dtype))(keys)

        return ParamSpec((num_layers, *self.shape), "L" + self.axes, init)


def zeros(shape: tuple[int, ...], axes: str) -> ParamSpec:
    """A parameter that starts at zero."""
    return ParamSpec(shape, axes, jax.nn.initializers.zeros)


def constant(value: float, shape: tuple[int, ...], axes: str) -> ParamSpec:
    """A parameter that starts at `value` everywhere."""
    return ParamSpec(shape, axes, jax.nn.initializers.constant(value))


@dataclasses.dataclass(frozen=True)
class ByLayer(ParamSpec):
    """A parameter that starts at `values[l]` everywhere in layer l."""

    values: tuple[float, ...] = ()

    def stacked(self, num_layers: int) -> ParamSpec:
        if len(self.values) != num_layers:
            raise ValueError(f"{len(self.values)} values for {num_layers} layers")

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            values = jnp.asarray(self.values, dtype).reshape(-1, *[1] * len(self.shape))
            return jnp.broadcast_to(values, shape)

        return ParamSpec((num_layers, *self.shape), "L" + self.axes, init)


def by_layer(values: Sequence[float], shape: tuple[int, ...], axes: str) -> ParamSpec:
    """A parameter that starts at a different constant in every layer."""
    return ByLayer(shape, axes, values=tuple(values))


def is_spec(x: Any) -> bool:
    """True for a leaf of a spec tree."""
    return isinstance(x, ParamSpec)


def tree_map(fn: Callable[..., Any], spec: ParamTree, *rest: Any) -> Any:
    """`jax.tree.map` over a tree whose leaves are `ParamSpec`."""
    return jax.tree.map(fn, spec, *rest, is_leaf=is_spec)


def leaves(spec: ParamTree) -> Iterator[tuple[str, ParamSpec]]:
    """Pairs of `blocks/mixer/q`-like path and spec, in the order of the flattened tree."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec, is_leaf=is_spec):
        yield path_name(path), leaf


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as `blocks/mixer/q`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by `blocks/mixer/q`-like path."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def tree_from_paths(leaves_by_path: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `by_path`."""
    return traverse_util.unflatten_dict(dict(leaves_by_path), sep="/")


def init(key: jax.Array, spec: ParamTree, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Draws every parameter; a parameter's value depends on the key and its path alone."""

    def draw(path: tuple[Any, ...], leaf: ParamSpec) -> jax.Array:
        name_key = jax.random.fold_in(key, zlib.crc32(path_name(path).encode()))
        return leaf.init(name_key, leaf.shape, dtype)

    return jax.tree_util.tree_map_with_path(draw, spec, is_leaf=is_spec)


def abstract(spec: ParamTree, dtype: Any = jnp.float32) -> Any:
    """The tree of `jax.ShapeDtypeStruct` that `init` would fill."""
    return tree_map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), spec)


def count(spec: ParamTree) -> int:
    """The number of scalars in the tree."""
    return sum(math.prod(s.shape) for _, s in leaves(spec))


def check(params: Any, spec: ParamTree) -> None:
    """Raises one error that lists every missing, unknown or misshapen parameter.

    Raises:
      BadInputError: if `params` is not exactly the tree that `spec` declares.
    """
    want = dict(leaves(spec))
    have = by_path(params)
    problems = [f"missing {name}" for name in want if name not in have]
    problems += [f"unknown {name}" for name in have if name not in want]
    problems += [
        f"{name} has shape {tuple(have[name].shape)}, not {want[name].shape} ({want[name].axes})"
        for name in want
        if name in have and tuple(have[name].shape) != want[name].shape
    ]
    if problems:
        raise BadInputError("parameters do not fit the config: " + "; ".join(problems))
