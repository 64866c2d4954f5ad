"""A folder that has its name only when it is whole: drafted beside it, synced, renamed.

`runs.replace_file` does the same for one file.
"""

from collections.abc import Generator
import contextlib
import os
from pathlib import Path
import shutil
import stat

from lm_jax import runs
from lm_jax.errors import BadInputError, Refusal


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Generator[Path]:
    """Yields an empty draft that takes the name `path`, in one step, when the block has ended.

    The draft is `.<name>.tmp` in the same parent. One that a killed process left is removed first;
    it is also removed if the block raises. Its files become as readable as the umask allows.

    Raises:
      BadInputError: `path` exists.
      StorageError: the folder cannot be written; `path` is then not there.
    """
    path = Path(path).absolute()
    check_new(path)
    draft = draft_of(path)
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        yield draft
        _open_modes(draft)
        _sync(draft)
        draft.rename(path)
        _sync_one(path.parent)
    except BaseException as error:
        # The error in flight matters more than a draft that a full disk will not give up.
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, Refusal):
            raise runs.storage_error(path, error) from error
        raise


def draft_of(path: Path) -> Path:
    """Where the folder that is to be at `path` is written."""
    return path.with_name(f".{path.name}.tmp")


def check_new(path: str | os.PathLike[str]) -> None:
    """Raises `BadInputError` if anything is at `path`; for use before a long computation."""
    if os.path.lexists(path):
        raise BadInputError(f"{path} exists; name a folder that does not, or remove it")


def _open_modes(folder: Path) -> None:
    """Gives files the mode that `open` would: safetensors makes its own readable by one user."""
    # The umask cannot be asked for without setting it; the folder was made under it.
    mode = folder.stat().st_mode & 0o666
    for below in folder.rglob("*"):
        if below.is_file() and stat.S_IMODE(below.stat().st_mode) != mode:
            below.chmod(mode)


def _sync(folder: Path) -> None:
    for below in folder.rglob("*"):
        _sync_one(below)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
