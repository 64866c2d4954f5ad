"""Sizes, inputs and instructions of the Triton kernels of `row_map_attention`."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.core import dispatch, tuning
from iaj_kernels.core.ptx import elementwise
from iaj_kernels.row_map_attention import tile
from iaj_kernels.row_map_attention.config import Call, Config
from iaj_kernels.row_map_attention.maps import OP, SOFTMAX, RowMap

WIDTHS = (16, 32, 64, 128, 256)


def unsupported_reason(config: Config, call: Call) -> str:
    """Why the kernels do not run for a call; empty if they do."""
    if reason := dispatch.unsupported_reason(config.target):
        return reason
    H, text = call.q_BTNH.shape[-1], ", ".join(map(str, WIDTHS))
    return "" if H in WIDTHS else f"needs H to be one of {text}, and H = {H}; pass 'xla'"


@dataclasses.dataclass(frozen=True)
class Plan(tiles.Plan):
    """The static half of one kernel; `exact` is true for float32 inputs."""

    config: Config
    exact: bool


class Inputs(NamedTuple):
    """Inputs of every kernel: arrays, their block specs, or references to them.

    Window, segments and heads (int32) are None where the call has none.
    """

    start_B: Any
    window_1: Any
    query_segments_BT: Any
    key_segments_BS: Any
    bias_N: Any
    heads_N: Any
    q_BTNH: Any
    k_BSKH: Any
    v_BSKH: Any


def plan(config: Config, call: Call, kernel: str) -> Plan:
    """The plan of "forward", or of "dq" or "dkv", the gradients of q, and of k and v."""
    B, T, N, H = call.q_BTNH.shape
    S, K = call.k_BSKH.shape[1:3]
    dtype = call.q_BTNH.dtype
    sizes = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H}
    default = tile.default_tiles(sizes, dtype)
    chosen = tuning.tiles(OP, config.target.device_kind, sizes, dtype, default)
    X, Y, warps, stages = (chosen[f"{kernel}_{entry}"] for entry in tiles.ENTRIES)
    X, Y = min(X, tiles.side(T)), min(Y, tiles.side(S))
    causal, exact = call.visibility.causal, dtype == jnp.float32
    return Plan(causal, T, S, N, K, H, X, Y, warps, stages, config.target, config, exact)


def inputs(call: Call) -> Inputs:
    """The arrays of a call, as the kernels read them."""
    heads_N = call.heads_N
    return Inputs(
        **tiles.operands(call.visibility),
        bias_N=call.bias_N,
        heads_N=None if heads_N is None else heads_N.astype(jnp.int32),
        q_BTNH=call.q_BTNH,
        k_BSKH=call.k_BSKH,
        v_BSKH=call.v_BSKH,
    )


def by_map(config: Config, head: jax.Array | None, run: Callable[[RowMap], None]) -> None:
    """Runs a program with the map of its head: softmax where `head`, if given, is 0."""
    if head is None:
        run(config.row_map)
        return
    pl.when(head != 0)(lambda: run(config.row_map))
    pl.when(head == 0)(lambda: run(SOFTMAX))


def diagonal(x: jax.Array) -> jax.Array:
    """The diagonal of a square tile, as a vector along its rows."""
    rows = x.shape[0]
    return jnp.sum(jnp.where(tiles.entries(0, rows, 0) == tiles.entries(0, rows, 1), x, 0.0), 1)


def elementary(plan: Plan, axis: int) -> tile.Elementary:
    """The functions of the target for tiles with the queries along `axis`."""
    if plan.config.target.interpret:
        return tile.EXACT
    # A thread holds few numbers of rows where the rows are queries, and two more of them save an
    # instruction per score. The extra rounding is too large for float32 inputs.
    folded = axis == 0 and not plan.exact
    return _FOLDED if folded else _INSTRUCTIONS


_plus = elementwise("fma.rn.f32 $0, $1, $2, $3;")
_plus_saturated = elementwise("fma.rn.sat.f32 $0, $1, $2, $3;")
_times_saturated = elementwise("mul.rn.sat.f32 $0, $1, $2;")

# The first three have relative errors of 2^-22 and less (PTX ISA).
_INSTRUCTIONS = tile.Elementary(
    exp2=elementwise("ex2.approx.ftz.f32 $0, $1;"),
    log2=elementwise("lg2.approx.ftz.f32 $0, $1;"),
    reciprocal=elementwise("rcp.approx.ftz.f32 $0, $1;"),
    plus=_plus,
    share=lambda u, pivot: _times_saturated(_plus(u.z, u.gain, u.offset), pivot),
    less=elementwise("neg.f32 t, $1; fma.rn.f32 $0, t, $2, $1;"),
)
_FOLDED = dataclasses.replace(
    _INSTRUCTIONS,
    share=lambda u, pivot: tile.folded(u, pivot, _plus_saturated),
)
