"""Files of tensors, read strictly: each has its shape, and none is left over."""

from collections.abc import Mapping, Sequence
from pathlib import Path
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, CorruptError

Shape = tuple[int, ...]


def read(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file.

    Raises:
      CorruptError: it is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not file.is_file():
        raise CorruptError(f"{file} is missing; copy the whole folder")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CorruptError(f"{file} is damaged: {error}") from error


def names(file: Path) -> set[str]:
    """The names of the tensors of a safetensors file, of which none is read.

    Raises:
      CorruptError: it is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise CorruptError(f"{file} is missing; copy the whole folder")
    try:
        with safe_open(file, "numpy") as opened:
            return set(opened.keys())
    except SafetensorError as error:
        raise CorruptError(f"{file} is damaged: {error}") from error


def read_npz(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file; pickled ones are refused.

    Raises:
      CorruptError: it is missing or damaged, or an array of it is pickled.
    """
    if not file.is_file():
        raise CorruptError(f"{file} is missing; copy the whole folder")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise CorruptError(f"{file} is damaged, or holds objects: {error}") from error


def get(
    file: Path,
    tensors: Mapping[str, np.ndarray],
    name: str,
    *shapes: Shape,
    stored: bool = False,
) -> np.ndarray:
    """A tensor in float32, or as `stored` says.

    Args:
      file: file of the tensors, for errors.
      tensors: tensors by name.
      name: name of the tensor.
      shapes: shapes that it may have, the usual first.
      stored: whether bfloat16 stays bfloat16 (`keeps_halves`), of large matrices that are read as
        they are.

    Raises:
      CorruptError: it is missing, of another shape or not finite.
    """
    x = tensors.get(name)
    if x is None or x.shape not in shapes:
        actual = "missing" if x is None else f"of shape {x.shape}"
        raise CorruptError(f"{file}: {name} is {actual}; it must be {shapes[0]}")
    if not np.isfinite(x).all():
        raise CorruptError(f"{file}: {name} has values that are not finite")
    keep = stored and x.dtype == jnp.bfloat16 and keeps_halves()
    return x if keep else np.asarray(x, np.float32)


def keeps_halves() -> bool:
    """Whether matrices in bfloat16 stay so: not on a CPU, whose programs widen whole ones."""
    return jax.default_backend() != "cpu"


def stacked(
    files: Sequence[Path],
    layers: Sequence[Mapping[str, np.ndarray]],
    name: str,
    shape: Shape,
    *,
    stored: bool = False,
) -> jnp.ndarray:
    """A tensor of every layer `[L, ...]`; `{layer}` in its name is the layer's number.

    `stored` is that of `get`.

    Raises:
      CorruptError: as `get`.
    """
    each = [
        get(file, tensors, name.format(layer=layer), shape, stored=stored)
        for layer, (file, tensors) in enumerate(zip(files, layers, strict=True))
    ]
    return jnp.asarray(np.stack(each))


def check_known(file: Path, tensors: Mapping[str, np.ndarray], known: set[str], what: str) -> None:
    """Raises for a tensor that has no part in what is read.

    Raises:
      BadInputError: naming it.
    """
    for name in sorted(tensors.keys() - known):
        raise BadInputError(f"{file}: {name} has no part in a {what}; give one without it")


def check_thresholds(folder: Path, theta_LF: np.ndarray | jnp.ndarray) -> None:
    """Raises for thresholds under which activations could be below 0.

    Raises:
      CorruptError: one is.
    """
    if not (np.asarray(theta_LF) >= 0).all():
        raise CorruptError(f"{folder}: thresholds must be at least 0")
