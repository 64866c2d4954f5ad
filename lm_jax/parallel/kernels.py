"""Kernels on a mesh: each device computes its own batch rows and heads.

The compiler partitions its own operations, but a Pallas kernel is one opaque call to it, for which
it gathers every argument whole on every device. So a mixer calls its kernel by `shard_kernel`, and
a function that is compiled for a mesh is traced by `under_mesh`. Without a mesh, or on one device,
both do nothing.
"""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from lm_jax.parallel import sharding

SplitAxes = Mapping[str, tuple[str, ...]]


def under_mesh(fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Wraps `fn` for `jax.jit`, so that `shard_kernel` finds the mesh while it is traced."""

    @functools.wraps(fn)
    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(*args)

    return traced


def shard_kernel(
    run: Callable[..., Any], args: tuple[Any, ...], axes: tuple[Any, ...], out_axes: Any, split: str
) -> Any:
    """`run(first, *args)`, each device on its part of the arguments.

    Batch rows are split over data and fsdp, all other axes of `split` over tensor: they must be
    independent of each other in `run`, up to sums in its gradient. Rows that do not divide stay
    whole, and so do the others unless every one of them divides.

    Args:
      run: a function of arrays; `first` maps each letter of `split` to the global index of the
        first element of this device.
      args: the arrays, also in trees; None where one is missing.
      axes: the letters of the axes of each of `args`; "" for one that goes whole to every device.
      out_axes: the same for the result.
      split: the letters of independent axes, of which one is B.

    On a mesh without the axes of `lm_jax.parallel.sharding`, or inside `jax.shard_map`, nothing is
    split.

    Raises:
      ValueError: an array's number of axes is not its number of letters.
    """
    sizes: dict[str, int] = {}

    def measure(letters: str, x: Any) -> None:
        if letters:
            sizes.update(zip(letters, x.shape, strict=True))

    jax.tree.map(measure, axes, args)
    mesh_axes = split_axes({name: sizes[name] for name in split})
    if not mesh_axes:
        return run(dict.fromkeys(split, 0), *args)

    def spec(letters: str) -> PartitionSpec:
        return PartitionSpec(*(mesh_axes.get(letter) for letter in letters))

    def shard(*parts: Any) -> Any:
        here: dict[str, Any] = dict.fromkeys(split, 0)
        for letter, names in mesh_axes.items():
            here[letter] = jax.lax.axis_index(names) * (sizes[letter] // jax.lax.axis_size(names))
        return run(here, *parts)

    return jax.shard_map(
        shard,
        in_specs=jax.tree.map(spec, axes),
        out_specs=jax.tree.map(spec, out_axes),
        check_vma=False,
    )(*args)


def split_axes(sizes: Mapping[str, int]) -> SplitAxes:
    """The axes of the mesh, traced with `under_mesh`, that arrays of these sizes are split over.

    A letter is missing where nothing splits it. Batch rows B go over data and fsdp, all others over
    tensor, as in `shard_kernel`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ours = set(sharding.AXES) <= set(mesh.axis_names)
    if not ours or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return {}
    groups = {sharding.BATCH[0]: "B", ("tensor",): "".join(sizes).replace("B", "")}
    results: dict[str, tuple[str, ...]] = {}
    for names, letters in groups.items():
        ways = math.prod(mesh.shape[name] for name in names)
        if ways > 1 and all(sizes[letter] % ways == 0 for letter in letters):
            results |= dict.fromkeys(letters, names)
    return results
