"""Training configuration: batch, optimizer, schedule, logging and checkpoints.

A checkpoint is bound to a `TrainConfig`: a run resumes only under the same one. `CheckpointPolicy`
may change between two starts of a run, because no number depends on it.
"""

import dataclasses
from typing import Literal, get_args

from lm_jax.errors import UsageError, out_of_range

# Fields of a command's config that may differ between two starts of a run: no number depends on
# them, or by rounding alone.
MAY_CHANGE = ("mesh", "save_every", "allow_fallback")


# Of the learning rate after its warm-up: to a tenth of the peak, none, or linearly to zero.
Schedule = Literal["cosine", "constant", "linear"]
WeightsDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Plateau:
    """When the validation loss counts as no longer falling.

    Attributes:
      min_gain: how far an evaluation must be below the best one before it, in nats per token or in
        the unit of the run's own criterion.
      patience: training stops at this many evaluations in a row with a smaller gain.

    Raises:
      UsageError: listing every field that cannot be used.
    """

    min_gain: float
    patience: int

    def __post_init__(self) -> None:
        _refuse(
            self,
            {
                "min_gain": (0 <= self.min_gain < float("inf"), "at least 0"),
                "patience": (self.patience >= 1, "at least 1"),
            },
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
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
      weights_dtype: precision to which weights, gradients and moments are rounded at every update
        (`optim.in_bfloat16`); arrays are float32, so that no memory is saved.

    Raises:
      UsageError: listing every field that cannot be used.
    """

    steps: int
    learning_rate: float
    weight_decay: float = 0.1
    warmup: float = 0.02
    clip_norm: float | None = None
    skip_sigma: float | None = None
    accumulate: int = 1
    eval_every: int = 0
    early_stop: bool = True
    schedule: Schedule = "cosine"
    plateau: Plateau | None = None
    weights_dtype: WeightsDtype = "float32"

    def __post_init__(self) -> None:
        wanted = {
            "steps": (self.steps >= 1, "at least 1"),
            "learning_rate": (self.learning_rate > 0, "above 0"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "warmup": (0 <= self.warmup < 1, "at least 0 and below 1"),
            "clip_norm": (self.clip_norm is None or self.clip_norm > 0, "above 0, or None"),
            "skip_sigma": (self.skip_sigma is None or self.skip_sigma > 0, "above 0, or None"),
            "accumulate": (self.accumulate >= 1, "at least 1"),
            "eval_every": (self.eval_every >= 0, "at least 0"),
            "schedule": (
                self.schedule in get_args(Schedule),
                f"one of {', '.join(get_args(Schedule))}",
            ),
            "weights_dtype": (
                self.weights_dtype in get_args(WeightsDtype),
                f"one of {', '.join(get_args(WeightsDtype))}",
            ),
        }
        _refuse(self, wanted)


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
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

    log_every: int = 50
    save_every: int = 1000
    keep: int = 2
    allow_fallback: bool = False

    def __post_init__(self) -> None:
        names = ("log_every", "save_every", "keep")
        _refuse(self, {name: (getattr(self, name) >= 1, "at least 1") for name in names})


def _refuse(config: object, wanted: dict[str, tuple[bool, str]]) -> None:
    problems = out_of_range(config, wanted)
    if problems:
        raise UsageError(f"{type(config).__name__}: " + "; ".join(problems))
