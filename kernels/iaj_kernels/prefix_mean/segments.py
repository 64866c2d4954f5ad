"""Segments of a sequence in the Pallas kernels of `prefix_mean`, and the states between them.

A sequence is cut into segments that run in parallel, a segment into chunks that run one after
another (`tile.py` has the arithmetic of a chunk). The state at every segment boundary is found in
two launches:

1. `summaries`: the state that each segment would leave if it started empty.
2. `boundaries`: a running sum over segments, each with its own decay beta^length, from either end.

The backward pass runs the same second step in reverse, on the cotangents of the state.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
import jax.numpy as jnp

from iaj_kernels.core import dispatch, tuning
from iaj_kernels.prefix_mean import tile
from iaj_kernels.prefix_mean.state import State, log_of_decay

OP = "prefix_mean"

# Segments whose summaries are loaded before the running sum waits for the first.
_AHEAD = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes and tiles of one pass; `chunk` and `block_e` are powers of two."""

    B: int
    T: int
    R: int
    E: int
    chunk: int
    segment: int
    block_e: int
    num_warps: int
    num_stages: int
    target: dispatch.Target

    @property
    def segments(self) -> int:
        """The number of segments; the last may be shorter."""
        return -(-self.T // self.segment)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Batch rows, segments, blocks of the value width."""
        return self.B, self.segments, self.E // self.block_e

    def call(self, kernel: Any, name: str, *, grid: tuple[int, ...] | None = None, **specs: Any):
        """`kernel(plan, *refs)`, to be called on arrays; `specs` as for `dispatch.triton_call`."""
        return dispatch.triton_call(
            functools.partial(kernel, self),
            target=self.target,
            name=f"{OP}_{name}",
            grid=grid or self.grid,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            **specs,
        )


def plan(target: dispatch.Target, sizes: dict[str, int], dtype: Any, *, backward: bool) -> Plan:
    """The plan of the forward or of the backward pass."""
    default = tile.default_tiles(sizes, dtype)
    chosen = tuning.tiles(OP, target.device_kind, sizes, dtype, default)
    prefix = "backward_" if backward else ""
    chunk = chosen[f"{prefix}chunk"]
    return Plan(
        **{letter: sizes[letter] for letter in "BTRE"},
        chunk=chunk,
        segment=-(-min(chosen[f"{prefix}segment"], sizes["T"]) // chunk) * chunk,
        # A gradient of a gate sums over the whole value width.
        block_e=sizes["E"] if backward else chosen["block_e"],
        num_warps=chosen[f"{prefix}num_warps"],
        num_stages=chosen[f"{prefix}num_stages"],
        target=target,
    )


def log2_of_decay(decay_R: jax.Array) -> jax.Array:
    """log2 beta as `[1, R]`, the form in which the kernels take it."""
    return (log_of_decay(decay_R) / math.log(2.0))[None]


def gates_spec(plan: Plan) -> pl.BlockSpec:
    """The rows of one segment of `[B, T, R]`."""
    return pl.BlockSpec((None, plan.segment, plan.R), lambda b, s, e: (b, s, 0))


def values_spec(plan: Plan) -> pl.BlockSpec:
    """The rows of one segment and a block of the width of `[B, T, E]`."""
    return pl.BlockSpec((None, plan.segment, plan.block_e), lambda b, s, e: (b, s, e))


def decay_spec(plan: Plan) -> pl.BlockSpec:
    """The block spec of the whole array `[1, R]` of decays."""
    return pl.BlockSpec((1, plan.R), lambda b, s, e: (0, 0))


def state_specs(plan: Plan, shift: int = 0) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Block specs of one entry of `[B, S, R, E]` and `[B, S, 1, R]`: the segment's plus `shift`."""
    return (
        pl.BlockSpec((None, None, plan.R, plan.block_e), lambda b, s, e: (b, s + shift, 0, e)),
        pl.BlockSpec((None, None, 1, plan.R), lambda b, s, e: (b, s + shift, 0, 0)),
    )


def state_shapes(plan: Plan, entries: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Total and mass at `entries` places of a sequence."""
    return (
        jax.ShapeDtypeStruct((plan.B, entries, plan.R, plan.E), jnp.float32),
        jax.ShapeDtypeStruct((plan.B, entries, 1, plan.R), jnp.float32),
    )


def steps_left(plan: Plan) -> jax.Array:
    """The steps from the start of this program's segment to the end of the sequence.

    Read it outside of loops: the interpreter knows no program index inside one.
    """
    return plan.T - pl.program_id(1) * plan.segment


def chunks(plan: Plan, left: jax.Array) -> jax.Array:
    """The number of chunks of a segment that hold a step; `left` is that of `steps_left`."""
    whole = jnp.int32(plan.segment // plan.chunk)
    if plan.T % plan.segment == 0:
        return whole
    return jnp.minimum(whole, lax.div(left + (plan.chunk - 1), jnp.int32(plan.chunk)))


def length(plan: Plan, left: jax.Array, k: jax.Array) -> jax.Array | int:
    """The number of steps in chunk k of a segment."""
    if plan.T % plan.chunk == 0:
        return plan.chunk
    return jnp.minimum(left - k * plan.chunk, plan.chunk)


def load(plan: Plan, left: jax.Array, ref: Any, k: jax.Array) -> jax.Array:
    """The rows of chunk k, 0 where the sequence has ended."""
    mask = _real(plan, left, k, ref.shape[-1])
    window = ref.at[pl.ds(k * plan.chunk, plan.chunk), :]
    return plt.load(window) if mask is None else plt.load(window, mask=mask, other=0.0)


def store(plan: Plan, left: jax.Array, ref: Any, k: jax.Array, rows: jax.Array) -> None:
    """Writes the rows of chunk k that exist."""
    mask = _real(plan, left, k, ref.shape[-1])
    plt.store(ref.at[pl.ds(k * plan.chunk, plan.chunk), :], rows.astype(ref.dtype), mask=mask)


def _real(plan: Plan, left: jax.Array, k: jax.Array, width: int) -> jax.Array | None:
    if plan.T % plan.chunk == 0:
        return None
    row_CX = lax.broadcasted_iota(jnp.int32, (plan.chunk, width), 0)
    return row_CX < length(plan, left, k)


def summaries(
    plan: Plan, write_BTR: jax.Array, value_BTE: jax.Array, log2_decay_1R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state `[B, S, R, E]`, `[B, S, 1, R]` that each segment leaves when it starts empty."""
    return plan.call(
        _summary_kernel,
        "summary",
        tile=(plan.chunk, plan.block_e),
        in_specs=[gates_spec(plan), values_spec(plan), decay_spec(plan)],
        out_specs=state_specs(plan),
        out_shape=state_shapes(plan, plan.segments),
    )(write_BTR, value_BTE, log2_decay_1R)


def _summary_kernel(plan: Plan, write_ref, value_ref, log2_decay_ref, total_ref, mass_ref) -> None:
    log2_decay_1R = log2_decay_ref[...]
    log2_decay_R1 = log2_decay_1R.reshape(plan.R, 1)
    left = steps_left(plan)

    def step(k, state):
        total_RE, mass_1R = state
        steps = length(plan, left, k)
        until_end_CR = tile.until_end(plan.chunk, log2_decay_1R, steps)
        write_CR = load(plan, left, write_ref, k).astype(jnp.float32)
        add_total_RE, add_mass_1R = tile.advance(
            until_end_CR, write_CR, load(plan, left, value_ref, k)
        )
        return (
            kept(log2_decay_R1, steps) * total_RE + add_total_RE,
            kept(log2_decay_1R, steps) * mass_1R + add_mass_1R,
        )

    empty = jnp.zeros(total_ref.shape, jnp.float32), jnp.zeros(mass_ref.shape, jnp.float32)
    total_ref[...], mass_ref[...] = lax.fori_loop(jnp.int32(0), chunks(plan, left), step, empty)


def kept(log2_decay: jax.Array, steps: jax.Array | int) -> jax.Array:
    """The share beta^steps of a sum that is kept after `steps`."""
    return jnp.exp2(jnp.asarray(steps, jnp.float32) * log2_decay)


def boundaries(
    plan: Plan,
    first: State,
    summary: tuple[jax.Array, jax.Array],
    log2_decay_1R: jax.Array,
    *,
    reverse: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The state at the S + 1 boundaries of S segments, `[B, S+1, R, E]` and `[B, S+1, 1, R]`.

    Args:
      first: the state at the first boundary, or with `reverse` its cotangent at the last.
      summary: what each segment adds to it.
    """
    rows, columns = min(plan.R, 16), min(plan.E, 32)
    S = plan.segments

    def specs(entries: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
        return (
            pl.BlockSpec((None, entries, rows, columns), lambda b, r, e: (b, 0, r, e)),
            pl.BlockSpec((None, entries, 1, rows), lambda b, r, e: (b, 0, 0, r)),
        )

    return plan.call(
        functools.partial(_boundary_kernel, reverse=reverse),
        "boundaries_reverse" if reverse else "boundaries",
        grid=(plan.B, plan.R // rows, plan.E // columns),
        in_specs=[
            *specs(1),
            *specs(S),
            pl.BlockSpec((1, rows), lambda b, r, e: (0, r)),
        ],
        out_specs=specs(S + 1),
        out_shape=state_shapes(plan, S + 1),
    )(first.total_BRE[:, None], first.mass_BR[:, None, None], *summary, log2_decay_1R)


def _boundary_kernel(
    plan: Plan,
    first_total_ref,
    first_mass_ref,
    add_total_ref,
    add_mass_ref,
    log2_decay_ref,
    total_ref,
    mass_ref,
    *,
    reverse: bool,
) -> None:
    S = plan.segments
    log2_decay_1R = log2_decay_ref[...]
    log2_decay_R1 = log2_decay_1R.reshape(log2_decay_1R.shape[1], 1)

    def block(n, state):
        # All loads of a block come first, and so wait for memory together.
        added = []
        for ahead in range(_AHEAD):
            k = n * _AHEAD + ahead
            s = jnp.clip(S - 1 - k if reverse else k, 0, S - 1)
            added.append((k, s, add_total_ref[s], add_mass_ref[s]))
        for k, s, add_total_RE, add_mass_1R in added:
            total_RE, mass_1R = state
            inside = k < S
            boundary = s + 1 if reverse else s
            plt.store(total_ref.at[boundary], total_RE, mask=_all(inside, total_RE))
            plt.store(mass_ref.at[boundary], mass_1R, mask=_all(inside, mass_1R))
            # Not `jnp.where(s == S - 1, last, segment)`: Pallas' Triton lowering gives numbers that
            # one flag chooses the type of the flag, so that of 64 its last bit is left.
            steps = jnp.minimum(plan.T - s * plan.segment, plan.segment).astype(jnp.float32)
            state = (
                jnp.where(
                    inside, jnp.exp2(steps * log2_decay_R1) * total_RE + add_total_RE, total_RE
                ),
                jnp.where(inside, jnp.exp2(steps * log2_decay_1R) * mass_1R + add_mass_1R, mass_1R),
            )
        return state

    blocks = jnp.int32(-(-S // _AHEAD))
    first = first_total_ref[0], first_mass_ref[0]
    total_RE, mass_1R = lax.fori_loop(jnp.int32(0), blocks, block, first)
    end = 0 if reverse else S
    total_ref[end], mass_ref[end] = total_RE, mass_1R


def _all(flag: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.broadcast_to(flag, like.shape)
