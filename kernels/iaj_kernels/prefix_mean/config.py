"""Arrays and static configuration of one call of `prefix_mean`."""

import dataclasses
from typing import NamedTuple

import jax

from iaj_kernels.core import dispatch
from iaj_kernels.prefix_mean.state import State


class Call(NamedTuple):
    """The arrays of a call; all but `resets_BT`, which may be None, have gradients."""

    write_BTR: jax.Array
    value_BTE: jax.Array
    decay_R: jax.Array
    read_BTR: jax.Array
    state: State
    resets_BT: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """The static half of a call; its two passes run on `target`."""

    mass_normalisation: bool
    target: dispatch.Target
