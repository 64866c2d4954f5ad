"""Arrays, static configuration and result of one call of `score_stats`."""

import dataclasses
import enum
from typing import NamedTuple

import jax
import numpy as np

from iaj_kernels.attention.visibility import Visibility
from iaj_kernels.core import dispatch

Array = jax.Array | np.ndarray


class Status(enum.IntEnum):
    """Status of a score row; the paper's counts are over ACTIVE rows (active-unsaturated)."""

    DEAD = 0  # r_* = 0, or below the smallest normal number, which may be flushed to 0
    ACTIVE = 1  # 0 < r_* and u_* below the cap
    SATURATED = 2  # u_* at or above the cap
    INVALID = 3  # a NaN or +inf among the shifted scores, or a target outside the row
    EMPTY = 4  # every key is masked


class RowStats(NamedTuple):
    """Statistics of score rows, one entry per row; `s_p` and `target_mass` add an axis of degrees.

    Never NaN. Rows that are neither ACTIVE nor SATURATED hold s_p = inf, target_mass = 0,
    relative_margin = 0 and active = 0; EMPTY and INVALID rows also margin = u_star = 0 and
    argmax = -1.
    """

    s_p: Array
    target_mass: Array  # 1 / (1 + S_p)
    margin: (
        Array  # Delta = z_* - max_{j != *} z_j; inf without a distractor, negative off the argmax
    )
    relative_margin: Array  # rho = Delta / u_*; with degrees, rho < 1 exactly where active > 0
    active: Array  # int32: the number of distractors with weight
    argmax: Array  # int32: the first key of greatest score, whatever the target
    status: Array  # int32: a Status
    u_star: Array  # shifted target score u_* = z_* + b, whatever its sign
    r_star: Array  # clipped target score r_* (with a row map: the target's weight)


class Call(NamedTuple):
    """The arrays of a call; `target_BTN` is None for the argmax of every row."""

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    bias_X: jax.Array
    target_BTN: jax.Array | None
    visibility: Visibility


@dataclasses.dataclass(frozen=True)
class Config:
    """The static half of a call; `visibility.Visibility.causal` is static too.

    Attributes:
      degrees: the powers p, an int where p is whole.
      cap: tau, the largest weight; inf caps nothing.
      scale: factor of q.k.
      soft_cap: cap of the scores, which become `soft_cap * tanh(score / soft_cap)`.
      target: what the call was traced for.
      blocks: (queries, keys) of a tile; None leaves the choice to the implementation.
    """

    degrees: tuple[int | float, ...]
    cap: float
    scale: float
    soft_cap: float | None
    target: dispatch.Target
    blocks: tuple[int, int] | None = None
