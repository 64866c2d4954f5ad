"""Arrays and chunk length of one call of `selective_scan`."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import jax

from iaj_kernels.core import dispatch
from iaj_kernels.selective_scan import tile

# A thread of the Triton kernels holds the states of a channel for a group of steps.
LARGEST_STATE = 32
# XLA for GPUs fuses unrolled steps into a few kernels, where a loop launches a few for every step.
# On CPUs a launch costs nothing, and the larger fusions are slower.
GPU_UNROLL = 16


class Call(NamedTuple):
    """The arrays of a call, without the skip; all have gradients."""

    u_BTI: jax.Array
    delta_BTI: jax.Array
    A_IJ: jax.Array
    B_BTJ: jax.Array
    C_BTJ: jax.Array
    state_BIJ: jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """Steps of a chunk, and how many of them the compiled loop unrolls."""

    chunk: int
    unroll: int


def config_for(sizes: Mapping[str, int], dtype: Any, target: dispatch.Target) -> Config:
    """The config of a call."""
    chunk = tile.default_tiles(sizes, dtype)["chunk"]
    return Config(chunk, 1 if target.platform == "cpu" else GPU_UNROLL)
