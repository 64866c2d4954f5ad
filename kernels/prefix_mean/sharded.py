"""The prefix mean of a sequence that is split over the devices of a mesh axis.

Each device holds one stretch of the steps, in the order of its index:

1. It finds the state that its own stretch leaves when it starts empty: one product.
2. One `all_gather` shows every such state, R E + R numbers a device and batch row, to all.
3. Those of the earlier stretches, joined in order, are the state that this stretch starts from.

The gradient of the gather is a sum over devices, so every gradient is that of the whole sequence.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from kernels.prefix_mean.state import join, stretch


def state_before(
    axis_name: str,
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    decay_R: jax.Array,
    state: Any,
    *,
    log_write: bool,
) -> Any:
    """The state before this device's stretch; `state` is the one before the whole sequence."""
    own = stretch(write_BTR, value_BTE, decay_R, log_write=log_write)
    every = lax.all_gather(own, axis_name)
    mine = lax.axis_index(axis_name)
    steps = write_BTR.shape[1]

    def add(state, numbered):
        number, later = numbered
        joined = join(state, later, decay_R, steps)
        return jax.tree.map(lambda a, b: jnp.where(number < mine, a, b), joined, state), None

    count = jax.tree.leaves(every)[0].shape[0]
    state, _ = lax.scan(add, state, (jnp.arange(count), every))
    return state
