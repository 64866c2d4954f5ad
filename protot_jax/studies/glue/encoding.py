"""Texts and pairs as rows of ids with their target, and batches of them by number.

A row is `<bos> text <eos>`, or for a pair `<bos> first [SEP] second <eos>`, padded with id 0 to the
length of the longest row of the task, and one more int32: the index of the class, or the bits of a
float32 score.
`[SEP]` is tokenized like any text, as in the code released with the Prototype Transformer, because
the pretrained models know no separator. What is too long is cut from the longer text of a pair.

Scores are standardised by mean and standard deviation of the training split.
"""

from collections.abc import Sequence
import dataclasses
import functools
import hashlib
from typing import NamedTuple

import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text.examples import Batch, order_name, shuffled
from lm_jax.text.tokenizer import Tokenizer, added_tokens
from lm_jax.train.objective import PAD
from protot_jax.studies.glue.readers import Split, TaskData
from protot_jax.studies.glue.tasks import Task

SEPARATOR = "[SEP]"


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Encoded examples: int32 `[n, T + 1]`, targets in the last column, and how many were cut."""

    rows_NS: np.ndarray
    truncated: int

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(self.rows_NS)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The sha256 of the rows."""
        return hashlib.sha256(np.ascontiguousarray(self.rows_NS, "<i4").tobytes()).hexdigest()


class Scale(NamedTuple):
    """A score is `mean + deviation * (what the model predicts)`; of classes 0 and 1."""

    mean: float
    deviation: float


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """The splits of a task as rows of one tokenizer: `predicted` by name holds all but `train`."""

    train: Rows
    selection: Rows
    predicted: dict[str, Rows]
    scale: Scale


def encode_task(
    data: TaskData, task: Task, tokenizer: Tokenizer, *, length: int, pads: bool = False
) -> Encoded:
    """Encodes every split, all to the length of the longest text, so that one program serves all.

    Args:
      data: the texts and targets.
      task: task whose kind of target is used.
      tokenizer: tokenizer of the model.
      length: most ids of a row.
      pads: whether rows have this length even if all texts are shorter.

    Raises:
      UsageError: `length` has no room for the texts of a pair.
      BadInputError: all scores of the training split are equal.
    """
    scale = Scale(0.0, 1.0)
    if not task.labels:
        targets = np.asarray(data.train.targets)
        scale = Scale(float(targets.mean()), float(targets.std()))
        if not scale.deviation:
            raise BadInputError(
                f"{task.title}: every score of the training split is {scale.mean:g}; give others"
            )
    splits = {"": data.train, " ": data.selection} | data.predicted
    texts = {name: encode_texts(split.texts, tokenizer, length) for name, split in splits.items()}
    longest = max(len(ids) for own, _ in texts.values() for ids in own)
    width = length if pads else longest
    train, selection, *others = (
        Rows(_rows(ids, splits[name], task, scale, width), cut)
        for name, (ids, cut) in texts.items()
    )
    return Encoded(train, selection, dict(zip(list(splits)[2:], others, strict=True)), scale)


def encode_texts(
    texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, length: int
) -> tuple[list[list[int]], int]:
    """The ids of texts or pairs, at most `length` each, and how many were cut."""
    before, after = added_tokens(tokenizer)
    between = tuple(_ids(tokenizer, SEPARATOR))
    pairs = max(map(len, texts)) > 1
    room = length - len(before) - len(after) - pairs * len(between)
    if room < 1 + pairs:
        raise UsageError(f"config.max_length = {length} leaves {room} ids for text; raise it")
    cut, rows = 0, []
    for own in texts:
        parts = [_ids(tokenizer, text) for text in own]
        kept = _fitted(parts, room)
        cut += kept != parts
        joined = kept[0] if len(kept) == 1 else [*kept[0], *between, *kept[1]]
        rows.append([*before, *joined, *after])
    return rows, cut


def _rows(ids: list[list[int]], split: Split, task: Task, scale: Scale, width: int) -> np.ndarray:
    """Ids and targets as int32 `[n, width + 1]`; unknown targets are 0."""
    rows_NS = np.full((len(ids), width + 1), PAD, np.int32)
    for row, own in zip(rows_NS, ids, strict=True):
        row[: len(own)] = own
    rows_NS[:, -1] = 0
    if split.targets is not None and task.labels:
        rows_NS[:, -1] = split.targets
    elif split.targets is not None:
        standard = (split.targets - scale.mean) / scale.deviation
        rows_NS[:, -1] = standard.astype(np.float32).view(np.int32)
    return rows_NS


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def _fitted(parts: list[list[int]], room: int) -> list[list[int]]:
    """The beginnings of one text or two that fit together; the shorter of two is cut last."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = map(len, parts)
    least = min(first, second, room // 2)
    if first <= second:
        return [parts[0][: max(least, room - second)], parts[1][: room - least]]
    return [parts[0][: room - least], parts[1][: max(least, room - first)]]


class TrainBatches:
    """The endless sequence of shuffled batches, as `lm_jax.text.examples.Batches` of documents."""

    def __init__(self, rows: Rows, *, batch_size: int, seed: int) -> None:
        """Shuffles anew every epoch.

        Raises:
          BadInputError: there are fewer examples than one batch.
        """
        if rows.count < batch_size:
            raise BadInputError(
                f"the training split has {rows.count} examples, fewer than one batch of "
                f"{batch_size}; lower config.batch_size"
            )
        self._rows, self._numbers = rows, shuffled(rows.count, seed).batch(batch_size)
        self.per_epoch = rows.count // batch_size
        self.fingerprint = (
            f"rows={rows.fingerprint[:16]} batch_size={batch_size} seed={seed} order={order_name()}"
        )

    def at(self, k: int) -> Batch:
        """Batch k = 0, 1, ... of all epochs."""
        places = np.asarray(self._numbers[k])
        return {"tokens": self._rows.rows_NS[places], "document": places.astype(np.int64)}


class EvalBatches:
    """Every example once; rows of padding, with "document" -1, fill the last batch."""

    def __init__(self, rows: Rows, *, batch_size: int) -> None:
        self._rows, self._batch_size = rows, batch_size
        self.per_epoch = -(-rows.count // batch_size)
        self.fingerprint = f"rows={rows.fingerprint[:16]} batch_size={batch_size}"

    def at(self, k: int) -> Batch:
        """Batch k of 0..per_epoch-1."""
        places = np.arange(k * self._batch_size, (k + 1) * self._batch_size)
        inside = places[places < self._rows.count]
        missing = len(places) - len(inside)
        tokens = np.pad(self._rows.rows_NS[inside], ((0, missing), (0, 0)), constant_values=PAD)
        return {"tokens": tokens, "document": np.pad(inside, (0, missing), constant_values=-1)}
