"""Device mesh and sharding rules: which mesh axis each axis of each array is split over.

The mesh has the axes `data`, `fsdp` and `tensor`. A batch is split over data and fsdp. Parameters
are split over fsdp along D (Zhao et al., 2023), over tensor along heads, MLP units and vocabulary
(Shoeybi et al., 2019), and replicated over data. An axis whose length the mesh does not divide
stays whole. The decoder mentions no mesh: `jax.jit` with these shardings suffices, except for
kernels, which the compiler cannot split (`lm_jax.parallel.kernels`).
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamSpec, ParamTree

AXES = ("data", "fsdp", "tensor")

RULES: Mapping[str, str] = {
    "D": "fsdp",
    "N": "tensor",
    "K": "tensor",
    "F": "tensor",
    "I": "tensor",
    "V": "tensor",
    "R": "tensor",
}

BATCH = PartitionSpec(("data", "fsdp"))


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over the given devices (default: all); one size may be -1: all that are left.

    Raises:
      UsageError: if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    known = int(np.prod([size for size in sizes.values() if size != -1]))
    if len(free) == 1 and known > 0 and len(devices) % known == 0:
        sizes[free[0]] = len(devices) // known
    if min(sizes.values()) < 1 or int(np.prod(list(sizes.values()))) != len(devices):
        raise UsageError(
            f"mesh: data = {data}, fsdp = {fsdp}, tensor = {tensor} do not multiply to the "
            f"{len(devices)} devices; set one of them to -1"
        )
    # Explicit axes would make a plain embedding lookup raise.
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def partition(mesh: Mesh | AbstractMesh, spec: ParamSpec) -> PartitionSpec:
    """The mesh axis of every axis of a parameter, None where it stays whole.

    Of two axes of one parameter with the same mesh axis, the first that divides gets it.
    """
    placed: list[str | None] = []
    for letter, size in zip(spec.axes, spec.shape, strict=True):
        name = RULES.get(letter)
        fits = name is not None and name not in placed and size % mesh.shape[name] == 0
        placed.append(name if fits else None)
    return PartitionSpec(*placed)


def named(mesh: Mesh, spec: ParamSpec) -> NamedSharding:
    """The sharding of one declared parameter."""
    return NamedSharding(mesh, partition(mesh, spec))


def param_shardings(mesh: Mesh, spec: ParamTree) -> Any:
    """The tree of shardings for a tree of specs; use it as `in_shardings` and `out_shardings`."""
    return params_lib.tree_map(lambda leaf: named(mesh, leaf), spec)


def abstract(spec: ParamTree, dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Any:
    """The tree of `jax.ShapeDtypeStruct` with its shardings; without a mesh, the default device."""
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def leaf(s: ParamSpec) -> jax.ShapeDtypeStruct:
        place = default if mesh is None else named(mesh, s)
        return jax.ShapeDtypeStruct(s.shape, dtype, sharding=place)

    return params_lib.tree_map(leaf, spec)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of any array whose first axis is the batch."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


@functools.lru_cache(maxsize=8)
def batch_share(mesh: Mesh) -> tuple[int, int]:
    """Which block of a batch's rows the devices of this process hold, out of how many blocks.

    (0, 1), all rows, where there is one process, or the rows of this one are not in one block.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    indices = batch_sharding(mesh).addressable_devices_indices_map((ways,)).values()
    held = sorted({row for index in indices if index for row in range(ways)[index[0]]})
    if held != list(range(held[0], held[-1] + 1)) or held[0] % len(held) or ways % len(held):
        return 0, 1
    return held[0] // len(held), ways // len(held)


def own_block(mesh: Mesh, batch_size: int) -> dict[str, int]:
    """Arguments by which `lm_jax.text.examples.Batches` reads the block of this process."""
    index, count = batch_share(mesh)
    return {"batch_size": batch_size, "process_index": index, "process_count": count}


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """Puts the host arrays of a batch on the mesh: of each, the block of `batch_share`.

    Raises:
      UsageError: if the batch does not divide over data and fsdp.
    """
    ways, place = mesh.shape["data"] * mesh.shape["fsdp"], batch_sharding(mesh)
    blocks = batch_share(mesh)[1]
    for leaf in jax.tree.leaves(batch):
        rows = leaf.shape[0] * blocks
        if rows % ways:
            raise UsageError(
                f"batch of {rows} does not divide over data x fsdp = {ways} devices; "
                f"make it a multiple of {ways}, or give those devices to tensor"
            )
    if jax.process_count() == 1:
        return jax.device_put(batch, place)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(
            place, x, (x.shape[0] * blocks, *x.shape[1:])
        ),
        batch,
    )


def fetch(tree: Any) -> Any:
    """Every array of a tree, whole, on this host; all processes must call it."""

    def whole(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(whole, tree)
