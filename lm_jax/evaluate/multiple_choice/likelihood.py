"""The log-likelihood of a continuation after a context, under any function from tokens to logits.

    1. Tokenise context + continuation as one text; what comes after the tokens of the context alone
       is the continuation. Spaces that end a context go over to the continuation. This is how the
       lm-evaluation-harness does it: no token boundary is forced between the two.
    2. Keep the last `max_length` tokens to read, if there are more.
    3. Sort by length, cut into batches of few shapes, pad on the right. The model is causal, so
       padding reaches nothing that is scored; rotations by length (LongRoPE, dynamic NTK) are told
       which tokens are padding.
    4. Sum log softmax(logits) over the continuation, in float32.

Results can be kept in a folder, under a hash of the model and of all settings that decide its
logits (`open_cache`). There a score is found by its tokens, so that other tasks, more questions
and the harness share it, and a killed run resumes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax.errors import BadInputError
from lm_jax.model.precision import exact_jit
from lm_jax.run import progress
from lm_jax.run.config import config_hash
from lm_jax.run.files import make_folder
from lm_jax.run.rows import RowStore
from lm_jax.text.tokenizer import Tokenizer

Logits = Callable[[np.ndarray, np.ndarray], jax.Array]

_FORMAT = 2
_LENGTH_STEP = 32
_DIGEST_CHARS = 32
_SCHEMA = pa.schema(
    [("tokens", pa.string()), ("log_likelihood", pa.float64()), ("greedy", pa.bool_())]
)


class Pair(NamedTuple):
    """Token ids of a context and of its continuation, neither of them empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Score(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether greedy decoding would give it."""

    log_likelihood: float
    greedy: bool


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A model to score: function from tokens to logits, tokenizer, longest context and batch.

    Attributes:
      logits: a function from ids, int32 `[B, T]`, and where they are no padding, bool `[B, T]`, to
        logits `[B, T, V]`; causal, deterministic and compiled. T is a multiple of 32 or
        `max_length`, B a power of two.
      tokenizer: the model's.
      max_length: the most tokens that the model reads.
      batch_tokens: the most tokens in a batch, of which all logits are held at once.
      cache: results of this very model, from `open_cache`; None stores none.
    """

    logits: Logits
    tokenizer: Tokenizer
    max_length: int
    batch_tokens: int = 1024
    cache: RowStore | None = None


def open_cache(
    folder: str | os.PathLike[str], *, model: str, settings: Mapping[str, Any]
) -> RowStore:
    """Opens, as a context, the results of one model in `folder`, which many models may share.

    One process at a time writes there; the caller holds the lock of a work folder.

    Args:
      folder: the folder of the results; its parent must exist.
      model: the model's identity (`Pretrained.identity.text`).
      settings: everything else that determines the logits: dtype, attend, gates.

    Raises:
      StorageError: the folder cannot be created or written.
      CorruptError: a stored result is damaged.
    """
    folder = Path(folder)
    make_folder(folder)
    fingerprint = config_hash({"model": model, "settings": settings, "format": _FORMAT})
    return RowStore(folder / fingerprint, _SCHEMA, fingerprint)


def pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Tokenises a context and what follows it.

    A begin-of-text token comes first where the model was trained with one. Names of special tokens
    in the text are plain text.

    Raises:
      BadInputError: the context is empty and the model has no begin- or end-of-text token to start
        from, or the continuation adds no token to the context.
    """
    known = encode(tokenizer, context.rstrip())
    added = encode(tokenizer, context + continuation)[len(known) :]
    if not known:
        start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if start is None:
            raise BadInputError(
                f"{continuation!r} has no context, and the tokenizer has no token to begin with; "
                "give a context"
            )
        known = [start]
    if not added:
        raise BadInputError(
            f"{continuation!r} adds no token to the context that ends in {context[-20:]!r}; change "
            "the choice"
        )
    return Pair(tuple(known), tuple(added))


def encode(tokenizer: Tokenizer, text: str, *, begin: bool = True) -> list[int]:
    """The ids of an unfinished text: with the model's begin-of-text token, if it has one."""
    first = tokenizer.encode("")[:1] if begin else []
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return [*(first if first == [tokenizer.bos_id] else []), *ids]


def score(scorer: Scorer, pairs: Sequence[Pair], *, quiet: bool = True) -> list[Score]:
    """The score of every pair, in their order; equal pairs are scored once.

    Args:
      scorer: the model.
      pairs: contexts with their continuations, from `pair`.
      quiet: whether no progress is printed.

    Raises:
      BadInputError: a continuation is longer than the model reads, or a logit is NaN.
    """
    rows = [_row(each, scorer.max_length) for each in pairs]
    cache = scorer.cache
    done = {} if cache is None else _stored(cache)
    missing = {row.digest: row for row in rows if row.digest not in done}
    with progress.track(
        "scoring", len(missing), unit="continuations", quiet=quiet or not missing
    ) as advance:
        for batch in _batches(list(missing.values()), scorer):
            for row, result in zip(batch, _run(scorer, batch), strict=True):
                done[row.digest] = result
                if cache is not None:
                    cache.append((row.digest,), _columns(row, result))
            advance(len(batch))
    if cache is not None:
        cache.flush()
    return [done[row.digest] for row in rows]


def is_cut(scorer: Scorer, each: Pair) -> bool:
    """Whether a pair is too long for the model, so that the beginning of its context is cut off."""
    return len(each.context) + len(each.continuation) > scorer.max_length + 1


class _Row(NamedTuple):
    """Input ids of the model and the last target; the last `scored` of them are scored."""

    ids: tuple[int, ...]
    scored: int
    digest: str


def _row(each: Pair, max_length: int) -> _Row:
    scored = len(each.continuation)
    if scored > max_length:
        raise BadInputError(
            f"a continuation of {scored} tokens is longer than the {max_length} that the model "
            "reads; leave its question out"
        )
    ids = (each.context + each.continuation)[-(max_length + 1) :]
    digest = hashlib.sha256(np.asarray((scored, *ids), "<i4").tobytes()).hexdigest()
    return _Row(ids, scored, digest[:_DIGEST_CHARS])


def _batches(rows: list[_Row], scorer: Scorer) -> Iterator[list[_Row]]:
    """Rows of similar length, the longest first, so that too large a batch fails at once."""
    rows = sorted(rows, key=lambda row: len(row.ids), reverse=True)
    while rows:
        size = _shape(rows[0], scorer)[0]
        yield rows[:size]
        rows = rows[size:]


def _shape(longest: _Row, scorer: Scorer) -> tuple[int, int]:
    """(B, T) of the batch that a row is the longest of; B depends on T alone."""
    steps = -(-(len(longest.ids) - 1) // _LENGTH_STEP)
    T = min(steps * _LENGTH_STEP, scorer.max_length)
    # A power of two, so that the data axis of a mesh divides it.
    return 1 << max(0, (scorer.batch_tokens // T).bit_length() - 1), T


def _run(scorer: Scorer, batch: list[_Row]) -> Iterator[Score]:
    shape = _shape(batch[0], scorer)
    tokens_BT, targets_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    valid_BT, scored_BT = np.zeros(shape, bool), np.zeros(shape, bool)
    for b, row in enumerate(batch):
        end = len(row.ids) - 1
        tokens_BT[b, :end], targets_BT[b, :end] = row.ids[:-1], row.ids[1:]
        valid_BT[b, :end], scored_BT[b, end - row.scored : end] = True, True
    logits_BTV = scorer.logits(tokens_BT, valid_BT)
    total_B, greedy_B = jax.device_get(_totals(logits_BTV, targets_BT, scored_BT))
    for b in range(len(batch)):
        if np.isnan(total_B[b]):
            raise BadInputError(
                "the model gives logits that are not numbers; check its weights and its dtype"
            )
        yield Score(float(total_B[b]), bool(greedy_B[b]))


@exact_jit
def _totals(
    logits_BTV: jax.Array, targets_BT: jax.Array, scored_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits_BTV = logits_BTV.astype(jnp.float32)
    of_target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    log_probs_BT = of_target_BT - jax.nn.logsumexp(logits_BTV, axis=-1)
    greedy_BT = logits_BTV.argmax(-1) == targets_BT
    total_B = jnp.where(scored_BT, log_probs_BT, 0.0).sum(1)
    return total_B, (greedy_BT | ~scored_BT).all(1)


def _stored(cache: RowStore) -> dict[str, Score]:
    rows = cache.read().to_pylist()
    return {row["tokens"]: Score(row["log_likelihood"], row["greedy"]) for row in rows}


def _columns(row: _Row, result: Score) -> dict[str, list[Any]]:
    return {
        "tokens": [row.digest],
        "log_likelihood": [result.log_likelihood],
        "greedy": [result.greedy],
    }
