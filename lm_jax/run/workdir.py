"""Work folder of one run: locked, bound to one config, without partial files.

`open_workdir` is called before any computation. It creates the folder, takes its lock, and compares
`config.json` with the config of the command: the same command again resumes where it stopped,
another config is refused. The files of a run:

    config.json       the settings, written first
    provenance.json   code, packages, device, seeds and hashes; one entry more for every restart
    log.txt           everything logged, and the tracebacks of errors; log.<n>.txt of process n
    finished.json     written after everything else (`finished`)
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import logging
import os
from pathlib import Path
import re
import socket
import sys
from typing import Any, Literal

import filelock

from lm_jax.errors import BadInputError, StorageError, UsageError, UserError, WorkdirInUseError
from lm_jax.run.config import ABSENT, config_difference, to_plain
from lm_jax.run.files import read_json, remove_draft, storage_error, write_json
from lm_jax.run.provenance import PROVENANCE_FILE, recording_fallbacks, utc_now

CONFIG_FILE = "config.json"
FINISHED_FILE = "finished.json"
LOG_FILE = "log.txt"
_LOG = re.compile(r"log(\.\d+)?\.txt")
Resume = Literal["auto", "force", "never"]
_LOCK = ".lock"
_HOLDER = ".holder.json"


@dataclasses.dataclass(frozen=True)
class Workdir:
    """An open work folder: its absolute path, and whether this start resumes an earlier one."""

    path: Path
    resumed: bool


def log_file(process: int) -> str:
    """The name of the log of one of the processes of a run."""
    return f"log.{process}.txt" if process else LOG_FILE


@contextlib.contextmanager
def open_workdir(
    path: str | os.PathLike[str],
    config: Any,
    *,
    resume: Resume = "auto",
    may_change: Collection[str] = (),
) -> Iterator[Workdir]:
    """Locks the work folder of one run for as long as the context lasts.

    The lock is the kernel's, so a killed holder leaves none behind. Inside the context, everything
    logged from INFO upwards goes to `log.txt`.

    Args:
      path: a relative one is created with its parents; the parent of an absolute one must exist, so
        that a folder on a volume that is not mounted is refused, not created on the system disk.
      config: a ConfigDict, mapping or dataclass of plain settings.
      resume: "auto" resumes in a folder with the same config; "force" also with another one, which
        then replaces `config.json` and removes `finished.json`; "never" requires a new folder.
      may_change: top-level fields of the config that may differ in the same run.

    A first start that ends with a refusal of its input (`UsageError`, `BadInputError`) before it
    wrote results leaves only its log, so that the corrected command can take the folder.

    Raises:
      UsageError: the folder holds another config, files that are no run, or a run that `resume`
        excludes.
      WorkdirInUseError: another process holds the folder.
      StorageError: the folder cannot be created or written.
      CorruptError: `config.json` is not JSON.
    """
    folder = Path(path).expanduser()
    settings = to_plain(config)
    _create(folder)
    _refuse_copy(folder)
    folder = folder.absolute()
    with _locked(folder):
        for leftover in folder.glob(".*.tmp"):
            remove_draft(leftover)
        changes = _compare_config(folder, settings, resume, may_change)
        start = utc_now()
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "start": start}
        write_json(folder / _HOLDER, holder)
        if changes:
            (folder / FINISHED_FILE).unlink(missing_ok=True)
        try:
            with logging_to(folder / LOG_FILE), recording_fallbacks(folder):
                # After the log: a config without one is that of an exported model.
                write_json(folder / CONFIG_FILE, settings)
                log = logging.getLogger(__name__)
                log.info("%s at %s", "started" if changes is None else "resumed", start)
                for change in changes or ():
                    log.warning("resumed by force: the stored %s", change)
                yield Workdir(folder, resumed=changes is not None)
        except (UsageError, BadInputError):
            if changes is None:
                _withdraw(folder)
            raise


def check_workdir(
    path: str | os.PathLike[str],
    config: Any,
    *,
    resume: Resume = "auto",
    may_change: Collection[str] = (),
) -> None:
    """Refuses a folder for what it holds, as `open_workdir` would, and writes nothing.

    For a command that does what takes long before it opens its folder.

    Args:
      path: work folder, which need not exist.
      config: settings, as of `open_workdir`.
      resume: rule of resuming, which `open_workdir` explains.
      may_change: fields that may differ, as of `open_workdir`.

    Raises:
      UsageError: the folder is a file, or holds another config, files that are no run, or a run
        that `resume` excludes.
      CorruptError: `config.json` is not JSON.
    """
    folder = Path(path).expanduser()
    _refuse_file(folder)
    if folder.is_dir():
        _refuse_copy(folder)
        _compare_config(folder, to_plain(config), resume, may_change)


def check_free(path: str | os.PathLike[str]) -> None:
    """Refuses a folder that another process holds, and leaves it as it is.

    Raises:
      WorkdirInUseError: another process holds it.
      StorageError: its lock cannot be opened.
    """
    folder = Path(path).expanduser()
    if (folder / _LOCK).is_file():
        with _locked(folder):
            pass


def _refuse_file(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--workdir={folder} is a file; name a folder")


def _refuse_copy(folder: Path) -> None:
    """Refuses an exported model, or what was copied of a run without the files that it needs."""
    held = {item.name for item in folder.iterdir()}
    if CONFIG_FILE in held and not held & {LOG_FILE, FINISHED_FILE, PROVENANCE_FILE}:
        raise UsageError(
            f"{folder} holds a {CONFIG_FILE} but no {LOG_FILE}: it is an exported model, which "
            "cannot be trained or run further, or a part of a run; name the folder of its run, or "
            "a new one"
        )


def _withdraw(folder: Path) -> None:
    """Undoes a first start that wrote nothing but its logs: a typo claims no folder."""
    written = _besides_logs(folder)
    if written <= {CONFIG_FILE, PROVENANCE_FILE}:
        # The config last: without it, provenance would be a file of something else.
        for name in sorted(written, reverse=True):
            (folder / name).unlink()


def _besides_logs(folder: Path) -> set[str]:
    names = {item.name for item in folder.iterdir() if item.name[0] != "."}
    return {name for name in names if not _LOG.fullmatch(name)}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = filelock.FileLock(folder / _LOCK, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise WorkdirInUseError(
            f"{folder} is in use by {_holder(folder)}; wait for it or choose another --workdir"
        ) from error
    except OSError as error:
        raise storage_error(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def _create(folder: Path) -> None:
    try:
        _refuse_file(folder)
        if folder.is_absolute() and not folder.parent.is_dir():
            raise StorageError(
                f"{folder} cannot be made, as {folder.parent} is not there; make that folder "
                "first, or choose another --workdir"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except UserError:
        raise
    except OSError as error:
        raise storage_error(folder, error) from error


def _holder(folder: Path) -> str:
    try:
        holder = read_json(folder / _HOLDER)
    except FileNotFoundError:
        return "another process, which has just started"
    return "process {pid} on {host}, started {start}".format(**holder)


def _compare_config(
    folder: Path, settings: Any, resume: str, may_change: Collection[str]
) -> list[str] | None:
    """Returns how the stored config differs, None in a new folder; refuses what may not resume."""
    if not (folder / CONFIG_FILE).exists():
        # Logs alone are those of a first start that was refused.
        if others := sorted(_besides_logs(folder)):
            raise UsageError(
                f"{folder} holds {others[0]!r} but no {CONFIG_FILE}, so it is not the folder of a "
                "run; choose a new --workdir"
            )
        return None
    if resume == "never":
        raise UsageError(f"{folder} holds a run already; choose a new --workdir, or --resume=auto")
    phrases = config_changes(folder, settings, may_change)
    if phrases and resume == "auto":
        earlier = ", as a run of an earlier version" if any(map(_is_renamed, phrases)) else ""
        changes = f"{list_changes(phrases)}{earlier}"
        raise UsageError(
            f"{folder} holds a run with {changes}; choose another --workdir, or --resume=force"
        )
    return phrases


def config_changes(folder: Path, config: Any, may_change: Collection[str] = ()) -> list[str]:
    """How `config.json` in a folder differs from a config, as phrases `config.x = 1, not 2`.

    Args:
      folder: folder of a run.
      config: settings of now, a ConfigDict, mapping or dataclass.
      may_change: top-level fields that are left out.

    Raises:
      CorruptError: `config.json` is not JSON.
    """
    pair = read_json(folder / CONFIG_FILE), to_plain(config)
    return config_difference(*(_without(each, may_change) for each in pair))


def _is_renamed(phrase: str) -> bool:
    """Whether a field stands in one of two settings alone."""
    return ABSENT in phrase.split(" = ", 1)[-1].split(", not ")


def list_changes(phrases: Sequence[str]) -> str:
    """The first of the phrases of `config_changes` for a message."""
    return ", ".join(phrases[:5]) + (f" and {len(phrases) - 5} more" if phrases[5:] else "")


def _without(config: Any, names: Collection[str]) -> Any:
    if not isinstance(config, Mapping):
        return config
    return {name: value for name, value in config.items() if name not in names}


class _LogFile(logging.FileHandler):
    """A log file; failing to write it stops the run, where logging would only print."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            raise storage_error(Path(self.baseFilename), error) from error
        super().handleError(record)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Appends everything logged from INFO upwards to a file, for as long as the context lasts.

    Of absl, to which orbax writes a page for every checkpoint, only warnings are logged.

    Raises:
      StorageError: it cannot be written.
    """
    try:
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise storage_error(path, error) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda entry: entry.name != "absl" or entry.levelno >= logging.WARNING)
    root = logging.getLogger()
    level = root.level
    # Handlers that are there, such as the one of absl on standard error, show no more than before.
    others = {other: other.level for other in root.handlers}
    for other in others:
        other.setLevel(max(other.level, level))
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO) or logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        for other, own in others.items():
            other.setLevel(own)
        root.removeHandler(handler)
        handler.close()
