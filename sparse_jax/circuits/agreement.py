"""How well an attribution ranks components: Spearman correlation with exact patching on a sample.

    scores = component_attributions(model, batch)
    rank_agreement(model, batch, "component_edges", scores, count=200).correlation

Both are means over prompts. Components are drawn without replacement among those that exist in
every prompt, so most of a large sample has effects near zero; `least` and `largest` tell. Intervals
are of bootstrap samples of the components that were compared, for the given model and prompts.
"""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from lm_jax.errors import UsageError, nearest
from lm_jax.statistics import (
    FEWEST_CLUSTERS,
    Interval,
    cluster_interval,
    resampled_interval,
)
from sparse_jax.circuits.components import component_effects
from sparse_jax.circuits.discover import component_edges, visible_edges
from sparse_jax.circuits.patching import Direction, edge_effects, head_effects
from sparse_jax.circuits.runs import Batch, CircuitModel

Kind = Literal["heads", "token_edges", "component_edges"]
# Effects are differences of two float32 metrics: what is below this share of the largest one, 8
# units in the last place of it, is their rounding, and counts as no effect.
ROUNDING = 2.0**-20
# Of a correlation.
_RANGE = (-1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class RankAgreement:
    """Spearman correlation of an attribution with exact effects.

    Attributes:
      kind: kind of components.
      correlation: Spearman's correlation with its 95 % interval (`rank_correlation`); None where
        one side is constant.
      count: components in the sample.
      least, largest: absolute exact effects in the sample, means over prompts.
    """

    kind: Kind
    correlation: Interval | None
    count: int
    least: float
    largest: float


def rank_correlation(
    first: np.ndarray, second: np.ndarray, *, clusters: np.ndarray | None = None, seed: int = 0
) -> Interval | None:
    """Spearman correlation of two `[C]` arrays with its 95 % interval over components.

    Pairs are resampled, or whole clusters of them. A resample in which one side is constant has no
    ranks to compare and counts as 0. None where one side is constant to begin with, or there is one
    cluster.

    Args:
      first, second: the two series to compare.
      clusters: id of each pair `[C]`; pairs of one id are not independent.
      seed: seed of the resamples.
    """
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    if clusters is not None:
        if np.ptp(clusters) == 0:
            return None
        pairs_C2 = np.stack([first, second], 1)
        return cluster_interval(
            pairs_C2,
            clusters,
            lambda some: float(_spearman(some[:, 0], some[:, 1])),
            within=_RANGE,
            seed=seed,
        )
    estimate, n = float(_spearman(first, second)), len(first)
    if n < FEWEST_CLUSTERS:
        return Interval(estimate, -math.inf, math.inf, n)
    result = stats.bootstrap(
        (first, second),
        _spearman,
        n_resamples=1000,
        batch=100,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return resampled_interval(estimate, result.bootstrap_distribution, n, within=_RANGE)


def _spearman(first: np.ndarray, second: np.ndarray, axis: int = -1) -> np.ndarray:
    """Pearson correlation of the ranks along an axis; 0 where one side is constant."""
    ranks = np.stack([stats.rankdata(side, axis=axis) for side in (first, second)])
    ranks -= ranks.mean(axis, keepdims=True)
    product, *squares = ((ranks[0] * ranks[1]).sum(axis), *(ranks**2).sum(axis))
    size = np.sqrt(squares[0] * squares[1])
    return np.where(size > 0, product / np.where(size > 0, size, 1), 0.0)


def rank_agreement(
    model: CircuitModel,
    batch: Batch,
    kind: Kind,
    attributions: jax.Array | np.ndarray,
    *,
    count: int = 200,
    seed: int = 0,
    direction: Direction = "noising",
    at_once: int = 8,
) -> RankAgreement:
    """Compares attributions with exact patching in the same direction.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      kind: "heads" (`[L, N, B]`), "token_edges" (`[L, B, N, T, S]`) or "component_edges"
        (`[U, B, R]`), in the shape of their attributions.
      attributions: attributions of that kind.
      count: components to patch; all where there are fewer. Of heads all are patched.
      seed: seed of the sample and of the interval's resamples.
      direction: direction of the attributions.
      at_once: number of patches to run side by side.

    Raises:
      UsageError: no such kind or direction, or a sample of fewer than three components.
    """
    if kind not in get_args(Kind):
        raise UsageError(f"there is no kind {kind!r}{nearest(kind, get_args(Kind))}")
    options = {"direction": direction, "at_once": at_once}
    scores = np.asarray(attributions, np.float64)
    if kind == "heads":
        exact = np.asarray(head_effects(model, batch, **options)).mean(-1).ravel()
        estimated = scores.mean(-1).ravel()
    else:
        edges = kind == "token_edges"
        exists = (visible_edges if edges else component_edges)(model, batch).all(1)
        places = np.argwhere(exists)
        rng = np.random.default_rng(seed)
        drawn = places[rng.permutation(len(places))[:count]]
        measured = edge_effects if edges else component_effects
        effects = measured(model, batch, jnp.asarray(drawn), **options)
        exact = np.asarray(effects).mean(1)
        estimated = scores.mean(1)[tuple(drawn.T)]
    if len(exact) < 3:
        raise UsageError(f"count = {len(exact)}: a rank correlation needs three components or more")
    size = np.abs(exact)
    exact = np.where(size <= ROUNDING * size.max(), 0.0, exact)
    size = np.abs(exact)
    correlation = rank_correlation(estimated, exact, seed=seed)
    return RankAgreement(kind, correlation, len(exact), float(size.min()), float(size.max()))
