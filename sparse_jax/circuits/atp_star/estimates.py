"""Estimates of the effects of places by attribution patching, its failures mended.

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
"""

import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.edits import Add, Chain
from lm_jax.model.layers import softcap
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from sparse_jax.circuits.patching import Direction, sides
from sparse_jax.circuits.place_patching import PLACES, heads_of
from sparse_jax.circuits.rules import EXACT
from sparse_jax.circuits.runs import Batch, CircuitModel, measure

# Places that have the true change of the attention weights.
_RECOMPUTED = ("query", "key")
# What of attention the mended estimates read.
_SCORED = ("attn.rot_q", "attn.rot_k", "attn.scores", "attn.pattern")
# The sites of what a layer's branches add to the stream.
_BRANCHES = ("attn.out", "mlp.out")


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


def by_method(
    model: CircuitModel, batch: Batch, place: str, *, direction: Direction = "noising"
) -> dict[str, np.ndarray]:
    """All estimates of the effects of a place by their names.

    They are `atp`, the gradient; of queries and keys `atp_star`, the true change of the weights;
    and of more layers than one `graddrop`.

    Args:
      model, batch, place, direction: arguments of `node_attributions`.
    """
    given = (model, batch, place)
    found = {"atp": node_attributions(*given, direction=direction, recompute=False)}
    if place in _RECOMPUTED:
        found["atp_star"] = node_attributions(*given, direction=direction)
    if model.cfg.num_layers > 1:
        found["graddrop"] = without_layers(*given, direction=direction)
    return found


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
    recomputed = recompute and place in _RECOMPUTED
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
