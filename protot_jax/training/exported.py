"""The folder of an exported model: its manifest, and its weights read into their sharding.

`protot_jax.training.export` writes it, and `protot_jax.training.saved_run.load_run` reads it like a
run.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model import params as params_lib
from lm_jax.run.files import ManifestFormat, verify_manifest
from lm_jax.weights import card as cards
from lm_jax.weights.safetensors import open_tensors, readable

WEIGHTS = "model.safetensors"
FORMAT = ManifestFormat(
    name="export.json",
    version=1,
    content="exported model",
    remedy="name a folder of `iaj protot export`",
    outdated="export the model again with this version",
    damaged="get the folder again, or export the model again",
    may_differ=cards.is_of_hub,
)


def is_exported(folder: Path) -> bool:
    """Whether a folder is an exported model, in place of a run."""
    return (folder / FORMAT.name).is_file()


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of an exported model, once all of its files agree with it.

    Raises:
      BadInputError: it is of another version.
      CorruptError: naming the first file that is missing, truncated or changed.
    """
    return verify_manifest(folder, FORMAT)


def read_manifest(folder: Path, *, best: bool) -> dict[str, Any]:
    """The manifest of an exported model, once all of its files agree with it.

    Args:
      folder: folder of the exported model.
      best: whether the weights of lowest validation perplexity are wanted, or else the last.

    Raises:
      BadInputError: it is of another version.
      CorruptError: naming the first file that is missing, truncated or changed.
      UsageError: the model was exported with the other weights.
    """
    manifest = verify(folder)
    wanted = "best" if best else "last"
    if manifest["step"] != manifest[f"{wanted}_step"]:
        other = "last" if best else "best"
        raise UsageError(
            f"{folder} has the {other} weights alone, of step {manifest['step']:,}; read it with "
            f"--checkpoint={other}, or export its run with --checkpoint={wanted}"
        )
    return manifest


def read_weights(folder: Path, target: Any) -> dict[str, Any]:
    """The parameters of an exported model, each put where its `jax.ShapeDtypeStruct` says.

    Args:
      folder: folder of the exported model, verified before.
      target: a tree of `jax.ShapeDtypeStruct`, as `sharding.abstract` makes; what the file has in
        bfloat16 is widened.

    Raises:
      BadInputError: the file has other parameters than those of the config, or is unreadable.
    """
    path = folder / WEIGHTS
    file, wanted = open_tensors(path), params_lib.by_path(target)
    if differing := sorted(set(file.keys()) ^ wanted.keys()):
        raise BadInputError(
            f"{path} and {folder / 'config.json'} are of different models: {', '.join(differing)} "
            "are parameters of one of them only; take both from one export"
        )
    leaves = {}
    for name, struct in wanted.items():
        with readable(path):
            array = file.get_tensor(name)
        rounded = array.dtype == jnp.bfloat16
        if array.shape != struct.shape or not (rounded or array.dtype == struct.dtype):
            raise BadInputError(
                f"{path}: {name} is {array.dtype}{list(array.shape)}, not "
                f"{np.dtype(struct.dtype)}{list(struct.shape)} as the config says; take both from "
                "one export"
            )
        leaves[name] = jax.device_put(array.astype(struct.dtype), struct.sharding)
    return params_lib.tree_from_paths(leaves)
