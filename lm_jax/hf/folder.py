"""A local Hugging Face folder: config.json, safetensors in one file or shards with an index.

Only safetensors are read. Pickled weights and folders that ask for code of their own are refused.
"""

from collections.abc import Mapping
import json
import os
from pathlib import Path
import shutil
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError, StorageError, nearest
from lm_jax.hf.table import Family
from lm_jax.hf.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"


def read_hf_config(folder: Path, families: Mapping[str, Family]) -> Any:
    """The transformers config of a folder, once its family is known to be supported.

    Raises:
      BadInputError: for no or malformed config.json, code of its own, quantised weights, or a family
        that is not supported.
    """
    raw = _read_json(folder / "config.json")
    if "auto_map" in raw:
        raise BadInputError(f"{folder}/config.json: auto_map asks to run code from the folder")
    if raw.get("quantization_config"):
        raise BadInputError(
            f"{folder}/config.json: quantization_config: quantised weights cannot be read; "
            "use the float weights or a GGUF file"
        )
    kind = raw.get("model_type")
    if kind not in families:
        raise BadInputError(
            f"{folder}/config.json: model_type = {kind!r} is not supported"
            f"{nearest(str(kind), families)}"
        )
    from lm_jax.hf.compat import transformers

    try:
        return transformers().AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise BadInputError(f"{folder}/config.json cannot be read: {reason}") from error


class SafetensorsSource:
    """Tensors of a folder; every shard is opened once, and read tensor by tensor."""

    def __init__(self, folder: Path, family: Family):
        self.files = _weight_files(folder)
        self._where: dict[str, tuple[Any, str]] = {}
        twice = []
        for path in self.files:
            file = _open(path)
            for stored in file.keys():  # noqa: SIM118 (not a dict)
                name = _with_prefix(stored, family)
                if name in self._where:
                    twice.append(name)
                self._where[name] = (file, stored)
        if twice:
            raise BadInputError(f"{folder}: stored twice: {', '.join(sorted(twice))}")
        _check_index(folder, {stored for _, stored in self._where.values()})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(file.get_slice(stored).get_shape())
            for name, (file, stored) in self._where.items()
        }

    def read(self, name: str) -> np.ndarray:
        file, stored = self._where[name]
        return np.asarray(file.get_tensor(stored))


def _with_prefix(stored: str, family: Family) -> str:
    if stored == family.head or stored.startswith(family.prefix):
        return stored
    return family.prefix + stored


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / INDEX).exists():
        shards = sorted(set(_weight_map(folder).values()))
        escaping = [
            s
            for s in shards
            if Path(s).name != s
            or (
                (folder / s).is_symlink()
                and not (folder / s).resolve().is_relative_to(folder.resolve().parents[1])
            )
        ]
        if escaping:
            raise BadInputError(f"{folder}/{INDEX} names files outside the folder: {escaping}")
        missing = [s for s in shards if not (folder / s).exists()]
        if missing:
            raise BadInputError(
                f"{folder}: missing shards {', '.join(missing)}; download them again"
            )
        return tuple(folder / s for s in shards)
    if (folder / "model.safetensors").exists():
        return (folder / "model.safetensors",)
    pickles = sorted(
        p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".ckpt", ".pth")
    )
    if pickles:
        raise BadInputError(
            f"{folder} has only pickled weights ({', '.join(pickles)}), which are never loaded; "
            "save them as safetensors first"
        )
    raise BadInputError(f"{folder} has neither model.safetensors nor {INDEX}")


def _weight_map(folder: Path) -> dict[str, str]:
    index = _read_json(folder / INDEX)
    if not isinstance(index.get("weight_map"), dict):
        raise BadInputError(f"{folder}/{INDEX} has no weight_map")
    return index["weight_map"]


def _check_index(folder: Path, stored: set[str]) -> None:
    if (folder / INDEX).exists():
        missing = sorted(set(_weight_map(folder)) - stored)
        if missing:
            raise BadInputError(f"{folder}: the shards lack {', '.join(missing[:20])}")


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="flax")
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            head = file.read(64)
        hint = "the file is truncated or damaged; download it again"
        if head.startswith(b"version https://git-lfs"):
            hint = "it is a Git LFS pointer; run `git lfs pull`"
        elif head.lstrip()[:1] == b"<":
            hint = "it is an HTML page; download the file itself"
        raise BadInputError(f"{path}: not readable as safetensors ({error}): {hint}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise BadInputError(f"{path} is missing") from error
    except (ValueError, OSError) as error:
        raise BadInputError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path} is not a JSON object")
    return data


def write_folder(
    path: Path, config: str, tensors: dict[str, np.ndarray], tokenizer: Tokenizer | None
) -> None:
    """Writes the folder under a temporary name, reads the weights back, and renames it."""
    from safetensors.flax import load_file, save_file

    if path.exists():
        raise BadInputError(f"{path} exists; give a folder that does not")
    draft = path.with_name(path.name + ".tmp")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        (draft / "config.json").write_text(config + "\n")
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save(draft)
        back = load_file(draft / "model.safetensors")
        for name, tensor in tensors.items():
            if not np.array_equal(np.asarray(back[name]), tensor):
                raise StorageError(f"{draft}: {name} did not read back as written; disk faulty?")
        os.replace(draft, path)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path}: cannot write the model: {error}") from error
