"""From data to drawing units: extents, linear and log scales, and ticks a person would choose.

Linear steps are 1, 2, 2.5 or 5 times a power of ten (Heckbert, Graphics Gems 1990); log ticks are
powers of ten, with 2 and 5 between them where there is room.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from lm_jax.errors import UsageError
from lm_jax.report.markup import number, power_of_ten

# beyond this, differences of two values overflow
LARGEST = 1e300
# drawing units that no plot reaches
OUTSIDE = 1e6


@dataclasses.dataclass(frozen=True)
class Scale:
    """A map of [low, high] in data units to [start, end] in drawing units, linear or log10."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: ArrayLike) -> np.ndarray:
        """Returns drawing units, NaN for what the scale cannot show."""
        values = np.asarray(values, dtype=float)
        values = np.where(np.isfinite(values) & ((values > 0) | (not self.log)), values, np.nan)
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log10(values), math.log10(low), math.log10(high)
        with np.errstate(over="ignore"):
            units = self.start + (values - low) / (high - low) * (self.end - self.start)
        # a line to a point far outside still leaves the plot on the right side
        return np.clip(units, -OUTSIDE, OUTSIDE)

    def at(self, value: float) -> float:
        """Returns the drawing unit of one value."""
        return float(self(value))

    def ticks(self, count: int = 6) -> np.ndarray:
        """Returns about `count` tick values inside the scale."""
        return (log_ticks if self.log else linear_ticks)(self.low, self.high, count)


def linear_ticks(low: float, high: float, count: int = 6) -> np.ndarray:
    """Returns the multiples of the finest nice step with at most `count` of them in [low, high]."""
    magnitude = 10.0 ** math.floor(math.log10((high - low) / count))
    for step in (magnitude * factor for factor in (1, 2, 2.5, 5, 10, 20)):
        # the slack keeps ends such as 0.30000000000000004
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < count:
            break
    # dividing by the inverse of a step below one keeps 3 * 0.1 at 0.3
    multiples = np.arange(first, last + 1)
    return multiples * step if step >= 1 else multiples / round(1 / step, 9)


def log_ticks(low: float, high: float, count: int = 6) -> np.ndarray:
    """Returns about `count` powers of ten in [low, high], with multiples between where few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for mantissas in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = np.array([m * 10.0**e for e in range(first, last + 1) for m in mantissas])
        ticks = ticks[(ticks >= low * (1 - 1e-9)) & (ticks <= high * (1 + 1e-9))]
        if ticks.size <= count:
            break
    if ticks.size < 2:
        return linear_ticks(low, high, count)
    return ticks[:: math.ceil(ticks.size / count)]


def tick_labels(ticks: Sequence[float] | np.ndarray) -> list[str]:
    """Returns one label per tick, all with the same number of decimals where that is readable."""
    ticks = [float(tick) for tick in ticks]
    sizes = [abs(tick) for tick in ticks if tick]
    if not sizes:
        return ["0" for _ in ticks]
    if max(sizes) < 1e5 and min(sizes) >= 1e-3:
        decimals = [next(d for d in range(7) if math.isclose(t, round(t, d))) for t in ticks]
        # a log axis runs from 0.01 to 100: common decimals would print 100.00
        spread = max(sizes) / min(sizes) > 100
        return [
            number(tick, f",.{own if spread else max(decimals)}f")
            for tick, own in zip(ticks, decimals, strict=True)
        ]
    return [_short(tick) for tick in ticks]


def extent(
    values: Iterable[ArrayLike],
    *,
    log: bool = False,
    given: tuple[float, float] | None = None,
    pad: float = 0.04,
) -> tuple[float, float]:
    """Returns the range of all showable values, padded; `given` wins. Empty data gives 0..1.

    Showable is finite, within +-1e300 and, on a log axis, positive. One value gets a range around.
    """
    if given is not None:
        low, high = (float(end) for end in given)
        if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
            need = "0 < low < high" if log else "low < high"
            raise UsageError(f"report: axis range {given!r} cannot be drawn; need {need}")
        return low, high
    parts = [np.asarray(part, dtype=float).ravel() for part in values]
    joined = np.concatenate([part[showable(part, log)] for part in parts] or [np.array([])])
    if joined.size == 0:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = float(joined.min()), float(joined.max())
    if log:
        low, high = math.log10(low), math.log10(high)
        margin = (high - low) * pad if high > low else 0.5
        return 10 ** (low - margin), 10 ** (high + margin)
    margin = (high - low) * pad if high > low else abs(low) / 2 or 0.5
    # a share or a count does not dip below its natural end for the sake of a margin
    return (low if low == 0 else low - margin), high + margin


def showable(values: ArrayLike, log: bool = False) -> np.ndarray:
    """Returns the mask of values that an axis can show."""
    values = np.asarray(values, dtype=float)
    return (np.abs(values) <= LARGEST) & ((values > 0) | (not log))


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves label positions apart to `gap`, in order, as little as needed, inside [low, high].

    When there is no room for all, the labels share the range evenly.
    """
    if not len(positions):
        return []
    order = np.argsort(positions, kind="stable")
    gap = min(gap, (high - low) / max(len(positions) - 1, 1))
    steps = gap * np.arange(len(positions))
    # without the ladder of gaps, least moved and in order is isotonic regression
    wanted = np.clip(np.asarray(positions, dtype=float)[order], low, high) - steps
    fitted = optimize.isotonic_regression(wanted).x
    placed = np.empty(len(positions))
    placed[order] = np.clip(fitted, low, high - steps[-1]) + steps
    return placed.tolist()


def _short(tick: float) -> str:
    if tick == 0:
        return "0"
    exponent = math.floor(math.log10(abs(tick)) + 1e-9)
    mantissa = tick / 10.0**exponent
    if math.isclose(mantissa, 1):
        return power_of_ten(exponent)
    return f"{mantissa:.3g}·{power_of_ten(exponent)}".replace("-", "−")
