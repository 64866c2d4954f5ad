"""The folder of one run: locked, tied to one config, and never holding half a file.

`open_workdir` is called before any computation. It makes the folder, takes its lock, and compares
`config.json` with the config at hand: the same command again goes on where it stopped, another
config is refused. What a run leaves behind:

    config.json       the settings, written first
    provenance.json   code, packages, device, seeds and hashes; one entry more for every restart
    log.txt           everything logged, and the tracebacks of errors
    finished.json     there only once everything else is written

A file appears under its name only when it is whole: it is written under a temporary name in the
same folder, synced, renamed, and the folder is synced (`replace_file`). So a run can be killed
anywhere.
"""

from collections.abc import Collection, Iterator, Mapping
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import math
import os
from pathlib import Path
import platform
import shlex
import socket
import subprocess
import sys
from typing import Any, BinaryIO, Literal

import filelock

from lm_jax.errors import (
    BadInputError,
    CorruptError,
    Refusal,
    StorageError,
    UsageError,
    WorkdirInUseError,
)
from lm_jax.launch import LOG_NAME, REMEDY
from lm_jax.settings import difference, plain

CONFIG = "config.json"
FINISHED = "finished.json"
PROVENANCE = "provenance.json"
_LOCK = ".lock"
_HOLDER = ".holder.json"
_PACKAGES = (
    "interpretable-attention-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "ml-collections",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "scipy",
    "pyarrow",
)


@dataclasses.dataclass(frozen=True)
class Workdir:
    """An open work folder: its absolute path, and whether an earlier start left results in it."""

    path: Path
    resumed: bool


@contextlib.contextmanager
def open_workdir(
    path: str | os.PathLike[str],
    config: Any,
    *,
    resume: Literal["auto", "force", "never"] = "auto",
    may_change: Collection[str] = (),
) -> Iterator[Workdir]:
    """Locks the work folder of one run for as long as the context lasts.

    The lock is the kernel's, so a killed holder leaves none behind. Inside the context, everything
    logged from INFO upwards goes to `log.txt`.

    Args:
      path: a relative one is made with its parents; an absolute one must have its parent there, so
        that a folder on a volume that is not mounted is refused, not made on the system disk.
      config: a ConfigDict, mapping or dataclass of plain settings.
      resume: "auto" goes on in a folder with the same config; "force" also with another one, which
        then replaces `config.json` and takes back `finished.json`; "never" wants a new folder.
      may_change: fields at the top of the config in which another one is the same run.

    A first start that ends in a refusal of its input (`UsageError`, `BadInputError`) before it made
    anything leaves its log alone, and the folder to the corrected command.

    Raises:
      UsageError: another config is there, or files that are no run, or `resume` forbids it.
      WorkdirInUseError: another process holds the folder.
      StorageError: the folder cannot be made or written.
      CorruptError: `config.json` is not JSON.
    """
    folder = Path(path).expanduser()
    settings = plain(config)
    _make(folder)
    folder = folder.absolute()
    with _locked(folder):
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()
        changes = _compare_config(folder, settings, resume, may_change)
        start = _now()
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "start": start}
        write_json(folder / _HOLDER, holder)
        if changes:
            (folder / FINISHED).unlink(missing_ok=True)
        write_json(folder / CONFIG, settings)
        try:
            with logging_to(folder / LOG_NAME):
                log = logging.getLogger(__name__)
                log.info("%s at %s", "started" if changes is None else "resumed", start)
                for change in changes or ():
                    log.warning("resumed by force: the stored %s", change)
                yield Workdir(folder, resumed=changes is not None)
        except (UsageError, BadInputError):
            if changes is None:
                _withdraw(folder)
            raise


def _withdraw(folder: Path) -> None:
    """Takes back a first start that made nothing but its log: a typo claims no folder."""
    made = {item.name for item in folder.iterdir() if item.name[0] != "."}
    if made <= {CONFIG, PROVENANCE, LOG_NAME}:
        for name in made - {LOG_NAME}:
            (folder / name).unlink()


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


def _make(folder: Path) -> None:
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--workdir={folder} is a file; name a folder")
        if folder.is_absolute() and not folder.parent.is_dir():
            raise StorageError(
                f"{folder} cannot be made, as {folder.parent} is not there; make that folder "
                "first, or choose another --workdir"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except Refusal:
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
    """Returns how the stored config differs, None in a new folder; refuses what may not go on."""
    if not (folder / CONFIG).exists():
        # A log alone is that of a first start that was refused.
        names = {item.name for item in folder.iterdir() if item.name[0] != "."}
        others = sorted(names - {LOG_NAME})
        if others:
            raise UsageError(
                f"{folder} holds {others[0]!r} but no {CONFIG}, so it is not the folder of a run; "
                "choose a new --workdir"
            )
        return None
    if resume == "never":
        raise UsageError(f"{folder} holds a run already; choose a new --workdir, or --resume=auto")
    stored = read_json(folder / CONFIG)
    phrases = difference(*(_without(config, may_change) for config in (stored, settings)))
    if phrases and resume == "auto":
        shown = ", ".join(phrases[:5]) + (f" and {len(phrases) - 5} more" if phrases[5:] else "")
        raise UsageError(
            f"{folder} holds a run with {shown}; choose another --workdir, or --resume=force"
        )
    return phrases


def _without(config: Any, names: Collection[str]) -> Any:
    if not isinstance(config, Mapping):
        return config
    return {name: value for name, value in config.items() if name not in names}


class _LogFile(logging.FileHandler):
    """A log file whose failure to be written stops the run, where logging would print and go on."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            raise storage_error(Path(self.baseFilename), error) from error
        super().handleError(record)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Appends everything logged from INFO upwards to a file, for as long as the context lasts.

    Of absl, which orbax writes a page to for every checkpoint, only warnings.

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
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO) or logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


def mark_finished(folder: Path) -> None:
    """Writes the marker of a finished run; call it when every other file is written."""
    write_json(folder / FINISHED, {"finished": _now()})


def finished(folder: str | os.PathLike[str]) -> str | None:
    """Returns when (ISO 8601, UTC) the run in `folder` finished, or None if it has not."""
    path = Path(folder) / FINISHED
    return read_json(path)["finished"] if path.exists() else None


def provenance(
    *,
    seeds: Mapping[str, int] | None = None,
    dtype: str | None = None,
    data: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Returns what it takes to repeat this run.

    Args:
      seeds: every seed by the name of what it drives.
      dtype: the dtype of the computation.
      data: sha256 of every data and weight file or set, by name.
      tokenizer: sha256 of the tokenizer file.
    """
    return {
        "start": _now(),
        "command": _command(),
        "git": _git(Path(__file__).parent),
        "packages": _versions(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "device": _device(),
        "dtype": dtype,
        "seeds": dict(seeds or {}),
        "data": dict(data or {}),
        "tokenizer": tokenizer,
    }


def record_provenance(folder: Path, entry: Mapping[str, Any]) -> None:
    """Writes `provenance.json`: the first start's entry, with later ones under `restarts`."""
    path = folder / PROVENANCE
    if path.exists():
        first = read_json(path)
        entry = first | {"restarts": [*first["restarts"], dict(entry)]}
    else:
        entry = {**entry, "restarts": []}
    write_json(path, entry)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec else ["python", sys.argv[0]]
    # A result is passed on with its provenance; the name of somebody's home is not part of it.
    home = str(Path.home())
    return shlex.join(argument.replace(home, "~") for argument in [*program, *sys.argv[1:]])


def _git(source: Path) -> dict[str, Any] | None:
    """Returns the commit of the code in `source` and whether it was changed; None if untracked."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    try:
        # A package installed below somebody's checkout is no part of that checkout.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.CalledProcessError):
        return None


def _versions() -> dict[str, str]:
    installed = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _device() -> dict[str, Any] | None:
    # A command that never loaded JAX has used no device, and must not wake one to say so.
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
    }


@contextlib.contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a binary file that takes the name `path`, in one step, once it is whole and on disk.

    Raises:
      StorageError: a write failed; `path` is as it was and the temporary file is gone.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        # The error in flight matters more than a temporary file that a full disk will not give up.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, Refusal):
            raise storage_error(path, error) from error
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(path: Path, error: OSError) -> StorageError:
    """Returns the refusal that says why `path` cannot be written, and what to do."""
    return StorageError(f"{path} cannot be written ({error.strerror or error}); {REMEDY}")


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file whole or not at all (`replace_file`)."""
    with replace_file(path) as file:
        file.write(data)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON, whole or not at all.

    JSON has no word for a number that is not finite: NaN is written as null, the infinities as the
    strings "inf" and "-inf". Arrays and their scalars become lists and numbers.
    """
    text = json.dumps(_jsonable(value), indent=2, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file; raises `CorruptError` if it is none."""
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise CorruptError(
            f"{path} is not JSON ({error}); restore it, or start again in another --workdir"
        ) from error


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return _jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return str(value) if isinstance(value, os.PathLike) else value
