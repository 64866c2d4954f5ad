"""AtP*: attribution patching of single places, with the failures of a gradient mended.

The estimate of the effect of a place (`place_patching`) by attribution patching is the difference
of its two values times the gradient of the metric. Kramár et al. 2024 (AtP*, arXiv:2403.00745) name
two reasons why it overlooks places, and what to do:

    saturated softmax   Through a weight close to 0 or 1 no gradient passes, but a patched query or
                        key may move it. `node_attributions` takes the true change of the attention
                        weights p to p', with D the derivatives of the metric by them:

                          query   sum over keys of (p' - p) D
                          key     in each query's row (p' - p) (D - mean of D over the other keys),
                                  whose weights among themselves stay as they are

    cancellation        A direct and an indirect effect of opposite signs have a small sum.
                        `without_layers` is the mean absolute estimate over backward passes in each
                        of which the branches of one layer are constants (GradDrop).

`bound_missed` says how large an effect may be that was overlooked nevertheless, from runs in which
random subsets of places are patched, as far as places do not act on one another.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from lm_jax.errors import UsageError
from lm_jax.model.edits import Add, Chain, Replace
from lm_jax.model.layers import softcap
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from sparse_jax.circuits.patching import Direction, sides
from sparse_jax.circuits.place_patching import PLACES, heads_of
from sparse_jax.circuits.rules import EXACT
from sparse_jax.circuits.runs import Batch, CircuitModel, map_in_batches, measure

# What of attention the mended estimates read.
_SCORED = ("attn.rot_q", "attn.rot_k", "attn.scores", "attn.pattern")
# Places whose patches leave those of the others as they are.
_SIDE_BY_SIDE = frozenset({"query", "key", "value", "mlp_out"})
# The sites of what a layer's branches add to the stream.
_BRANCHES = ("attn.out", "mlp.out")


class Node(NamedTuple):
    """A place at one position: its name in `PLACES`, layer, head (0 without heads), position."""

    place: str
    layer: int
    head: int
    position: int


def node_attributions(
    model: CircuitModel,
    batch: Batch,
    place: str,
    *,
    direction: Direction = "noising",
    recompute: bool = True,
) -> np.ndarray:
    """Estimates of `place_patching.place_effects` from one backward pass.

    Queries and keys have the true change of the weights; values and other places their gradient.
    The memory holds a few arrays of the size of all attention patterns, `[L, B, N, T, T]`.

    Args:
      model: a dense or sparse model; open gates stay open, closed ones closed.
      batch: the prompts.
      place: name in `PLACES`.
      direction: see the head of `patching`.
      recompute: whether queries and keys have their true change of the attention weights; else
        they are estimated by their gradient, as other places are.

    Returns:
      Estimates `[L, T, B]`, of places of heads `[L, N, T, B]`.

    Raises:
      UsageError: no such place or direction.
    """
    return _estimates(model, batch, place, direction, recompute, None)


def without_layers(
    model: CircuitModel,
    batch: Batch,
    place: str,
    *,
    direction: Direction = "noising",
    recompute: bool = True,
) -> np.ndarray:
    """Mean absolute estimates over backward passes without one layer's branches (GradDrop).

    There are as many passes as layers. Their sum is divided by the number of passes in which a
    place has an estimate: one less than layers, for there is none without the place's own layer,
    but as many for `resid_pre`, which lies before its layer.

    Args:
      model, batch, place, direction, recompute: arguments of `node_attributions`.

    Returns:
      Estimates without a sign, shaped as those of `node_attributions`.

    Raises:
      UsageError: no such place or direction, or the model has one layer.
    """
    L = model.cfg.num_layers
    if L < 2:
        raise UsageError("model: with one layer there is no other to leave out; give a deeper one")
    given = (model, batch, place, direction, recompute)
    sizes = [np.abs(_estimates(*given, jnp.asarray(layer))) for layer in range(L)]
    return np.sum(sizes, axis=0) / (L if place == "resid_pre" else L - 1)


def _estimates(
    model: CircuitModel,
    batch: Batch,
    place: str,
    direction: Direction,
    recompute: bool,
    without: jax.Array | None,
) -> np.ndarray:
    heads = heads_of(model.cfg, place)
    run_BT, other_BT = sides(batch, direction)
    recomputed = recompute and place in ("query", "key")
    program = _recomputed if recomputed else _products
    estimates = np.asarray(program(model, batch, run_BT, other_BT, without, place=place))
    estimates = np.moveaxis(estimates, 1, -1)
    estimates = estimates.swapaxes(1, 2) if heads else estimates
    return np.where(np.asarray(batch.valid_BT).T, estimates, 0.0)


@struct.dataclass
class _Constant:
    """The site as it is, a constant where `on` is true."""

    on: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.where(self.on, jax.lax.stop_gradient(x), x)


def _gradient(
    model: CircuitModel,
    batch: Batch,
    run_BT: jax.Array,
    site: str,
    shape: tuple[int, ...],
    without: jax.Array | None,
) -> jax.Array:
    """Gradient of each prompt's metric by a site, without the branches of a layer."""
    edits: dict[str, Any] = {}
    if without is not None:
        on_L = jnp.arange(model.cfg.num_layers) == without
        edits = {name: _Constant(on_L.reshape(-1, 1, 1, 1)) for name in _BRANCHES}

    def total(added: jax.Array) -> jax.Array:
        own = Add(added)
        chained = {site: Chain((own, edits[site]))} if site in edits else {site: own}
        return measure(model, batch, run_BT, edits=edits | chained, rules=EXACT)[0].sum()

    return jax.grad(total)(jnp.zeros(shape, jnp.float32))


@functools.partial(exact_jit, static_argnames="place")
def _products(model, batch, run_BT, other_BT, without, *, place):
    """Differences times gradients `[L, B, T]`, of heads `[L, B, T, N]`."""
    site = PLACES[place]
    here, there = (
        measure(model, batch, tokens_BT, record={site: keep})[1][site].astype(jnp.float32)
        for tokens_BT in (run_BT, other_BT)
    )
    gradient = _gradient(model, batch, run_BT, site, here.shape, without)
    return ((there - here) * gradient).sum(-1)


@functools.partial(exact_jit, static_argnames="place")
def _recomputed(model, batch, run_BT, other_BT, without, *, place):
    """Changes of the weights times derivatives by them `[L, B, T, N]`, of keys `[L, B, S, K]`."""
    cfg, site = model.cfg, PLACES[place]
    record = dict.fromkeys(_SCORED, keep)
    here = measure(model, batch, run_BT, record=record)[1]
    there = measure(model, batch, other_BT, record={site: keep})[1][site]
    query_LBTNH, key_LBSKH, score_LBNTS, pattern_LBNTS = (
        here[name].astype(jnp.float32) for name in _SCORED
    )
    by_pattern = _gradient(model, batch, run_BT, "attn.pattern", pattern_LBNTS.shape, without)
    if model.gates is None:
        seen_LBNTS, by_weight_LBNTS = score_LBNTS > -jnp.inf, by_pattern
    elif model.gates.renormalise:
        # The weights are a softmax over open keys.
        seen_LBNTS, by_weight_LBNTS = pattern_LBNTS > 0, by_pattern
    else:
        # Gates multiply the weights, and are 0 or 1 in this run.
        seen_LBNTS = score_LBNTS > -jnp.inf
        by_weight_LBNTS = jnp.where(pattern_LBNTS > 0, by_pattern, 0.0)
    queries, keys = (there, key_LBSKH) if place == "query" else (query_LBTNH, there)
    groups = cfg.num_heads // cfg.num_kv_heads
    product_LBNTS = jnp.einsum("LBTNH,LBSNH->LBNTS", queries, jnp.repeat(keys, groups, axis=3))
    patched_LBNTS = softcap(product_LBNTS * cfg.scale, cfg.score_softcap)
    score_LBNTS, patched_LBNTS = (
        jnp.where(seen_LBNTS, x, -jnp.inf) for x in (score_LBNTS, patched_LBNTS)
    )
    own = query_LBTNH if place == "query" else key_LBSKH
    differs_LBTN = (own != there).any(-1)
    if place == "query":
        change_LBNTS = _softmax(patched_LBNTS) - _softmax(score_LBNTS)
        effect_LBTN = (change_LBNTS * by_weight_LBNTS).sum(-1).swapaxes(2, 3)
        return jnp.where(differs_LBTN, effect_LBTN, 0.0)
    effect_LBNTS = key_effects(score_LBNTS, patched_LBNTS, by_weight_LBNTS)
    effect_LBNS = effect_LBNTS.sum(3)
    L, B, N, S = effect_LBNS.shape
    effect_LBSK = effect_LBNS.reshape(L, B, N // groups, groups, S).sum(3).swapaxes(2, 3)
    return jnp.where(differs_LBTN, effect_LBSK, 0.0)


def _softmax(score: jax.Array) -> jax.Array:
    """Weights of rows, 0 where a row sees no key."""
    sees = (score > -jnp.inf).any(-1, keepdims=True)
    return jnp.where(sees, jax.nn.softmax(jnp.where(sees, score, 0.0), axis=-1), 0.0)


def key_effects(score: jax.Array, patched: jax.Array, by_weight: jax.Array) -> jax.Array:
    """Change of `sum of softmax(score) * by_weight` if one key has its patched score `[..., S]`.

    The weights of the other keys among themselves stay, so that all that is needed of them is the
    logarithm of their sum and their mean of `by_weight`. Both are sums of their own terms, not of
    all terms less one: where one key has nearly all weight, that difference would be rounding.

    Args:
      score: scores of rows, -inf for keys that are not seen.
      patched: each key's score after its patch, that of the others unchanged.
      by_weight: derivatives by the weights.
    """
    seen = score > -jnp.inf
    largest, total, sum_of = _over_others(score, jnp.where(seen, by_weight, 0.0))
    alone = total == 0
    mean = sum_of / jnp.where(alone, 1.0, total)
    others = largest + jnp.log(jnp.where(alone, 1.0, total))
    before, after = (jnp.where(seen & ~alone, x, 0.0) - others for x in (score, patched))
    shift = after - before
    # The difference of two sigmoids, which near 1 have no digits left for it.
    up = jax.nn.sigmoid(after) * jax.nn.sigmoid(-before) * -jnp.expm1(-jnp.abs(shift))
    down = jax.nn.sigmoid(before) * jax.nn.sigmoid(-after) * jnp.expm1(-jnp.abs(shift))
    change = jnp.where(shift > 0, up, down)
    # A key without others keeps all weight.
    return jnp.where(seen & ~alone, change * (by_weight - mean), 0.0)


def _over_others(score: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Largest score m over all keys but one, and sums of e^(score - m), alone and times `value`."""
    lowest = jnp.finfo(score.dtype).min
    seen = score > -jnp.inf
    terms = jnp.where(seen, score, lowest), seen.astype(score.dtype), jnp.where(seen, value, 0.0)
    empty = tuple(
        jnp.full_like(x[..., :1], fill) for x, fill in zip(terms, (lowest, 0, 0), strict=True)
    )

    def joined(first: Any, second: Any) -> Any:
        largest = jnp.maximum(first[0], second[0])
        powers = [jnp.exp(each[0] - largest) for each in (first, second)]
        sums = (first[i] * powers[0] + second[i] * powers[1] for i in (1, 2))
        return (largest, *sums)

    before = jax.lax.associative_scan(joined, terms, axis=score.ndim - 1)
    after = jax.lax.associative_scan(joined, terms, axis=score.ndim - 1, reverse=True)
    before = tuple(
        jnp.concatenate([e, x[..., :-1]], -1) for e, x in zip(empty, before, strict=True)
    )
    after = tuple(jnp.concatenate([x[..., 1:], e], -1) for e, x in zip(empty, after, strict=True))
    return joined(before, after)


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
