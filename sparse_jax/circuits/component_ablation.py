"""Component edges ablated in one forward pass: each reader has its own view of the writers.

The input of reader r is the residual stream x plus, for every writer u before it,

    ablate[u, r] (ablated value of u - its value in this run)

so an ablated edge carries the ablated value, and every other edge what the circuit computes. The
changes of all writers are the state of the edits (`lm_jax.StatefulEdit`): each writer puts its
own there as it is computed, and each reader takes a weighted sum. Weights between 0 and 1 are
allowed and have gradients, which edge pruning needs.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.model.config import DecoderConfig
from lm_jax.model.sites import StatefulEdit
from sparse_jax.circuits.component_graph import ComponentGraph
from sparse_jax.circuits.components import head_writes, split_readers
from sparse_jax.circuits.runs import CircuitModel


def ablate_edges(
    model: CircuitModel, ablate_UBR: jax.Array, values_UBTD: jax.Array
) -> dict[str, Any]:
    """Edits that give every reader the ablated values of some writers.

    Args:
      model: a dense or sparse model.
      ablate_UBR: true, or 1, for the edges to ablate, in each prompt; pairs that are no edge are
        ignored.
      values_UBTD: ablated values of all writers; B, T and D may be 1.
    """
    cfg, graph = model.cfg, ComponentGraph.of(model.cfg)
    L, N, K = cfg.num_layers, cfg.num_heads, cfg.num_kv_heads
    weights = split_readers(
        jnp.moveaxis(ablate_UBR.astype(jnp.float32) * graph.mask_UR[:, None], 0, 1), graph
    )
    # One product with the changes of all writers serves queries, keys and values.
    edits: dict[str, Any] = {
        "q_input": _RewireHeads(jnp.concatenate(weights[:3], -1), N),
        "k_input": _AddRead(jnp.full(L, 0), K),
        "v_input": _AddRead(jnp.full(L, K), K),
        "mlp_input": _Rewire(weights.mlp),
        "final_input": _Rewire(weights.logits),
    }
    layers = values_UBTD[1:].reshape(L, N + 1, *values_UBTD.shape[1:])
    first_L = 1 + jnp.arange(L) * (N + 1)
    edits["embed"] = _PutInput(values_UBTD[0], cfg)
    edits["mlp.out"] = _PutMlp(layers[:, N], first_L + N)
    block = {"mixer": {"o": model.params["blocks"]["mixer"]["o"]}}
    if "ln1_post" in cfg.norm_names:
        block["ln1_post"] = model.params["blocks"].get("ln1_post", {})
        edits["attn.z"] = _KeepHeads()
        edits["ln1_post.scale"] = _PutNormalisedHeads(block, layers[:, :N], first_L, cfg)
    else:
        edits["attn.z"] = _PutHeads(block, layers[:, :N], first_L, cfg)
    return edits


@struct.dataclass
class _State:
    """What passes from site to site.

    Attributes:
      change_BUTD: ablated minus own value of the writers so far, 0 for those to come.
      read_BTXD: what keys and values of this layer read, computed with what its queries read.
      z_BTNH: outputs of the heads, kept until the norm after the mixer.
    """

    change_BUTD: jax.Array
    read_BTXD: jax.Array
    z_BTNH: jax.Array

    def put(self, first: jax.Array | int, change_BXTD: jax.Array) -> "_State":
        changed = jax.lax.dynamic_update_slice_in_dim(self.change_BUTD, change_BXTD, first, 1)
        return dataclasses.replace(self, change_BUTD=changed)

    def read(self, weight_BUX: jax.Array) -> jax.Array:
        """Weighted sums of the changes of all writers, `[B, T, X, D]`."""
        B, U, T, D = self.change_BUTD.shape
        change_BUM = self.change_BUTD.reshape(B, U, T * D)
        read_BXM = jnp.einsum("BUX,BUM->BXM", weight_BUX, change_BUM)
        return jnp.moveaxis(read_BXM.reshape(B, -1, T, D), 1, 2)


def _added(x: jax.Array, change: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) + change).astype(x.dtype)


@struct.dataclass
class _PutInput(StatefulEdit):
    """The edit at the embedding, which makes the first state."""

    value_BTD: jax.Array
    cfg: DecoderConfig = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, _State]:
        del state
        cfg, (B, T, D) = self.cfg, x.shape
        first = _State(
            jnp.zeros((B, ComponentGraph.of(cfg).num_writers, T, D), jnp.float32),
            jnp.zeros((B, T, 2 * cfg.num_kv_heads, D), jnp.float32),
            jnp.zeros((B, T, cfg.num_heads, cfg.head_dim), x.dtype),
        )
        return x, first.put(0, (self.value_BTD - x.astype(jnp.float32))[:, None])


@struct.dataclass
class _PutMlp(StatefulEdit):
    value_BTD: jax.Array
    index: jax.Array

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        return x, state.put(self.index, (self.value_BTD - x.astype(jnp.float32))[:, None])


@struct.dataclass
class _PutHeads(StatefulEdit):
    """The edit at the outputs of the heads."""

    block: Any
    values_NBTD: jax.Array
    first: jax.Array
    cfg: DecoderConfig = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        return x, self.put(state, x, None)

    def put(self, state: _State, z_BTNH: jax.Array, divisor_BT1: jax.Array | None) -> _State:
        writes_BTND = head_writes(self.block, z_BTNH, divisor_BT1, self.cfg)
        values_BNTD = jnp.moveaxis(self.values_NBTD, 0, 1)
        return state.put(self.first, values_BNTD - jnp.moveaxis(writes_BTND, 2, 1))


@struct.dataclass
class _KeepHeads(StatefulEdit):
    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        return x, dataclasses.replace(state, z_BTNH=x)


@struct.dataclass
class _PutNormalisedHeads(_PutHeads):
    """The edit at the divisor of the norm after the mixer, which uses the heads' kept outputs."""

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        return x, self.put(state, state.z_BTNH, x)


@struct.dataclass
class _RewireHeads(StatefulEdit):
    """The edit at the queries' inputs: all that queries, keys and values read (`weight_BUX`)."""

    weight_BUX: jax.Array
    queries: int = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        read_BTXD = state.read(self.weight_BUX)
        own_BTND, rest_BTXD = jnp.split(read_BTXD, [self.queries], axis=2)
        return _added(x, own_BTND), dataclasses.replace(state, read_BTXD=rest_BTXD)


@struct.dataclass
class _AddRead(StatefulEdit):
    """The edit at the inputs of keys or values: `count` of the sums computed for them."""

    first: jax.Array
    count: int = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        read = jax.lax.dynamic_slice_in_dim(state.read_BTXD, self.first, self.count, axis=2)
        return _added(x, read), state


@struct.dataclass
class _Rewire(StatefulEdit):
    """The edit at a site that is one reader."""

    weight_BU: jax.Array

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        return _added(x, state.read(self.weight_BU[..., None])[:, :, 0]), state
