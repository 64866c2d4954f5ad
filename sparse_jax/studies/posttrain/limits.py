"""Strengths on their floor or ceiling: a run whose bound decides nothing says so."""

from collections.abc import Mapping, Sequence
import math
from typing import NamedTuple

from lm_jax.run import processes
from sparse_jax.gates.geco import Strength

PATIENCE = 50
# Of a strength that is stored as its logarithm in float32.
_ROUNDING = 1e-5


class Limit(NamedTuple):
    """A limit of the strength: the setting, what it means to stay there, and the remedy."""

    setting: str
    meaning: str


FLOOR = Limit(
    "least",
    "the bound is not kept even with hardly any penalty, so that no edge needs to close; start "
    "with open gates (config.open_at_start), or set higher config.slacks",
)
CEILING = Limit("most", "the penalty cannot rise though the bound is kept; set it higher")


def limit_of(strength: float, settings: Strength) -> Limit | None:
    """The limit that a strength is on; None between them, and where both are the same."""
    if settings.least == settings.most:
        return None
    for limit in (FLOOR, CEILING):
        if math.isclose(strength, getattr(settings, limit.setting), rel_tol=_ROUNDING):
            return limit
    return None


def at_limits(strengths: Sequence[float], settings: Strength) -> tuple[int, int]:
    """The numbers of updates at which the strength was on its floor, and on its ceiling."""
    found = [limit_of(strength, settings) for strength in strengths]
    return found.count(FLOOR), found.count(CEILING)


def swing(strengths: Sequence[float]) -> float:
    """The greatest strength over the least one after it: how far it fell again; 1 if it never did.

    A strength that only rises has swung by 1, however far; one that overshoots falls again.
    """
    highest, widest = 0.0, 1.0
    for strength in strengths:
        highest = max(highest, strength)
        widest = max(widest, highest / strength)
    return widest


class StrengthWatch:
    """A tracker that warns once for every stay of `PATIENCE` updates on a limit."""

    def __init__(self, run: str, settings: Strength) -> None:
        self._run, self._settings = run, settings
        self._limit: Limit | None = None
        self._stay = 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Reads the strength of an update; other numbers are ignored."""
        if "train/strength" not in values:
            return
        limit = limit_of(values["train/strength"], self._settings)
        self._stay = self._stay + 1 if limit == self._limit else 1
        self._limit = limit
        if limit is not None and self._stay == PATIENCE:
            value = getattr(self._settings, limit.setting)
            processes.note(
                f"{self._run}: the strength was at config.strength.{limit.setting} = {value:g} for "
                f"{PATIENCE} updates, up to update {step}: {limit.meaning}"
            )

    def flush(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""
