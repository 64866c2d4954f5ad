"""The default tiles of `delta_rule`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

# The side of the smallest tile that a product of the Triton kernels takes.
SMALLEST = 16


def default_tiles(sizes: Mapping[str, int], dtype: Any) -> dict[str, int]:
    """Steps of a chunk and columns of a program in Triton, and the longest chunk in XLA."""
    narrow = sizes["H"] <= 64
    return {
        # Such tiles fit into the registers of a program; products of float32 take more of them.
        "chunk": 32 if narrow and dtype != jnp.float32 else 16,
        "columns": 32 if narrow else SMALLEST,
        "longest_chunk": 64,
    }
