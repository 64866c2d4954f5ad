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
      model: dense or sparse.
      ablate_UBR: true, or 1, for the edges to ablate, in each prompt; pairs that are no edge are
        ignored.
      values_UBTD: ablated values of all writers; B, T and D may be 1.
    """
    cfg, graph = model.cfg, ComponentGraph.of(model.cfg)
    L, N = cfg.num_layers, cfg.num_heads
    weights = ablate_UBR.astype(jnp.float32) * graph.mask_UR[:, None]
    edits: dict[str, Any] = {
        site: _Rewire(weight) for site, weight in split_readers(weights, graph).by_site().items()
    }
    layers = values_UBTD[1:].reshape(L, N + 1, *values_UBTD.shape[1:])
    first_L = 1 + jnp.arange(L) * (N + 1)
    edits["embed"] = _PutInput(values_UBTD[0], graph.num_writers, (cfg.num_heads, cfg.head_dim))
    edits["mlp.out"] = _PutMlp(layers[:, N], first_L + N)
    block = {"mixer": {"o": model.params["blocks"]["mixer"]["o"]}}
    if cfg.post_norms:
        block["ln1_post"] = model.params["blocks"].get("ln1_post", {})
        edits["attn.z"] = _KeepHeads()
        edits["ln1_post.scale"] = _PutNormalisedHeads(block, layers[:, :N], first_L, cfg)
    else:
        edits["attn.z"] = _PutHeads(block, layers[:, :N], first_L, cfg)
    return edits


@struct.dataclass
class _State:
    """`change_UBTD`: ablated minus own value of the writers so far, 0 for those to come.

    `z_BTNH`: outputs of the heads, kept until the norm after the mixer.
    """

    change_UBTD: jax.Array
    z_BTNH: jax.Array

    def put(self, first: jax.Array | int, change_XBTD: jax.Array) -> "_State":
        changed = jax.lax.dynamic_update_slice_in_dim(self.change_UBTD, change_XBTD, first, 0)
        return dataclasses.replace(self, change_UBTD=changed)


@struct.dataclass
class _PutInput(StatefulEdit):
    value_BTD: jax.Array
    num_writers: int = struct.field(pytree_node=False)
    head_shape: tuple[int, int] = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, _State]:
        del state
        empty = jnp.zeros((self.num_writers, *x.shape), jnp.float32)
        z_BTNH = jnp.zeros((*x.shape[:2], *self.head_shape), x.dtype)
        return x, _State(empty, z_BTNH).put(0, (self.value_BTD - x.astype(jnp.float32))[None])


@struct.dataclass
class _PutMlp(StatefulEdit):
    value_BTD: jax.Array
    index: jax.Array

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        return x, state.put(self.index, (self.value_BTD - x.astype(jnp.float32))[None])


@struct.dataclass
class _PutHeads(StatefulEdit):
    """At the outputs of the heads."""

    block: Any
    values_NBTD: jax.Array
    first: jax.Array
    cfg: DecoderConfig = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        return x, self.put(state, x, None)

    def put(self, state: _State, z_BTNH: jax.Array, divisor_BT1: jax.Array | None) -> _State:
        writes_BTND = head_writes(self.block, z_BTNH, divisor_BT1, self.cfg)
        return state.put(self.first, self.values_NBTD - jnp.moveaxis(writes_BTND, 2, 0))


@struct.dataclass
class _KeepHeads(StatefulEdit):
    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        return x, dataclasses.replace(state, z_BTNH=x)


@struct.dataclass
class _PutNormalisedHeads(_PutHeads):
    """At the divisor of the norm after the mixer, where the heads' outputs were kept."""

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        return x, self.put(state, state.z_BTNH, x)


@struct.dataclass
class _Rewire(StatefulEdit):
    """At a reader: `weight_UB` or, for X readers of a site, `weight_UBX`."""

    weight: jax.Array

    def __call__(self, x: jax.Array, state: _State) -> tuple[jax.Array, _State]:
        equation = "UBTD,UBX->BTXD" if self.weight.ndim == 3 else "UBTD,UB->BTD"
        change = jnp.einsum(equation, state.change_UBTD, self.weight)
        return (x.astype(jnp.float32) + change).astype(x.dtype), state
