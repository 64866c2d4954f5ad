"""The training state: parameters, optimizer moments and counters, and their shardings.

The state goes into and out of every step in the same pinned shardings. Without them the compiler
may choose another layout after a restart, and a resumed run then differs in the last bits.
"""

import dataclasses
from typing import Any, Self

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.train import optim
from lm_jax.train.config import TrainConfig
from lm_jax.train.objective import Objective

# Losses of the last steps, of which a spike stands out.
LOSS_WINDOW = 128


def run_keys(seed: int) -> tuple[jax.Array, jax.Array]:
    """The random keys of a run: of its initial parameters, and of its steps."""
    init_key, step_key = jax.random.split(jax.random.key(seed))
    return init_key, step_key


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


@dataclasses.dataclass(frozen=True, eq=False)
class StateLayout:
    """What a state is made of, and where on the devices it is.

    Attributes:
      mesh: the devices of the state.
      spec: the declaration of the parameters.
      optimizer: the optimizer of the moments.
      window: number of losses that the state keeps.
      aux_state: the objective's own state, before the first step.
    """

    mesh: Mesh
    spec: ParamTree
    optimizer: optax.GradientTransformation
    window: int = 0
    aux_state: Any = None

    @classmethod
    def of(
        cls,
        objective: Objective,
        mesh: Mesh,
        config: TrainConfig,
        decays: optim.Choice = optim.is_weight,
    ) -> Self:
        """The layout of a training, of which `decays` selects the parameters with weight decay."""
        spec, window = objective.spec, 0 if config.skip_sigma is None else LOSS_WINDOW
        optimizer = optim.adamw(spec, config, decays)
        return cls(mesh, spec, optimizer, window, objective.init_state())

    def shardings(self) -> TrainState:
        """The sharding of every leaf: moments as their parameters, scalars replicated."""
        everywhere = sharding.replicated(self.mesh)
        placed = sharding.param_shardings(self.mesh, self.spec)
        shapes = params_lib.abstract(self.spec)
        moments = optim.moment_shardings(self.optimizer, shapes, placed, everywhere)
        own = jax.tree.map(lambda _: everywhere, self.aux_state)
        return TrainState(everywhere, placed, moments, everywhere if self.window else None, own)

    def abstract(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct` with shardings, into which a checkpoint is loaded."""
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            jax.eval_shape(self._start, params_lib.abstract(self.spec)),
            self.shardings(),
        )

    def init(self, key: jax.Array, params: ParamTree | None = None) -> TrainState:
        """The state before the first step, initialised sharded: no device ever holds it whole.

        Args:
          key: random key of the parameters.
          params: initial parameters; None draws them.
        """
        places = self.shardings()
        if params is None:
            drawn = jax.jit(
                lambda key: self._start(params_lib.init(key, self.spec)), out_shardings=places
            )
            return drawn(key)
        params_lib.check(params, self.spec)
        params = jax.device_put(params, places.params)
        return jax.jit(self._start, out_shardings=places)(params)

    def _start(self, params: ParamTree) -> TrainState:
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.init(params),
            losses_W=jnp.full((self.window,), jnp.nan) if self.window else None,
            aux_state=self.aux_state,
        )
