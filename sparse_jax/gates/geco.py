"""GECO: a penalty with an adaptive strength, to minimise edges under a bound on the loss.

GECO (Rezende and Viola, 2018), as sparse attention post-training uses it (Eq. 4, 5 and 7):

    min E|A|   subject to   CE <= tau

In the paper's Lagrangian E|A| + lambda (CE - tau) the multiplier is on the loss. Divided by lambda
it is CE + s E|A|, with the strength s = 1 / lambda of the paper's Fig. 11. This form is minimised
here, because its gradient keeps the scale of an ordinary loss. The dual variable is ln s,

    ln s  <-  clip(ln s + dual_rate (tau - average CE))

so that the strength rises while the loss is below the bound and falls while it is above. The
average is an exponential moving average with bias correction; a decay of 0 takes the last loss.

The bound may move: with a `reference`, the loss that a dense model had at each update on the same
batch, tau bounds the difference, which depends on the text of the batch far less than the loss.

Edges answer late to the strength. Integral control alone then overshoots: the strength rises until
they close, and by then it is far too high. With `proportional` the update is the velocity form of
proportional-integral control (Stooke, Achiam and Abbeel, 2020, "Responsive Safety in Reinforcement
Learning by PID Lagrangian Methods"), in ln s. Of the error e = tau - average CE,

    ln s  <-  clip(ln s + dual_rate e + proportional (e - e before))

whose limits need no further care: what is clipped is not summed up.

The quantity under the bound is called the loss here; it may also be a divergence (`objective`).
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Annotated, ClassVar

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import out_of_range
from lm_jax.run.config import LATER
from lm_jax.run.settings import (
    Finite,
    NonNegativeFloat,
    PositiveFloat,
    Settings,
    ShareBelow1,
    within,
)


@dataclasses.dataclass(frozen=True)
class Strength(Settings):
    """Update rule of the strength, without its target.

    Attributes:
      dual_rate: factor of the step in ln s; the paper's are 0.1 (GPT-2) and 0.01 (OLMo).
      decay: decay of the moving average of the loss, in [0, 1).
      start: the strength before the first update.
      least: floor of the strength.
      most: ceiling of the strength.
      longest: the longest step in ln s, which limits the effect of a spike of the loss.
      settle: share of the updates, the last ones, in which the step in ln s shrinks linearly to 0,
        so that the strength does not swing while the learning rate is low; 0 never shrinks it.
      proportional: factor of the change of the error in the step in ln s, which damps the swing of
        a strength that edges answer late; 0 leaves it out.

    Raises:
      UsageError: fields are out of range; the message lists them all.
    """

    where: ClassVar[str] = "GECO: "

    dual_rate: PositiveFloat = 0.01
    decay: ShareBelow1 = 0.99
    start: float = 1.0
    least: float = 1e-4
    most: Finite = 1e5
    longest: PositiveFloat = 0.1
    settle: Annotated[float, within(0, 1)] = 0.0
    proportional: NonNegativeFloat = dataclasses.field(default=0.0, metadata=LATER)

    def problems(self) -> list[str]:
        """What does not fit together."""
        fits = 0 < self.least <= self.start <= self.most
        wanted = {"start": (fits, "between least and most, above 0")}
        return out_of_range(self, wanted, prefix=self.where)


@dataclasses.dataclass(frozen=True)
class GecoConfig(Strength):
    """The dual update; `target` is tau, in nats per token, `steps` the number of updates.

    `steps` matters only with `settle`.
    """

    target: Finite = dataclasses.field(kw_only=True)
    steps: int = dataclasses.field(default=0, kw_only=True)

    def problems(self) -> list[str]:
        """What does not fit together."""
        wanted = {"steps": (self.steps >= 1 or not self.settle, "at least 1 with settle")}
        return out_of_range(self, wanted, prefix=self.where) + super().problems()

    @property
    def adapts(self) -> bool:
        """Whether the strength can change."""
        return self.least < self.most

    @classmethod
    def fixed(cls, strength: float) -> "GecoConfig":
        """A constant strength, whatever the loss."""
        return cls(target=0.0, start=strength, least=strength, most=strength)


@struct.dataclass
class Dual:
    """Float32 scalars: ln s, the weighted sum of losses, the sum of its weights; past updates.

    `reference_U` is float32 [updates], in nats per token, or None.
    """

    log_strength: jax.Array
    sum: jax.Array
    weight: jax.Array
    updates: jax.Array
    reference_U: jax.Array | None

    @property
    def strength(self) -> jax.Array:
        """The factor s of the edges."""
        return jnp.exp(self.log_strength)

    @property
    def average(self) -> jax.Array:
        """The moving average of the loss; NaN before the first."""
        return self.sum / self.weight


def init(settings: GecoConfig, reference: Sequence[float] = ()) -> Dual:
    """The initial dual state.

    Args:
      settings: settings of the strength.
      reference: a loss for each update, in nats per token, which the target is above; () for none.
    """
    zero = jnp.zeros((), jnp.float32)
    start = jnp.asarray(math.log(settings.start), jnp.float32)
    reference_U = jnp.asarray(reference, jnp.float32) if reference else None
    return Dual(start, zero, zero, jnp.zeros((), jnp.int32), reference_U)


def update(dual: Dual, loss: jax.Array, settings: GecoConfig) -> Dual:
    """The dual state after a step whose batch had this loss, in nats per token.

    A loss that is not finite makes the state not finite, at which the training loop stops.
    """
    if dual.reference_U is not None:
        loss = loss - dual.reference_U[dual.updates]
    total = settings.decay * dual.sum + (1.0 - settings.decay) * loss
    weight = settings.decay * dual.weight + (1.0 - settings.decay)
    average = total / weight
    step = settings.dual_rate * (settings.target - average)
    if settings.proportional:
        # The error changes by as much as the average, which is not known before the first update.
        rise = jnp.where(dual.updates > 0, average - dual.average, 0.0)
        step -= settings.proportional * rise
    step = jnp.clip(step, -settings.longest, settings.longest)
    if settings.settle:
        left = (settings.steps - dual.updates) / (settings.settle * settings.steps)
        step *= jnp.clip(left, 0.0, 1.0)
    low, high = math.log(settings.least), math.log(settings.most)
    log_strength = jnp.clip(dual.log_strength + step, low, high)
    return Dual(log_strength, total, weight, dual.updates + 1, dual.reference_U)


def lagrangian(loss: jax.Array, edges: jax.Array, dual: Dual) -> jax.Array:
    """The loss that the parameters minimise, in which the strength is a constant."""
    return loss + jax.lax.stop_gradient(dual.strength) * edges
