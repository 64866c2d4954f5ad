"""Tile sizes and inputs of the Triton kernels of `gated_attention`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.core import dispatch, noise, tuning
from iaj_kernels.gated_attention import tile
from iaj_kernels.gated_attention.config import Call, Config

OP = "gated_attention"


@dataclasses.dataclass(frozen=True)
class Plan(tiles.Plan):
    """The static half of one kernel."""

    config: Config


class Inputs(NamedTuple):
    """Inputs of every kernel: arrays, their block specs, or references to them.

    The window and the segments are None where the call has none.
    """

    words_3: Any
    bias_N: Any
    start_B: Any
    window_1: Any
    query_segments_BT: Any
    key_segments_BS: Any
    q_BTNH: Any
    k_BSKH: Any
    v_BSKH: Any


def unsupported_reason(config: Config, call: Call) -> str:
    """Why the kernels do not run for a call; empty if they do."""
    if reason := dispatch.unsupported_reason(config.target):
        return reason
    if config.renormalise:
        return "does not support renormalise=True; pass implementation='xla'"
    H, widest = call.q_BTNH.shape[-1], tile.WIDEST
    if widest < H:
        return f"needs a head width of at most {widest}, and H = {H}; pass implementation='xla'"
    return ""


def plan(config: Config, call: Call, kernel: str) -> Plan:
    """The plan of "forward", or of "queries" or "keys", the gradients of q, and of k and v."""
    B, T, N, H = call.q_BTNH.shape
    S, K = call.k_BSKH.shape[1:3]
    dtype = call.q_BTNH.dtype
    sizes = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H}
    default = tile.default_tiles(sizes, dtype)
    chosen = tuning.tiles(OP, config.target.device_kind, sizes, dtype, default)
    X, Y, warps, stages = (chosen[f"{kernel}_{entry}"] for entry in tiles.ENTRIES)
    X, Y = config.blocks or (X, Y)
    own = Y if kernel == "keys" else X
    X, Y = min(X, tiles.side(T)), min(Y, tiles.side(S))
    # A short tile leaves nothing to do for some of its warps.
    warps = max(1, warps * (Y if kernel == "keys" else X) // own)
    causal = call.visibility.causal
    return Plan(causal, T, S, N, K, H, X, Y, warps, stages, config.target, config)


def inputs(call: Call) -> Inputs:
    """The arrays of a call, as the kernels read them."""
    return Inputs(
        words_3=words(call),
        bias_N=call.bias_N,
        **tiles.operands(call.visibility),
        q_BTNH=call.q_BTNH,
        k_BSKH=call.k_BSKH,
        v_BSKH=call.v_BSKH,
    )


def words(call: Call) -> jax.Array:
    """The seed and the origin (batch, head) of the noise, uint32 `[3]`."""
    numbers = (call.seed, call.origin_2[0], call.origin_2[1])
    return jnp.stack([jnp.asarray(x).astype(jnp.uint32) for x in numbers])


def stream(refs: Inputs, b: jax.Array, n: jax.Array) -> jax.Array:
    """The noise word of query head `n` of batch row `b` of this call."""
    seed, batch, head = refs.words_3[0], refs.words_3[1], refs.words_3[2]
    return noise.stream(seed, b.astype(jnp.uint32) + batch, n.astype(jnp.uint32) + head)
