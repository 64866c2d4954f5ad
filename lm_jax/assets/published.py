"""Models that this project trained, pinned by the sha256 of each file: `models/` of a checkout.

    folder("protot_whole")                        where it is: nothing is copied in a checkout
    fetch("pair_small", source="path/of/checkout")    copies it into the user's cache

No package index has them. A model is looked for, in this order,

    1. inside the installed package, which holds those that `iaj quickstart` reads;
    2. in the checkout that the package is imported from;
    3. in the user's cache (`user_cache`), where `fetch` puts a copy from a checkout.

`published.toml` has the files of each with size and sha256; `python -m tools.pin_models` writes it.
"""

from collections.abc import Mapping
import dataclasses
import functools
from importlib import resources
from pathlib import Path
import shutil
import tomllib

from lm_jax.errors import BadInputError, CorruptError, UsageError, nearest
from lm_jax.run import user_cache
from lm_jax.run.files import content_digest, file_digest, new_folder

MANIFEST = "published.toml"
# A wheel holds models in this folder, beside this file.
_INSIDE = "models"


@dataclasses.dataclass(frozen=True)
class Published:
    """One entry of the manifest.

    Attributes:
      name: name of the entry.
      description: content of the entry, in a line.
      home: folder of a checkout that holds the files, such as `models/pair_192`.
      licence: licence of the files.
      files: size in bytes and sha256 of each file, by its path in the folder.
    """

    name: str
    description: str
    home: str
    licence: str
    files: Mapping[str, Mapping[str, int | str]]

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
    return {name: Published(name, **entry) for name, entry in tomllib.loads(text).items()}


def entry(name: str) -> Published:
    """The entry of a name.

    Raises:
      UsageError: there is none; names the nearest.
    """
    if name not in entries():
        raise UsageError(f"{name!r} is not a published model{nearest(name, entries())}")
    return entries()[name]


def find(name: str) -> Path | None:
    """The folder of a model if all its files are there by their sizes; reads no file."""
    known = entry(name)
    here = Path(__file__)
    places = (here.parent / _INSIDE / name, here.parents[2] / known.home, _copy(known))
    return next((place for place in places if _is_there(known, place)), None)


def folder(name: str) -> Path:
    """The folder of a model.

    Raises:
      BadInputError: the model is not on this machine.
    """
    result = find(name)
    if result is None:
        raise BadInputError(
            f"{name} is not on this machine, and no package index has it; it is the folder "
            f"{entry(name).home} of this project's repository: clone that and run: "
            f"iaj fetch {name} --from CHECKOUT"
        )
    return result


def resolve(source: str | Path) -> Path:
    """A path, or the folder of the published model of that name where there is no such path."""
    path = Path(source)
    if path.exists() or str(source) not in entries():
        return path
    return folder(str(source))


def verify(name: str) -> Path:
    """Compares every file of a model with the manifest; returns the folder.

    Raises:
      BadInputError: the model is not on this machine.
      CorruptError: a file is not what the manifest says.
    """
    place = folder(name)
    _check(entry(name), place, CorruptError)
    return place


def fetch(name: str, *, source: str | Path | None = None) -> Path:
    """The folder of a model; where it is not on this machine, a copy from `source` in the cache.

    Args:
      name: name of the manifest.
      source: a checkout, a folder that holds the model under its name, or the model's folder.

    Raises:
      UsageError: an unknown name.
      BadInputError: the model is neither on this machine nor in `source`, or differs there.
      StorageError: the cache cannot be written.
    """
    known = entry(name)
    if source is None or find(name) is not None:
        return folder(name)
    given = Path(source).expanduser()
    places = (given / known.home, given / name, given)
    origin = next((place for place in places if _is_there(known, place)), None)
    if origin is None:
        raise BadInputError(
            f"{given}: neither a checkout with {known.home}, nor the folder of {name} itself "
            f"({len(known.files)} files, {known.size / 1e6:.1f} MB, as this version pins them)"
        )
    _check(known, origin, BadInputError)
    target = _copy(known)
    # What is there is not whole, or it would have been found.
    shutil.rmtree(target, ignore_errors=True)
    with new_folder(target) as draft:
        for file in known.files:
            (draft / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin / file, draft / file)
        _check(known, draft, BadInputError)
    return target


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
