"""Score statistics on a GPU through Pallas' Triton lowering: one kernel, two loops over the keys.

An instance owns a tile of queries of one head and walks over the tiles of keys that it can see,
first for the peak of its rows and then for the sums; see `tile`. Scores live in registers alone: to
form them twice costs less than to store them. Arrays keep their `[B, T, N, H]` layout and any
length; a load past the end of an array is masked to zero and a store is masked out. The key head of
a query head is found by its block index, so grouped heads are never copied.
"""

from collections.abc import Mapping
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
import jax.numpy as jnp

from kernels import dispatch, tuning
from kernels.score_stats import tile
from kernels.score_stats.config import Config, ScoreStats
from kernels.visibility import Visibility, key_blocks

# Biases of one kernel: each holds a count and a sum per degree in registers.
_BIASES = 4
# A float32 product is made of multiply-adds with its operands in registers: this much of the head
# width at a time, or they spill. A tensor core reads the whole width of bfloat16 operands.
_FLOAT32_WIDTH = 16


class _Inputs(NamedTuple):
    """What the kernel reads: arrays outside of it, their specs, and the references inside."""

    start_B: Any
    window_1: Any
    bias_X: Any
    target_BTN: Any
    query_segments_BT: Any
    key_segments_BS: Any
    q_BTNH: Any
    k_BSKH: Any


def unavailable(config: Config, sizes: Mapping[str, int]) -> str:
    """Why the kernel does not run for this call; empty if it does."""
    lacking = dispatch.lacks_gpu(config.target)
    if lacking:
        return lacking
    H = sizes["H"]
    if H < 16 or H > 256 or H & (H - 1):
        return f"needs a head width of 16, 32, 64, 128 or 256, and H = {H}"
    if config.blocks is not None and any(size < 16 or size & (size - 1) for size in config.blocks):
        return f"needs blocks that are powers of two and at least 16, and they are {config.blocks}"
    return ""


def run(
    config: Config,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    bias_X: jax.Array,
    target_BTN: jax.Array | None,
    visible: Visibility,
) -> ScoreStats:
    """The statistics at each bias, `[X, B, T, N]`; see `api.score_stats`."""
    window = visible.window
    found = []
    for first in range(0, bias_X.shape[0], _BIASES):
        inputs = _Inputs(
            start_B=visible.start_B,
            window_1=None if window is None else window[None],
            bias_X=bias_X[first : first + _BIASES],
            target_BTN=target_BTN,
            query_segments_BT=visible.query_segments_BT,
            key_segments_BS=visible.key_segments_BS,
            q_BTNH=q_BTNH,
            k_BSKH=k_BSKH,
        )
        found.append(_call(config, inputs, visible))
    top, argmax, star, rival = found[0][:4]
    active = jnp.concatenate([each.active for each in found])
    sums = jnp.concatenate([each.sums for each in found], axis=1)
    by_head = tile.Found(top, argmax, star, rival, active, sums)
    by_position = tile.Found(*(x.swapaxes(-1, -2) for x in by_head))
    S = k_BSKH.shape[1]
    return tile.finish(config, by_position, bias_X[:, None, None, None], target_BTN, S)


def _tiles(config: Config, sizes: Mapping[str, int], dtype: Any) -> dict[str, int]:
    queries = min(max(16, 1 << (sizes["T"] - 1).bit_length()), 64)
    float32 = dtype == jnp.float32
    heuristic = {
        "queries": queries,
        "keys": 64 if float32 or sizes["H"] <= 128 else 32,
        "warps": 8 if float32 and queries == 64 else 4,
        "stages": 2,
    }
    tiles = tuning.tiles("score_stats", config.target.device_kind, sizes, dtype, heuristic)
    if config.blocks is not None:
        tiles["queries"], tiles["keys"] = config.blocks
    return tiles


def _call(config: Config, inputs: _Inputs, visible: Visibility) -> tile.Found:
    """The kernel's outputs, `[..., B, N, T]`."""
    B, T, N, H = inputs.q_BTNH.shape
    S, K = inputs.k_BSKH.shape[1:3]
    X, P, G = inputs.bias_X.shape[0], len(config.degrees), N // K
    sizes = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H, "X": X, "P": P}
    tiles = _tiles(config, sizes, inputs.q_BTNH.dtype)
    Q, Y = tiles["queries"], tiles["keys"]
    count = -(-T // Q)

    # Index maps get (query tile, head, batch row).
    every = _Inputs(
        start_B=pl.BlockSpec((1,), lambda i, n, b: (b,)),
        window_1=pl.BlockSpec((1,), lambda i, n, b: (0,)),
        bias_X=pl.BlockSpec((X,), lambda i, n, b: (0,)),
        target_BTN=pl.BlockSpec((None, T, None), lambda i, n, b: (b, 0, n)),
        query_segments_BT=pl.BlockSpec((None, T), lambda i, n, b: (b, 0)),
        key_segments_BS=pl.BlockSpec((None, S), lambda i, n, b: (b, 0)),
        q_BTNH=pl.BlockSpec((None, T, None, H), lambda i, n, b: (b, 0, n, 0)),
        k_BSKH=pl.BlockSpec(
            (None, S, None, H), lambda i, n, b: (b, 0, lax.div(n, jnp.int32(G)), 0)
        ),
    )
    given: Any = jax.tree.map(lambda spec, array: None if array is None else spec, every, inputs)

    def row_spec(*lead: int) -> pl.BlockSpec:
        zeros = (0,) * len(lead)
        return pl.BlockSpec((*lead, None, None, T), lambda i, n, b: (*zeros, b, n, 0))

    def rows(dtype: Any, *lead: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, B, N, T), dtype)

    one = row_spec()
    kernel = functools.partial(_kernel, config, visible, (T, S, Q, Y))
    found = dispatch.triton_call(
        kernel,
        target=config.target,
        name="score_stats_forward",
        tile=(Q, Y),
        grid=(count, N, B),
        in_specs=(given,),
        out_specs=[one, one, one, one, row_spec(X), row_spec(P, X)],
        out_shape=[
            rows(jnp.float32),
            rows(jnp.int32),
            rows(jnp.float32),
            rows(jnp.float32),
            rows(jnp.int32, X),
            rows(jnp.float32, P, X),
        ],
        num_warps=tiles["warps"],
        num_stages=tiles["stages"],
    )(inputs)
    return tile.Found(*found)


def _kernel(
    config: Config,
    visible: Visibility,
    sizes: tuple[int, int, int, int],
    inputs: _Inputs,
    *outputs: Any,
) -> None:
    T, S, Q, Y = sizes
    out = tile.Found(*outputs)
    # Under a causal mask the last queries have the most keys: they start first.
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    row_Q = i * Q + lax.broadcasted_iota(jnp.int32, (Q,), 0)
    rows = pl.ds(i * Q, Q)
    column_Y = lax.broadcasted_iota(jnp.int32, (Y,), 0)
    inside_Q = row_Q < T
    first = inputs.start_B[0] + i * Q
    window = None if inputs.window_1 is None else inputs.window_1[0]

    H = inputs.q_BTNH.shape[-1]
    width = H if inputs.q_BTNH.dtype == jnp.bfloat16 else min(H, _FLOAT32_WIDTH)
    parts = [pl.ds(h, width) for h in range(0, H, width)]

    def load_queries(part):
        return plt.load(inputs.q_BTNH.at[rows, part], mask=inside_Q[:, None], other=0.0)

    whole_QH = load_queries(parts[0]) if len(parts) == 1 else None
    target_Q1 = None
    if inputs.target_BTN is not None:
        target_Q1 = plt.load(inputs.target_BTN.at[rows], mask=inside_Q, other=0)[:, None]
    query_segments_Q1 = None
    if inputs.query_segments_BT is not None:
        query_segments_Q1 = plt.load(inputs.query_segments_BT.at[rows], mask=inside_Q, other=-1)[
            :, None
        ]

    def keys(j):
        return (j * Y + column_Y)[None, :]

    def scores(j, masked: bool):
        """The scores of key tile `j`."""
        columns = pl.ds(j * Y, Y)
        inside_Y = j * Y + column_Y < S
        product = jnp.zeros((Q, Y), jnp.float32)
        for part in parts:
            if masked:
                k_YH = plt.load(inputs.k_BSKH.at[columns, part], mask=inside_Y[:, None], other=0.0)
            else:
                k_YH = plt.load(inputs.k_BSKH.at[columns, part])
            product += lax.dot_general(
                load_queries(part) if whole_QH is None else whole_QH,
                k_YH,
                (((1,), (1,)), ((), ())),
                precision=dispatch.exact_dot(k_YH.dtype),
                preferred_element_type=jnp.float32,
            )
        if not masked:
            return tile.score(config, product, None)
        segments = (None, None)
        if query_segments_Q1 is not None:
            segments = (
                query_segments_Q1,
                plt.load(inputs.key_segments_BS.at[columns], mask=inside_Y, other=-1)[None, :],
            )
        query_Q1 = (inputs.start_B[0] + row_Q)[:, None]
        seen = visible.tile(query_Q1, keys(j), *segments, window=window)
        inside = jnp.broadcast_to(inside_Y[None, :], (Q, Y))
        return tile.score(config, product, inside if seen is None else seen & inside)

    low, high = key_blocks(visible.causal, window, first, Q, S, Y)
    # Tiles before `full` are seen whole by every row, and need no mask.
    full = low
    if window is None and query_segments_Q1 is None:
        full = jnp.int32(S // Y)
        if visible.causal:
            full = jnp.minimum(full, lax.div(jnp.maximum(first + 1, 0), jnp.int32(Y)))

    def over_keys(body, carry):
        carry = lax.fori_loop(low, full, functools.partial(body, False), carry)
        return lax.fori_loop(full, high, functools.partial(body, True), carry)

    def first_loop(masked, j, peak):
        is_target = None if target_Q1 is None else keys(j) == target_Q1
        return tile.raise_peak(peak, scores(j, masked), j, is_target)

    found = over_keys(first_loop, tile.no_peak((Q, Y), target_Q1 is not None))
    top_Q, argmax_Q, star_Q = tile.peak(found)
    at_Q1 = argmax_Q[:, None] if target_Q1 is None else target_Q1
    biases = [inputs.bias_X[x] for x in range(inputs.bias_X.shape[0])]
    reciprocal = _divide if config.target.interpret else _exact_reciprocal
    weights = [tile.target_weight(config, star_Q, bias, reciprocal) for bias in biases]

    def second_loop(masked, j, carry):
        rival_Q, counts = carry
        z = tile.rivals(scores(j, masked), keys(j) == at_Q1)
        added = [
            tile.distractors(config, z, star_Q, bias, *weight)
            for bias, weight in zip(biases, weights, strict=True)
        ]
        return jnp.maximum(rival_Q, jnp.max(z, axis=-1)), jax.tree.map(jnp.add, counts, added)

    zeros = jnp.zeros((Q,), jnp.float32)
    none = (jnp.zeros((Q,), jnp.int32), *(zeros for _ in config.degrees))
    rival_Q, counts = over_keys(
        second_loop, (jnp.full((Q,), -jnp.inf, jnp.float32), [none for _ in biases])
    )

    def store(ref, values):
        plt.store(ref, values, mask=inside_Q)

    store(out.top.at[rows], top_Q)
    store(out.argmax.at[rows], argmax_Q)
    store(out.star.at[rows], star_Q)
    store(out.rival.at[rows], rival_Q)
    for x, (active_Q, *sums) in enumerate(counts):
        store(out.active.at[jnp.int32(x), rows], active_Q)
        for p, sum_Q in enumerate(sums):
            store(out.sums.at[jnp.int32(p), jnp.int32(x), rows], sum_Q)


def _divide(x: jax.Array) -> jax.Array:
    return 1.0 / x


def _exact_reciprocal(x: jax.Array) -> jax.Array:
    """Rounded correctly; Triton's division may be two units in the last place away."""
    (y,) = plt.elementwise_inline_asm(
        "rcp.rn.f32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return y
