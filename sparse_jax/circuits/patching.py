"""Importance of heads and token edges: exact activation patching, and attribution patching.

A component's value is replaced by the one that it has on the other prompt of its pair, and the
effect is the change of the metric, per prompt:

    noising     the clean run with a component of the corrupt one: m(patched) - m(clean)
    denoising   the corrupt run with a component of the clean one: m(patched) - m(corrupt)

So a component that the model needs has a negative effect by noising and a positive one by
denoising. A head is its output z at all positions. A token edge (layer, head, query, key) is its
value contribution A[q, k] v[k] to z at the query (`part="value"`), or its softmax weight A[q, k]
alone, with the value v[k] of the run (`part="weight"`). Other keys keep their weights: none is
normalised again, which a patch of the score would do.

Attribution patching (Nanda 2023; Syed et al. 2023) is the first-order estimate of all effects from
one backward pass in the run that is patched: the difference of the component's two values times
the gradient of the metric, or its like under other local derivatives (`rules`).
"""

import dataclasses
import functools
from typing import Literal, get_args

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError, nearest
from lm_jax.model.edits import Add, Replace
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from sparse_jax.circuits.rules import EXACT, GradientRules
from sparse_jax.circuits.runs import Batch, CircuitModel, measure
from sparse_jax.circuits.upper_runs import UnpatchedRun, measure_from, sweep, unpatched

Direction = Literal["noising", "denoising"]
EdgePart = Literal["value", "weight"]


@struct.dataclass
class Activations:
    """Attention on one side of the pairs, in float32.

    Attributes:
      z_LBTNH: outputs of the heads.
      pattern_LBNTS: attention weights.
      v_LBSKH: values.
    """

    z_LBTNH: jax.Array
    pattern_LBNTS: jax.Array
    v_LBSKH: jax.Array

    def contributions_LBTNH(self, mask_LBNTS: jax.Array) -> jax.Array:
        """Sum of the value contributions of the edges in a mask, by head and query."""
        L, B, S, K, H = self.v_LBSKH.shape
        weights = self.pattern_LBNTS * mask_LBNTS
        N, T = weights.shape[2:4]
        grouped = weights.reshape(L, B, K, N // K, T, S)
        return jnp.einsum("LBKGTS,LBSKH->LBTKGH", grouped, self.v_LBSKH).reshape(L, B, T, N, H)

    def products_LBNTS(self, g_LBTNH: jax.Array) -> jax.Array:
        """Inner product of every edge's value contribution with `g` at its head and query."""
        L, B, S, K, H = self.v_LBSKH.shape
        T, N = g_LBTNH.shape[2:4]
        grouped = g_LBTNH.reshape(L, B, T, K, N // K, H)
        values = jnp.einsum("LBTKGH,LBSKH->LBKGTS", grouped, self.v_LBSKH)
        return self.pattern_LBNTS * values.reshape(L, B, N, T, S)

    def contribution_BH(self, edge_4: jax.Array) -> jax.Array:
        """The value contribution of one edge: its layer, head, query and key."""
        layer, head, query, key = edge_4
        group = head // (self.pattern_LBNTS.shape[2] // self.v_LBSKH.shape[3])
        weight_B = self.pattern_LBNTS[layer, :, head, query, key]
        return weight_B[:, None] * self.v_LBSKH[layer, :, key, group]

    def patched_from(self, other: "Activations", part: str) -> "Activations":
        """The contributions of edges when one part of them comes from another run.

        Raises:
          UsageError: an edge has no such part.
        """
        if part not in get_args(EdgePart):
            raise UsageError(
                f"an edge has no part {part!r} to patch{nearest(part, get_args(EdgePart))}"
            )
        if part == "value":
            return other
        return dataclasses.replace(self, pattern_LBNTS=other.pattern_LBNTS)


_RECORDED = {"attn.z": keep, "attn.pattern": keep, "attn.v": keep}


def activations(model: CircuitModel, batch: Batch, tokens_BT: jax.Array) -> Activations:
    """Attention of a model on the clean or the corrupt prompts."""
    return metric_and_activations(model, batch, tokens_BT)[1]


@exact_jit
def metric_and_activations(
    model: CircuitModel, batch: Batch, tokens_BT: jax.Array
) -> tuple[jax.Array, Activations]:
    """The metric of each prompt, `[B]`, and attention, on the clean or the corrupt prompts."""
    metric_B, records = measure(model, batch, tokens_BT, record=_RECORDED)
    return metric_B, Activations(*(records[name].astype(jnp.float32) for name in _RECORDED))


def head_effects(
    model: CircuitModel,
    batch: Batch,
    *,
    direction: Direction = "noising",
    at_once: int = 8,
) -> jax.Array:
    """Exact effect of patching each head, `[L, N, B]`.

    A patched run begins at the layer of its head (`upper_runs`). Where a head has the same output
    on both prompts its effect is 0 exactly.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      direction: see the head of this file.
      at_once: heads patched side by side, which bounds the memory.

    Raises:
      UsageError: no such direction.
    """
    L, N = model.cfg.num_layers, model.cfg.num_heads
    run_BT, other_BT = sides(batch, direction)
    values = _run_and_values(model, batch, run_BT, other_BT)
    program = functools.partial(_patch_heads, model, batch, run_BT, *values)
    heads = np.arange(L * N)
    return sweep(program, heads, heads // N, at_once).reshape(L, N, -1)


@exact_jit
def _run_and_values(
    model: CircuitModel, batch: Batch, run_BT: jax.Array, other_BT: jax.Array
) -> tuple[UnpatchedRun, jax.Array, jax.Array]:
    """The run that is patched, its z, and the other run's."""
    run, own = unpatched(model, batch, run_BT, record=("attn.z",))
    _, other = unpatched(model, batch, other_BT, record=("attn.z",))
    return run, own["attn.z"], other["attn.z"]


@exact_jit
def _patch_heads(
    model: CircuitModel,
    batch: Batch,
    run_BT: jax.Array,
    run: UnpatchedRun,
    own_LBTNH: jax.Array,
    other_LBTNH: jax.Array,
    head_X: jax.Array,
) -> jax.Array:
    """The effect of each of some heads, which are counted from those of the first layer."""
    L, N = model.cfg.num_layers, model.cfg.num_heads
    first = head_X.min() // N

    def patched(index: jax.Array) -> jax.Array:
        mask_LN = jnp.arange(L * N).reshape(L, N) == index
        patch = Replace(other_LBTNH, mask_LN[:, None, None, :, None])
        metric_B = measure_from(model, batch, run_BT, run, first, {"attn.z": patch})
        own_BTH, other_BTH = (z[index // N, :, :, index % N] for z in (own_LBTNH, other_LBTNH))
        return run.effects(metric_B, (own_BTH != other_BTH).any((1, 2)))

    return jax.vmap(patched)(head_X)


def head_attributions(
    model: CircuitModel,
    batch: Batch,
    *,
    direction: Direction = "noising",
    rules: GradientRules = EXACT,
) -> jax.Array:
    """First-order estimate of `head_effects` from one backward pass, `[L, N, B]`.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      direction: see the head of this file.
      rules: local derivatives of the backward pass.

    Raises:
      UsageError: no such direction.
    """
    run_BT, other_BT = sides(batch, direction)
    g_LBTNH = _gradient(model, batch, run_BT, rules)
    here, there = (activations(model, batch, tokens) for tokens in (run_BT, other_BT))
    return _head_products(here, there, g_LBTNH)


@exact_jit
def _head_products(here: Activations, there: Activations, g_LBTNH: jax.Array) -> jax.Array:
    return ((there.z_LBTNH - here.z_LBTNH) * g_LBTNH).sum((2, 4)).swapaxes(1, 2)


def edge_attributions(
    model: CircuitModel,
    batch: Batch,
    *,
    direction: Direction = "noising",
    part: EdgePart = "value",
    rules: GradientRules = EXACT,
) -> jax.Array:
    """First-order effect of patching each token edge, `[L, B, N, T, S]`; 0 at masked pairs.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      direction: see the head of this file.
      part: the part of an edge that is patched; see the head of this file.
      rules: local derivatives of the backward pass.

    Raises:
      UsageError: no such direction or part.
    """
    run_BT, other_BT = sides(batch, direction)
    g_LBTNH = _gradient(model, batch, run_BT, rules)
    here, other = (activations(model, batch, tokens) for tokens in (run_BT, other_BT))
    return _edge_products(here, here.patched_from(other, part), g_LBTNH)


@exact_jit
def _edge_products(here: Activations, there: Activations, g_LBTNH: jax.Array) -> jax.Array:
    return there.products_LBNTS(g_LBTNH) - here.products_LBNTS(g_LBTNH)


def edge_effects(
    model: CircuitModel,
    batch: Batch,
    edges_E4: jax.Array,
    *,
    direction: Direction = "noising",
    part: EdgePart = "value",
    at_once: int = 8,
) -> jax.Array:
    """Exact effect of patching single token edges, `[E, B]`, in runs from the edge's layer on.

    Args:
      model: a dense or sparse model.
      batch: the prompts; every prompt has the edge patched.
      edges_E4: layer, head, query and key of each edge.
      direction: see the head of this file.
      part: the part of an edge that is patched; see the head of this file.
      at_once: edges patched side by side.

    Raises:
      UsageError: no such direction or part.
    """
    run_BT, other_BT = sides(batch, direction)
    run, here = _run_and_activations(model, batch, run_BT)
    there = here.patched_from(activations(model, batch, other_BT), part)
    program = functools.partial(_patch_edges, model, batch, run_BT, run, here, there)
    edges = np.asarray(edges_E4)
    return sweep(program, edges, edges[:, 0], at_once)


@exact_jit
def _run_and_activations(
    model: CircuitModel, batch: Batch, run_BT: jax.Array
) -> tuple[UnpatchedRun, Activations]:
    run, records = unpatched(model, batch, run_BT, record=tuple(_RECORDED))
    return run, Activations(*(records[name].astype(jnp.float32) for name in _RECORDED))


@struct.dataclass
class _AddAt:
    """The site plus `value` where `on` is true."""

    value: jax.Array
    on: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.where(self.on, x + self.value.astype(x.dtype), x)


@exact_jit
def _patch_edges(
    model: CircuitModel,
    batch: Batch,
    run_BT: jax.Array,
    run: UnpatchedRun,
    here: Activations,
    there: Activations,
    edges_X4: jax.Array,
) -> jax.Array:
    """The effect of each of some token edges."""
    L, B, N, T, _ = here.pattern_LBNTS.shape
    first = edges_X4[:, 0].min()

    def patched(edge_4: jax.Array) -> jax.Array:
        layer, head, query, _ = edge_4
        # Its contribution before the patch equals that of the run: nothing upstream is edited.
        change_BH = there.contribution_BH(edge_4) - here.contribution_BH(edge_4)
        on_LTN = jnp.zeros((L, T, N), bool).at[layer, query, head].set(True)
        value_LBTNH = jnp.broadcast_to(change_BH[:, None, None], (L, B, 1, 1, change_BH.shape[1]))
        patch = _AddAt(value_LBTNH, on_LTN[:, None, :, :, None])
        metric_B = measure_from(model, batch, run_BT, run, first, {"attn.z": patch})
        return run.effects(metric_B, (change_BH != 0).any(1))

    return jax.vmap(patched)(edges_X4)


@functools.partial(exact_jit, static_argnames="rules")
def _gradient(
    model: CircuitModel, batch: Batch, run_BT: jax.Array, rules: GradientRules
) -> jax.Array:
    """Gradient of each prompt's metric by z of all heads, `[L, B, T, N, H]`, float32.

    One program for each set of rules, of heads and token edges alike.
    """
    cfg = model.cfg
    B, T = run_BT.shape
    zero = jnp.zeros((cfg.num_layers, B, T, cfg.num_heads, cfg.head_dim), jnp.float32)

    def total(added: jax.Array) -> jax.Array:
        metric_B, _ = measure(model, batch, run_BT, edits={"attn.z": Add(added)}, rules=rules)
        # Prompts do not see each other, so the gradient of the sum holds that of each.
        return metric_B.sum()

    return jax.grad(total)(zero)


def sides(batch: Batch, direction: str) -> tuple[jax.Array, jax.Array]:
    """Tokens of the run that is patched, and of the run that the values come from."""
    check_direction(direction)
    pair = (batch.clean_BT, batch.corrupt_BT)
    return pair if direction == "noising" else pair[::-1]


def check_direction(direction: str) -> None:
    """Refuses what is no direction.

    Raises:
      UsageError: naming the nearest.
    """
    if direction not in get_args(Direction):
        raise UsageError(
            f"there is no direction {direction!r}{nearest(direction, get_args(Direction))}"
        )
