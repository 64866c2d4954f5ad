"""Local tier of checkpoints: each process keeps its own shards on a disk of its node.

    LOCAL/<run>/process_3/step_000120/    shards.safetensors, MANIFEST.json

A save waits for no other process and for no shared file system, so it can be frequent. A run
resumes from the newest step that every process holds, whole and of the same run, settings, data and
split, if that is newer than the newest shared checkpoint (`manager`); otherwise from that one.

The run is told by a random id in its work folder: a folder that was deleted and begun again has
another one, and starts at step 0. Folders of runs that began before there were ids take every step.
"""

from collections.abc import Mapping
import hashlib
import logging
from pathlib import Path
import shutil
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from lm_jax.checkpoint.manager import (
    Identity,
    Restored,
    Stepped,
    clean_drafts,
    saved_steps,
    step_folder,
)
from lm_jax.errors import BadInputError, CorruptError
from lm_jax.model import params as params_lib
from lm_jax.run import processes
from lm_jax.run.files import (
    ManifestFormat,
    new_folder,
    to_jsonable,
    verify_manifest,
    write_manifest,
)

_KEEP = 2
_SHARDS = "shards.safetensors"
_KIND = ManifestFormat(
    name="MANIFEST.json",
    version=1,
    content="whole local checkpoint",
    remedy="remove it",
    outdated="remove it",
    damaged="remove it",
)
_NONE = -1
_log = logging.getLogger(__name__)


def own_folder(root: Path, run: Path) -> Path:
    """The folder of this process below `root`, which runs and the processes of a node may share."""
    name = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:16]
    return root.absolute() / name / f"process_{jax.process_index()}"


def save(
    folder: Path,
    state: Stepped,
    *,
    identity: Identity,
    progress: Mapping[str, Any],
    run: str | None = None,
) -> None:
    """Saves this process's shards of the state, and removes all but the last two steps.

    Args:
      folder: this process's folder of shards (`own_folder`).
      state: the arrays on the mesh, with their step.
      identity: the settings and data that the checkpoint is bound to.
      progress: JSON that `restore` returns with the state.
      run: id of the run.

    Raises:
      StorageError: it could not be written; those before it are unchanged.
    """
    # As bytes: numpy has no bfloat16, and the writer of safetensors does not honour strides.
    shards = {
        _name(path, array, shard.index): np.frombuffer(np.asarray(shard.data).tobytes(), np.uint8)
        for path, array in params_lib.by_path(state).items()
        for shard in array.addressable_shards
    }
    with new_folder(step_folder(folder, int(state.step))) as draft:
        save_file(shards, draft / _SHARDS)
        notes = identity.notes() | {"progress": dict(progress), "run": run}
        write_manifest(draft, _KIND, {"notes": notes, "shards": sorted(shards)})
    for step in saved_steps(folder)[:-_KEEP]:
        shutil.rmtree(step_folder(folder, step))


def restore(
    folder: Path,
    target: Stepped,
    identity: Identity,
    *,
    newer_than: int,
    up_to: int | None = None,
    run: str | None = None,
) -> Restored | None:
    """Loads the newest step that all processes hold; None if there is none. All must call it.

    A step that is damaged, or of another run, other settings, data, devices or processes, counts as
    missing, and the log says so. All others than the one loaded are removed, so the shared one must
    be known to be whole and of this run (`manager.newest`).

    Args:
      folder: this process's folder of shards (`own_folder`).
      target: `StateLayout.abstract`, the shapes, dtypes and shardings wanted.
      identity: what the step must be bound to, with the same mesh and packages.
      newer_than: the step must be above this one.
      up_to: the highest step to take; None for any.
      run: the id that the step must have been saved with; None for any.
    """
    clean_drafts(folder)
    wanted = params_lib.by_path(target)
    names = {
        _name(path, array, index)
        for path, array in wanted.items()
        for index in array.sharding.addressable_devices_indices_map(array.shape).values()
    }
    bound = to_jsonable(identity.notes()) | ({} if run is None else {"run": run})
    notes = {}
    for step in saved_steps(folder):
        if step <= newer_than or (up_to is not None and step > up_to):
            continue
        if found := _read_notes(step_folder(folder, step), names, bound):
            notes[step] = found
    steps = [*[_NONE] * _KEEP, *sorted(notes)][-_KEEP:]
    held = processes.gather(np.array(steps, np.int32)).reshape(-1, _KEEP).tolist()
    step = max(set.intersection(*map(set, held)) - {_NONE}, default=_NONE)
    # The run goes on from another step, and will save those after it again.
    for other in {*saved_steps(folder)} - {step}:
        shutil.rmtree(step_folder(folder, other))
    if step == _NONE:
        return None
    shards = load_file(step_folder(folder, step) / _SHARDS)

    def leaf(path: str, array: jax.ShapeDtypeStruct) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            flat = shards[_name(path, array, index)].view(array.dtype)
            return flat.reshape(array.sharding.shard_shape(array.shape))

        return jax.make_array_from_callback(array.shape, array.sharding, read)

    leaves = [leaf(path, array) for path, array in wanted.items()]
    return Restored(jax.tree.unflatten(jax.tree.structure(target), leaves), notes[step])


def remove(folder: Path) -> None:
    """Removes the steps of this process; for a run that is finished."""
    shutil.rmtree(folder, ignore_errors=True)


def _name(path: str, array: Any, index: tuple[slice, ...]) -> str:
    """A shard's name: leaf, dtype, and where in the leaf it lies, as `params/w float32 0:8,4:8`."""
    spans = (each.indices(size)[:2] for each, size in zip(index, array.shape, strict=True))
    return f"{path} {array.dtype} " + ",".join(f"{first}:{end}" for first, end in spans)


def _read_notes(path: Path, names: set[str], bound: dict[str, Any]) -> dict[str, Any] | None:
    """The notes of a step that is whole and has these shards and notes; None otherwise."""
    try:
        manifest = verify_manifest(path, _KIND)
    except (BadInputError, CorruptError) as error:
        _log.warning("%s; it is not used", error)
        return None
    if set(manifest["shards"]) == names and manifest["notes"].items() >= bound.items():
        return manifest["notes"]
    _log.warning(
        "%s is of another run, other settings, data, devices or processes; it is not used", path
    )
    return None
