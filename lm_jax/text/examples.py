"""Batches of a prepared split: a pure function of the data, the seed and one number.

    examples = Examples(open_prepared(folder), "train", context=256)
    batches = Batches(examples, batch_size=32, seed=0)
    batches.at(k)

Batch k is the same array in every process and at any time. A run resumes at its next k, with any
number of processes, and stores no iterator state. There are three ways to form examples of
`context + 1` ids (inputs, and targets shifted by one):

    truncate   one example is the beginning of one document, padded with zeros (`<pad>`), which the
               loss leaves out; the rest of a long document is not used. As the Prototype
               Transformer was trained.
    pack       the documents of an epoch are joined in its order and cut into rows; only the last
               row of an epoch, if it is not full, is not used.
    window     every document is cut into rows of its own; the last id of one is also the first
               of the next, so that every id is a target once. The last row is padded with -1,
               because to a pretrained model every id may be text.

The examples of all epochs form one endless sequence, and batch k holds its places k B to k B + B-1.
So every example occurs once per epoch, also where B does not divide their number. An epoch's order
permutes the examples one by one, so that a batch does not come out of one long document; only where
documents are joined it permutes those. The order is that of grain's `MapDataset.shuffle`, which
computes the example at any place from the seed, the epoch and the place alone (a small block cipher
that permutes the numbers below `count`). So a batch costs the same however many examples there are,
and nothing is read ahead of it.
"""

import functools
import hashlib
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.text.prepared import Prepared
from lm_jax.text.records import open_records, records_file, unreadable
from lm_jax.text.splits import SPLITS
from lm_jax.text.tokenizer_training import PAD

if TYPE_CHECKING:
    import grain

# The id at positions without a token.
IGNORE_INDEX = -1
Mode = Literal["truncate", "pack", "window"]
Batch = dict[str, np.ndarray]


class Examples:
    """Rows of `context + 1` ids of one split, read on demand.

    Attributes:
      count: examples in an epoch.
      truncated: documents of which a part is not used; 0 unless mode is "truncate".
      unused_tokens: ids that no example of an epoch holds.
      fill: the id at positions without a token.
    """

    def __init__(
        self,
        prepared: Prepared,
        split: str = "train",
        *,
        context: int,
        mode: Mode = "truncate",
        limit: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Opens a split.

        Args:
          prepared: the data, as `prepare.open_prepared` gives it.
          split: "train", "validation" or "test".
          context: length of the model's input, in ids.
          mode: how documents become rows; see the head of this file.
          limit: the number of documents to use, the first of the split; None for all.
          vocab_size: the model's vocabulary size, to check it against the data's; None skips the
            check.

        Raises:
          UsageError: for an invalid split, context, mode or limit.
          BadInputError: the split holds nothing to read, or the model has fewer tokens than the
            data, or `truncate` would pad with an id that is not padding.
        """
        if split not in SPLITS:
            raise UsageError(f"split = {split!r} is not one of {', '.join(SPLITS)}")
        if mode not in get_args(Mode):
            raise UsageError(f"mode = {mode!r} is not one of {', '.join(get_args(Mode))}")
        if context < 1 or (limit is not None and limit < 1):
            raise UsageError(f"context = {context} and limit = {limit} must be positive")
        result = prepared.manifest["vocab_size"]
        if vocab_size is not None and vocab_size < result:
            raise BadInputError(
                f"{prepared.folder} has ids up to {result - 1}, and the model a vocabulary of "
                f"{vocab_size}; give the model vocab_size={result}, or prepare other data"
            )
        if mode == "truncate" and prepared.tokenizer.token(0) != PAD:
            raise BadInputError(
                f"{prepared.folder}: id 0 is {prepared.tokenizer.token(0)!r}, not {PAD!r}, so rows "
                "cannot be padded with it; use mode='window' or 'pack'"
            )
        self.prepared, self.split, self.mode, self.limit = prepared, split, mode, limit
        self.width = context + 1
        self.fill = IGNORE_INDEX if mode == "window" else 0
        self._file = prepared.folder / records_file(split)
        self._lengths = self._read_lengths()[:limit].astype(np.int64)
        total = int(self._lengths.sum())
        self.truncated = self.unused_tokens = 0
        if mode == "truncate":
            over = np.maximum(self._lengths - self.width, 0)
            self._extents = np.ones_like(self._lengths)
            self.truncated, self.unused_tokens = int((over > 0).sum()), int(over.sum())
        elif mode == "pack":
            self._extents = self._lengths
            self.unused_tokens = total % self.width
        else:
            # A document of one id has no target.
            self._extents = -(-(self._lengths - 1) // context)
            self.unused_tokens = int((self._lengths == 1).sum())
        # The size of a document in an epoch: ids where documents are joined, else rows.
        taken = int(self._extents.sum())
        self.count = taken // self.width if mode == "pack" else taken
        if not self.count:
            raise BadInputError(
                f"{self._file} holds {total} tokens in {len(self._lengths)} documents, not one "
                f"example of {self.width}; prepare more documents"
            )

    @property
    def documents(self) -> int:
        """How many documents are used."""
        return len(self._lengths)

    def ends(self, order: np.ndarray) -> np.ndarray:
        """Where each document ends, in ids, if all are joined in this order."""
        return np.cumsum(self._lengths[order])

    @functools.cached_property
    def _stored(self) -> tuple[np.ndarray, np.ndarray]:
        """The documents as they are stored, and where each ends: in ids if joined, else in rows."""
        return np.arange(self.documents), np.cumsum(self._extents)

    def read(
        self, places: np.ndarray, order: np.ndarray | None = None, *, ends: np.ndarray | None = None
    ) -> Batch:
        """Examples by their places.

        Args:
          places: int [n], each below `count`: indices of stored examples, or for "pack" of the rows
            of an epoch whose documents are joined in `order`.
          order: a permutation of the documents, for "pack"; None is the stored order.
          ends: `ends(order)`, for a caller that reads often in one order.

        Returns:
          "tokens", int32 [n, context + 1]; and "document", int64 [n], the number in the split of
          the document at the first id of the row.

        Raises:
          UsageError: an order for examples that are not joined.
          BadInputError: a record cannot be read, or an id in it is not in the vocabulary.
          CorruptError: a record's length is not the stored one.
        """
        tokens = np.full((len(places), self.width), self.fill, np.int32)
        if order is None:
            order, ends = self._stored
        elif self.mode != "pack":
            raise UsageError(f"mode = {self.mode!r} joins no documents; leave `order` out")
        elif ends is None:
            ends = self.ends(order)
        if self.mode != "pack":
            numbers = np.searchsorted(ends, places, side="right")
            starts = (places - ends[numbers] + self._extents[numbers]) * (self.width - 1)
            for row, start, ids in zip(tokens, starts, self._records(numbers), strict=True):
                kept = ids[start : start + self.width]
                row[: len(kept)] = kept
            return {"tokens": tokens, "document": numbers.astype(np.int64)}
        starts = places * self.width
        firsts = np.searchsorted(ends, starts, side="right")
        lasts = np.searchsorted(ends, starts + self.width - 1, side="right")
        for row, start, first, last in zip(tokens, starts, firsts, lasts, strict=True):
            inside = order[first : last + 1]
            skipped = start - (ends[first] - self._lengths[order[first]])
            row[:] = np.concatenate(self._records(inside))[skipped : skipped + self.width]
        return {"tokens": tokens, "document": order[firsts].astype(np.int64)}

    def _read_lengths(self) -> np.ndarray:
        file = self.prepared.folder / f"{self.split}-lengths.npy"
        lengths = np.load(file, allow_pickle=False)
        if (stored := self._reader.num_records()) != len(lengths):
            raise CorruptError(
                f"{self._file} holds {stored} records, and {file.name} the lengths of "
                f"{len(lengths)}; remove the folder and prepare the data again"
            )
        return lengths

    @functools.cached_property
    def _reader(self) -> Any:
        # Reading ahead helps a scan, and these reads are random.
        return open_records(self._file, "readahead_buffer_size:0,max_parallelism:0")

    def _records(self, numbers: np.ndarray) -> list[np.ndarray]:
        """The ids of documents, checked."""
        try:
            records = self._reader.read(numbers.tolist())
        except RuntimeError as error:
            raise unreadable(self._file, error) from error
        result = []
        for number, record in zip(numbers.tolist(), records, strict=True):
            if len(record) != self._lengths[number] * self.prepared.dtype.itemsize:
                raise CorruptError(
                    f"{self._file}: record {number} has {len(record)} bytes, not "
                    f"{self._lengths[number]} ids; remove the folder and prepare the data again"
                )
            ids = np.frombuffer(record, self.prepared.dtype)
            if ids.max() >= self.prepared.manifest["vocab_size"]:
                raise BadInputError(
                    f"{self._file}: record {number} has the id {ids.max()}, and the vocabulary "
                    f"{self.prepared.manifest['vocab_size']} tokens; prepare the data again"
                )
            result.append(ids)
        return result


class Batches:
    """The endless sequence of shuffled batches, for training.

    Attributes:
      fingerprint: text that identifies everything that determines the batches of all processes, as
        words `name=value`. A checkpoint stores it, and a run with another one refuses the
        checkpoint.
      per_epoch: whole batches in an epoch.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        batch_size: int,
        seed: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Batches of all rows, or of the block of rows of one process.

        Args:
          examples: the examples of a split.
          batch_size: rows of a batch, of all processes together.
          seed: random seed of the order.
          process_index: index of the process whose rows are read.
          process_count: number of processes.

        Raises:
          UsageError: for an invalid size or seed, or a size that the processes cannot share evenly.
          BadInputError: the split has fewer examples than one batch.
        """
        if not 0 <= seed < 2**64:
            raise UsageError(f"seed = {seed} must be in 0..2^64 - 1")
        self._rows = _share(batch_size, process_index, process_count)
        if examples.count < batch_size:
            raise BadInputError(
                f"{examples.prepared.folder}: {examples.split} has {examples.count} examples, "
                f"fewer than one batch of {batch_size}; give a smaller batch or more documents"
            )
        self._examples, self._batch_size = examples, batch_size
        self.fingerprint = _fingerprint(examples, batch_size, seed)
        self.per_epoch = examples.count // batch_size
        self._numbers = shuffled(examples.count, seed).batch(batch_size)

        # The contents of a row of joined documents depend on all documents before it. A batch may
        # span two epochs.
        @functools.lru_cache(maxsize=2)
        def joined(epoch: int) -> tuple[np.ndarray, np.ndarray]:
            order = epoch_order(examples.documents, seed, epoch)
            return order, examples.ends(order)

        self._joined = joined

    def at(self, k: int) -> Batch:
        """Batch k = 0, 1, ... of all epochs, as `Examples.read` returns it.

        Raises:
          UsageError: k is negative.
          BadInputError, CorruptError: as `Examples.read`.
        """
        if k < 0:
            raise UsageError(f"batch {k} is before the first, which is 0")
        if self._examples.mode != "pack":
            return self._examples.read(np.asarray(self._numbers[k])[self._rows])
        places = k * self._batch_size + self._rows
        epochs, places = np.divmod(places, self._examples.count)
        parts = []
        for epoch in np.unique(epochs).tolist():
            order, ends = self._joined(epoch)
            parts.append(self._examples.read(places[epochs == epoch], order, ends=ends))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class OnePass:
    """Every example once, in the order in which they are stored, for evaluation.

    The last batch is padded with rows of `Examples.fill`, whose "document" is -1, so that all
    batches, on all processes, have one shape. There are `per_epoch` of them.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Takes what `Batches` takes, but a split may be smaller than a batch."""
        self._rows = _share(batch_size, process_index, process_count)
        self.examples, self._batch_size = examples, batch_size
        self.fingerprint = _fingerprint(examples, batch_size, None)
        self.per_epoch = -(-examples.count // batch_size)

    def at(self, k: int) -> Batch:
        """Batch k of 0..per_epoch-1, as `Examples.read` returns it.

        Raises:
          UsageError: there is no batch k.
          BadInputError, CorruptError: as `Examples.read`.
        """
        if not 0 <= k < self.per_epoch:
            raise UsageError(f"batch {k} is not one of the {self.per_epoch} of this pass")
        places = k * self._batch_size + self._rows
        inside = places[places < self.examples.count]
        result = self.examples.read(inside)
        missing = len(places) - len(result["document"])
        return {
            "tokens": np.pad(
                result["tokens"],
                ((0, missing), (0, 0)),
                constant_values=self.examples.fill,
            ),
            "document": np.pad(result["document"], (0, missing), constant_values=-1),
        }


def shuffled(count: int, seed: int) -> "grain.MapDataset[int]":
    """The numbers 0..count-1 without end, in a different order every epoch.

    Element i is a pure function of the three numbers (count, seed, i), and costs the same whatever
    they are.
    """
    # Takes most of a second to import, and only training needs it.
    import grain

    return grain.MapDataset.range(count).seed(seed).shuffle().repeat()


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The whole order of one epoch of `shuffled`: a permutation of 0..count-1."""
    return np.asarray(shuffled(count, seed).batch(count)[epoch])


@functools.cache
def order_name() -> str:
    """Name of the shuffling algorithm, for a fingerprint.

    It holds the hash of a sample order, because grain promises no order across its versions.
    """
    sample = epoch_order(1009, seed=0, epoch=1).astype("<i8")
    return f"grain:{hashlib.sha256(sample.tobytes()).hexdigest()[:8]}"


def _share(batch_size: int, process_index: int, process_count: int) -> np.ndarray:
    """The rows of a batch that belong to one process."""
    if batch_size < 1:
        raise UsageError(f"batch_size = {batch_size} must be positive")
    if process_count < 1 or batch_size % process_count or not 0 <= process_index < process_count:
        raise UsageError(
            f"process {process_index} of {process_count} cannot have an even share of a batch of "
            f"{batch_size}; choose a batch size that the number of processes divides"
        )
    rows = batch_size // process_count
    return np.arange(process_index * rows, (process_index + 1) * rows)


def _fingerprint(examples: Examples, batch_size: int, seed: int | None) -> str:
    manifest = examples.prepared.manifest
    names = (records_file(examples.split), f"{examples.split}-lengths.npy")
    data = "".join(manifest["files"][name]["sha256"] for name in names)
    parts = {
        "data": hashlib.sha256(data.encode()).hexdigest()[:16],
        "tokenizer": manifest["tokenizer_sha256"][:16],
        "split": examples.split,
        "limit": examples.limit,
        "context": examples.width - 1,
        "mode": examples.mode,
        "batch_size": batch_size,
        "seed": seed,
    }
    if seed is not None:
        parts["order"] = order_name()
    return " ".join(f"{name}={value}" for name, value in parts.items())
