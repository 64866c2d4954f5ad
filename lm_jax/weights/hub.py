"""Models of the Hugging Face hub, `ORG/NAME` or `ORG/NAME@REVISION`, from the hub's own cache.

Other files of a repository are read from there too, by `part`, those of a folder within it as
`ORG/NAME/FOLDER@REVISION`, and single ones by `file`.

The cache is that of `huggingface_hub` (HF_HOME or HF_HUB_CACHE moves it). It is looked into first;
the network is only used where a download was asked for (`lm_jax.run.downloads`), and then fetches
what is missing of the config, the safetensors, the gates and the tokenizer: no pickles, no code.
"""

from collections.abc import Sequence
import contextlib
from pathlib import Path
import re

from lm_jax.errors import BadInputError, StorageError
from lm_jax.run import downloads
from lm_jax.run.files import STORAGE_ERRNOS
from lm_jax.text.tokenizer_files import GENERATION_CONFIG
from lm_jax.weights.safetensors import CONFIG, INDEX, SINGLE, weight_map

_REPOSITORY, _REVISION = r"([\w.-]+/[\w.-]+)", r"(?:@((?!.*\.\.)[\w.-][\w./-]*))?"
NAME = re.compile(_REPOSITORY + _REVISION)
# The same with a folder of the repository.
PART = re.compile(_REPOSITORY + r"((?:/(?!\.)[\w.-]+)*)" + _REVISION)
# The gates of a sparse model of `sparse_jax`; without them its weights are another model.
GATES = "sparse.json"
# The field of its config.json that names that file.
GATES_FIELD = "gates"
# What is read of a model, and so what is downloaded.
FILES = (
    *(CONFIG, "model*.safetensors", INDEX, GENERATION_CONFIG, GATES),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)


def identity(name: str, model: str, revision: str | None) -> dict[str, str]:
    """What provenance says of a model called `name`: identity or digest, and commit on the hub."""
    return {name: model} | ({} if revision is None else {f"{name} revision": revision})


def revision(folder: Path) -> str | None:
    """The commit of a snapshot in the cache, `snapshots/<commit>`; None for another folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def repository(folder: Path) -> str | None:
    """The `ORG/NAME` of a snapshot in the cache; None for another folder."""
    kind, *words = folder.parent.parent.name.split("--")
    is_snapshot = revision(folder) is not None and kind == "models" and len(words) == 2
    return "/".join(words) if is_snapshot else None


def cache() -> Path:
    """The folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def find(name: str) -> Path | None:
    """The whole snapshot of a hub id, downloaded where that is allowed; None where there is none.

    Raises:
      BadInputError: the download was asked for and failed, or the repository has no safetensors.
      StorageError: the cache cannot be written.
    """
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    parts = NAME.fullmatch(name)
    if parts is None:
        return None
    repository, revision = parts.groups()
    try:
        # Not to be in the cache is one of two usual answers.
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = _snapshot(repository, revision, FILES, local_files_only=True)
            if _is_whole(folder):
                if not downloads.are_allowed():
                    return folder
                # Another program may have left the gates out; a later commit is not asked for.
                revision = folder.name
    except HFValidationError:
        return None
    return _download(name, repository, revision) if downloads.are_allowed() else None


def part(name: str, patterns: Sequence[str]) -> Path | None:
    """A folder of a repository, downloaded where that is allowed; None where it is not here.

    Args:
      name: `ORG/NAME`, with a folder of the repository and `@REVISION` or without.
      patterns: names of the files in that folder that are read, which may have `*`.

    Raises:
      BadInputError: the download was asked for and failed.
      StorageError: the cache cannot be written.
    """
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    parts = PART.fullmatch(name)
    if parts is None:
        return None
    repository, folder, revision = parts.groups()
    folder = folder.removeprefix("/")
    wanted = [f"{folder}/{pattern}" if folder else pattern for pattern in patterns]
    try:
        if downloads.are_allowed():
            found = _fetch(name, repository, revision, wanted)
        else:
            found = _snapshot(repository, revision, wanted, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return found / folder if (found / folder).is_dir() else None


def file(repository: str, path: str, revision: str | None) -> Path | None:
    """A file of a repository, downloaded where that is allowed; None where it is not here.

    Raises:
      BadInputError: the download was asked for and failed.
      StorageError: the cache cannot be written.
    """
    from huggingface_hub import try_to_load_from_cache

    if downloads.are_allowed():
        return _fetch(f"{repository}/{path}", repository, revision, [path]) / path
    found = try_to_load_from_cache(repository, path, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _snapshot(
    repository: str, revision: str | None, patterns: Sequence[str], *, local_files_only: bool
) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repository,
        revision=revision,
        allow_patterns=list(patterns),
        local_files_only=local_files_only,
    )
    return Path(folder)


def _is_whole(folder: Path) -> bool:
    """False where a download was interrupted, or fetched only the config or the tokenizer."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / SINGLE).is_file():
        return True
    shards = weight_map(folder).values() if (folder / INDEX).is_file() else ()
    return bool(shards) and all((folder / name).is_file() for name in shards)


def _download(name: str, repository: str, revision: str | None) -> Path:
    folder = _fetch(f"model {name!r}", repository, revision, FILES)
    if not _is_whole(folder):
        raise BadInputError(
            f"model {name!r} has no {CONFIG} with {SINGLE} or its shards on the hub, and pickled "
            "weights are never fetched; take a repository or revision that has them"
        )
    return folder


def _fetch(what: str, repository: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """A snapshot with the files of these patterns, downloaded."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        return _snapshot(repository, revision, patterns, local_files_only=False)
    except (OSError, HTTPError) as error:
        if getattr(error, "errno", None) in STORAGE_ERRNOS:
            raise StorageError(
                f"{cache()} cannot be written ({error}); free space, or set HF_HOME to a folder "
                "with room"
            ) from error
        remedy = "check the network and HF_HUB_OFFLINE, or name a folder that holds it"
        if isinstance(error, HfHubHTTPError):
            remedy = "check the name, the revision and your access to it"
        reason = " ".join(str(error).split()).rstrip(".")
        raise BadInputError(f"{what} cannot be downloaded ({reason}); {remedy}") from error
