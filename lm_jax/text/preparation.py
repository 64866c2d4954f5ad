"""Corpus preparation: documents tokenized once into files that are verified when opened.

A prepared folder holds, for each split,

    <split>-00000-of-00001.array_record   one record per document: its ids, little-endian
    <split>-lengths.npy                   uint32 [documents], the ids in each record
    tokenizer.json                        the tokenizer (and tokenizer_config.json)
    manifest.json                         every file with size and sha256, counts per split, what
                                          was left out and why, the sources; written last

A document is the ids of its text, followed by the end-of-text token. A hash of its text and the
seed alone decide its split, so that the order of a source, or more documents in it, move no other
document. ArrayRecord has random access; its own checksums cover the records that are read, those of
the manifest the files.

Documents that were tokenized elsewhere, of a source `tokens:FOLDER`, come with their splits and
their tokenizer (`token_files`). `exports` writes prepared data for others.

The folder is written under another name, synced and renamed (`new_folder`): it exists whole, or
does not exist.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run import processes, stop
from lm_jax.run.config import config_difference, to_plain
from lm_jax.run.files import (
    ManifestFormat,
    check_new,
    new_folder,
    read_manifest,
    replace_file,
    storage_error,
    verify_manifest,
    write_manifest,
)
from lm_jax.run.results import Count, Share
from lm_jax.text import corpora
from lm_jax.text.records import record_writers
from lm_jax.text.splits import SPLITS, check_shares, split_of, split_point
from lm_jax.text.token_files import (
    KIND,
    id_dtype,
    read_token_file,
    split_file,
)
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import END_OF_TEXT, train_tokenizer

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


@dataclasses.dataclass(frozen=True)
class SplitSize:
    """Share, documents and tokens of one split."""

    share: Share
    documents: Count
    tokens: Count


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """All that decides the contents of a prepared folder; see `corpora.documents` and `prepare`.

    The default corpus is 249 long speeches, so its documents are cut at paragraphs. Neighbouring
    paragraphs of one speech may then be in different splits. The paper's corpus is read with unit
    "document".

    Attributes:
      source: sotu, wiki, wikitext2, a file or folder, another source of `lm_jax.text.corpora`, or
        tokens:FOLDER with token files of every split, for which all other fields are without use.
      unit: "document" reads documents whole, "paragraph" cuts them at empty lines.
      words: greatest number of words in a part, where documents are cut.
      field: column of the text, in .jsonl, .parquet and tensorflow-datasets.
      vocab_size: tokens of the tokenizer that is trained on the corpus.
      splits: shares of the train, validation and test splits; they sum to 1.
      max_tokens: reading ends once all splits together have this many tokens; 0 reads all.
      seed: random seed of the splits.
    """

    source: str = "sotu"
    unit: corpora.Unit = "paragraph"
    words: int = 600
    field: str = "text"
    vocab_size: int = 16_000
    splits: tuple[float, float, float] = (0.94, 0.05, 0.01)
    max_tokens: int = 0
    seed: int = 0


def prepare(
    documents: Iterable[corpora.Document],
    tokenizer: Tokenizer,
    folder: str | os.PathLike[str],
    *,
    splits: Sequence[float] = (0.94, 0.05, 0.01),
    seed: int,
    longest: int = 1_000_000,
    max_tokens: int | None = None,
    sources: Mapping[str, str] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Tokenizes documents into a new folder, and returns its manifest.

    Args:
      documents: texts, as from `corpora.documents`; those that cannot be used are counted and left
        out (`corpora.usable`), and so are those without ids ("no tokens").
      tokenizer: the tokenizer; its special tokens are added, but never read out of the text.
      folder: a folder that does not exist yet.
      splits: the shares of train, validation and test; they sum to 1.
      seed: random seed of the splits.
      longest: the most characters of a document; a longer one is left out.
      max_tokens: number of ids in all splits together, after which no further document is read.
      sources: sha256 by file name, for the manifest (`corpora.hashes`).
      notes: further JSON for the manifest, such as the settings.

    Raises:
      UsageError: for invalid shares or an invalid seed.
      BadInputError: `folder` exists, or a split with a positive share got no documents.
      StorageError: the folder cannot be written; then it does not exist.
      StoppedError: the command was asked to stop; nothing is kept.
    """
    check_shares(splits)
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed = {seed} must be in 0..2^64 - 1")
    folder = Path(folder)
    check_new(folder)
    skips: Counter[str] = Counter()

    def encoded() -> Iterator[EncodedDocument]:
        for _, text in corpora.usable(documents, skips, longest=longest):
            data = text.encode()
            split = split_of(split_point(data, seed), splits)
            yield EncodedDocument(split, document_ids(tokenizer, text), data)

    content = {"seed": seed, "sources": dict(sources or {}), "notes": dict(notes or {})}
    return write_documents(folder, encoded(), tokenizer, splits, skips, content, max_tokens)


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
    return _with_end(tokenizer, tokenizer.encode(text, split_special_tokens=True))


def _with_end(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    end = tokenizer.backend.token_to_id(END_OF_TEXT)
    # A tokenizer from elsewhere has no end-of-text token but EOS, and seldom adds it by itself.
    end = tokenizer.eos_id if end is None or end >= tokenizer.vocab_size else end
    return [*ids, end] if ids and end is not None and ids[-1] != end else ids


def _prepare_token_files(
    source: Path, folder: Path, seed: int, sources: Mapping[str, str], notes: Mapping[str, Any]
) -> dict[str, Any]:
    """Prepares the token files in `source`, in their own splits, by the tokenizer beside them."""
    tokenizer = Tokenizer.from_folder(source)
    of_split = {
        split: read_token_file(split_file(source, split), vocab_size=tokenizer.vocab_size)
        for split in SPLITS
    }
    encoded = (
        EncodedDocument(split, _with_end(tokenizer, ids.tolist()), ids.astype("<u4").tobytes())
        for split, documents in of_split.items()
        for ids in documents
    )
    counts = [len(documents) for documents in of_split.values()]
    shares = [count / max(sum(counts), 1) for count in counts]
    content = {"seed": seed, "sources": dict(sources), "notes": dict(notes)}
    return write_documents(folder, encoded, tokenizer, shares, Counter(), content)


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


def prepare_corpus(
    folder: str | os.PathLike[str],
    corpus: CorpusConfig,
    *,
    tokenizer: Tokenizer | None = None,
) -> Prepared:
    """Opens `folder` if it was prepared with these settings, else trains a tokenizer and prepares.

    Several processes may call it at once: one prepares, the others wait and open.

    Args:
      folder: the prepared folder, which need not exist.
      corpus: the corpus to prepare.
      tokenizer: a tokenizer to use in place of one trained on the documents.

    Raises:
      UsageError: `folder` was prepared with other settings.
      BadInputError: `folder` was prepared from files that have changed since; files that are gone
        are not compared.
      BadInputError, CorruptError, StorageError: as `prepare` and `open_prepared`.
    """
    folder = Path(folder)
    is_new = False
    with _locked(folder):
        if not (folder / MANIFEST).is_file():
            # Refused before the long part.
            check_new(folder)
            is_new = True
            kind, _, source = corpus.source.partition(":")
            sources, notes = corpora.hashes(corpus.source), {"corpus": dataclasses.asdict(corpus)}
            if kind == KIND:
                _prepare_token_files(Path(source), folder, corpus.seed, sources, notes)
                return open_prepared(folder, tokenizer=tokenizer)
            own = tokenizer or train_tokenizer(
                (text for _, text in corpora.usable(_documents(corpus), Counter())),
                vocab_size=corpus.vocab_size,
            )
            prepare(
                _documents(corpus),
                own,
                folder,
                splits=corpus.splits,
                seed=corpus.seed,
                max_tokens=corpus.max_tokens or None,
                sources=sources,
                notes=notes,
            )
    prepared = open_prepared(folder, tokenizer=tokenizer)
    stored = prepared.manifest["notes"].get("corpus", {})
    if changes := config_difference(stored, to_plain(corpus)):
        raise UsageError(
            f"{folder} was prepared with {', '.join(changes)}; name another folder, or remove it"
        )
    if not is_new:
        _check_sources(folder, corpus.source, prepared.manifest["sources"])
    return prepared


def _check_sources(folder: Path, source: str, stored: Mapping[str, str]) -> None:
    """Refuses prepared data of files that have changed since."""
    now = corpora.own_hashes(source)
    names = sorted(name for name in {*stored, *now} if stored.get(name) != now.get(name))
    if stored and now and names:
        raise BadInputError(
            f"{folder} was prepared from other files of the corpus {source} (changed, added or "
            f"removed: {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}); put those "
            "back, or name another folder"
        )


def prepare_on_first(
    folder: str | os.PathLike[str], corpus: CorpusConfig, *, tokenizer: Tokenizer | None = None
) -> Prepared:
    """`prepare_corpus` in all processes of a run: the first prepares, then the others open.

    Raises:
      ElsewhereError: the first refused, or was stopped.
      UsageError, BadInputError, CorruptError, StorageError: as `prepare_corpus`.
    """
    prepared: list[Prepared] = []

    def prepare_here() -> None:
        prepared.append(prepare_corpus(folder, corpus, tokenizer=tokenizer))

    processes.on_first(prepare_here)
    return prepared[0] if prepared else prepare_corpus(folder, corpus, tokenizer=tokenizer)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
        lock.acquire()
    except OSError as error:
        raise storage_error(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def split_documents(corpus: CorpusConfig, split: str) -> Iterator[str]:
    """The texts of one of `SPLITS`, in the order of the corpus; what cannot be used is left out.

    Where the preparation ended at `max_tokens`, these are more than the split then had, but none is
    of another split.

    Raises:
      BadInputError: the corpus cannot be read any more.
    """
    for _, text in corpora.usable(_documents(corpus), Counter()):
        if split_of(split_point(text.encode(), corpus.seed), corpus.splits) == split:
            yield text


def _documents(corpus: CorpusConfig) -> Iterator[corpora.Document]:
    return corpora.documents(
        corpus.source, unit=corpus.unit, words=corpus.words, field=corpus.field
    )


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
