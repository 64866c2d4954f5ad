"""Prepared data: a folder of tokenized documents, whose files are verified when it is opened.

A prepared folder holds, for each split,

    <split>-00000-of-00001.array_record   one record per document: its ids, little-endian
    <split>-lengths.npy                   uint32 [documents], the ids in each record
    tokenizer.json                        the tokenizer (and tokenizer_config.json)
    manifest.json                         every file with size and sha256, counts per split, what
                                          was left out and why, the sources; written last

A document is the ids of its text, followed by the end-of-text token. ArrayRecord has random access;
its own checksums cover the records that are read, those of the manifest the files.

The folder is written under another name, synced and renamed (`new_folder`): it exists whole, or
does not exist.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.run import stop
from lm_jax.run.files import (
    ManifestFormat,
    new_folder,
    read_manifest,
    replace_file,
    verify_manifest,
    write_manifest,
)
from lm_jax.text.records import record_writers
from lm_jax.text.splits import SPLITS
from lm_jax.text.token_files import id_dtype
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import END_OF_TEXT

MANIFEST = "manifest.json"
_KIND = ManifestFormat(
    name=MANIFEST,
    version=1,
    content="prepared data",
    remedy="prepare it",
    outdated="prepare the data again with this version",
    damaged="remove the folder and prepare the data again",
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared folder, every file of which agreed with the manifest when it was opened."""

    folder: Path
    manifest: Mapping[str, Any]
    tokenizer: Tokenizer

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the ids in a record."""
        return np.dtype(self.manifest["dtype"])


class EncodedDocument(NamedTuple):
    """A document: its split, its ids, and the bytes that it is known by."""

    split: str
    ids: list[int]
    data: bytes


def write_documents(
    folder: Path,
    documents: Iterable[EncodedDocument],
    tokenizer: Tokenizer,
    splits: Sequence[float],
    skips: Counter[str],
    content: Mapping[str, Any],
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Writes a new prepared folder, and returns its manifest.

    Args:
      folder: a folder that does not exist yet.
      documents: encoded documents, in the order of the records; those without ids are counted among
        `skips`.
      tokenizer: the tokenizer that gave the ids.
      splits: shares of the three splits; one of a positive share must get documents.
      skips: how many documents were left out, by reason.
      content: the part of the manifest that is known before: `seed`, `sources` and `notes`.
      max_tokens: no further document is read once all splits together have that many ids.

    Raises:
      BadInputError, StorageError, StoppedError: as `prepare`.
    """
    dtype = id_dtype(tokenizer.vocab_size)
    lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
    total, digest = 0, hashlib.sha256()
    with new_folder(folder) as draft, record_writers(draft, folder, SPLITS) as write:
        for split, ids, data in documents:
            stop.check("while preparing data")
            if not ids:
                skips["no tokens"] += 1
                continue
            digest.update(hashlib.sha256(data).digest())
            write(split, np.asarray(ids, dtype).tobytes())
            lengths[split].append(len(ids))
            total += len(ids)
            if max_tokens is not None and total >= max_tokens:
                break
        _check_filled(lengths, splits, skips)
        for split in SPLITS:
            with replace_file(draft / f"{split}-lengths.npy") as file:
                np.save(file, np.asarray(lengths[split], np.uint32))
        write.close()
        tokenizer.save(draft)
        own = {
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_sha256": tokenizer.sha256,
            "splits": {
                split: {"share": share, "documents": len(counts), "tokens": sum(counts)}
                for (split, counts), share in zip(lengths.items(), splits, strict=True)
            },
            "skipped": dict(sorted(skips.items())),
            "documents_sha256": digest.hexdigest(),
        }
        write_manifest(draft, _KIND, own | dict(content))
    return read_manifest(folder, _KIND)


def document_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a document, the end of text among them; none for a text without ids."""
    return with_end(tokenizer, tokenizer.encode(text, split_special_tokens=True))


def with_end(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The ids of a document with the end of text, where there are any."""
    end = tokenizer.backend.token_to_id(END_OF_TEXT)
    # A tokenizer from elsewhere has no end-of-text token but EOS, and seldom adds it by itself.
    end = tokenizer.eos_id if end is None or end >= tokenizer.vocab_size else end
    return [*ids, end] if ids and end is not None and ids[-1] != end else ids


def open_prepared(
    folder: str | os.PathLike[str], *, tokenizer: Tokenizer | None = None
) -> Prepared:
    """Opens a folder of `prepare` after comparing every file with the manifest.

    Args:
      folder: a folder of `prepare`.
      tokenizer: the caller's tokenizer, which must be that of the data; None skips the check.

    Raises:
      BadInputError: there is no manifest, or the ids are of another tokenizer.
      CorruptError: naming the first file that is missing, truncated or changed.
    """
    folder = Path(folder)
    manifest = verify_manifest(folder, _KIND)
    own = Tokenizer.from_folder(folder)
    for other in (own, tokenizer):
        if other is not None and other.sha256 != manifest["tokenizer_sha256"]:
            raise BadInputError(
                f"{folder} was prepared with tokenizer {manifest['tokenizer_sha256'][:12]}, not "
                f"{other.sha256[:12]}; prepare the data with the tokenizer of the model"
            )
    return Prepared(folder, manifest, own)


def _check_filled(
    lengths: Mapping[str, list[int]], splits: Sequence[float], skips: Mapping[str, int]
) -> None:
    empty = [
        split for split, share in zip(SPLITS, splits, strict=True) if share and not lengths[split]
    ]
    if empty:
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(skips.items()))
        raise BadInputError(
            f"{', '.join(empty)} got none of {sum(map(len, lengths.values()))} documents (left "
            f"out: {skipped or 'none'}); give more documents, or a share of 0 for that split"
        )
