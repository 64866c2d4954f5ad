"""Sums of two-digit numbers as rows of tokens, as in Appendix A of the paper.

    reads      3 6 + 2 8 = ? ? ? ? ?       13 symbols: ten digits, + = ?
    answers    . . . . . . 0 0 0 6 4       each digit of the sum at the place of its question mark

A problem is a number: 36 + 28 is 3628, so there are ten thousand. A row holds the eleven input ids
and then the five target ids. Targets are not shifted: the digit that belongs to a `?` is predicted
at the position of the `?`, so that no digit of the answer attends to another one.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text.examples import epoch_order, order_name, shuffled
from lm_jax.train.objective import PAD, LMBatch

SYMBOLS = "0123456789+=?"
# Id 0 is padding.
VOCAB_SIZE = len(SYMBOLS) + 1
COUNT = 10_000
READ, ANSWERED = 11, 5
FIRST_ANSWER = READ - ANSWERED
# Positions of the two operand digits, and of the answer digit, of each decimal place from the ones
# upwards. The three highest places of the answer have no operand digits.
OPERANDS = ((1, 4), (0, 3))
ANSWERS = (10, 9, 8, 7, 6)


def encode(text: str) -> list[int]:
    """Ids of a text.

    Raises:
      UsageError: it contains a character that is no symbol of the task.
    """
    if strange := sorted(set(text) - set(SYMBOLS)):
        raise UsageError(f"{text!r} holds {''.join(strange)!r}; use only digits, +, = and ?")
    return [SYMBOLS.index(symbol) + 1 for symbol in text]


def decode(ids: ArrayLike) -> str:
    """Text of ids; padding is a middle dot."""
    return "".join("·" if id == PAD else SYMBOLS[id - 1] for id in np.atleast_1d(ids).tolist())


def number(text: str) -> int:
    """The problem of a text such as `36+28`.

    Raises:
      UsageError: the text is not two numbers of two digits.
    """
    parts = text.split("+")
    if len(parts) != 2 or not all(len(p) == 2 and set(p) <= set(SYMBOLS[:10]) for p in parts):
        raise UsageError(f"{text!r} is no problem; write two numbers of two digits, such as 36+28")
    return 100 * int(parts[0]) + int(parts[1])


def format_problem(number: int) -> str:
    """Text of a problem, such as `36+28=`, without the question marks."""
    return f"{number // 100:02}+{number % 100:02}="


def rows(numbers_P: np.ndarray) -> np.ndarray:
    """Ids, int32 `[P, 16]`: eleven inputs and five targets."""
    numbers_P = np.asarray(numbers_P)
    first, second = np.divmod(numbers_P, 100)
    columns = [_digit(first, 1), _digit(first, 0), "+", _digit(second, 1), _digit(second, 0), "="]
    columns += ["?"] * ANSWERED
    columns += [_digit(first + second, place) for place in reversed(range(ANSWERED))]
    ids = [encode(c)[0] if isinstance(c, str) else c + 1 for c in columns]
    return np.stack([np.broadcast_to(i, numbers_P.shape) for i in ids], axis=1).astype(np.int32)


def carried(numbers_P: np.ndarray) -> np.ndarray:
    """Whether a carry comes into each place, bool `[P, 3]`: ones (never), tens, hundreds."""
    first, second = np.divmod(np.asarray(numbers_P), 100)
    tens = first % 10 + second % 10 >= 10
    return np.stack([np.zeros_like(tens), tens, first + second >= 100], axis=1)


def carries(numbers_P: np.ndarray) -> np.ndarray:
    """Number of carries in each sum: 0, 1 or 2."""
    return carried(numbers_P).sum(1)


def split(held_out: int, seed: int, always: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Problems to train on and held-out problems, each in ascending order.

    Args:
      held_out: how many are held out.
      seed: seed of the random choice.
      always: problems that are always held out.

    Raises:
      UsageError: there are too few problems for both parts.
    """
    # A single problem has no interval.
    least = max(len(set(always)), 2)
    if not least <= held_out < COUNT:
        raise UsageError(f"held_out = {held_out} must be at least {least} and below {COUNT}")
    order = epoch_order(COUNT, seed, 0)
    order = np.concatenate([np.unique(always).astype(int), order[~np.isin(order, always)]])
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def digest(numbers_P: np.ndarray) -> str:
    """sha256 of problems in this order."""
    return hashlib.sha256(np.asarray(numbers_P, "<i8").tobytes()).hexdigest()


def answer_batch(tokens_BS: jax.Array) -> LMBatch:
    """Batch that predicts each digit of the answer at its question mark."""
    input_BT, answer_BA = tokens_BS[:, :READ], tokens_BS[:, READ:]
    target_BT = jnp.pad(answer_BA, ((0, 0), (FIRST_ANSWER, 0)))
    return LMBatch(input_BT, input_BT != PAD, target_BT, target_BT != PAD)


class Batches:
    """Endless sequence of shuffled batches, in the order of `lm_jax.text.examples.Batches`.

    Attributes:
      fingerprint: text that identifies the batches.
      per_epoch: complete batches in an epoch.
    """

    def __init__(self, numbers_P: np.ndarray, *, batch_size: int, seed: int) -> None:
        """Batches of the rows of these problems.

        Raises:
          BadInputError: there are fewer problems than `batch_size`.
        """
        if len(numbers_P) < batch_size:
            raise BadInputError(
                f"{len(numbers_P)} problems are fewer than one batch of {batch_size}; give a "
                "smaller batch_size, or hold fewer problems out"
            )
        self._numbers = numbers_P
        self._places = shuffled(len(numbers_P), seed).batch(batch_size)
        self.per_epoch = len(numbers_P) // batch_size
        self.fingerprint = (
            f"{_data(numbers_P)} batch_size={batch_size} seed={seed} order={order_name()}"
        )

    def at(self, k: int) -> dict[str, np.ndarray]:
        """Batch k = 0, 1, ... of all epochs: `tokens` as from `rows`; `document`, the problem."""
        numbers_B = self._numbers[self._places[k]]
        return {"tokens": rows(numbers_B), "document": numbers_B.astype(np.int64)}


class OnePass:
    """Every problem once, in order; the last batch is filled with rows of padding."""

    def __init__(self, numbers_P: np.ndarray, *, batch_size: int) -> None:
        self._numbers, self._batch_size = numbers_P, batch_size
        self.per_epoch = -(-len(numbers_P) // batch_size)
        self.fingerprint = f"{_data(numbers_P)} batch_size={batch_size} seed=None"

    def at(self, k: int) -> dict[str, np.ndarray]:
        """Batch k in 0..per_epoch-1; the document of a row of padding is -1."""
        numbers_B = self._numbers[k * self._batch_size : (k + 1) * self._batch_size]
        missing = self._batch_size - len(numbers_B)
        return {
            "tokens": np.pad(rows(numbers_B), ((0, missing), (0, 0)), constant_values=PAD),
            "document": np.pad(numbers_B.astype(np.int64), (0, missing), constant_values=-1),
        }


def _digit(numbers: np.ndarray, place: int) -> np.ndarray:
    return numbers // 10**place % 10


def _data(numbers_P: np.ndarray) -> str:
    return f"task=addition problems={digest(numbers_P)[:16]}"
