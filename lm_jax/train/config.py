"""Training configuration: batch, optimizer, schedule, logging and checkpoints.

A checkpoint is bound to a `TrainConfig`: a run resumes only under the same one. `CheckpointPolicy`
may change between two starts of a run, because no number depends on it. `BatchFields` and its
subclasses are the fields of these that the settings of commands have.
"""

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal, get_args

from lm_jax.run.config import LATER
from lm_jax.run.settings import (
    Bound,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    ShareBelow1,
    above,
    choice,
)

# Fields of a command's config that may differ between two starts of a run: no number depends on
# them, or by rounding alone.
MAY_CHANGE = ("mesh", "save_every", "allow_fallback")


# Of the learning rate after its warm-up: to a tenth of the peak, none, or linearly to zero.
Schedule = Literal["cosine", "constant", "linear"]
WeightsDtype = Literal["float32", "bfloat16"]

_MESH = Bound(
    "three sizes of at least 1, of which one may be -1",
    lambda mesh: mesh.count(-1) <= 1 and all(size == -1 or size >= 1 for size in mesh),
)

_FACTORS = Bound(
    "factors above 0", lambda factors: all(0 < factor < math.inf for _, factor in factors)
)


@dataclasses.dataclass(frozen=True)
class Plateau(Settings):
    """When the validation loss counts as no longer falling.

    Attributes:
      min_gain: how far an evaluation must be below the best one before it, in nats per token or in
        the unit of the run's own criterion.
      patience: training stops at this many evaluations in a row with a smaller gain.

    Raises:
      UsageError: listing every field that cannot be used.
    """

    where: ClassVar[str] = "Plateau."

    min_gain: NonNegativeFloat
    patience: PositiveInt


@dataclasses.dataclass(frozen=True)
class TrainConfig(Settings):
    """The training half of a config; the defaults are those of Prototype Transformer, section 4.

    Attributes:
      steps: updates of the whole run, the length of the schedule.
      learning_rate: peak learning rate, reached at the end of the warm-up.
      weight_decay: decay of weights; other parameters have none (`optim.is_weight`).
      warmup: the fraction of `steps` in which the learning rate rises.
      clip_norm: largest norm of the gradient; None does not clip.
      skip_sigma: number of standard deviations: an update whose loss is that many above the mean of
        the last 128 losses is skipped; None skips none (as in Levanter and MaxText).
      accumulate: number of micro-batches of a batch; the update is that of the whole batch.
      eval_every: steps between evaluations; 0 means an epoch. The last step is also evaluated.
      early_stop: whether to stop at the first evaluation whose perplexity is above the previous
        one.
      schedule: schedule of the learning rate after the warm-up.
      plateau: the plateau of the validation loss at whose end training stops; None trains all
        steps.
      eps: number that Adam adds to the root of the second moment. Where gradients are small beside
        it the step is in proportion to the gradient, as that of SGD, and not of its full size.
      rate_factors: groups of parameters by the first part of their path, each with the factor of
        its learning rate.
      weights_dtype: precision to which weights, gradients and moments are rounded at every update
        (`optim.in_bfloat16`); arrays are float32, so that no memory is saved.

    Raises:
      UsageError: listing every field that cannot be used.
    """

    where: ClassVar[str] = "TrainConfig."

    steps: PositiveInt
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat = 0.1
    warmup: ShareBelow1 = 0.02
    clip_norm: Annotated[float | None, above(0)] = None
    skip_sigma: Annotated[float | None, above(0)] = None
    accumulate: PositiveInt = 1
    eval_every: NonNegativeInt = 0
    early_stop: bool = True
    schedule: Annotated[Schedule, choice(get_args(Schedule))] = "cosine"
    plateau: Plateau | None = None
    weights_dtype: Annotated[WeightsDtype, choice(get_args(WeightsDtype))] = "float32"
    eps: PositiveFloat = dataclasses.field(default=1e-8, metadata=LATER)
    rate_factors: Annotated[tuple[tuple[str, float], ...], _FACTORS] = dataclasses.field(
        default=(), metadata=LATER
    )


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy(Settings):
    """How often a run logs and saves.

    Attributes:
      log_every: steps between reads of the losses, at which a NaN is detected.
      save_every: steps between checkpoints; every evaluation and the last step also save one.
      keep: how many of the last checkpoints are kept; the best one is kept as well.
      allow_fallback: whether to continue from the checkpoint before the newest one where that is
        damaged.

    Raises:
      UsageError: listing every field that cannot be used.
    """

    where: ClassVar[str] = "CheckpointPolicy."

    log_every: PositiveInt = 50
    save_every: PositiveInt = 1000
    keep: PositiveInt = 2
    allow_fallback: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchFields(Settings):
    """Fields of the settings of every command that trains in batches.

    Attributes:
      batch_size: examples of one update, on all devices together.
      eval_every: steps between evaluations; 0 for an epoch.
      mesh: sizes of the axes data, fsdp, tensor; one may be -1.
      allow_fallback: whether to continue from the checkpoint before the newest one where that is
        damaged.
    """

    batch_size: PositiveInt
    eval_every: NonNegativeInt = 0
    mesh: Annotated[tuple[int, int, int], _MESH] = (-1, 1, 1)
    allow_fallback: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateFields(BatchFields):
    """Fields of the settings of a command that trains at one learning rate.

    Attributes:
      learning_rate: peak of the learning rate; a cosine to a tenth follows.
      warmup: share of the steps in which the learning rate rises to its peak.
      clip_norm: largest norm of the gradient; 0 does not clip.
    """

    learning_rate: PositiveFloat
    warmup: ShareBelow1
    clip_norm: NonNegativeFloat = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFields(RateFields):
    """Fields of the settings of a command that trains for a number of steps.

    Attributes:
      steps: updates of a run.
      save_every: steps between checkpoints; each evaluation saves one too.
    """

    steps: PositiveInt
    save_every: PositiveInt


def train_config(settings: Any, **others: Any) -> TrainConfig:
    """The training configuration whose fields are those of the same name in a command's settings.

    Args:
      settings: settings of a command; a `clip_norm` or `skip_sigma` of 0 is None.
      **others: fields that the settings lack, or that differ from theirs.

    Raises:
      UsageError: listing every field that cannot be used.
    """
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    given = {name: getattr(settings, name) for name in names if hasattr(settings, name)} | others
    off: dict[str, Any] = {name: given.get(name) or None for name in ("clip_norm", "skip_sigma")}
    return TrainConfig(**given | off)
