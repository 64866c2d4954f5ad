"""Sequences of the recall suite as rows of tokens, to train on and to measure.

    reads      k v l w . . l w . k       ids from 1 on; 0 is padding
    answers    . . . . . . w . . v       the target of each query; 0 elsewhere

A row holds the T input ids and then the T target ids. Row n of a stream is a function of the task,
the stream and n alone, and so is batch k.
"""

import hashlib
from typing import Literal, NamedTuple

import jax
import numpy as np

from lm_jax.text import recall
from lm_jax.train.objective import PAD, LMBatch

Task = Literal["mqar", "induction", "needle"]
TASKS: tuple[Task, ...] = ("mqar", "induction", "needle")
Split = Literal["train", "choice", "test"]
_SPLITS: tuple[Split, ...] = ("train", "choice", "test")


class Condition(NamedTuple):
    """A task at one length; `pairs` is the number of pairs of MQAR, and None of other tasks."""

    task: Task
    length: int
    pairs: int | None = None


def is_possible(condition: Condition, vocab_size: int) -> bool:
    """Whether a sequence has room for its queries, and the vocabulary for its tokens."""
    length, ids = condition.length, vocab_size - 1
    if condition.task == "mqar":
        pairs = condition.pairs or 1
        return recall.least_mqar_length(pairs) <= length and 2 * pairs < ids
    return length >= 3 and (condition.task == "needle" or length // 2 + 1 <= ids)


def chance(condition: Condition, vocab_size: int) -> float:
    """Accuracy of a guess that knows the form of a sequence, and recalls nothing.

    MQAR: any of the values; induction: any token of the block; needle: any id except the mark.
    """
    if condition.task == "mqar":
        return 1.0 / (condition.pairs or 1)
    if condition.task == "induction":
        return 1.0 / (condition.length // 2 + 1)
    return 1.0 / (vocab_size - 2)


def draw(condition: Condition, vocab_size: int, rng: np.random.RandomState) -> recall.Recall:
    """A random sequence of the task."""
    task, length, pairs = condition
    ordinary = np.arange(PAD + 1, vocab_size)
    if task == "mqar":
        return recall.mqar(rng, ordinary, length, pairs or 1)
    if task == "induction":
        return recall.induction(rng, ordinary, length)
    return recall.needle(rng, ordinary, length)


def as_row(made: recall.Recall) -> np.ndarray:
    """Ids, int32 `[2 T]`: inputs and then targets."""
    target_T = np.full(len(made.tokens), PAD)
    target_T[list(made.queries)] = made.targets
    return np.concatenate([made.tokens, target_T]).astype(np.int32)


def rows(condition: Condition, count: int, vocab_size: int, split: Split) -> np.ndarray:
    """Rows int32 `[count, 2 T]` of one condition; the first do not depend on `count`."""
    stream = [_SPLITS.index(split), TASKS.index(condition.task), *condition[1:]]
    keys = [part or 0 for part in stream]
    made = (
        draw(condition, vocab_size, np.random.RandomState([*keys, index])) for index in range(count)
    )
    return np.stack([as_row(each) for each in made])


def answer_batch(tokens_BS: jax.Array) -> LMBatch:
    """Batch that predicts each target at its query."""
    T = tokens_BS.shape[1] // 2
    input_BT, target_BT = tokens_BS[:, :T], tokens_BS[:, T:]
    return LMBatch(input_BT, input_BT != PAD, target_BT, target_BT != PAD)


class Batches:
    """Endless batches of one task at one length, each row in one of its conditions.

    Attributes:
      fingerprint: text that identifies the batches.
      per_epoch: the number 1, as there are no epochs.
    """

    def __init__(
        self, conditions: tuple[Condition, ...], *, batch_size: int, vocab_size: int, seed: int
    ) -> None:
        self._conditions, self._batch_size = conditions, batch_size
        self._vocab_size, self._seed = vocab_size, seed
        self.per_epoch = 1
        described = repr((conditions, batch_size, vocab_size, seed))
        self.fingerprint = f"recall {hashlib.sha256(described.encode()).hexdigest()[:16]}"

    def at(self, k: int) -> dict[str, np.ndarray]:
        """Batch k = 0, 1, ...: `tokens` as from `rows`; `document`, the numbers of the rows."""
        numbers_B = np.arange(k * self._batch_size, (k + 1) * self._batch_size)
        return {
            "tokens": np.stack([self._row(n) for n in numbers_B.tolist()]),
            "document": numbers_B,
        }

    def _row(self, number: int) -> np.ndarray:
        task = TASKS.index(self._conditions[0].task)
        rng = np.random.RandomState([_SPLITS.index("train"), task, self._seed, number])
        chosen = self._conditions[rng.randint(len(self._conditions))]
        return as_row(draw(chosen, self._vocab_size, rng))
