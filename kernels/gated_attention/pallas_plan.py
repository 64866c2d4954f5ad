"""Tile sizes and inputs of the Triton kernels of `gated_attention`."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.attention.tiles import Tiling, operands, side
from kernels.core import dispatch, noise, tuning
from kernels.gated_attention.config import Call, Config

OP = "gated_attention"
KERNELS = ("forward", "queries", "keys")

# By head width: queries, keys, warps and stages of a tile of the kernels. Compiled for an H200, no
# main loop among them spills a register. float32 products are exact, so they use no tensor
# core and their tiles are small.
_TENSOR_CORE_TILES: Mapping[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    128: ((128, 64, 8, 2), (128, 64, 8, 2), (32, 128, 8, 2)),
    256: ((128, 64, 8, 2), (128, 32, 8, 1), (64, 32, 8, 1)),
}
_EXACT_TILES: Mapping[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    64: ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    128: ((32, 32, 8, 1), (16, 32, 8, 1), (32, 32, 8, 1)),
    256: ((16, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
}


@dataclasses.dataclass(frozen=True)
class Plan(Tiling):
    """The static half of one kernel."""

    config: Config
    warps: int
    stages: int


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
    H, widest = call.q_BTNH.shape[-1], max(_TENSOR_CORE_TILES)
    if widest < H:
        return f"needs a head width of at most {widest}, and H = {H}; pass implementation='xla'"
    return ""


def plan(config: Config, call: Call, kernel: str) -> Plan:
    """The plan of one of `KERNELS`: the last two give the gradients of q, and of k and v."""
    B, T, N, H = call.q_BTNH.shape
    S, K = call.k_BSKH.shape[1:3]
    dtype = call.q_BTNH.dtype
    sizes = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H}
    chosen = tuning.tiles(OP, config.target.device_kind, sizes, dtype, _heuristic(dtype, H))
    X, Y, warps, stages = (
        chosen[f"{kernel}_{what}"] for what in ("queries", "keys", "warps", "stages")
    )
    X, Y = config.blocks or (X, Y)
    own = Y if kernel == "keys" else X
    X, Y = min(X, side(T)), min(Y, side(S))
    # A short tile leaves nothing to do for some of its warps.
    warps = max(1, warps * (Y if kernel == "keys" else X) // own)
    return Plan(call.visibility.causal, T, S, N, K, H, X, Y, config, warps, stages)


def _heuristic(dtype: Any, H: int) -> dict[str, int]:
    table = _TENSOR_CORE_TILES if dispatch.exact_dot(dtype) is None else _EXACT_TILES
    width = min(each for each in table if each >= H)
    return {
        f"{kernel}_{what}": size
        for kernel, sizes in zip(KERNELS, table[width], strict=True)
        for what, size in zip(("queries", "keys", "warps", "stages"), sizes, strict=True)
    }


def inputs(call: Call) -> Inputs:
    """The arrays of a call, as the kernels read them."""
    return Inputs(
        words_3=words(call),
        bias_N=call.bias_N,
        **operands(call.visibility),
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
