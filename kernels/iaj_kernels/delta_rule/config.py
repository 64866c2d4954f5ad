"""Arrays and chunk length of one call of `delta_rule`."""

import dataclasses
from typing import NamedTuple

import jax

# A program of the Triton kernels holds all rows of some columns of a memory.
WIDEST_KEY = 256


class Call(NamedTuple):
    """The arrays of a call; all have gradients. Without decay the memory keeps all it holds."""

    q_BTNH: jax.Array
    k_BTNH: jax.Array
    v_BTNE: jax.Array
    beta_BTN: jax.Array
    state_BNHE: jax.Array
    log_decay_BTN: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """The longest chunk, in steps."""

    longest_chunk: int
