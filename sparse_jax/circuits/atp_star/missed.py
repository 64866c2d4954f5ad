"""How much a place may do that nobody patched by itself, from runs with random subsets patched.

A bound holds as far as places do not act on one another.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from lm_jax.errors import UsageError
from lm_jax.model.edits import Replace
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from sparse_jax.circuits.patching import Direction, sides
from sparse_jax.circuits.place_patching import PLACES, heads_of
from sparse_jax.circuits.runs import Batch, CircuitModel, map_in_batches, measure

# Places whose patches leave those of the others as they are.
_SIDE_BY_SIDE = frozenset({"query", "key", "value", "mlp_out"})


class Node(NamedTuple):
    """A place at one position: its name in `PLACES`, layer, head (0 without heads), position."""

    place: str
    layer: int
    head: int
    position: int


@dataclasses.dataclass(frozen=True)
class MissedBound:
    """What single places may do at most, of places that were not patched one by one.

    Attributes:
      nodes: the places.
      effect_X: mean of the metric in runs with the place among the patched ones, less that in runs
        without: the effect on the mean over prompts, averaged over what else is patched.
      bound_X: bounds on the absolute effects, all of which hold together with the confidence.
      confidence: probability of that, if places do not act on one another.
    """

    nodes: tuple[Node, ...]
    effect_X: np.ndarray
    bound_X: np.ndarray
    confidence: float


def bound_missed(
    model: CircuitModel,
    batch: Batch,
    nodes: Sequence[Node],
    *,
    direction: Direction = "noising",
    subsets: int = 512,
    share: float = 0.5,
    confidence: float = 0.95,
    seed: int = 0,
    at_once: int = 8,
) -> MissedBound:
    """Bounds on the effects of places from runs in which random subsets of them are patched.

    The two groups of runs of a place, with it and without, differ in their means by its effect,
    averaged over what else is patched; it is the effect of the place alone if places do not act on
    one another. Effects of opposite signs on two prompts cancel. Bounds are by Welch's t, for both
    signs and all places together after Bonferroni.

    Args:
      model: a dense or sparse model.
      batch: the prompts, over which the metric is averaged.
      nodes: different places, those that exact patching has not verified. They are queries, keys,
        values and `mlp_out`, or all of one kind, `resid_pre` in one layer alone, since a patch of
        another place would overwrite theirs.
      direction: see the head of `patching`.
      subsets: number of runs.
      share: share of the places that each run patches.
      confidence: probability that all bounds hold.
      seed: seed of the subsets.
      at_once: runs side by side, which bounds the memory.

    Raises:
      UsageError: a setting is outside its range, a place is named twice or is not there, or a place
        is in fewer than two of the runs with or without it.
    """
    nodes = tuple(Node(*node) for node in nodes)
    if not nodes or len(set(nodes)) < len(nodes):
        raise UsageError("nodes: name different places, one at least")
    for name, value in (("share", share), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UsageError(f"{name} = {value} is not between 0 and 1")
    places = {node.place for node in nodes}
    one_layer = "resid_pre" not in places or len({node.layer for node in nodes}) == 1
    if not one_layer or (len(places) > 1 and not places <= _SIDE_BY_SIDE):
        raise UsageError(
            f"nodes: {', '.join(sorted(places))} overwrite one another; give queries, keys, values "
            "and mlp_out, or one kind of place (of resid_pre one layer)"
        )
    for node in nodes:
        shape = _shape(model, batch, node.place)
        if not all(0 <= at < size for at, size in zip(node[1:], shape, strict=True)):
            raise UsageError(f"nodes: there is no {node}; layers, heads and positions are {shape}")
    patched_KX = np.random.default_rng(seed).random((subsets, len(nodes))) < share
    counts_2X = np.stack([patched_KX.sum(0), (~patched_KX).sum(0)])
    if counts_2X.min() < 2:
        raise UsageError(
            f"subsets = {subsets}: a place is in fewer than two runs with or without it; take more"
        )
    metric_K = runs_of(model, batch, nodes, patched_KX, direction=direction, at_once=at_once)
    return bound_of(nodes, patched_KX, metric_K, confidence)


def runs_of(
    model: CircuitModel,
    batch: Batch,
    nodes: Sequence[Node],
    patched_KX: np.ndarray,
    *,
    direction: Direction,
    at_once: int,
) -> np.ndarray:
    """Mean metric of runs in which some places are patched, `[K]`.

    Args:
      model, batch, nodes, direction, at_once: arguments of `bound_missed`.
      patched_KX: mask of the places that each run patches.
    """
    run_BT, other_BT = sides(batch, direction)
    places = tuple(dict.fromkeys(node.place for node in nodes))
    values = {place: _recorded(model, batch, other_BT, place=place) for place in places}
    place_X = jnp.asarray([places.index(node.place) for node in nodes])
    at_X3 = jnp.asarray([node[1:] for node in nodes])
    program = functools.partial(
        *(_patch_subsets, model, batch, run_BT, values, place_X, at_X3), places=places
    )
    return np.asarray(map_in_batches(program, jnp.asarray(patched_KX), at_once), np.float64)


def bound_of(
    nodes: tuple[Node, ...], patched_KX: np.ndarray, metric_K: np.ndarray, confidence: float
) -> MissedBound:
    """The bounds of `bound_missed`, of runs and their metric."""
    metric_K1 = metric_K[:, None]
    means, errors, parts = [], [], []
    for mask_KX in (patched_KX, ~patched_KX):
        count_X = mask_KX.sum(0)
        mean_X = (metric_K1 * mask_KX).sum(0) / count_X
        variance_X = (((metric_K1 - mean_X) ** 2) * mask_KX).sum(0) / (count_X - 1)
        means.append(mean_X)
        errors.append(variance_X / count_X)
        parts.append((variance_X / count_X) ** 2 / (count_X - 1))
    effect_X, square_X = means[0] - means[1], errors[0] + errors[1]
    degrees_X = square_X**2 / np.maximum(parts[0] + parts[1], np.finfo(np.float64).tiny)
    tail = (1 - confidence) / (2 * len(nodes))
    quantile_X = scipy.stats.t.isf(tail, np.maximum(degrees_X, 1))
    bound_X = np.abs(effect_X) + quantile_X * np.sqrt(square_X)
    return MissedBound(nodes, effect_X, bound_X, confidence)


def _shape(model: CircuitModel, batch: Batch, place: str) -> tuple[int, int, int]:
    """Layers, heads (1 without any) and positions of a place."""
    return model.cfg.num_layers, heads_of(model.cfg, place) or 1, batch.clean_BT.shape[1]


@functools.partial(exact_jit, static_argnames="place")
def _recorded(model, batch, tokens_BT, *, place):
    site = PLACES[place]
    return measure(model, batch, tokens_BT, record={site: keep})[1][site]


@functools.partial(exact_jit, static_argnames="places")
def _patch_subsets(
    model: CircuitModel,
    batch: Batch,
    run_BT: jax.Array,
    values: Mapping[str, jax.Array],
    place_X: jax.Array,
    at_X3: jax.Array,
    patched_WX: jax.Array,
    *,
    places: tuple[str, ...],
) -> jax.Array:
    """The mean metric of each run, `[W]`."""

    def patched(patched_X: jax.Array) -> jax.Array:
        edits = {}
        for number, place in enumerate(places):
            on_X = patched_X & (place_X == number)
            mask_LNT = jnp.zeros(_shape(model, batch, place), bool)
            mask_LNT = mask_LNT.at[tuple(at_X3.T)].max(on_X, mode="drop")
            mask = mask_LNT.swapaxes(1, 2)[:, None, :, :, None]
            mask = mask if heads_of(model.cfg, place) else mask[..., 0]
            edits[PLACES[place]] = Replace(values[place], mask)
        return measure(model, batch, run_BT, edits=edits)[0].mean()

    return jax.vmap(patched)(patched_WX)
