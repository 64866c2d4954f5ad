"""Ranges of axes and colour scales, and the spacing of labels."""

from collections.abc import Iterable, Sequence
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from lm_jax.errors import UsageError, nearest

# beyond this, differences of two values overflow, and below that, logarithms are of no use
LARGEST, SMALLEST = 1e300, 1e-300
SCALES = ("sequential", "diverging")


def extent(
    values: Iterable[ArrayLike],
    *,
    log: bool = False,
    domain: tuple[float, float] | None = None,
    pad: float = 0.04,
    floor: bool = True,
    name: str = "axis",
) -> tuple[float, float]:
    """Returns the range of all showable values, padded, or `domain`. Empty data gives 0..1.

    Showable is finite, within +-1e300 and, on a log axis, positive. One value gets a range around
    it. With `floor`, a range that begins at 0 has no margin below it, as a share or a count has
    none. `name` is the caller's argument, for errors.
    """
    if domain is not None:
        low, high = (float(end) for end in domain)
        if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
            need = "0 < low < high on a log axis" if log else "low < high"
            raise UsageError(f"report: axis range {name}={domain!r} cannot be drawn; need {need}")
        return low, high
    parts = [np.asarray(part, dtype=float).ravel() for part in values]
    joined = np.concatenate([part[showable(part, log)] for part in parts] or [np.array([])])
    if joined.size == 0:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = float(joined.min()), float(joined.max())
    if log:
        low, high = math.log10(low), math.log10(high)
        margin = (high - low) * pad if high > low else 0.5
        return 10 ** max(low - margin, -307), 10 ** min(high + margin, 308)
    margin = (high - low) * pad if high > low else abs(low) / 2 or 0.5
    return (low if low == 0 and floor else low - margin), high + margin


def showable(values: ArrayLike, log: bool = False) -> np.ndarray:
    """Returns the mask of values that an axis can show."""
    values = np.asarray(values, dtype=float)
    return (np.abs(values) <= LARGEST) & ((values >= SMALLEST) | (not log))


def colour_scale(
    where: str, values: np.ndarray, scale: str | None, domain: tuple[float, float] | None
) -> tuple[float, float, bool]:
    """Returns the ends of a colour scale and whether it diverges, which then are symmetric.

    `scale` is one of `SCALES`; None is diverging where signs differ.
    """
    if scale not in (None, *SCALES):
        raise UsageError(f"{where}: scale={scale!r}{nearest(str(scale), SCALES)}")
    low, high = extent([values], domain=domain, pad=0.0, name="value_range")
    if scale == "diverging" or (scale is None and low < 0 < high):
        end = max(abs(low), abs(high))
        return -end, end, True
    return low, high, False


def inside(values: ArrayLike, low: float, high: float) -> np.ndarray:
    """Returns the mask of values in a range."""
    values = np.asarray(values, dtype=float)
    return (values >= low) & (values <= high)


def pixels(
    values: ArrayLike, low: float, high: float, length: float, *, log: bool = False
) -> np.ndarray:
    """Returns the distances of values from the top, `high`, of an axis of `length` pixels.

    Values that the axis cannot show are NaN.
    """
    values = np.where(showable(values, log), np.asarray(values, dtype=float), np.nan)
    if log:
        values, low, high = np.log10(values), math.log10(low), math.log10(high)
    return length * (high - values) / (high - low)


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves label positions apart to `gap`, in order, as little as needed, inside [low, high].

    Without room for all, the labels share the range evenly.
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
