"""Effects of component edges: exact patching, EAP and EAP-IG.

An edge (writer, reader) of `component_graph` is patched by giving that reader alone the writer's
value of the other prompt: its input is the residual stream plus (other value - own value). All else
is as in the run, and no other reader sees the change. The effect is m(patched) - m(run), per
prompt, in the direction of `patching`: an edge that the model needs is negative by noising and
positive by denoising. (EAP-IG scores a loss by noising, so its sign is the other one.)

Edge attribution patching (EAP; Syed et al. 2023) is its first-order estimate,

    score(u, r) = sum over positions of (other value of u - own value of u) . dm/d(input of r)

of all edges from one backward pass. `METHODS` differ in where the gradient is taken; a is the
share of the clean prompt in the embeddings, the other share is that of the corrupt one:

    eap               the run that is patched: a = 1 by noising, 0 by denoising
    clean_corrupted   the mean of both ends
    eap_ig            the mean over S steps (Hanna et al. 2024): a = k / S for k = 0 .. S - 1 (left)
                      or 1 .. S (right), or a = (k + 1/2) / S (midpoint)

Scores have the axes `[U, B, R]`: writers, prompts, readers; 0 where there is no edge. The mean over
prompts is `.mean(1)`.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, get_args

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError, nearest
from lm_jax.model.config import DecoderConfig
from lm_jax.model.edits import Add, Replace
from lm_jax.model.layers import add_axes
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import StatefulEdit, keep
from lm_jax.run.processes import call_stoppable
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.patching import Direction, check_direction, sides
from sparse_jax.circuits.rules import EXACT, GradientRules
from sparse_jax.circuits.runs import Batch, CircuitModel, measure
from sparse_jax.circuits.upper_runs import UnpatchedRun, measure_from, sweep, unpatched

Method = Literal["eap", "clean_corrupted", "eap_ig"]
PathRule = Literal["left", "right", "midpoint"]
METHODS = get_args(Method)

# Sites of the readers of a layer, in the order of `ComponentGraph`; the logits read `final_input`.
_LAYER_SITES = ("q_input", "k_input", "v_input", "mlp_input")


class ReaderArrays(NamedTuple):
    """One array for each kind of reader, with an axis of readers (X) or one per layer.

    Attributes:
      q, k, v: `[L, B, T, X, D]`, X being query heads or key heads.
      mlp: `[L, B, T, D]`.
      logits: `[B, T, D]`.
    """

    q: Any
    k: Any
    v: Any
    mlp: Any
    logits: Any

    @classmethod
    def zeros(cls, cfg: DecoderConfig, B: int, T: int) -> "ReaderArrays":
        """Zeros, in float32."""
        L, N, K, D = cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.hidden_size
        shapes = [(L, B, T, N, D), (L, B, T, K, D), (L, B, T, K, D), (L, B, T, D), (B, T, D)]
        return cls(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def by_site(self) -> dict[str, Any]:
        """The arrays by the site that they belong to."""
        return dict(zip((*_LAYER_SITES, "final_input"), self, strict=True))


def split_readers(values_XR: jax.Array, graph: ComponentGraph) -> ReaderArrays:
    """Values of all readers, `[..., R]`, by kind: `[L, ..., X]`, `[L, ...]` and `[...]`."""
    leading = values_XR.shape[:-1]
    layers = values_XR[..., :-1].reshape(*leading, graph.num_layers, graph.layer_readers)
    N, K = graph.num_heads, graph.num_kv_heads
    q, k, v, mlp = jnp.split(jnp.moveaxis(layers, -2, 0), np.cumsum([N, K, K]), axis=-1)
    return ReaderArrays(q, k, v, mlp[..., 0], values_XR[..., -1])


def head_writes(
    block: Any, z_BTNH: jax.Array, divisor_BT1: jax.Array | None, cfg: DecoderConfig
) -> jax.Array:
    """What each head of a layer adds to the residual stream, `[B, T, N, D]` in float32.

    With a norm after the mixer it is the head's share of that norm's output, at the divisor of the
    run. Biases belong to no head.

    Args:
      block: parameters of the layer.
      z_BTNH: outputs of the heads.
      divisor_BT1: the divisor of the norm after the mixer, where there is one.
      cfg: configuration of the model.
    """
    z_BTNH = z_BTNH.astype(jnp.float32)
    o_NHD = block["mixer"]["o"].astype(jnp.float32)
    writes_BTND = jnp.einsum("BTNH,NHD->BTND", z_BTNH, o_NHD)
    if divisor_BT1 is None:
        return writes_BTND
    if cfg.norm == "layer":
        writes_BTND = writes_BTND - writes_BTND.mean(-1, keepdims=True)
    writes_BTND = writes_BTND / divisor_BT1[:, :, None]
    scale_D = block.get("ln1_post", {}).get("scale")
    if scale_D is None:
        return writes_BTND
    scale_D = scale_D.astype(jnp.float32) + cfg.norm_offset
    return writes_BTND * add_axes(scale_D, writes_BTND.ndim)


@exact_jit
def writer_values(model: CircuitModel, batch: Batch, tokens_BT: jax.Array) -> jax.Array:
    """What every writer adds to the residual stream, `[U, B, T, D]` in float32.

    With biases of the attention outputs they sum to the input of the logits.
    """
    names = ["embed", "attn.z", "mlp.out"] + ["ln1_post.scale"] * (
        "ln1_post" in model.cfg.norm_names
    )
    _, records = measure(model, batch, tokens_BT, record=dict.fromkeys(names, keep))
    writes = functools.partial(head_writes, cfg=model.cfg)
    heads_LBTND = jax.vmap(writes)(
        model.params["blocks"], records["attn.z"], records.get("ln1_post.scale")
    )
    heads_LNBTD = jnp.moveaxis(heads_LBTND, 3, 1)
    mlps_L1BTD = records["mlp.out"].astype(jnp.float32)[:, None]
    layers = jnp.concatenate([heads_LNBTD, mlps_L1BTD], 1)
    embed_1BTD = records["embed"].astype(jnp.float32)[None]
    return jnp.concatenate([embed_1BTD, layers.reshape(-1, *layers.shape[2:])])


def component_attributions(
    model: CircuitModel,
    batch: Batch,
    *,
    method: Method = "eap_ig",
    steps: int = 5,
    path_rule: PathRule = "midpoint",
    direction: Direction = "noising",
    rules: GradientRules = EXACT,
    by_position: bool = False,
) -> jax.Array:
    """Estimated effect of every component edge, `[U, B, R]`; see the head of this file.

    The memory is about 8 B T D (U + R) bytes, and the activations of one backward pass.

    With `by_position` it is `[U, B, R, T]`, the effect of the edge at one token alone: of what the
    writer adds there on the reader that reads there. These sum to the effects without positions,
    and take T times their memory.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      method: the method, which says where gradients are taken.
      steps: S of "eap_ig".
      path_rule: the rule that places the points of "eap_ig" on the path.
      direction: see the head of `patching`.
      rules: local derivatives of the backward passes.
      by_position: whether edges are split by tokens.

    Raises:
      UsageError: no such method, path rule or direction, or no step.
    """
    check_direction(direction)
    shares_S = jnp.asarray(_shares(method, steps, path_rule, direction), jnp.float32)
    sign = 1.0 if direction == "noising" else -1.0
    return sign * _component_attributions(model, batch, shares_S, rules, by_position)


def _shares(method: str, steps: int, path_rule: str, direction: str) -> np.ndarray:
    """Shares of the clean prompt at which the gradient is taken."""
    if method not in METHODS:
        raise UsageError(f"there is no method {method!r}{nearest(method, METHODS)}")
    if path_rule not in get_args(PathRule):
        raise UsageError(
            f"there is no path rule {path_rule!r}{nearest(path_rule, get_args(PathRule))}"
        )
    if steps < 1:
        raise UsageError(f"steps = {steps} must be at least 1")
    if method == "eap":
        return np.array([1.0 if direction == "noising" else 0.0])
    if method == "clean_corrupted":
        return np.array([0.0, 1.0])
    offset = {"left": 0.0, "midpoint": 0.5, "right": 1.0}[path_rule]
    return (np.arange(steps) + offset) / steps


def _component_attributions(
    model: CircuitModel,
    batch: Batch,
    shares_S: jax.Array,
    rules: GradientRules,
    by_position: bool = False,
) -> jax.Array:
    """Scores by noising with the mean gradient over shares of the clean prompt."""
    clean, corrupt = (
        writer_values(model, batch, tokens) for tokens in (batch.clean_BT, batch.corrupt_BT)
    )
    total = ReaderArrays.zeros(model.cfg, *batch.clean_BT.shape)
    # A program of one step serves any number of them.
    for share in shares_S:
        values = total, model, batch, clean[0], corrupt[0], share, rules
        total = call_stoppable(_add_gradient, *values)
    return _scores(clean, corrupt, total, model.cfg, by_position) / len(shares_S)


@functools.partial(exact_jit, static_argnames="rules", donate_argnums=0)
def _add_gradient(
    total: ReaderArrays,
    model: CircuitModel,
    batch: Batch,
    clean_BTD: jax.Array,
    corrupt_BTD: jax.Array,
    share: jax.Array,
    rules: GradientRules,
) -> ReaderArrays:
    """The sum `total` plus the gradients at one share of the clean prompt in the embeddings."""
    embed_BTD = share * clean_BTD + (1.0 - share) * corrupt_BTD
    return jax.tree.map(jnp.add, total, reader_gradients(model, batch, embed_BTD, rules))


@functools.partial(exact_jit, static_argnames=("cfg", "by_position"))
def _scores(
    clean: jax.Array,
    corrupt: jax.Array,
    gradients: ReaderArrays,
    cfg: DecoderConfig,
    by_position: bool,
) -> jax.Array:
    graph = ComponentGraph.of(cfg)
    scores = _products(corrupt - clean, gradients, graph, by_position)
    exists_U1R = jnp.asarray(graph.mask_UR)[:, None]
    scores = jnp.where(exists_U1R[(None,) * (scores.ndim - 3)], scores, 0.0)
    return jnp.moveaxis(scores, 0, -1) if by_position else scores


def reader_gradients(
    model: CircuitModel, batch: Batch, embed_BTD: jax.Array, rules: GradientRules
) -> ReaderArrays:
    """Gradient of each prompt's metric by the input of each reader, in a run from embeddings."""
    B, T = batch.clean_BT.shape

    def total(added: ReaderArrays) -> jax.Array:
        edits: dict[str, Any] = {site: Add(value) for site, value in added.by_site().items()}
        edits["embed"] = Replace(embed_BTD, jnp.ones((1, 1, 1), bool))
        metric_B, _ = measure(model, batch, batch.clean_BT, edits=edits, rules=rules)
        # Prompts do not see each other, so the gradient of the sum holds that of each.
        return metric_B.sum()

    return jax.grad(total)(ReaderArrays.zeros(model.cfg, B, T))


def _products(
    change_UBTD: jax.Array, gradients: ReaderArrays, graph: ComponentGraph, by_position: bool
) -> jax.Array:
    """Inner products of every writer's change with every reader's gradient, `[U, B, R]`.

    With `by_position` those of each token, `[T, U, B, R]`.
    """
    T = "T" if by_position else ""
    layers = [
        jnp.einsum(f"UBTD,LBTXD->{T}UBLX", change_UBTD, g if g.ndim == 5 else g[:, :, :, None])
        for g in gradients[:-1]
    ]
    last = jnp.einsum(f"UBTD,BTD->{T}UB", change_UBTD, gradients.logits)
    inside = jnp.concatenate(layers, -1).reshape(*last.shape, graph.num_readers - 1)
    return jnp.concatenate([inside, last[..., None]], -1)


def component_effects(
    model: CircuitModel,
    batch: Batch,
    edges_E2: jax.Array | np.ndarray,
    *,
    direction: Direction = "noising",
    at_once: int = 8,
) -> jax.Array:
    """Exact effect of patching single component edges, `[E, B]`, in runs from the reader's layer.

    Args:
      model: a dense or sparse model.
      batch: the prompts.
      edges_E2: writer and reader of each edge, as in `ComponentGraph`.
      direction: see the head of `patching`.
      at_once: edges patched side by side, which bounds the memory.

    Raises:
      UsageError: no such direction, or a pair that is no edge.
    """
    edges = np.asarray(edges_E2)
    graph = ComponentGraph.of(model.cfg)
    shape = (graph.num_writers, graph.num_readers)
    for writer, reader in edges[((edges < 0) | (edges >= shape)).any(1)]:
        raise UsageError(
            f"edge ({writer}, {reader}) is outside {shape[0]} writers, {shape[1]} readers"
        )
    for writer, reader in edges[~graph.mask_UR[edges[:, 0], edges[:, 1]]]:
        names = graph.writer_names[writer], graph.reader_names[reader]
        raise UsageError(f"{names[1]} does not read {names[0]}, which is not before it")
    run_BT, other_BT = sides(batch, direction)
    run, change_UBTD = _run_and_changes(model, batch, run_BT, other_BT)
    program = functools.partial(_patch_edges, model, batch, run_BT, run, change_UBTD)
    return sweep(program, edges, edges[:, 1] // graph.layer_readers, at_once)


def ungrouped(model: CircuitModel) -> CircuitModel:
    """The same model with a key and a value head for each query head, and their readers.

    It computes what the model computes, to rounding.
    """
    cfg = model.cfg
    shared = cfg.num_heads // cfg.num_kv_heads
    blocks = model.params["blocks"]
    mixer = dict(blocks["mixer"])
    for name in ("k", "v", "k_bias", "v_bias"):
        if name in mixer:
            mixer[name] = jnp.repeat(mixer[name], shared, axis=-2)
    if cfg.qk_norm in ("each_head", "projection"):
        mixer["k_norm"] = {"scale": jnp.repeat(mixer["k_norm"]["scale"], shared, axis=-2)}
    return dataclasses.replace(
        model,
        cfg=dataclasses.replace(cfg, num_kv_heads=cfg.num_heads),
        params=model.params | {"blocks": blocks | {"mixer": mixer}},
    )


@struct.dataclass
class _Enter(StatefulEdit):
    """The edit at the embedding: what enters the first layer, and `value` as the state of edits."""

    stream_BTD: jax.Array
    value: Any

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        del x, state
        return self.stream_BTD, self.value


@struct.dataclass
class _AddState(StatefulEdit):
    """The edit at a reader: adds the change that is the state, `[B, T, D]`, where `on` is true.

    `on` has the axis X of readers, or none where a site is one reader.
    """

    on: jax.Array

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        if self.on.ndim:
            patched = x + state[:, :, None].astype(x.dtype)
            return jnp.where(self.on[:, None], patched, x), state
        return jnp.where(self.on, x + state.astype(x.dtype), x), state


@exact_jit
def _run_and_changes(
    model: CircuitModel, batch: Batch, run_BT: jax.Array, other_BT: jax.Array
) -> tuple[UnpatchedRun, jax.Array]:
    """The run that is patched, and what each writer adds in the other one minus in it."""
    run, _ = unpatched(model, batch, run_BT)
    own, other = (writer_values(model, batch, tokens) for tokens in (run_BT, other_BT))
    return run, other - own


@exact_jit
def _patch_edges(
    model: CircuitModel,
    batch: Batch,
    run_BT: jax.Array,
    run: UnpatchedRun,
    change_UBTD: jax.Array,
    edges_X2: jax.Array,
) -> jax.Array:
    """The effect of each of some component edges."""
    graph = ComponentGraph.of(model.cfg)
    first = edges_X2[:, 1].min() // graph.layer_readers

    def patched(edge_2: jax.Array) -> jax.Array:
        writer, reader = edge_2
        on = split_readers(jnp.arange(graph.num_readers) == reader, graph)
        edits: dict[str, Any] = {site: _AddState(each) for site, each in on.by_site().items()}
        edits["embed"] = _Enter(run.stream_LBTD[first], change_UBTD[writer])
        metric_B = measure_from(model, batch, run_BT, run, first, edits)
        return run.effects(metric_B, (change_UBTD[writer] != 0).any((1, 2)))

    return jax.vmap(patched)(edges_X2)
