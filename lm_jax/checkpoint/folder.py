"""A verified checkpoint folder: orbax arrays under a manifest of sha256 digests.

Orbax commits a save in one step, but does not notice a flipped bit in what it stored. So a
checkpoint is a folder that counts only when its MANIFEST.json, written last, agrees with every
file:

    arrays/          the parameters, as orbax v1 stores them, in the sharding they had
    ...              what the caller adds: a config, a tokenizer
    MANIFEST.json    every file with size and sha256, every array with shape and dtype, the caller's
                     notes, and a digest of the manifest itself

The folder is written under another name, synced and renamed (`new_folder`).
"""

from collections.abc import Callable, Mapping
import contextlib
import math
import os
from pathlib import Path
from typing import Any

from lm_jax.errors import BadInputError
from lm_jax.model import params as params_lib
from lm_jax.run import processes
from lm_jax.run.files import (
    ManifestFormat,
    draft_of,
    new_folder,
    read_manifest,
    verify_manifest,
    write_manifest,
)

MANIFEST = "MANIFEST.json"
ARRAYS = "arrays"
_KIND = ManifestFormat(
    name=MANIFEST,
    version=1,
    content="whole checkpoint",
    remedy="name one, or save it again",
    outdated="convert the model again with this version",
    damaged="restore the checkpoint from a copy, or make it again",
)


def save_checkpoint(
    path: str | os.PathLike[str],
    params: Mapping[str, Any],
    *,
    notes: Mapping[str, Any] | None = None,
    beside: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Writes a new folder with `params` and returns its manifest.

    Args:
      path: the folder, which must not exist; its parents are created.
      params: nested dicts of arrays.
      notes: further JSON for the manifest: versions, hashes of the source, the mesh.
      beside: function that writes further files into its argument, the folder; the manifest lists
        them too.

    Raises:
      BadInputError: `path` exists.
      StorageError: the folder cannot be written; then `path` does not exist.
    """
    from orbax.checkpoint import v1 as ocp

    path = Path(path).absolute()
    arrays = {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        for name, leaf in params_lib.by_path(params).items()
    }
    state: Any = dict(params)
    draft = draft_of(path)

    def complete() -> None:
        if beside is not None:
            beside(draft)
        content = {
            "notes": dict(notes or {}),
            "parameters": sum(math.prod(entry["shape"]) for entry in arrays.values()),
            "arrays": arrays,
        }
        write_manifest(draft, _KIND, content)
        drafted.close()

    # Process 0 creates and renames the folder; all processes write the arrays.
    with contextlib.ExitStack() as drafted:
        processes.enter_on_first(drafted, new_folder(path))
        ocp.save(str(draft / ARRAYS), state)
        processes.on_first(complete)
    return read_checkpoint_manifest(path)


def read_checkpoint_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint, whose files are not read; errors of `verify_checkpoint`."""
    return read_manifest(Path(path), _KIND)


def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Compares every file with the manifest, and returns the manifest.

    Raises:
      BadInputError: if there is no manifest.
      CorruptError: naming the first file that is missing, truncated or changed.
    """
    return verify_manifest(Path(path), _KIND)


def load_checkpoint(
    path: str | os.PathLike[str], target: Any, *, cast: bool = False
) -> dict[str, Any]:
    """Loads verified parameters into the shapes, dtypes and shardings of `target`.

    Args:
      path: a folder of `save_checkpoint`.
      target: a tree of `jax.ShapeDtypeStruct`, as `sharding.abstract` makes.
      cast: whether to convert to the dtypes of `target`; else another dtype is refused.

    Raises:
      BadInputError: there is no checkpoint, or its arrays are not those of `target` (all
        differences are listed).
      CorruptError: a file does not match the manifest.
    """
    return load_arrays(Path(path), verify_checkpoint(path), target, cast=cast)


def load_arrays(
    path: Path,
    manifest: Mapping[str, Any],
    target: Any,
    *,
    cast: bool = False,
    part: str | None = None,
) -> dict[str, Any]:
    """`load_checkpoint` for a folder that was verified to have this manifest.

    `part` names the top entry of the stored tree that `target` stands for; no other is read.
    """
    from orbax.checkpoint import v1 as ocp

    stored, tree, context = manifest["arrays"], target, ocp.Context()
    if part is not None:
        head = f"{part}/"
        stored = {
            name.removeprefix(head): entry
            for name, entry in stored.items()
            if name.startswith(head)
        }
        tree = {part: target}
        context.pytree.loading.partial_load = True
    _check_arrays(path, stored, params_lib.by_path(target), cast)
    with context:
        loaded: Any = ocp.load(str(path.absolute() / ARRAYS), tree)
    return loaded if part is None else loaded[part]


def _check_arrays(
    path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], cast: bool
) -> None:
    """Checks names, shapes and dtypes: orbax converts dtypes silently, and its errors are long."""
    problems = [f"missing {name}" for name in wanted if name not in stored]
    problems += [f"unused {name}" for name in stored if name not in wanted]
    for name in wanted.keys() & stored.keys():
        shape, dtype = tuple(stored[name]["shape"]), stored[name]["dtype"]
        if shape != wanted[name].shape:
            problems.append(f"{name} has shape {shape}, not {wanted[name].shape}")
        if dtype != str(wanted[name].dtype) and not cast:
            problems.append(
                f"{name} is {dtype}, not {wanted[name].dtype}; pass cast=True to convert"
            )
    if problems:
        listed = "; ".join(sorted(problems)[:20])
        raise BadInputError(
            f"{path} does not hold the parameters asked for ({len(problems)} differences): {listed}"
        )


def array_files(path: Path, manifest: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files that hold the parameters."""
    return tuple(path / name for name in manifest["files"] if name.startswith(f"{ARRAYS}/"))
