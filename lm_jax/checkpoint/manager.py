"""Checkpoint manager of a training run: a folder per step, whole, verified, bound to its run.

    checkpoints/step_000120/    arrays of the TrainState, MANIFEST.json (`folder`)
    checkpoints/step_000140/

The manifest's notes hold what a run must agree with to resume (config, data), what it should (mesh,
versions), and what it needs besides arrays: the next batch, and the results of its evaluations.

A save is written under another name, synced and renamed, so a killed one leaves a draft, which the
next start removes. A folder that has its name but does not verify was damaged later: an error names
it and stops the run. Where the user allows it, the run goes back by one checkpoint instead, and the
damaged folder is renamed, not deleted.
"""

from collections.abc import Mapping
import dataclasses
import os
from pathlib import Path
import re
import shutil
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from lm_jax.checkpoint.folder import (
    load_arrays,
    read_checkpoint_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.model import params as params_lib
from lm_jax.run import processes
from lm_jax.run.config import config_difference, config_hash
from lm_jax.run.identity import difference

FOLDER = "checkpoints"
_NAME = re.compile(r"step_(\d{6,})")
_NONE = -1


class Stepped(Protocol):
    """A pytree of arrays, of which `step` counts the updates: `lm_jax.train.state.TrainState`."""

    step: Any


@dataclasses.dataclass(frozen=True)
class Identity:
    """The settings, data and base weights that a checkpoint belongs to.

    `config` holds the plain settings that decide the numbers (model, optimizer, seed),
    `fingerprint` stands for the data, and `base_sha256` for the model that adapters lie over or
    that training began with (`ModelIdentity.text`): another one is refused. Another
    `mesh` or another version of a package is allowed and printed.
    """

    config: Mapping[str, Any]
    fingerprint: str
    mesh: Mapping[str, int]
    packages: Mapping[str, str]
    base_sha256: str | None = None

    def notes(self) -> dict[str, Any]:
        """The identity as JSON, with the hash of the config."""
        return dataclasses.asdict(self) | {"config_hash": config_hash(self.config)}


@dataclasses.dataclass(frozen=True)
class Restored:
    """A state in its shardings, and the notes that were saved with it."""

    state: Any
    notes: Mapping[str, Any]


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """The size of every axis of the mesh."""
    return {str(name): int(size) for name, size in mesh.shape.items()}


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` updates is."""
    return folder / f"step_{step:06d}"


def saved_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending; the checkpoints are not verified."""
    matches = [_NAME.fullmatch(path.name) for path in folder.glob("step_*")]
    return sorted(int(match[1]) for match in matches if match)


def save(
    folder: Path,
    state: Stepped,
    *,
    identity: Identity,
    progress: Mapping[str, Any],
    keep: int,
    best: int | None,
) -> Path:
    """Saves the state, and only then removes checkpoints that need not stay.

    Args:
      folder: the run's checkpoint folder.
      state: a copy is on disk when this returns.
      identity: the settings and data that the checkpoint is bound to.
      progress: JSON that `load` returns with the state.
      keep: how many of the last checkpoints stay.
      best: a step whose checkpoint stays as well.

    Raises:
      StorageError: the checkpoint could not be written; those before it are unchanged.
    """
    step = int(state.step)
    path = step_folder(folder, step)
    # Batch k trains step k, so the position in the data is one number for any count of processes.
    notes = {"step": step, "next_batch": step, "progress": dict(progress)} | identity.notes()
    # Dicts in place of the optimizer's tuples: orbax would store those under names of its own.
    arrays = params_lib.tree_from_paths(params_lib.by_path(state))
    save_checkpoint(path, arrays, notes=notes)
    if processes.is_first():
        stay = {*saved_steps(folder)[-keep:], best}
        for old in saved_steps(folder):
            if old not in stay:
                _remove(step_folder(folder, old))
    return path


def _remove(path: Path) -> None:
    # Renamed first: half a folder under its own name would pass for a damaged checkpoint.
    doomed = path.with_name(f".{path.name}.tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)


def clean_drafts(folder: Path) -> None:
    """Removes what a killed save or removal left; call it under the lock of the run."""
    for draft in folder.glob(".step_*.tmp"):
        shutil.rmtree(draft)


def newest(folder: Path, identity: Identity, *, allow_fallback: bool = False) -> int | None:
    """The step of the newest checkpoint, which is whole and belongs to the run; None without one.

    Args:
      folder: the run's checkpoint folder.
      identity: the settings and data that the checkpoint must be bound to.
      allow_fallback: whether a damaged newest checkpoint is set aside and the one before it taken.

    Raises:
      CorruptError: a checkpoint is damaged; the file is named.
      UsageError: it belongs to another config or other data; what differs is listed.
      BadInputError: it was trained over other weights.
    """
    step = processes.on_first(lambda: _newest(folder, allow_fallback))
    if step == _NONE:
        return None
    path = step_folder(folder, step)
    _check_identity(path, read_checkpoint_manifest(path)["notes"], identity)
    return step


def load(folder: Path, step: int, target: Stepped) -> Restored:
    """Loads a checkpoint that `newest` verified.

    Args:
      folder: the run's checkpoint folder.
      step: the step that `newest` returned.
      target: `StateLayout.abstract`, the shapes, dtypes and shardings wanted.

    Raises:
      BadInputError: its arrays are not those of `target`.
    """
    path = step_folder(folder, step)
    manifest = read_checkpoint_manifest(path)
    wanted = params_lib.by_path(target)
    loaded = load_arrays(path, manifest, params_lib.tree_from_paths(wanted))
    leaves = params_lib.by_path(loaded)
    state = jax.tree.unflatten(jax.tree.structure(target), [leaves[path] for path in wanted])
    return Restored(state, manifest["notes"])


def _newest(folder: Path, allow_fallback: bool) -> int:
    """The step of the newest checkpoint, which is whole, or `_NONE`."""
    clean_drafts(folder)
    steps = saved_steps(folder)
    if not steps:
        return _NONE
    newest = step_folder(folder, steps[-1])
    try:
        _verify(newest, steps[-1])
        return steps[-1]
    except CorruptError as error:
        if len(steps) == 1:
            raise
        before = step_folder(folder, steps[-2])
        if not allow_fallback:
            raise CorruptError(
                f"{error}; or give --config.allow_fallback to continue from {before.name}"
            ) from error
        _verify(before, steps[-2])
        aside = newest.with_name(f"{newest.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        newest.rename(aside)
        processes.note(f"{error}; set aside as {aside.name}; continuing from {before.name}")
        return steps[-2]


def _verify(path: Path, step: int) -> dict[str, Any]:
    try:
        manifest = verify_checkpoint(path)
    except BadInputError as error:
        # The folder took its name after the manifest was written: without one it lost it.
        raise CorruptError(str(error)) from error
    if manifest["notes"].get("step") != step:
        raise CorruptError(
            f"{path} holds step {manifest['notes'].get('step')}; give the folder its own name back"
        )
    return manifest


def load_params(folder: str | os.PathLike[str], step: int, target: Any) -> dict[str, Any]:
    """Loads the parameters alone of one checkpoint, for reading a run after it ended.

    Args:
      folder: the run's checkpoint folder.
      step: the step of the checkpoint.
      target: a tree of `jax.ShapeDtypeStruct`, as `sharding.abstract` makes.

    Raises:
      BadInputError: there is no such checkpoint, or it holds other parameters.
      CorruptError: it is damaged; the file is named.
    """
    path = step_folder(Path(folder), step)
    if not path.is_dir():
        known = ", ".join(map(str, saved_steps(Path(folder)))) or "none"
        raise BadInputError(f"{path} is not there; saved steps: {known}")
    return load_arrays(path, _verify(path, step), target, part="params")


def _check_identity(path: Path, stored: Mapping[str, Any], identity: Identity) -> None:
    before, now = stored.get("base_sha256"), identity.base_sha256
    if change := difference(before or "", now or "", where=path):
        raise BadInputError(
            f"{path} was trained over a base model with {change}; put that model back, or choose "
            "another --workdir"
        )
    problems = config_difference(stored["config"], identity.config)
    remedy = "go back to those settings, or choose another --workdir"
    before, now = stored["fingerprint"].split(), identity.fingerprint.split()
    if before != now:
        # A fingerprint is made of words, of which only some differ.
        had, has = ([w for w in a if w not in b] for a, b in ((before, now), (now, before)))
        instead = f"{' '.join(had)}, not" if had else "without"
        problems.append(f"data {instead} {' '.join(has)}")
        if any(word.startswith("order=") for word in has):
            remedy = (
                "the installed version draws the examples in another order, so choose another "
                "--workdir, or finish this run with the version that began it"
            )
    if problems:
        raise UsageError(f"{path} was trained with {', '.join(problems)}; {remedy}")
    changed = [
        f"{name} {phrase.removeprefix('config.')}"
        for name in ("mesh", "packages")
        for phrase in config_difference(stored[name], getattr(identity, name))
    ]
    if changed:
        processes.note(
            f"{path.name} was saved with {', '.join(changed)}: the run continues, close to an "
            "uninterrupted one but not bit for bit"
        )
