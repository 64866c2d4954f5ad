"""The training state: parameters, optimizer moments and counters, and their shardings.

The state goes into and out of every step in the same pinned shardings. Without them the compiler
may choose another layout after a restart, and a resumed run then differs in the last bits.
"""

import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.train import optim


@struct.dataclass
class TrainState:
    """Float32 parameters and moments after `step` updates, an int32 scalar.

    `losses_W` are the losses of the last W steps, NaN before the first; None where no update is
    ever skipped. `aux_state` is the objective's. The same tree holds the shardings, or the
    `jax.ShapeDtypeStruct`, of all these.
    """

    step: Any
    params: Any
    opt_state: Any
    losses_W: Any = None
    aux_state: Any = None


def state_shardings(
    mesh: Mesh,
    spec: ParamTree,
    optimizer: optax.GradientTransformation,
    *,
    window: int = 0,
    aux_state: Any = None,
) -> TrainState:
    """The sharding of every leaf: moments as their parameters, scalars replicated."""
    everywhere = sharding.replicated(mesh)
    placed = sharding.param_shardings(mesh, spec)
    moments = optim.moment_shardings(optimizer, params_lib.abstract(spec), placed, everywhere)
    own = jax.tree.map(lambda _: everywhere, aux_state)
    return TrainState(everywhere, placed, moments, everywhere if window else None, own)


def abstract_state(
    mesh: Mesh,
    spec: ParamTree,
    optimizer: optax.GradientTransformation,
    *,
    window: int = 0,
    aux_state: Any = None,
) -> TrainState:
    """The state as `jax.ShapeDtypeStruct` with shardings, into which a checkpoint is loaded."""
    start = functools.partial(_start, optimizer=optimizer, window=window, aux_state=aux_state)
    state = jax.eval_shape(start, params_lib.abstract(spec))
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        state,
        state_shardings(mesh, spec, optimizer, window=window, aux_state=aux_state),
    )


def _start(
    params: ParamTree, *, optimizer: optax.GradientTransformation, window: int, aux_state: Any
) -> TrainState:
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        losses_W=jnp.full((window,), jnp.nan) if window else None,
        aux_state=aux_state,
    )


def init_state(
    key: jax.Array,
    mesh: Mesh,
    spec: ParamTree,
    optimizer: optax.GradientTransformation,
    *,
    window: int = 0,
    aux_state: Any = None,
    params: ParamTree | None = None,
) -> TrainState:
    """The state before the first step, initialised sharded: no device ever holds it whole.

    Args:
      key: random key of the parameters.
      mesh: the devices of the state.
      spec: the declaration of the parameters.
      optimizer: the optimizer of the moments.
      window: number of losses that the state keeps.
      aux_state: the objective's own state, before the first step.
      params: initial parameters; None draws them.
    """
    start = functools.partial(_start, optimizer=optimizer, window=window, aux_state=aux_state)
    shardings = state_shardings(mesh, spec, optimizer, window=window, aux_state=aux_state)
    if params is None:
        drawn = jax.jit(lambda key: start(params_lib.init(key, spec)), out_shardings=shardings)
        return drawn(key)
    params_lib.check(params, spec)
    params = jax.device_put(params, shardings.params)
    return jax.jit(start, out_shardings=shardings)(params)
