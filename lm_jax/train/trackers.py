"""Trackers: programs that show the numbers of a run by step, besides its parquet files.

Event files of TensorBoard are always written. `--track=wandb` adds Weights & Biases, which takes
its project, key and mode from its own environment; with WANDB_MODE=offline nothing is sent:

    pip install 'interpretable-attention-jax[wandb]'
    WANDB_PROJECT=prototypes iaj protot pretrain ... --track=wandb

`--track=trackio` adds Trackio, which keeps numbers on this machine, or in the Space that
TRACKIO_SPACE_ID names. Its project is that of TRACKIO_PROJECT, or `iaj`:

    pip install 'interpretable-attention-jax[trackio]'
    iaj protot pretrain ... --track=trackio
    trackio show --project iaj

`--track=csv` writes `tracked.csv`, a line `step,name,value` for every number.
"""

from collections.abc import Mapping
import csv
import importlib.util
import io
import os
from pathlib import Path
from typing import Any, Literal, Protocol

from lm_jax.errors import UsageError
from lm_jax.run.config import config_hash
from lm_jax.run.files import replace_file

EVENTS = "tensorboard"
CSV = "tracked.csv"
_CSV_HEADER = ["step", "name", "value"]
# Those that are packages of their own.
PACKAGES = ("wandb", "trackio")
Track = Literal["none", "wandb", "trackio", "csv"]


class Tracker(Protocol):
    """Where numbers by step go."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers by name; those of one step may come in parts."""
        ...

    def flush(self) -> None:
        """Writes everything added so far to disk."""
        ...

    def close(self) -> None:
        """Writes the rest and ends."""
        ...


class TensorBoard:
    """Event file of TensorBoard; events after the first `done` steps are purged when it opens."""

    def __init__(self, folder: Path, done: int) -> None:
        # Imported here, as every command reads this module for its flags.
        from tensorboardX import SummaryWriter

        events = folder / EVENTS
        # The package names a file by the second, and one of a run that began in it would be lost.
        count = len(list(events.iterdir())) if events.exists() else 0
        self._writer = SummaryWriter(
            str(events),
            purge_step=done + 1 if done else None,
            filename_suffix=f".{count}" if count else "",
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Logged:
    """A run of Weights & Biases or Trackio: one for a folder and its settings, when resumed too."""

    def __init__(self, track: Track, folder: Path, settings: Mapping[str, Any]) -> None:
        folder = folder.absolute()
        run_id = config_hash({"folder": str(folder), "settings": settings})[:16]
        name = f"{folder.parent.name}/{folder.name}"
        same: dict[str, Any] = {"config": dict(settings), "resume": "allow"}
        if track == "wandb":
            import wandb

            self._run = wandb.init(dir=str(folder), id=run_id, name=name, **same)
        else:
            import trackio

            # It knows a run by its name.
            project = os.environ.get("TRACKIO_PROJECT", "iaj")
            self._run = trackio.init(project, name=f"{name} {run_id[:8]}", embed=False, **same)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Does nothing: their own processes write what was added."""

    def close(self) -> None:
        self._run.finish()


class Csv:
    """A CSV file of numbers by step; lines after the first `done` steps are dropped as it opens."""

    def __init__(self, folder: Path, done: int) -> None:
        path, kept = folder / CSV, []
        if done and path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                lines = csv.reader(file)
                next(lines, None)
                # A kill may have cut the last line.
                kept = [line for line in lines if len(line) == 3 and int(line[0]) <= done]
        with replace_file(path) as file:
            text = io.StringIO(newline="")
            csv.writer(text).writerows([_CSV_HEADER, *kept])
            file.write(text.getvalue().encode())
        self._file = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        # Shortest digits that read back as the same number.
        self._writer.writerows((step, name, float(value)) for name, value in values.items())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def check(track: Track) -> None:
    """Raises `UsageError` if the package of a tracker is missing."""
    if track in PACKAGES and importlib.util.find_spec(track) is None:
        raise UsageError(
            f"--track={track}: {track} is missing; "
            f"pip install 'interpretable-attention-jax[{track}]'"
        )


def trackers(
    track: Track, folder: Path, done: int, settings: Mapping[str, Any]
) -> tuple[Tracker, ...]:
    """Opens the trackers of a run with these settings that has done `done` steps in this folder."""
    events = TensorBoard(folder, done)
    if track in PACKAGES:
        return (events, Logged(track, folder, settings))
    return (events, Csv(folder, done)) if track == "csv" else (events,)
