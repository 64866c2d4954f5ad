"""How few heads, or pairs of a query and a key, carry most of an edge (paper, Fig. 6).

Components of an edge are all heads of all layers, or all causal pairs of all heads, with their
shares a of `mediation`. In order of size, their cumulative mass is

    absolute   the sum of the largest |a| over the sum of all
    signed     the sum of the largest a in the direction of the total over the total, at most 1

The sums over layers are not the edge (a path through two heads counts at both), so the mass is of
what mediates, not of the edge; an edge that no head carries has none and is left out of means. Two
models may leave out different edges. An edge between different positions must pass attention, and
so none of those is left out: means over them are over the same kind of edge in both.
"""

from collections.abc import Collection
import dataclasses
import itertools
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from sparse_jax.circuits.curves import crossing

Component = Literal["heads", "pairs"]
Sign = Literal["absolute", "signed"]
# Of the two ends of an edge.
Positions = Literal["any", "different"]
COMPONENTS, SIGNS, POSITIONS = get_args(Component), get_args(Sign), get_args(Positions)


class Kind(NamedTuple):
    """Which components by which mass, over edges between which positions."""

    component: Component
    sign: Sign
    positions: Positions


KINDS = [Kind(*each) for each in itertools.product(COMPONENTS, SIGNS, POSITIONS)]
# Edges at a time, so that the arrays of tens of thousands of pairs stay in the cache.
_EDGES = 4


def shares(score_XLNTS: np.ndarray, component: Component) -> np.ndarray:
    """Shares of all components of each edge `[X, C]`."""
    X, T = len(score_XLNTS), score_XLNTS.shape[-1]
    if component == "heads":
        return score_XLNTS.sum((3, 4), dtype=np.float64).reshape(X, -1)
    query_P, key_P = np.tril_indices(T)
    return score_XLNTS[..., query_P, key_P].astype(np.float64).reshape(X, -1)


def cumulative(share_XC: np.ndarray, sign: Sign) -> np.ndarray:
    """Mass of the largest components `[X, C]`, NaN for edges without any."""
    if sign == "absolute":
        ordered_XC = -np.sort(-np.abs(share_XC), axis=1)
        total_X1 = ordered_XC.sum(1, keepdims=True)
    else:
        total_X1 = share_XC.sum(1, keepdims=True)
        ordered_XC = -np.sort(-share_XC * np.sign(total_X1), axis=1)
        total_X1 = np.abs(total_X1)
    summed_XC = np.cumsum(ordered_XC, axis=1)
    mass_XC = np.divide(
        summed_XC, total_X1, out=np.full_like(summed_XC, np.nan), where=total_X1 > 0
    )
    # Components against the total come last, when the sum is above 1 already.
    return np.minimum(mass_XC, 1.0)


def needed(mass_XC: np.ndarray, fraction: float) -> np.ndarray:
    """How many components have this mass, of each edge `[X]`."""
    return 1 + np.argmax(mass_XC >= fraction - 1e-12, axis=1)


def needed_of_mean(mass_C: np.ndarray, fraction: float) -> float:
    """Where a mean curve reaches this mass, between two counts by interpolation; NaN without."""
    return crossing(np.arange(1, len(mass_C) + 1), mass_C, fraction)


@dataclasses.dataclass(frozen=True)
class Mass:
    """Mean over edges.

    Attributes:
      component, sign, positions: see the head of this file.
      edges: number of edges of which any component has a share.
      unmediated: edges without.
      mass_C: mean cumulative mass; empty without edges.
      needed: mean number of components that have the fraction; NaN without edges.
    """

    component: Component
    sign: Sign
    positions: Positions
    edges: int
    unmediated: int
    mass_C: np.ndarray
    needed: float


class MassSums:
    """Sums over edges, a batch at a time."""

    def __init__(self, fraction: float, components: Collection[Component] = COMPONENTS) -> None:
        """`fraction` is the argument of `needed`; other components than these have no edges."""
        self._fraction, self._components = fraction, components
        self._mass: dict[Kind, Any] = dict.fromkeys(KINDS, 0.0)
        self._counts = {kind: np.zeros(3, np.int64) for kind in KINDS}

    def add(self, score_XLNTS: np.ndarray, different_X: np.ndarray) -> None:
        """Adds the shares of some edges; `different_X` are those between different positions."""
        for start in range(0, len(score_XLNTS), _EDGES):
            some = slice(start, start + _EDGES)
            for component in self._components:
                share_XC = shares(score_XLNTS[some], component)
                for sign in SIGNS:
                    mass_XC = cumulative(share_XC, sign)
                    self._add(Kind(component, sign, "any"), mass_XC)
                    self._add(Kind(component, sign, "different"), mass_XC[different_X[some]])

    def _add(self, kind: Kind, mass_XC: np.ndarray) -> None:
        has_X = ~np.isnan(mass_XC[:, 0])
        count = needed(mass_XC[has_X], self._fraction).sum()
        self._mass[kind] = self._mass[kind] + mass_XC[has_X].sum(0)
        self._counts[kind] += (has_X.sum(), (~has_X).sum(), count)

    def means(self) -> list[Mass]:
        """Means over the edges so far, of each kind."""
        return [
            _mean(kind, mass, *self._counts[kind].tolist()) for kind, mass in self._mass.items()
        ]


def _mean(kind: Kind, total_C: Any, edges: int, unmediated: int, count: int) -> Mass:
    if not edges:
        return Mass(*kind, 0, unmediated, np.empty(0), float("nan"))
    return Mass(*kind, edges, unmediated, total_C / edges, count / edges)
