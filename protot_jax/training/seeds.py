"""Means over seeds, with intervals: training runs that differ only in their seed."""

from collections.abc import Sequence
import dataclasses
import math

from lm_jax.errors import UsageError
from lm_jax.run.results import Real
from lm_jax.statistics import student_interval

# Student's interval of two runs is many times as long as their distance, and uninformative.
LEAST = 3


@dataclasses.dataclass(frozen=True)
class OverSeeds:
    """The mean over `n` seeds, Student's 95 % interval of it, and the lowest and highest seed.

    `low` and `high` are None for fewer than three seeds, or where a value is not finite.
    """

    mean: Real
    low: float | None
    high: float | None
    lowest: Real
    highest: Real
    n: int

    def __str__(self) -> str:
        if self.n == 1:
            return f"{self.mean:.2f} (one run)"
        seeds = f"seeds {self.lowest:.2f} to {self.highest:.2f}, n = {self.n}"
        interval = "" if self.low is None else f"95 % {self.low:.2f} to {self.high:.2f}, "
        return f"{self.mean:.2f} ({interval}{seeds})"


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """The mean over seeds of one value per seed, with its interval and range.

    The interval covers initialisation, data order and dropout, and not the choice of settings or of
    the text.

    Raises:
      UsageError: there is no value.
    """
    if not values:
        raise UsageError("over_seeds: there is no value; give one per seed")
    low = high = None
    mean = sum(values) / len(values)
    if len(values) >= LEAST and math.isfinite(mean):
        interval = student_interval(values)
        mean, low, high = interval.estimate, interval.low, interval.high
    return OverSeeds(mean, low, high, min(values), max(values), len(values))
