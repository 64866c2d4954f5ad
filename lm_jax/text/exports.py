"""Writing prepared data for others: as token files, or as the held-out documents alone."""

from collections import Counter
from collections.abc import Iterator
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.run.files import check_new, new_folder
from lm_jax.text.prepared import EncodedDocument, Prepared, write_documents
from lm_jax.text.records import read_records, records_file
from lm_jax.text.splits import SPLITS
from lm_jax.text.token_files import split_file, write_token_file

HELD_OUT = ("validation", "test")


def export_token_files(prepared: Prepared, folder: str | os.PathLike[str]) -> None:
    """Writes prepared data as a new folder of token files, a corpus `tokens:FOLDER`.

    Raises:
      BadInputError: `folder` exists, or a record cannot be read.
      StorageError: it cannot be written; then it does not exist.
    """
    folder = Path(folder)
    check_new(folder)
    with new_folder(folder) as draft:
        for split in SPLITS:
            write_token_file(
                split_file(draft, split),
                _documents(prepared, split),
                vocab_size=prepared.manifest["vocab_size"],
            )
        prepared.tokenizer.save(draft)


def export_held_out(
    prepared: Prepared, folder: str | os.PathLike[str], *, documents: int
) -> dict[str, Any]:
    """Writes the first documents of the held-out splits as a new prepared folder.

    It has no training text. `of_documents_sha256` in the notes of its manifest names the data that
    it is a part of; the settings of the corpus in the notes are those of that data.

    Args:
      prepared: the data.
      folder: a folder that does not exist yet.
      documents: the most documents of validation, and of test.

    Returns:
      The manifest.

    Raises:
      BadInputError: `folder` exists, or a record cannot be read.
      StorageError: it cannot be written; then it does not exist.
    """
    manifest = prepared.manifest
    chosen = [
        EncodedDocument(split, ids.tolist(), ids.astype("<u4").tobytes())
        for split in HELD_OUT
        for ids in itertools.islice(_documents(prepared, split), documents)
    ]
    counts = Counter(document.split for document in chosen)
    notes = manifest["notes"] | {"of_documents_sha256": manifest["documents_sha256"]}
    return write_documents(
        Path(folder),
        chosen,
        prepared.tokenizer,
        [counts[split] / max(len(chosen), 1) for split in SPLITS],
        Counter(),
        {name: manifest[name] for name in ("seed", "sources")} | {"notes": notes},
    )


def _documents(prepared: Prepared, split: str) -> Iterator[np.ndarray]:
    """The ids of each document of a split, in order."""
    for record in read_records(prepared.folder / records_file(split)):
        yield np.frombuffer(record, prepared.dtype)
