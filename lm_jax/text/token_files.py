"""Token files: documents that were tokenized elsewhere, as NumPy archives.

A token file is an `.npz` with two arrays and no pickles:

    tokens    integers [X], the ids of all documents one after the other
    offsets   integers [N + 1], where each document begins, and at last X

A folder of `train.npz`, `validation.npz` and `test.npz` with the `tokenizer.json` of the ids is a
corpus, `tokens:FOLDER` (`lm_jax.text.preparation`).
"""

from collections.abc import Iterable
import os
from pathlib import Path
import zipfile
import zlib

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.run.files import replace_file

KIND = "tokens"
_NAMES = ("tokens", "offsets")


def split_file(folder: str | os.PathLike[str], split: str) -> Path:
    """The token file of a split."""
    return Path(folder) / f"{split}.npz"


def id_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which ids are stored, little-endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def read_token_file(path: str | os.PathLike[str], *, vocab_size: int) -> list[np.ndarray]:
    """The ids `[n]` of each document of a token file; some may have none.

    Args:
      path: the `.npz` file.
      vocab_size: size of the tokenizer's vocabulary; every id is below it.

    Raises:
      BadInputError: the file cannot be read, lacks an array, or has one of another dtype or shape;
        the offsets do not ascend from 0 to the number of tokens; an id is not in the vocabulary.
    """
    arrays = _arrays(Path(path))
    for name, array in arrays.items():
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise BadInputError(
                f"{path}: {name} is {array.dtype} of shape {array.shape}; store integers in one "
                "dimension"
            )
    tokens, offsets = (arrays[name] for name in _NAMES)
    # Differences of unsigned integers would wrap.
    offsets = offsets.astype(np.int64)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens):
        ends = f"{offsets[0]} to {offsets[-1]}" if len(offsets) else "none"
        raise BadInputError(
            f"{path}: offsets go from {ends}, not from 0 to the {len(tokens)} tokens; store where "
            "each document begins, and at last the number of tokens"
        )
    if (falls := np.flatnonzero(np.diff(offsets) < 0)).size:
        raise BadInputError(
            f"{path}: offsets fall from {offsets[falls[0]]} to {offsets[falls[0] + 1]} after "
            f"document {falls[0]}; store them in order"
        )
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        outside = tokens.max() if tokens.max() >= vocab_size else tokens.min()
        raise BadInputError(
            f"{path}: tokens have the id {outside}, and the vocabulary {vocab_size} tokens; give "
            "the tokenizer of these files"
        )
    return np.split(tokens, offsets[1:-1]) if len(offsets) > 1 else []


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise BadInputError(f"{path} is not there; give a token file of every split")
    try:
        # A `.npy` file is no archive.
        if not zipfile.is_zipfile(path):
            raise BadInputError(
                f"{path} is no .npz file; write one with the arrays tokens, offsets"
            )
        with np.load(path, allow_pickle=False) as file:
            lacking = [name for name in _NAMES if name not in file]
            if lacking:
                raise BadInputError(
                    f"{path} has no array {' or '.join(lacking)}; store tokens and offsets"
                )
            return {name: file[name] for name in _NAMES}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise BadInputError(
            f"{path} cannot be read ({error}); write it anew, without Python objects"
        ) from error


def write_token_file(
    path: str | os.PathLike[str], documents: Iterable[np.ndarray], *, vocab_size: int
) -> None:
    """Writes documents, the ids `[n]` of each, as a token file.

    Raises:
      BadInputError: an id is not in the vocabulary.
      StorageError: the file cannot be written.
    """
    documents = [np.asarray(ids, np.int64) for ids in documents]
    tokens = np.concatenate([np.zeros(0, np.int64), *documents])
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise BadInputError(
            f"{path}: ids go from {tokens.min()} to {tokens.max()}, and the vocabulary has "
            f"{vocab_size} tokens; give the tokenizer's vocab_size"
        )
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    with replace_file(path) as file:
        np.savez_compressed(file, tokens=tokens.astype(id_dtype(vocab_size)), offsets=offsets)
