"""Batches of constant shapes, so that a suite compiles once per bucket and number of queries."""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools

import numpy as np

from lm_jax.errors import UsageError
from polyattn_jax.suites.prompts import Suite

PAD = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts padded on the right to one length.

    Causality keeps padding out of every prompt, but rotations by length (LongRoPE, dynamic NTK)
    need `valid_BT` not to count it.

    Attributes:
      tokens_BT: int32; token 0 beyond a prompt's length.
      lengths_B: int32, tokens of each prompt.
      query_positions_BQ: int32.
      target_BQ: int32, the token that must follow each query; -1 where none is scored.
      answer_position_BQ: int32, the key with the answer; -1 where none does or it comes later.
      valid_B: bool, False for the repeats that fill the last batch of a bucket.
      index_B: int32, place of each prompt in the suite.
      ids: id of each prompt.
    """

    tokens_BT: np.ndarray
    lengths_B: np.ndarray
    query_positions_BQ: np.ndarray
    target_BQ: np.ndarray
    answer_position_BQ: np.ndarray
    valid_B: np.ndarray
    index_B: np.ndarray
    ids: tuple[str, ...]

    @property
    def valid_BT(self) -> np.ndarray:
        """False where a token is padding."""
        return np.arange(self.tokens_BT.shape[1]) < self.lengths_B[:, None]

    @property
    def target_B(self) -> np.ndarray:
        """The token that must follow the last query."""
        return self.target_BQ[:, -1]

    @property
    def answer_position_B(self) -> np.ndarray:
        """The key with the answer to the last query, or -1."""
        return self.answer_position_BQ[:, -1]


def batches(
    suite: Suite, batch_size: int, *, buckets: Sequence[int] | None = None
) -> Iterator[Batch]:
    """Yields every prompt once, shortest bucket first, in the order of the suite within a bucket.

    Prompts of one batch have as many queries; those of a bucket with the fewest come first.

    Args:
      suite: the prompts.
      batch_size: B of every batch; the last of a bucket repeats its first prompt, `valid_B` False.
      buckets: lengths T to pad to; a prompt goes into the smallest that holds it. One bucket, of
        the longest prompt, unless given.

    Raises:
      UsageError: for batch_size < 1, no buckets, or a prompt longer than every bucket.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size={batch_size} holds no prompt: give at least 1")
    lengths = np.array([len(prompt.tokens) for prompt in suite.prompts], np.int32)
    buckets = sorted({int(lengths.max())} if buckets is None else set(buckets))
    if not buckets or buckets[-1] < lengths.max():
        longest = suite.prompts[int(lengths.argmax())]
        raise UsageError(
            f"buckets={buckets}: prompt {longest.id!r} has {len(longest.tokens)} tokens: add a "
            "bucket that holds it"
        )
    return _generate(suite, lengths, batch_size, buckets)


def _generate(
    suite: Suite, lengths: np.ndarray, batch_size: int, buckets: Sequence[int]
) -> Iterator[Batch]:
    bucket_of = np.searchsorted(buckets, lengths)
    queries = np.array([len(prompt.query_positions) for prompt in suite.prompts])
    for b, asked in itertools.product(range(len(buckets)), sorted({*queries.tolist()})):
        bucket, members = buckets[b], np.flatnonzero((bucket_of == b) & (queries == asked))
        for first in range(0, len(members), batch_size):
            chosen = members[first : first + batch_size]
            fill = np.full(batch_size - len(chosen), chosen[0])
            index = np.concatenate([chosen, fill]).astype(np.int32)
            yield _batch(suite, index, bucket, valid=len(chosen))


def _batch(suite: Suite, index: np.ndarray, bucket: int, *, valid: int) -> Batch:
    prompts = [suite.prompts[i] for i in index]
    shape = (len(prompts), len(prompts[0].query_positions))
    tokens = np.full((len(prompts), bucket), PAD, np.int32)
    targets, answers = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.tokens)] = prompt.tokens
        scored = prompt.answers()
        _, targets[row, -len(scored) :], answers[row, -len(scored) :] = zip(*scored, strict=True)
        if len(scored) == 1:
            # One answer for the whole prompt: every query may look for it, the last one is scored.
            answer = scored[0][2]
            answers[row] = [answer if answer <= q else -1 for q in prompt.query_positions]
    return Batch(
        tokens_BT=tokens,
        lengths_B=np.array([len(prompt.tokens) for prompt in prompts], np.int32),
        query_positions_BQ=np.array([prompt.query_positions for prompt in prompts], np.int32),
        target_BQ=targets,
        answer_position_BQ=answers,
        valid_B=np.arange(len(prompts)) < valid,
        index_B=index,
        ids=tuple(prompt.id for prompt in prompts),
    )
