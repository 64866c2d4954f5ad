"""A local Hugging Face folder: config.json, safetensors in one file or shards with an index.

Only safetensors are read. Pickled weights, folders that ask for code of their own, and shard names
or links that lead out of the folder are refused.
"""

from collections.abc import Generator, Mapping
import contextlib
import json
from pathlib import Path
import re
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError, StorageError
from lm_jax.run.files import new_folder
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.families.table import Family

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

_SHARD = re.compile(r"\w[\w.-]*\.safetensors")
_PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_FLOATS = ("F64", "F32", "F16", "BF16")
# Names of the number of layers, in any family.
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
_MOST_LABELS = 10**6


def read_family(folder: Path, families: Mapping[str, Family]) -> tuple[Family, dict[str, Any]]:
    """The family of a folder and the raw content of its config.json.

    Raises:
      BadInputError: for no or malformed config.json, code of its own, quantised weights, or a
        family that is not supported.
    """
    path = folder / CONFIG
    raw = read_object(path)
    if "auto_map" in raw:
        raise BadInputError(
            f"{path}: auto_map asks to run code from the folder, which is never done; use a model "
            f"of a supported family ({', '.join(sorted(families))}), or take auto_map out where "
            "that code is what transformers has for its model_type (Phi-3)"
        )
    if raw.get("quantization_config"):
        raise BadInputError(
            f"{path}: quantization_config: quantised weights cannot be read; use the float weights "
            "or a GGUF file"
        )
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        raise BadInputError(
            f"{path}: model_type = {kind!r} is not supported; use a model of one of "
            f"{', '.join(sorted(families))}"
        )
    return families[kind], raw


def read_hf_config(folder: Path, family: Family, raw: Mapping[str, Any], tensors: int) -> Any:
    """The transformers config of a folder.

    Args:
      folder: the model's folder; transformers reads its config.json again.
      family, raw: the family and the config, as `read_family` gives them.
      tensors: how many the weights have; no model has more layers.

    Raises:
      BadInputError: for a field that transformers refuses, or a model that it reads as another.
    """
    path = folder / CONFIG
    # transformers makes lists of that many entries.
    limits = {**dict.fromkeys(_DEPTHS, tensors), "num_labels": _MOST_LABELS}
    for field, most in limits.items():
        for fields in (raw, raw.get("text_config")):
            value = fields.get(field) if isinstance(fields, dict) else None
            if isinstance(value, int) and value > most:
                raise BadInputError(
                    f"{path}: {field} = {value} is absurd for weights of {tensors} tensors; take "
                    "weights and config of one model"
                )
    from huggingface_hub.errors import StrictDataclassError

    from lm_jax.weights.compat import transformers

    # Whatever the validation of a field, or the arithmetic before it, comes to.
    unreadable = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
    try:
        config = transformers().AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (StrictDataclassError, *unreadable) as error:
        reason = " ".join(str(error).split())
        raise BadInputError(f"{path} cannot be read: {reason}; mend that field") from error
    if config.model_type != family.name:
        raise BadInputError(
            f"{path}: transformers reads this {family.name} as {config.model_type!r}, which is not "
            "supported; use a model of another family"
        )
    return config


class SafetensorsSource:
    """The weights of a folder under the names of its family, without buffers."""

    def __init__(self, folder: Path, family: Family):
        self.files = _weight_files(folder)
        opened = {path: open_tensors(path) for path in self.files}
        stored = {path: list(file.keys()) for path, file in opened.items()}
        names = [name for of_file in stored.values() for name in of_file]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadInputError(f"{folder}: tensors stored in two shards: {', '.join(twice)}")
        if self.files[0].name != SINGLE:
            _check_index(folder, {name: path.name for path in stored for name in stored[path]})
        # Files saved from the bare model, as GPT-2 is on hubs, lack the prefix on every name.
        bare = not any(name.startswith(family.prefix) for name in names)
        self._where: dict[str, tuple[Path, Any, str]] = {}
        for path, of_file in stored.items():
            for name in of_file:
                ours = family.name_in_table(name, bare=bare)
                if not family.ignores(ours):
                    self._where[ours] = (path, opened[path], name)
        self._check_dtypes(folder)

    def _check_dtypes(self, folder: Path) -> None:
        kinds = {
            name: file.get_slice(stored).get_dtype()
            for name, (_, file, stored) in self._where.items()
        }
        others = [f"{name} ({kind})" for name, kind in kinds.items() if kind not in _FLOATS]
        if others:
            raise BadInputError(
                f"{folder}: tensors that are not float ({', '.join(_FLOATS)}): "
                f"{shortened(others)}; quantised weights cannot be read, use the float weights"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight."""
        return {
            name: tuple(file.get_slice(stored).get_shape())
            for name, (_, file, stored) in self._where.items()
        }

    def read(self, name: str) -> np.ndarray:
        """One weight, whole, as it is stored."""
        path, file, stored = self._where[name]
        with readable(path):
            return file.get_tensor(stored)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The single file or the shards, each known to be a file of this folder."""
    if (folder / SINGLE).exists():
        names = [SINGLE]
    elif (folder / INDEX).exists():
        names = sorted(set(weight_map(folder).values()))
        if escaping := [name for name in names if not _SHARD.fullmatch(name)]:
            raise BadInputError(
                f"{folder / INDEX} names shards that are no plain *.safetensors name: {escaping}"
            )
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise BadInputError(
                f"{folder}: missing shards {', '.join(missing)}; download them again"
            )
    else:
        _refuse_pickles(folder)
        raise BadInputError(
            f"{folder} has neither {SINGLE} nor {INDEX}; name the folder with the weights"
        )
    files = tuple(folder / name for name in names)
    for file in files:
        _check_inside(folder, file)
    return files


def _check_inside(folder: Path, file: Path) -> None:
    """Refuses a link that leads out of the folder, but for the blobs of a hub's cache.

    The cache holds `snapshots/<revision>/<name>`, each a link to `../../blobs/<digest>`.
    """
    folder, target = folder.resolve(), file.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise BadInputError(
            f"{file} is a link out of its folder, to {target}; put the file itself there"
        )


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(item.name for item in folder.iterdir() if item.suffix in _PICKLES)
    if pickles:
        raise BadInputError(
            f"{folder} has only pickled weights ({', '.join(pickles)}), which are never loaded, as "
            "loading can run code; where you trust them, save the model with save_pretrained of "
            "transformers, which writes safetensors"
        )


def weight_map(folder: Path) -> dict[str, str]:
    """The shard of every tensor, by the index of a folder.

    Raises:
      BadInputError: the index is missing or malformed.
    """
    path = folder / INDEX
    shards = read_object(path).get("weight_map")
    is_map = isinstance(shards, dict) and all(isinstance(s, str) for s in shards.values())
    if not shards or not is_map:
        raise BadInputError(f"{path} has no weight_map of names; download it again")
    return shards


def _check_index(folder: Path, stored: Mapping[str, str]) -> None:
    """Raises unless the index names every stored tensor in its shard, and no other."""
    index = weight_map(folder)
    problems = [
        f"{name} is indexed in {index.get(name, 'no shard')}, stored in {stored.get(name, 'none')}"
        for name in sorted(index.keys() | stored.keys())
        if index.get(name) != stored.get(name)
    ]
    if problems:
        raise BadInputError(
            f"{folder / INDEX} does not fit the shards: {shortened(problems)}; download all of "
            "them from one revision"
        )


def open_tensors(path: Path) -> Any:
    """A file of tensors, each read whole where it is asked for.

    Raises:
      BadInputError: the file cannot be read as safetensors.
    """

    from safetensors import safe_open

    with readable(path):
        # Through a memory map the pages read would stay and count on top of the parameters.
        return safe_open(path, framework="numpy", backend="pread")


@contextlib.contextmanager
def readable(path: Path) -> Generator[None]:
    """Turns errors of safetensors into a `BadInputError` that says what the file is instead."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        with path.open("rb") as file:
            head = file.read(64)
        hint = "it is truncated or damaged; download it again"
        if head.startswith(b"version https://git-lfs"):
            hint = "it is a Git LFS pointer; run `git lfs pull`"
        elif head.lstrip().startswith(b"<"):
            hint = "it is an HTML page; download the file itself"
        raise BadInputError(f"{path} is not readable as safetensors ({error}): {hint}") from error
    except OSError as error:
        raise BadInputError(f"{path} cannot be read ({error}); check its permissions") from error


def shortened(items: list[str], limit: int = 20) -> str:
    """The first items, and the number of those that are left out."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder.

    Raises:
      BadInputError: the file is missing, or holds no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInputError(f"{path} is missing; name the folder with the whole model") from error
    except (ValueError, RecursionError, OSError) as error:
        raise BadInputError(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path} is not a JSON object; download it again")
    return data


def write_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    tokenizer: Tokenizer | None,
) -> None:
    """Writes config, weights and tokenizer into a new folder, and reads the weights back."""
    with new_folder(path) as draft:
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(draft / SINGLE, tensors, {"format": "pt"})
        if tokenizer is not None:
            tokenizer.save(draft)


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a file of tensors and reads it back.

    Raises:
      StorageError: what was read is not what was written.
    """
    from safetensors.numpy import save_file

    # The writer copies each buffer as it is: a transposed view would be stored wrongly.
    packed = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(packed, path, metadata=dict(metadata))
    written = open_tensors(path)
    for name, tensor in packed.items():
        if written.get_tensor(name).tobytes() != tensor.tobytes():
            raise StorageError(f"{path}: {name} did not read back as written; check the disk")
