"""Arrays and settings of one call of `gated_slots`."""

import dataclasses
from typing import NamedTuple

import jax


class Slots(NamedTuple):
    """The memory, float32: a key and a value in each of M slots."""

    keys_BNMH: jax.Array
    values_BNME: jax.Array


class Call(NamedTuple):
    """The arrays of a call; all but `resets_BT`, which may be None, have gradients."""

    q_BTNH: jax.Array
    k_BTNH: jax.Array
    v_BTNE: jax.Array
    log_decay_BTNM: jax.Array
    state: Slots
    resets_BT: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """Factor of the scores, and the longest chunk, in steps."""

    scale: float
    longest_chunk: int
