"""Arrays and static configuration of one call of `row_map_attention`."""

import dataclasses
from typing import NamedTuple

import jax

from iaj_kernels.attention.visibility import Visibility
from iaj_kernels.core.dispatch import Target
from iaj_kernels.row_map_attention.maps import RowMap


class Call(NamedTuple):
    """The arrays of a call; the first four have gradients.

    `heads_N` is bool, or None for every head.
    """

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    bias_N: jax.Array
    heads_N: jax.Array | None
    visibility: Visibility


class Rows(NamedTuple):
    """Two numbers of every row for the backward pass, float32; see `tile.closed`."""

    pivot_BNT: jax.Array
    factor_BNT: jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """The static half of a call; hashable, as the static argument of a `custom_vjp`.

    `first` is the position of the first query where that is known when the call is traced, and
    `bias_moves` whether the bias may have a gradient. The target is that of the forward call: the
    backward pass may be traced elsewhere.
    """

    row_map: RowMap
    scale: float
    soft_cap: float | None
    first: int | None
    bias_moves: bool
    target: Target
