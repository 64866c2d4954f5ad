"""What the folder of one run is bound to, so that no result is reported under other settings.

    <run>/run.json    settings, weights, data, seed and bound that the run is one of

Its part `trained` decides the parameters, its part `shown` only what is made of them at the end.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_jax.errors import UsageError
from lm_jax.run import processes
from lm_jax.run.config import config_difference, to_plain
from lm_jax.run.files import read_json, storage_error, write_json

RUN = "run.json"


def claim(
    folder: Path,
    *,
    trained: Mapping[str, Any],
    shown: Mapping[str, Any],
    result: str,
    force: bool,
) -> bool:
    """Binds a run's folder to what it is a run of, and returns whether its result is of that.

    Where only `shown` has changed, the result is made again from the last checkpoint.

    Args:
      folder: of the run, made if need be.
      trained: what decides its parameters.
      shown: what decides the rest.
      result: name of the file that is there once a run is whole.
      force: set a run of other `trained` aside, under a name of its own, in place of refusing.

    Raises:
      UsageError: the folder holds another run.
      StorageError: it cannot be written.
    """
    wanted = {"trained": to_plain(trained), "shown": to_plain(shown)}
    return bool(processes.on_first(lambda: _claim(folder, wanted, result, force)))


def _claim(folder: Path, wanted: dict[str, Any], result: str, force: bool) -> bool:
    file = folder / RUN
    if folder.exists() and any(folder.iterdir()):
        stored = read_json(file) if file.exists() else {"trained": {}, "shown": {}}
        if changes := config_difference(stored["trained"], wanted["trained"]):
            if not force:
                raise UsageError(
                    f"{folder} holds a run with {', '.join(changes[:5])}; choose another "
                    "--workdir, or set that run aside with --resume=force"
                )
            _set_aside(folder, changes)
        elif config_difference(stored["shown"], wanted["shown"]):
            (folder / result).unlink(missing_ok=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    write_json(file, wanted)
    return (folder / result).exists()


def _set_aside(folder: Path, changes: list[str]) -> None:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.replaced_{number}")).exists():
        number += 1
    folder.rename(aside)
    processes.note(
        f"{folder} was trained with {', '.join(changes[:5])}; set aside as {aside.name}, and "
        "trained again"
    )
