"""How well an attribution ranks components: Spearman correlation with exact patching on a sample.

    scores = component_attributions(model, batch)
    rank_agreement(model, batch, "component_edges", scores, count=200).correlation

Both are means over prompts. Components are drawn without replacement among those that exist in
every prompt, so most of a large sample has effects near zero; `least` and `largest` tell.
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import spearmanr

from lm_jax.errors import UsageError, nearest
from sparse_jax.circuits.components import component_effects
from sparse_jax.circuits.discover import component_edges, visible_edges
from sparse_jax.circuits.patching import Direction, edge_effects, head_effects
from sparse_jax.circuits.runs import Batch, CircuitModel

Kind = Literal["heads", "token_edges", "component_edges"]


@dataclasses.dataclass(frozen=True)
class RankAgreement:
    """Spearman correlation of an attribution with exact effects.

    Attributes:
      kind: of components.
      correlation: NaN where one side is constant.
      count: components in the sample.
      least, largest: absolute exact effects in the sample, means over prompts.
    """

    kind: Kind
    correlation: float
    count: int
    least: float
    largest: float


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
      model: dense or sparse.
      batch: the prompts.
      kind: "heads" (`[L, N, B]`), "token_edges" (`[L, B, N, T, S]`) or "component_edges"
        (`[U, B, R]`), in the shape of their attributions.
      attributions: of that kind.
      count: components to patch; all where there are fewer. Of heads all are patched.
      seed: draws the sample.
      direction: of the attributions.
      at_once: patches run side by side.

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
    constant = np.ptp(exact) == 0 or np.ptp(estimated) == 0
    correlation = np.nan if constant else float(spearmanr(estimated, exact).statistic)
    size = np.abs(exact)
    return RankAgreement(kind, correlation, len(exact), float(size.min()), float(size.max()))
