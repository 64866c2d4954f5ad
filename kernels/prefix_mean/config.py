"""One call of `prefix_mean`: its arrays, and what is static and captured when it is traced."""

import dataclasses
from typing import NamedTuple

import jax

from kernels.core import dispatch
from kernels.prefix_mean.state import State


class Call(NamedTuple):
    """The arrays of a call; all have gradients."""

    write_BTR: jax.Array
    value_BTE: jax.Array
    decay_R: jax.Array
    read_BTR: jax.Array
    state: State


@dataclasses.dataclass(frozen=True)
class Config:
    """The static half of a call; `target` is what it, and its backward pass, runs on."""

    mass_normalisation: bool
    target: dispatch.Target
