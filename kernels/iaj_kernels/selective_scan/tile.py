"""The default tiles of `selective_scan`."""

from collections.abc import Mapping
import math
from typing import Any

_SHORTEST_CHUNK = 16
# Numbers of the states of a group of steps that a thread of the Triton kernels holds in registers.
_HELD = 64


def default_tiles(sizes: Mapping[str, int], dtype: Any) -> dict[str, int]:
    """Steps of a chunk; channels of a program in Triton, one a thread, and steps of a group.

    Chunks are of about the square root of T, of nearly equal length.
    """
    del dtype
    longest = max(_SHORTEST_CHUNK, 2 ** round(math.log2(sizes["T"]) / 2))
    states = 1 << (sizes["J"] - 1).bit_length()
    return {
        "chunk": math.ceil(sizes["T"] / math.ceil(sizes["T"] / longest)),
        "channels": 32,
        "group": _HELD // max(states, 16),
    }
