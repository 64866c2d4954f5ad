"""Score statistics on a GPU by Pallas' Triton lowering: one kernel, two loops over the keys.

A program owns a tile of queries of one head and loops over its visible tiles of keys, first for the
peak of its rows and then for the sums; see `tile`. Scores stay in registers: computing them twice
costs less than storing them. Arrays keep their `[B, T, N, H]` layout and any
length; a load past the end of an array is masked to zero and a store is masked out. The key head of
a query head is found by its block index, so grouped heads are never copied.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.core import dispatch, ptx, tuning
from iaj_kernels.score_stats import tile
from iaj_kernels.score_stats.config import Call, Config, RowStats

# Biases of one kernel: each holds a count and a sum per degree in registers.
_BIASES = 4
# A float32 product takes its operands from registers: this much of the head width at a time, or
# they spill. A tensor core reads the whole width of bfloat16 operands.
_FLOAT32_WIDTH = 16


@dataclasses.dataclass(frozen=True)
class Plan(tiles.Plan):
    """The static half of the kernel."""

    config: Config


class _Inputs(NamedTuple):
    """Inputs of the kernel: arrays, their block specs, or references to them."""

    start_B: Any
    window_1: Any
    bias_X: Any
    target_BTN: Any
    query_segments_BT: Any
    key_segments_BS: Any
    q_BTNH: Any
    k_BSKH: Any


def unsupported_reason(config: Config, call: Call) -> str:
    """Why the kernel does not run for a call; empty if it does."""
    if reason := dispatch.unsupported_reason(config.target):
        return reason
    H = call.q_BTNH.shape[-1]
    if H < 16 or H > 256 or H & (H - 1):
        return f"needs a head width of 16, 32, 64, 128 or 256, and H = {H}"
    if config.blocks is not None and any(size < 16 or size & (size - 1) for size in config.blocks):
        return f"needs blocks that are powers of two and at least 16, and they are {config.blocks}"
    return ""


def run(config: Config, call: Call) -> RowStats:
    """The statistics at each bias, `[X, B, T, N]`; see `api.score_stats`."""
    q_BTNH, k_BSKH, bias_X, target_BTN, visibility = call
    results = []
    for first in range(0, bias_X.shape[0], _BIASES):
        inputs = _Inputs(
            **tiles.operands(visibility),
            bias_X=bias_X[first : first + _BIASES],
            target_BTN=target_BTN,
            q_BTNH=q_BTNH,
            k_BSKH=k_BSKH,
        )
        results.append(_launch(config, inputs, visibility.causal))
    top, argmax, star, runner_up = results[0][:4]
    active = jnp.concatenate([each.active for each in results])
    sums = jnp.concatenate([each.sums for each in results], axis=1)
    by_head = tile.Reductions(top, argmax, star, runner_up, active, sums)
    by_position = tile.Reductions(*(x.swapaxes(-1, -2) for x in by_head))
    S = k_BSKH.shape[1]
    return tile.finish(config, by_position, bias_X[:, None, None, None], target_BTN, S)


def _launch(config: Config, inputs: _Inputs, causal: bool) -> tile.Reductions:
    """The kernel's outputs, `[..., B, N, T]`."""
    B, T, N, H = inputs.q_BTNH.shape
    S, K = inputs.k_BSKH.shape[1:3]
    X, P = inputs.bias_X.shape[0], len(config.degrees)
    sizes = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H, "X": X, "P": P}
    dtype = inputs.q_BTNH.dtype
    default = tile.default_tiles(sizes, dtype)
    chosen = tuning.tiles("score_stats", config.target.device_kind, sizes, dtype, default)
    queries, keys, warps, stages = (chosen[entry] for entry in tiles.ENTRIES)
    queries, keys = config.blocks or (queries, keys)
    plan = Plan(causal, T, S, N, K, H, queries, keys, warps, stages, config.target, config)

    # Index maps get (query tile, head, batch row).
    blocks = {
        "1": pl.BlockSpec((1,), lambda i, n, b: (0,)),
        "B": pl.BlockSpec((1,), lambda i, n, b: (b,)),
        "X": pl.BlockSpec((X,), lambda i, n, b: (0,)),
        "BT": pl.BlockSpec((None, T), lambda i, n, b: (b, 0)),
        "BS": pl.BlockSpec((None, S), lambda i, n, b: (b, 0)),
        "BTN": pl.BlockSpec((None, T, None), lambda i, n, b: (b, 0, n)),
        "BTNH": pl.BlockSpec((None, T, None, H), lambda i, n, b: (b, 0, n, 0)),
        "BSKH": pl.BlockSpec(
            (None, S, None, H), lambda i, n, b: (b, 0, lax.div(n, jnp.int32(plan.G)), 0)
        ),
    }
    layout = tiles.Layout((plan.query_tiles, N, B), blocks)

    def row_spec(*lead: int) -> pl.BlockSpec:
        zeros = (0,) * len(lead)
        return pl.BlockSpec((*lead, None, None, T), lambda i, n, b: (*zeros, b, n, 0))

    def rows(dtype: Any, *lead: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, B, N, T), dtype)

    one = row_spec()
    result = plan.call(
        _kernel,
        "score_stats_forward",
        grid=layout.grid,
        in_specs=(layout.specs(inputs),),
        out_specs=[one, one, one, one, row_spec(X), row_spec(P, X)],
        out_shape=[
            rows(jnp.float32),
            rows(jnp.int32),
            rows(jnp.float32),
            rows(jnp.float32),
            rows(jnp.int32, X),
            rows(jnp.float32, P, X),
        ],
    )(inputs)
    return tile.Reductions(*result)


def _kernel(plan: Plan, inputs: _Inputs, *outputs: Any) -> None:
    config, Q, Y = plan.config, plan.X, plan.Y
    out = tile.Reductions(*outputs)
    # Under a causal mask the last queries have the most keys: they start first.
    row = (pl.num_programs(0) - 1 - pl.program_id(0)) * Q
    rows = pl.ds(row, Q)
    first = inputs.start_B[0] + row
    inside_Q = tiles.inside(row, Q, plan.T)

    H = inputs.q_BTNH.shape[-1]
    width = H if inputs.q_BTNH.dtype == jnp.bfloat16 else min(H, _FLOAT32_WIDTH)
    parts = [pl.ds(h, width) for h in range(0, H, width)]

    def load_queries(part):
        return tiles.load(inputs.q_BTNH.at[rows, part], _rows(inside_Q))

    whole_QH = load_queries(parts[0]) if len(parts) == 1 else None
    target_Q1 = None
    if inputs.target_BTN is not None:
        target_Q1 = tiles.load_along(inputs.target_BTN.at[rows], inside_Q, 0)
    query_segments_Q1 = tiles.segments_along(inputs.query_segments_BT, rows, inside_Q, 0)

    def keys(j):
        return tiles.entries(j * Y, Y, 1)

    def scores(j, masked: bool):
        """The scores of key tile `j`."""
        columns = pl.ds(j * Y, Y)
        inside_Y = tiles.inside(j * Y, Y, plan.S) if masked else None
        dot_QY = jnp.zeros((Q, Y), jnp.float32)
        for part in parts:
            q_QH = load_queries(part) if whole_QH is None else whole_QH
            k_YH = tiles.load(inputs.k_BSKH.at[columns, part], _rows(inside_Y))
            dot_QY += tiles.product(q_QH, k_YH, 1, 1)
        if not masked:
            return tile.score(config, dot_QY, None)
        key_segments_1Y = tiles.segments_along(inputs.key_segments_BS, columns, inside_Y, 1)
        segments = (query_segments_Q1, key_segments_1Y)
        query_Q1 = tiles.entries(first, Q, 0)
        mask = tiles.visible_mask(plan, inputs, query_Q1, keys(j), segments)
        return tile.score(config, dot_QY, mask)

    ranges = tiles.key_ranges(plan, inputs, first, tiles.capped_clip)

    def first_loop(j, peak, masked):
        is_target = None if target_Q1 is None else keys(j) == target_Q1
        return tile.raise_peak(peak, scores(j, masked), j, is_target)

    result = tiles.walk(ranges, first_loop, tile.no_peak((Q, Y), target_Q1 is not None))
    top_Q, argmax_Q, star_Q = tile.peak(result)
    at_Q1 = argmax_Q[:, None] if target_Q1 is None else target_Q1
    biases = [inputs.bias_X[x] for x in range(inputs.bias_X.shape[0])]
    reciprocal = _divide if config.target.interpret else _exact_reciprocal
    weights = [tile.target_weight(config, star_Q, bias, reciprocal) for bias in biases]

    def second_loop(j, carry, masked):
        runner_up_Q, counts = carry
        z = tile.without_target(scores(j, masked), keys(j) == at_Q1)
        added = [
            tile.distractors(config, z, star_Q, bias, *weight)
            for bias, weight in zip(biases, weights, strict=True)
        ]
        return jnp.maximum(runner_up_Q, jnp.max(z, axis=-1)), jax.tree.map(jnp.add, counts, added)

    zeros = jnp.zeros((Q,), jnp.float32)
    none = (jnp.zeros((Q,), jnp.int32), *(zeros for _ in config.degrees))
    empty = (jnp.full((Q,), -jnp.inf, jnp.float32), [none for _ in biases])
    runner_up_Q, counts = tiles.walk(ranges, second_loop, empty)

    def store(ref, values):
        tiles.store(ref, values, inside_Q)

    store(out.top.at[rows], top_Q)
    store(out.argmax.at[rows], argmax_Q)
    store(out.star.at[rows], star_Q)
    store(out.runner_up.at[rows], runner_up_Q)
    for x, (active_Q, *sums) in enumerate(counts):
        store(out.active.at[jnp.int32(x), rows], active_Q)
        for p, sum_Q in enumerate(sums):
            store(out.sums.at[jnp.int32(p), jnp.int32(x), rows], sum_Q)


def _rows(inside: jax.Array | None) -> jax.Array | None:
    """A mask of rows for a matrix."""
    return None if inside is None else inside[:, None]


def _divide(x: jax.Array) -> jax.Array:
    return 1.0 / x


# Rounded correctly; Triton's division may be two units in the last place away.
_exact_reciprocal = ptx.elementwise("rcp.rn.f32 $0, $1;")
