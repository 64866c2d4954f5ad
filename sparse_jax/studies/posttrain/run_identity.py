"""Binds the folder of a run to its settings, so that no result is reported under others.

<run>/run.json    settings, weights, data, seed and bound of the run (`results.RunIdentity`)
"""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
from typing import Any

from lm_jax.errors import UsageError
from lm_jax.run import processes
from lm_jax.run.config import config_difference, to_plain
from lm_jax.run.files import make_folder, write_json
from lm_jax.run.identity import is_same
from lm_jax.run.results import load_result
from sparse_jax.studies.posttrain.results import RunIdentity

RUN = "run.json"
# The setting that identifies a model (`lm_jax.run.identity`).
BASE = "base_sha256"


def claim_folder(
    folder: Path,
    *,
    trained: Mapping[str, Any],
    shown: Mapping[str, Any],
    result: str,
    force: bool,
) -> bool:
    """Binds a folder to one run, and returns whether the result of that run is there.

    Where only `shown` has changed, the result is computed again from the last checkpoint.

    Args:
      folder: folder of the run; created if need be.
      trained: what decides the parameters.
      shown: what decides only the report and the export.
      result: name of the file that is written last, once the run is complete.
      force: rename the folder of a run with another `trained` instead of refusing it.

    Raises:
      UsageError: the folder belongs to another run.
      CorruptError: its `run.json` is damaged.
      StorageError: it cannot be written.
    """
    identity = RunIdentity(to_plain(trained), to_plain(shown))
    return bool(processes.on_first(lambda: _claim(folder, identity, result, force)))


def _claim(folder: Path, identity: RunIdentity, result: str, force: bool) -> bool:
    file = folder / RUN
    if folder.exists() and any(folder.iterdir()):
        stored = load_result(file, RunIdentity) if file.exists() else RunIdentity({}, {})
        kept = _with_recorded_base(stored, identity, file)
        if changes := config_difference(stored.trained, kept.trained):
            if not force:
                raise UsageError(
                    f"{folder} holds a run with {', '.join(changes[:5])}; choose another "
                    "--workdir, or set that run aside with --resume=force"
                )
            _set_aside(folder, changes)
        else:
            identity = kept
            if config_difference(stored.shown, identity.shown):
                (folder / result).unlink(missing_ok=True)
    make_folder(folder, parents=True)
    write_json(file, identity)
    return (folder / result).exists()


def _with_recorded_base(stored: RunIdentity, identity: RunIdentity, file: Path) -> RunIdentity:
    """The identity with the base as it was recorded, if it is the same one.

    A run that recorded the weights alone never gets a configuration and a tokenizer that are not
    known to be those of its training.
    """
    before, now = stored.trained.get(BASE), identity.trained.get(BASE)
    if before and now and is_same(before, now, where=file):
        return dataclasses.replace(identity, trained={**identity.trained, BASE: before})
    return identity


def _set_aside(folder: Path, changes: list[str]) -> None:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.replaced_{number}")).exists():
        number += 1
    folder.rename(aside)
    processes.note(
        f"{folder} was trained with {', '.join(changes[:5])}; set aside as {aside.name}, and "
        "trained again"
    )
