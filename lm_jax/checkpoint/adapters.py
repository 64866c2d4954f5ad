"""Low-rank adapters in a file: safetensors with their settings and the digest of their base."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.model import params as params_lib
from lm_jax.model.lora import LoraConfig
from lm_jax.model.params import ParamTree
from lm_jax.run.files import write_bytes
from lm_jax.run.identity import difference

ADAPTER_FILE = "adapter.safetensors"
_FORMAT = "lm_jax.lora 1"


def save_adapters(
    path: str | os.PathLike[str],
    adapters: ParamTree,
    settings: LoraConfig,
    *,
    base_sha256: str,
) -> None:
    """Writes adapters as safetensors, with their settings and their base.

    Args:
      path: the file.
      adapters: parameters of the adapters.
      settings: settings of the adapters.
      base_sha256: the base, as `Pretrained.identity.text`.

    Raises:
      StorageError: the file cannot be written; an earlier one is unchanged.
    """
    from safetensors.numpy import save as to_bytes

    tensors = {
        name: np.ascontiguousarray(np.asarray(leaf, np.float32))
        for name, leaf in params_lib.by_path(adapters).items()
    }
    metadata = {
        "format": _FORMAT,
        "base_sha256": base_sha256,
        "settings": json.dumps(dataclasses.asdict(settings)),
    }
    write_bytes(path, to_bytes(tensors, metadata))


def load_adapters(
    path: str | os.PathLike[str], *, base_sha256: str
) -> tuple[dict[str, Any], LoraConfig]:
    """Reads adapters that were trained on this base (`Pretrained.identity.text`, or its digest).

    Raises:
      BadInputError: it is no adapter, or one of another base.
      CorruptError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise BadInputError(f"{path} is not there; name the {ADAPTER_FILE} of a post-training run")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptError(
            f"{path} is no whole safetensors file ({error}); copy it again"
        ) from error
    if metadata.get("format") != _FORMAT:
        raise BadInputError(f"{path} is no adapter of lm_jax; name the {ADAPTER_FILE} of a run")
    if change := difference(metadata["base_sha256"], base_sha256, where=path):
        raise BadInputError(
            f"{path} was trained on a base with {change}; load it over the model it was trained on"
        )
    settings = json.loads(metadata["settings"])
    settings["targets"] = tuple(settings["targets"])
    return params_lib.tree_from_paths(tensors), LoraConfig(**settings)
