"""Atomic writes of files and folders, and manifests of their digests.

A file or folder is written under a temporary name beside its own, synced, and renamed, and then
its parent is synced (`replace_file`, `new_folder`). So a process can be killed anywhere: a file
under its own name is whole. One under a temporary name, `.<name>.tmp`, may be removed.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
from pathlib import Path, PurePosixPath
import shutil
import stat
from typing import Any, BinaryIO

from lm_jax.errors import BadInputError, CorruptError, StorageError, UserError

STORAGE_ERRNOS = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EFBIG", "EIO")
    if hasattr(errno, name)
)
STORAGE_REMEDY = "free space or change permissions there, or choose another --workdir"


@contextlib.contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a binary file that takes the name `path`, in one step, once it is whole and on disk.

    Raises:
      StorageError: a write failed; `path` is unchanged and the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_path(path.parent)
    except BaseException as error:
        # The error in flight matters more than a temporary file that a full disk will not give up.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, UserError):
            raise storage_error(path, error) from error
        raise


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file whole or not at all (`replace_file`)."""
    with replace_file(path) as file:
        file.write(data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a UTF-8 file whole or not at all (`replace_file`)."""
    write_bytes(path, text.encode())


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON, whole or not at all.

    JSON has no literal for a number that is not finite: NaN is written as null, the infinities as
    the strings "inf" and "-inf". Arrays and their scalars become lists and numbers.
    """
    text = json.dumps(to_jsonable(value), indent=2, allow_nan=False)
    write_text(path, f"{text}\n")


def load_json(text: str | bytes, **options: Any) -> Any:
    """Reads JSON like `json.loads`; brackets nested too deeply are a `ValueError`, too."""
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file; raises `CorruptError` if it is not JSON."""
    try:
        return load_json(Path(path).read_bytes())
    except ValueError as error:
        raise CorruptError(
            f"{path} is not JSON ({error}); restore it, or start again in another --workdir"
        ) from error


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Generator[Path]:
    """Yields an empty draft that takes the name `path`, in one step, when the block has ended.

    The draft is `.<name>.tmp` in the same parent. One that a killed process left is removed first;
    it is also removed if the block raises. Its files become as readable as the umask allows.

    Raises:
      BadInputError: `path` exists.
      StorageError: the folder cannot be written; then `path` does not exist.
    """
    path = Path(path).absolute()
    check_new(path)
    draft = draft_of(path)
    try:
        remove_draft(draft)
        draft.mkdir(parents=True)
        yield draft
        _open_modes(draft)
        _sync_tree(draft)
        draft.rename(path)
        _sync_path(path.parent)
    except BaseException as error:
        # The error in flight matters more than a draft that a full disk will not give up.
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, UserError):
            raise storage_error(path, error) from error
        raise


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Makes a folder that may be there already.

    Args:
      path: the folder.
      parents: whether to make the folders above it too.

    Raises:
      StorageError: it cannot be made.
    """
    try:
        path.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise storage_error(path, error) from error


def draft_of(path: Path) -> Path:
    """The temporary path at which the folder `path` is written."""
    return path.with_name(f".{path.name}.tmp")


def remove_draft(path: Path) -> None:
    """Removes the file or the folder that a killed process left at `path`, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_new(path: str | os.PathLike[str]) -> None:
    """Raises `BadInputError` if anything is at `path`; for use before a long computation."""
    if os.path.lexists(path):
        raise BadInputError(f"{path} exists; name a folder that does not, or remove it")


def _open_modes(folder: Path) -> None:
    """Gives files the mode that `open` would: safetensors makes its own readable by one user."""
    # The umask cannot be read without setting it; the folder was created under it.
    mode = folder.stat().st_mode & 0o666
    for below in folder.rglob("*"):
        if below.is_file() and stat.S_IMODE(below.stat().st_mode) != mode:
            below.chmod(mode)


def _sync_tree(folder: Path) -> None:
    for below in folder.rglob("*"):
        _sync_path(below)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclasses.dataclass(frozen=True)
class ManifestFormat:
    """Manifest of a kind of verified folder: its file name, version and error messages.

    Attributes:
      name: file name of the manifest.
      version: number in its field `format`.
      content: what the folder holds, as in "a whole checkpoint".
      remedy: advice for a folder without a manifest.
      outdated: advice for a manifest of another version.
      damaged: advice for a damaged folder.
      may_differ: function that says of a file whether it may have been written anew since, as the
        card of a model that was uploaded.
    """

    name: str
    version: int
    content: str
    remedy: str
    outdated: str
    damaged: str
    may_differ: Callable[[Path], bool] = lambda file: False

    def corrupt(self, file: Path, what: str) -> CorruptError:
        """The error that `file` is damaged."""
        return CorruptError(f"{file} {what}; {self.damaged}")


def write_manifest(folder: Path, kind: ManifestFormat, content: Mapping[str, Any]) -> None:
    """Writes a folder's manifest: `content`, every file with size and sha256, its own digest.

    All other files must be in the folder before.
    """
    manifest = {
        "format": kind.version,
        **content,
        "files": {
            file.relative_to(folder).as_posix(): file_digest(file)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        },
    }
    write_json(folder / kind.name, manifest | {"sha256": content_digest(manifest)})


def read_manifest(folder: Path, kind: ManifestFormat) -> dict[str, Any]:
    """A folder's manifest, compared with its own digest; the files are not read.

    Raises:
      BadInputError: there is no manifest, or one of another version.
      CorruptError: it is damaged.
    """
    path = folder / kind.name
    if not path.is_file():
        raise BadInputError(
            f"{folder} has no {kind.name}, so it is no {kind.content}; {kind.remedy}"
        )
    try:
        manifest = load_json(path.read_bytes())
    except ValueError as error:
        raise kind.corrupt(path, f"is not JSON ({error})") from error
    stated = manifest.pop("sha256", None) if isinstance(manifest, dict) else None
    if stated != content_digest(manifest):
        raise kind.corrupt(path, "does not match its own digest")
    if manifest.get("format") != kind.version:
        raise BadInputError(
            f"{path}: format {manifest.get('format')} is not {kind.version}; {kind.outdated}"
        )
    return manifest


def verify_manifest(folder: Path, kind: ManifestFormat) -> dict[str, Any]:
    """Compares every file of a folder with its manifest, and returns the manifest.

    Raises:
      BadInputError: there is no manifest, or one of another version.
      CorruptError: naming the first file that is missing, truncated or changed.
    """
    manifest = read_manifest(folder, kind)
    for name, entry in manifest["files"].items():
        file = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise kind.corrupt(folder / kind.name, f"names a file outside the folder, {name}")
        if not file.is_file():
            raise kind.corrupt(file, "is missing")
        if kind.may_differ(file):
            continue
        if file.stat().st_size != entry["size"]:
            raise kind.corrupt(file, f"has {file.stat().st_size} bytes, not {entry['size']}")
        if file_digest(file) != entry:
            raise kind.corrupt(file, "does not match its sha256")
    return manifest


def file_digest(file: Path) -> dict[str, Any]:
    """The size in bytes and the sha256 of a file, as a manifest holds them."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"size": file.stat().st_size, "sha256": digest}


def content_digest(manifest: Any) -> str:
    """The sha256 of a manifest without its own entry of that name."""
    return hashlib.sha256(
        json.dumps(manifest, sort_keys=True, allow_nan=False).encode()
    ).hexdigest()


def storage_error(path: Path, error: OSError) -> StorageError:
    """Returns the error for a `path` that cannot be written, with its cause and remedy."""
    return StorageError(f"{path} cannot be written ({error.strerror or error}); {STORAGE_REMEDY}")


def to_jsonable(value: Any) -> Any:
    """Converts `value` to dicts, lists and scalars for `json.dumps`, as `write_json` does."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return str(value) if isinstance(value, os.PathLike) else value
