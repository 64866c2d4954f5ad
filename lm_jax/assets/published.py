"""Models that this project trained, pinned by the sha256 of each file: `models/` of a checkout.

    folder("protot_whole")                        where it is: nothing is copied in a checkout
    folder("pair_192_sparse_transcoder")          a part of one: a folder within it
    fetch("pair_small", source="path/of/checkout")    copies it into the user's cache

No package index has them. A model is looked for, in this order,

    1. inside the installed package, which holds those that `iaj quickstart` reads;
    2. in the checkout that the package is imported from;
    3. in the user's cache (`user_cache`), where `fetch` puts a copy from a checkout or an archive.

`published.toml` has the files of each with size and sha256; `python -m tools.pin_models` writes it.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
from importlib import resources
import os
from pathlib import Path
import re
import shutil
import tomllib
import zipfile
import zlib

import filelock

from lm_jax.assets import transfer
from lm_jax.errors import BadInputError, CorruptError, UsageError, closest, nearest
from lm_jax.run import user_cache
from lm_jax.run.files import content_digest, file_digest, make_folder, new_folder

MANIFEST = "published.toml"
# A wheel holds models in this folder, beside this file.
_INSIDE = "models"


@dataclasses.dataclass(frozen=True)
class Part:
    """A model or transcoder within a published folder, with a name of its own.

    Attributes:
      folder: path in the folder of the entry, such as `transcoders/sparse`.
      description: content of the part, in a line.
    """

    folder: str
    description: str


@dataclasses.dataclass(frozen=True)
class Release:
    """An archive of an entry that is attached to a release: a zip file of the paths in `files`.

    Attributes:
      url: address of the archive.
      sha256: digest of the archive.
    """

    url: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Published:
    """One entry of the manifest.

    Attributes:
      name: name of the entry.
      description: content of the entry, in a line.
      home: folder of a checkout that holds the files, such as `models/pair_192`.
      licence: licence of the files.
      files: size in bytes and sha256 of each file, by its path in the folder.
      parts: models and transcoders within the folder, by their names.
      release: archive to download where no checkout is at hand; None for none.
    """

    name: str
    description: str
    home: str
    licence: str
    files: Mapping[str, Mapping[str, int | str]]
    parts: Mapping[str, Part] = dataclasses.field(default_factory=dict)
    release: Release | None = None

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(int(each["size"]) for each in self.files.values())

    @property
    def digest(self) -> str:
        """The sha256 of the list of files."""
        return content_digest({name: dict(each) for name, each in self.files.items()})


@functools.cache
def entries() -> dict[str, Published]:
    """The entries by name."""
    text = resources.files("lm_jax.assets").joinpath(MANIFEST).read_text("utf-8")
    results = {}
    for name, fields in tomllib.loads(text).items():
        parts = {part: Part(**each) for part, each in fields.pop("parts", {}).items()}
        release = Release(**given) if (given := fields.pop("release", None)) else None
        results[name] = Published(name, parts=parts, release=release, **fields)
    return results


@functools.cache
def parts() -> dict[str, str]:
    """The name of the entry that each part belongs to, by the name of the part."""
    return {part: name for name, each in entries().items() for part in each.parts}


def names() -> list[str]:
    """All names: of entries, each followed by those of its parts."""
    return [name for own, each in entries().items() for name in (own, *each.parts)]


def entry(name: str) -> Published:
    """The entry of a name, or the one that a part of this name belongs to.

    Raises:
      UsageError: there is none; names the nearest.
    """
    if name not in names():
        raise UsageError(f"{name!r} is not a published model{nearest(name, names())}")
    return entries()[parts().get(name, name)]


def find(name: str) -> Path | None:
    """The folder of a model if all its files are there by their sizes; reads no file."""
    known = entry(name)
    here = Path(__file__)
    places = (here.parent / _INSIDE / known.name, here.parents[2] / known.home, _copy(known))
    whole = next((place for place in places if _is_there(known, place)), None)
    return whole if whole is None or name == known.name else whole / known.parts[name].folder


def folder(name: str) -> Path:
    """The folder of a model.

    Raises:
      BadInputError: the model is not on this machine.
    """
    result = find(name)
    if result is None:
        known = entry(name)
        remedy = f"run: iaj fetch {name}"
        if known.release is None:
            remedy = (
                f"no package index has it; it is in the folder {known.home} of this project's "
                f"repository: clone that and run: iaj fetch {name} --from CHECKOUT"
            )
        raise BadInputError(f"{name} is not on this machine; {remedy}")
    return result


def resolve(source: str | os.PathLike[str]) -> Path:
    """A path, or the folder of the published model of that name where there is no such path."""
    path = Path(source)
    if path.exists() or os.fspath(source) not in names():
        return path
    return folder(os.fspath(source))


def resolve_model(source: str | os.PathLike[str]) -> Path:
    """The path of `resolve`, which holds a single model.

    Raises:
      BadInputError: the model is not on this machine, or the name is that of several.
    """
    path, name = resolve(source), os.fspath(source)
    if path != Path(source) and name in entries() and (known := entries()[name].parts):
        models = [part for part in known if not part.endswith("_transcoder")]
        raise BadInputError(f"{name} holds several models; name one of them: {', '.join(models)}")
    return path


def resolve_file(source: str | os.PathLike[str]) -> Path:
    """The path of `resolve`, or the file of a published entry that has only one."""
    path, name = resolve(source), os.fspath(source)
    if path == Path(source) or name not in entries() or len(entries()[name].files) > 1:
        return path
    return path / next(iter(entries()[name].files))


def hint(source: str | os.PathLike[str]) -> str:
    """What follows the error that there is no such folder: the published name that is closest."""
    is_name = not Path(source).exists() and len(Path(source).parts) == 1
    return closest(os.fspath(source), names()) if is_name else ""


def verify(name: str) -> Path:
    """Compares every file of a model with the manifest; returns the folder.

    Raises:
      BadInputError: the model is not on this machine.
      CorruptError: a file is not what the manifest says.
    """
    known = entry(name)
    _check(known, folder(known.name), CorruptError)
    return folder(name)


def fetch(name: str, *, source: str | Path | None = None, progress: bool = True) -> Path:
    """The folder of a model; where it is not on this machine, a copy of it in the cache.

    Args:
      name: name of the manifest; of a part, the whole entry is fetched.
      source: a checkout, a folder that holds the model under its name, the model's folder, an
        archive of it, or the address of one; None for the archive of the release, if there is one.
      progress: whether to print how far a download is, to standard error.

    Raises:
      UsageError: an unknown name.
      BadInputError: the model is neither on this machine nor in `source`, or differs there.
      StorageError: the cache cannot be written.
    """
    known = entry(name)
    if find(name) is not None:
        return folder(name)
    if source is None and known.release is not None:
        source = known.release.url
    if source is None:
        return folder(name)
    target = _copy(known)
    make_folder(target.parent, parents=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(filelock.FileLock(target.with_name(f".{target.name}.lock")))
        # Another process may have fetched it meanwhile.
        if find(name) is not None:
            return folder(name)
        if re.match(r"[a-z]+://", str(source)):
            source = stack.enter_context(_downloaded(known, str(source), progress))
        # What is there is not whole, or it would have been found.
        shutil.rmtree(target, ignore_errors=True)
        draft = stack.enter_context(new_folder(target))
        _fill(known, Path(source).expanduser(), draft)
        _check(known, draft, BadInputError)
    return folder(name)


@contextlib.contextmanager
def _downloaded(known: Published, url: str, progress: bool) -> Iterator[Path]:
    """The archive at an address, removed when the block has ended; a part of it stays."""
    file = _copy(known).with_suffix(".zip")
    with transfer.progress_of(file.name, known.size, shown=progress) as report:
        try:
            transfer.save(url, file, report)
        except transfer.TransferError as error:
            raise BadInputError(
                f"{known.name}: {error}; try again, or name a checkout: "
                f"iaj fetch {known.name} --from CHECKOUT"
            ) from error
    try:
        pinned = known.release
        if (
            pinned is not None
            and url == pinned.url
            and file_digest(file)["sha256"] != pinned.sha256
        ):
            raise BadInputError(
                f"{url}: sha256 differs from the manifest; nothing was read from it"
            )
        yield file
    finally:
        file.unlink()


def _fill(known: Published, source: Path, draft: Path) -> None:
    """Copies the files of an entry from a checkout, a folder or an archive."""
    if source.is_file():
        _unpack(known, source, draft)
        return
    places = (source / known.home, source / known.name, source)
    origin = next((place for place in places if _is_there(known, place)), None)
    if origin is None:
        raise BadInputError(
            f"{source}: neither a checkout with {known.home}, nor an archive or the folder of "
            f"{known.name} itself ({len(known.files)} files, {known.size / 1e6:.1f} MB, as this "
            "version pins them)"
        )
    _check(known, origin, BadInputError)
    for file in known.files:
        (draft / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin / file, draft / file)


def _unpack(known: Published, archive: Path, draft: Path) -> None:
    """Takes the files of an entry, and no others, out of a zip file."""
    try:
        with zipfile.ZipFile(archive) as opened:
            for file in known.files:
                (draft / file).parent.mkdir(parents=True, exist_ok=True)
                with opened.open(file) as stream, (draft / file).open("wb") as output:
                    shutil.copyfileobj(stream, output)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise BadInputError(
            f"{archive}: not a whole zip file of {known.name} ({error}); get it again"
        ) from error


def _copy(known: Published) -> Path:
    return user_cache.folder() / f"{known.name}-{known.digest[:12]}"


def _is_there(known: Published, place: Path) -> bool:
    return all(
        (file := place / name).is_file() and file.stat().st_size == pinned["size"]
        for name, pinned in known.files.items()
    )


def _check(known: Published, place: Path, error: type[BadInputError] | type[CorruptError]) -> None:
    for name, pinned in known.files.items():
        if file_digest(place / name) != pinned:
            raise error(f"{place / name}: sha256 differs from the manifest; take the file anew")
