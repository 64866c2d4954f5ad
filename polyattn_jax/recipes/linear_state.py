"""What a recipe would cost as linear attention: its feature map, its state, the cache it replaces.

Weights that are a polynomial of degree p of u = q.k / sqrt(d) + b are an inner product of finite
features, u^p = phi(q).phi(k), so that sum_j phi(k_j) v_j^T is a state of fixed size. With m = d
coordinates for b = 0 and m = d + 1 otherwise (one more for the constant), phi holds the monomials

    of degree p          C(m + p - 1, p) with each once ("symmetric"), m^p without symmetry
    of degrees 0 to p    C(d + p, p), and 1 + d + ... + d^p        (the Taylor map, p = 2)

and the state has as many rows, of the d numbers of a value and one more for the sum that a
normalised map divides by. A KV cache has 2 d numbers per token and KV head, and the state belongs
to a KV head as well, since it holds no query. The counts are exact. A layer with a sliding window
needs no more cache than its window, so that there the comparison favours the state.

A window (`window:w=,sinks=`) is no linear attention, but its cache has w + sinks tokens at any
length, which is what is counted.

A recipe that is a feature map itself (`feature_maps`) has as many features as that map, whatever
the model does to its scores. The gated delta rule (`delta_maps`) has no features, since its
weights depend on the keys between, but a state of d x d numbers; in a layer with a sliding window
it is no recurrence, so that only a cache gives its weights.
Softmax in a window of a feature map or of the Taylor map has no features: it needs the cache of
w + sinks tokens besides the state.

There is no finite feature map for any other weight that is no polynomial of u: max(u, 0)^p, a
sigmoid, an exponential (softmax, softpick), entmax, or a sum over |u|^p with odd p. For the
rectified powers the plain power u^p is counted instead, and named so: it is another map, with
weights where the recipe has none. A tanh on the scores (`score_softcap`) leaves no such recipe a
polynomial.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from iaj_kernels.row_map_attention.maps import RowMap
from lm_jax.model.config import DecoderConfig
from lm_jax.run.results import Count
from polyattn_jax.recipes.delta_maps import GatedDelta
from polyattn_jax.recipes.feature_maps import FeatureMap
from polyattn_jax.recipes.field_maps import FieldMap
from polyattn_jax.recipes.row_maps import Recipe


@dataclasses.dataclass(frozen=True)
class LinearState:
    """Size of the linear attention of one recipe, per KV head and layer.

    Attributes:
      finite: whether the recipe's own weights, outside a window, have a finite feature map.
      reason: why not; empty where they have.
      degree: degree of the polynomial that is counted, the recipe's own or, where that has no
        finite feature map, the plain power; null where there is none, and so are the counts, but
        for a recipe that is a feature map.
      features: number of features of a key, with each monomial once.
      tensor_features: number of features of a key, without use of symmetry.
      state: numbers in the state of the symmetric features and in the cache of the window.
      cache_tokens: tokens from which on a KV cache has as many numbers.
      window: tokens of the cache of a window with its sinks; null for a recipe without one.
    """

    recipe: str
    finite: bool
    reason: str
    degree: Count | None
    features: Count | None
    tensor_features: Count | None
    state: Count | None
    cache_tokens: Count | None
    window: Count | None = None

    @property
    def own(self) -> bool:
        """Whether the state that is counted is that of the recipe, and not of the plain power."""
        return self.finite or (self.state is not None and self.degree is None)


def linear_state(recipe: Recipe, bias: Any, cfg: DecoderConfig) -> LinearState:
    """The cost of linear attention with a recipe in a model, for its widest heads.

    Args:
      recipe: the row map.
      bias: the recipe's b, resolved: a number, or `[L, N]`.
      cfg: the model.
    """
    d = max(stack.cfg.head_dim for stack in cfg.stacks)
    if isinstance(recipe.map, GatedDelta):
        reason = "weights depend on the keys between"
        return LinearState(recipe.name, False, reason, None, None, None, d * d, -(-d // 2))
    if isinstance(recipe.map, FeatureMap):
        features = recipe.map.size(d)
        return _of_size(recipe, "", None, features, features, d)
    if isinstance(recipe.map, FieldMap) and recipe.map.kind == "window":
        tokens = recipe.map.w + recipe.map.sinks
        reason = "an exponential is no polynomial"
        return LinearState(
            recipe.name, False, reason, None, None, None, 2 * d * tokens, tokens, tokens
        )
    reason = _why_infinite(recipe.map)
    p, lower = _polynomial(recipe.map)
    if cfg.score_softcap is not None:
        reason, p = "the model caps its scores by a tanh", None
    if p is None:
        return LinearState(recipe.name, False, reason, None, None, None, None, None)
    if lower:
        features, tensor = math.comb(d + p, p), sum(d**power for power in range(p + 1))
    else:
        m = d + 1 if np.any(bias) else d
        features, tensor = math.comb(m + p - 1, p), m**p
    return _of_size(recipe, reason, p, features, tensor, d)


@dataclasses.dataclass(frozen=True)
class KeptState:
    """What a model keeps for one sequence.

    Attributes:
      numbers: numbers in caches and states.
      key_heads: number of key heads that have a cache with softmax everywhere.
      freed: number of them whose cache goes.
    """

    numbers: int
    key_heads: int
    freed: int


def kept_state(
    recipe: Recipe, bias: Any, heads_LN: np.ndarray, cfg: DecoderConfig, length: int
) -> KeptState:
    """What a model keeps, with a recipe in some of its heads.

    A key head whose query heads all have the recipe keeps the recipe's state, one that a softmax
    head reads its cache, and with replaced heads beside it both. A recipe without a finite feature
    map needs the whole cache. In a layer with a sliding window the state of a feature map needs its
    cache as well, since keys that leave the window are subtracted, and a delta rule has a cache
    alone. A window keeps no more than
    there is, and no key is outside it where the text is no longer.

    Args:
      recipe, bias: arguments of `linear_state`.
      heads_LN: heads that have the recipe.
      cfg: the model; where layers read the keys of an earlier one, they are of that one's.
      length: number of tokens of the sequence.
    """
    numbers = key_heads = freed = 0
    for owner, (own, layers) in key_readers(cfg).items():
        entry, d, window = linear_state(recipe, bias, own), own.head_dim, cfg.layer_windows[owner]
        seen = min(window or length, length)
        cache, kept = 2 * d * seen, 2 * d * min(entry.window or 0, seen)
        features = (entry.state or 0) - 2 * d * (entry.window or 0) if entry.own else 0
        no_recurrence = isinstance(recipe.map, GatedDelta) and seen < length
        if no_recurrence or length <= (entry.window or 0):
            features = 0
        heads_RKG = heads_LN[layers].reshape(len(layers), own.num_kv_heads, -1)
        is_window = entry.window is not None and not entry.finite
        goes = is_window or (entry.own and seen == length)
        for heads_RG in heads_RKG.swapaxes(0, 1):
            gone = goes and heads_RG.all() and kept < cache
            numbers += (kept if gone else cache) + features * int(heads_RG.any())
            key_heads, freed = key_heads + 1, freed + int(gone)
    return KeptState(numbers, key_heads, freed)


def key_readers(cfg: DecoderConfig) -> dict[int, tuple[DecoderConfig, list[int]]]:
    """The layers that read the keys of each layer that has some, with the latter's configuration.

    Args:
      cfg: the model; a layer may read the keys of an earlier one.
    """
    readers: dict[int, tuple[DecoderConfig, list[int]]] = {}
    for stack in cfg.stacks:
        for layer in stack.layers:
            owner = stack.cfg.kv if isinstance(stack.cfg.kv, int) else layer
            readers.setdefault(owner, (stack.cfg, []))[1].append(layer)
    return readers


def _of_size(
    recipe: Recipe, reason: str, degree: int | None, features: int, tensor: int, d: int
) -> LinearState:
    """The result where there are features to count; `d` is the width of a head."""
    window = None
    if isinstance(recipe.map, FieldMap | FeatureMap) and recipe.map.w:
        window = recipe.map.w + recipe.map.sinks
    state = features * (d + int(recipe.map.normalised)) + 2 * d * (window or 0)
    return LinearState(
        recipe=recipe.name,
        finite=not reason,
        reason=reason,
        degree=degree,
        features=features,
        tensor_features=tensor,
        state=state,
        cache_tokens=-(-state // (2 * d)),
        window=window,
    )


def _polynomial(row_map: RowMap | FieldMap) -> tuple[int | None, bool]:
    """Degree of the polynomial to count, or None; whether it has monomials of lower degree too."""
    if isinstance(row_map, FieldMap):
        match row_map.kind:
            case "taylor2":
                return 2, True
            case "poly" | "poly_over_length":
                return row_map.p, False
            case _:
                return None, False
    whole = row_map.relu and row_map.p == int(row_map.p)
    return (int(row_map.p), False) if whole else (None, False)


def _why_infinite(row_map: RowMap | FieldMap) -> str:
    """Why the weights of a map are no polynomial of the scores; empty where they are."""
    if isinstance(row_map, FieldMap):
        if row_map.kind == "poly" and row_map.p % 2:
            return "the sum over |z + b|^p is no polynomial for odd p"
        return {
            "softpick": "softpick is rectified and exponential",
            "entmax15": "the threshold of entmax depends on the whole row",
            "softmax_logn": "an exponential is no polynomial",
        }.get(row_map.kind, "")
    if row_map.relu:
        return "max(z + b, 0) is rectified"
    if row_map.kind == "softmax":
        return "an exponential is no polynomial"
    return "a sigmoid is no polynomial"


def sentence(entry: LinearState) -> str:
    """The cost in words: whether a finite feature map exists, its size and the cache it equals."""
    if entry.window is not None and not entry.finite:
        return f"none, but a KV cache of {entry.window:,} tokens at any length"
    size = f"as much memory as {entry.cache_tokens or 0:,} tokens of KV cache"
    if entry.window is not None:
        size = f"with the cache of a window of {entry.window:,} tokens {size}"
    if entry.degree is not None:
        size = (
            f"{entry.features:,} symmetric features per KV head ({entry.tensor_features:,} without "
            f"symmetry), {size}"
        )
    elif entry.finite:
        size = f"{entry.features:,} features per KV head, {size}"
    if entry.finite:
        return f"a finite feature map of {size}"
    text = f"no finite feature map: {entry.reason}"
    if entry.own:
        return f"{text}, but a state of {entry.state or 0:,} numbers per KV head, {size}"
    if entry.degree is None:
        return text
    return f"{text}; the plain power of degree {entry.degree} has {size}"
