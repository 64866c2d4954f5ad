"""A subset of a large corpus of parquet files, by number of tokens or of documents, on the record.

FineWeb-Edu (Penedo et al. 2024) is distributed as parquet files with the columns `text`, `id` and
`dump`. `build_subset` takes its documents in order of file names and rows, until there are enough,
and writes a folder that `preparation.prepare_corpus` reads as a source:

    documents.parquet   id, dump and text of every document
    tokenizer.json      learned from the first 10,000 of them, by which tokens are counted
    subset.json         files with sha256, dumps, order, counts, sha256 of the ids; written last

The split of a document depends on a hash of its text (`splits.split_point`), so that shares
give counts by chance. `exact_shares` are shares that give the wanted counts exactly.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run import stop
from lm_jax.run.files import (
    ManifestFormat,
    check_new,
    file_digest,
    new_folder,
    read_manifest,
    write_manifest,
)
from lm_jax.text import corpora, lines
from lm_jax.text.prepared import document_ids
from lm_jax.text.splits import SPLITS, split_of, split_point
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import train_tokenizer

DOCUMENTS = "documents.parquet"
MANIFEST = "subset.json"
FORMAT = ManifestFormat(
    name=MANIFEST,
    version=1,
    content="subset of a corpus",
    remedy="build it",
    outdated="build the subset again with this version",
    damaged="remove the folder and build the subset again",
)
ORDER = "file names, then rows"
_ROWS = 1_000


@dataclasses.dataclass(frozen=True)
class SubsetConfig:
    """What decides a subset.

    Attributes:
      tokens: reading ends once there are this many, the end of text of each document included.
      counts: numbers of documents of train, validation and test; instead of `tokens` where given.
      splits: shares of the three, in the nearest whole numbers; used without `counts`.
      seed: random seed of the splits.
      vocab_size: vocabulary size of the learned tokenizer.
      dump: name to record where the files have no column of that name.
      text, id: names of columns.
    """

    tokens: int = 250_000_000
    counts: tuple[int, int, int] | None = None
    splits: tuple[float, float, float] = (0.94, 0.05, 0.01)
    seed: int = 0
    vocab_size: int = 16_000
    dump: str = ""
    text: str = "text"
    id: str = "id"


@dataclasses.dataclass
class _Read:
    """What is known of the documents that were taken, in their order."""

    ids: Any = dataclasses.field(default_factory=hashlib.sha256)
    points: list[float] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)
    dumps: Counter[str] = dataclasses.field(default_factory=Counter)
    files: list[Path] = dataclasses.field(default_factory=list)
    skips: Counter[str] = dataclasses.field(default_factory=Counter)


def build_subset(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    config: SubsetConfig,
    *,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any]:
    """Writes the new folder of a subset, and returns its manifest.

    Args:
      source: a folder of .parquet files, or one such file.
      folder: a folder that does not exist yet.
      config: the settings of the subset.
      tokenizer: a tokenizer to count tokens by, in place of one that is learned.

    Raises:
      UsageError: for counts, shares or tokens that cannot be.
      BadInputError: `folder` exists, a file or column cannot be used, or there are not enough
        documents.
      StorageError: the folder cannot be written; then it does not exist.
      StoppedError: the command was asked to stop; nothing is kept.
    """
    _check(config)
    source = Path(source)
    files = parquet_files(source)
    check_new(folder)
    own = tokenizer or train_tokenizer(
        (text for _, _, text in _documents(files, config, _Read())), vocab_size=config.vocab_size
    )
    read = _Read()
    with new_folder(folder) as draft:
        _write(draft / DOCUMENTS, _wanted(files, config, own, read))
        enough = sum(config.counts) if config.counts else 1
        if len(read.points) < enough:
            raise BadInputError(
                f"{source} has {len(read.points)} documents that can be used, of {enough}; add "
                "files, or ask for fewer"
            )
        counts = config.counts or nearest_counts(len(read.points), config.splits)
        shares = exact_shares(read.points, counts)
        names = [split_of(point, shares) for point in read.points]
        own.save(draft)
        content = {
            "config": dataclasses.asdict(config),
            "order": ORDER,
            "documents": len(read.points),
            "tokens": sum(read.lengths),
            "ids_sha256": read.ids.hexdigest(),
            "dumps": dict(sorted(read.dumps.items())),
            "sources": _sources(source, read.files),
            "skipped": dict(sorted(read.skips.items())),
            "tokenizer_sha256": own.sha256,
            "shares": list(shares),
            "splits": {
                split: {
                    "documents": names.count(split),
                    "tokens": sum(
                        n for n, name in zip(read.lengths, names, strict=True) if name == split
                    ),
                }
                for split in SPLITS
            },
        }
        write_manifest(draft, FORMAT, content)
    return read_manifest(Path(folder), FORMAT)


def parquet_files(source: Path) -> list[Path]:
    """The .parquet files of a folder in order of their names, or the one named.

    Raises:
      BadInputError: there is none.
    """
    files = [source] if source.is_file() else sorted(source.rglob("*.parquet"))
    if not files:
        raise BadInputError(f"{source} holds no .parquet file; put those of the corpus there")
    return files


def nearest_counts(documents: int, splits: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers of documents with shares nearest to `splits` (largest remainders)."""
    exact = np.asarray(splits) * documents
    counts = np.floor(exact).astype(int)
    most = np.argsort(-(exact - counts), kind="stable")[: documents - counts.sum()]
    counts[most] += 1
    return tuple(map(int, counts))


def exact_shares(points: Sequence[float], counts: Sequence[int]) -> tuple[float, float, float]:
    """Shares of train, validation and test by which `split_of` gives the counts exactly.

    Args:
      points: points of the documents (`split_point`).
      counts: number of documents of each of the three splits; their sum is the number of points.

    Raises:
      BadInputError: two documents have nearly one point, so that no share parts them.
    """
    ordered = np.sort(points)
    edges = [0.0]
    for n in np.cumsum(counts)[:2]:
        inside = 0 < n < len(ordered)
        edges.append(float(ordered[n - 1] + ordered[n]) / 2 if inside else float(n > 0))
    shares = (edges[1], edges[2] - edges[1], 1.0 - edges[2])
    found = Counter(split_of(point, shares) for point in points)
    if [found[split] for split in SPLITS] != list(counts):
        raise BadInputError("no shares give these counts exactly; take another seed")
    return shares


def _check(config: SubsetConfig) -> None:
    if config.counts is not None:
        if min(config.counts) < 0 or sum(config.counts) < 1:
            raise UsageError(
                f"counts = {config.counts} must be three numbers of documents, not all 0"
            )
    elif min(config.splits) < 0 or not np.isclose(sum(config.splits), 1.0):
        raise UsageError(f"splits = {config.splits} must be three shares with sum 1")
    if config.tokens < 1:
        raise UsageError(f"tokens = {config.tokens} must be at least 1")


def _documents(
    files: Sequence[Path], config: SubsetConfig, read: _Read
) -> Iterator[tuple[str, str, str]]:
    """Id, dump and text of the documents that can be used, in order."""

    def rows() -> Iterator[tuple[tuple[str, str], str | bytes]]:
        for file in files:
            read.files.append(file)
            columns = [config.text, config.id]
            for text, name, dump in corpora.parquet_rows(file, columns, ["dump"]):
                if not name:
                    raise BadInputError(
                        f"{file}: a document has no {config.id!r}; name the column of its ids"
                    )
                yield (name.decode(), dump.decode() or config.dump), lines.decoded(text)

    for (name, dump), text in corpora.usable(rows(), read.skips):
        yield name, dump, text


def _wanted(
    files: Sequence[Path], config: SubsetConfig, tokenizer: Tokenizer, read: _Read
) -> Iterator[tuple[str, str, str]]:
    """The documents of the subset, which are noted in `read` as they pass."""
    total = 0
    for name, dump, text in _documents(files, config, read):
        stop.check("while building the subset")
        read.ids.update(f"{name}\n".encode())
        read.points.append(split_point(text.encode(), config.seed))
        read.lengths.append(len(document_ids(tokenizer, text)))
        read.dumps[dump] += 1
        total += read.lengths[-1]
        yield name, dump, text
        if config.counts is None and total >= config.tokens:
            return
        if config.counts is not None and len(read.points) == sum(config.counts):
            return


def _write(file: Path, documents: Iterator[tuple[str, str, str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("id", pa.string()), ("dump", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while rows := list(itertools.islice(documents, _ROWS)):
            columns = [pa.array(column) for column in zip(*rows, strict=True)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _sources(source: Path, files: Sequence[Path]) -> Mapping[str, str]:
    """sha256 of the files that were read, by name."""
    folder = source if source.is_dir() else source.parent
    return {file.relative_to(folder).as_posix(): file_digest(file)["sha256"] for file in files}
