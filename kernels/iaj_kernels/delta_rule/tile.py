"""The default tiles of `delta_rule`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

# The side of the smallest tile that a product of the Triton kernels takes.
SMALLEST = 16
# Programs that fill a GPU: two for each of the 132 processors of an H100, to a power of two.
_PROGRAMS = 256
# The fewest steps of a segment, and the fewest segments that are worth the two more runs they take.
_STEPS, _SEGMENTS = 512, 4


def default_tiles(sizes: Mapping[str, int], dtype: Any) -> dict[str, int]:
    """Steps of a chunk and columns of a program in Triton, and the longest chunk in XLA."""
    narrow = sizes["H"] <= 64
    return {
        # Such tiles fit into the registers of a program; products of float32 take more of them.
        "chunk": 32 if narrow and dtype != jnp.float32 else 16,
        "columns": 32 if narrow else SMALLEST,
        "longest_chunk": 64,
    }


def segments(sizes: Mapping[str, int], columns: int) -> int:
    """The number of segments that the Triton kernels cut a row into; 1 where rows fill a GPU."""
    programs, found = sizes["B"] * sizes["N"] * -(-sizes["E"] // columns), 1
    while 2 * found * programs <= _PROGRAMS and sizes["T"] >= 2 * found * _STEPS:
        found *= 2
    return found if found >= _SEGMENTS else 1
