"""Arrays, static configuration and kernel tiles of one call of `row_map_attention`."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.attention.visibility import Visibility
from kernels.core.dispatch import Target
from kernels.row_map_attention.maps import RowMap


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
class Tiles:
    """Queries and keys of one tile, warps and pipeline stages of a kernel; powers of two."""

    block_q: int
    block_k: int
    warps: int
    stages: int


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
    forward: Tiles
    dq: Tiles
    dkv: Tiles


# By the widest head: (queries, keys, warps, stages) of a tile. Those that compile for an H200 with
# little or no spilling and the fewest instructions per score; not timed.
_TILES = {
    64: {"forward": (64, 128, 4, 2), "dq": (64, 64, 4, 2), "dkv": (64, 64, 4, 2)},
    128: {"forward": (128, 64, 8, 2), "dq": (128, 64, 8, 2), "dkv": (64, 128, 8, 2)},
    256: {"forward": (128, 64, 8, 2), "dq": (128, 32, 8, 2), "dkv": (32, 32, 4, 1)},
}
# Full float32 products do not use tensor cores, and their operands fill registers.
_FLOAT32_TILES = (32, 32, 4, 1)


def heuristic(H: int, dtype: Any) -> dict[str, int]:
    """Tile sizes by the names of their entries in a tuning table."""
    chosen = next((tiles for widest, tiles in _TILES.items() if widest >= H), _TILES[256])
    if dtype == jnp.float32:
        chosen = dict.fromkeys(chosen, _FLOAT32_TILES)
    return {
        f"{kernel}_{field.name}": value
        for kernel, values in chosen.items()
        for field, value in zip(dataclasses.fields(Tiles), values, strict=True)
    }


def tiles_of(entries: Mapping[str, int], kernel: str, T: int, S: int) -> Tiles:
    """The tiles of one kernel, no larger than the call and no smaller than a product allows."""
    return Tiles(
        block_q=min(entries[f"{kernel}_block_q"], _power_of_two(T)),
        block_k=min(entries[f"{kernel}_block_k"], _power_of_two(S)),
        warps=entries[f"{kernel}_warps"],
        stages=entries[f"{kernel}_stages"],
    )


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
