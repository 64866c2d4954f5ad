"""Score statistics in blocks of plain XLA: the path of CPUs, and the fallback of GPUs.

For each block of queries, the scores of one block of keys after the other are formed, once: the
first loop of `tile` keeps them, `[queries, S]`, for the second. A block of keys that no query of
the block can see is neither formed nor read. The G query heads of a key head are rows of one
matrix, so no key is copied per head, and as many batch rows run together as fit.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.attention.batches import CACHED_ELEMENTS
from iaj_kernels.attention.visibility import Visibility, key_blocks
from iaj_kernels.core import dispatch
from iaj_kernels.score_stats import tile
from iaj_kernels.score_stats.config import Call, Config, RowStats

# Elements of the stored scores: at most about 16 MiB unless one row is longer.
_KEPT = 1 << 22


class _BatchRow(NamedTuple):
    """The arrays of one batch row, T and S padded to whole blocks; `run` adds a leading B."""

    q_TNH: Any
    k_SKH: Any
    start: Any
    target_TN: Any
    query_segments_T: Any
    key_segments_S: Any


def run(config: Config, call: Call) -> RowStats:
    """The statistics at each bias, `[X, B, T, N]`; see `api.score_stats`."""
    q_BTNH, k_BSKH, bias_X, target_BTN, visibility = call
    B, T, N, _ = q_BTNH.shape
    S = k_BSKH.shape[1]
    together, Q, Y = _blocks(config, B, T, N, S)
    rows = _BatchRow(
        _padded(q_BTNH, Q),
        _padded(k_BSKH, Y),
        visibility.start_B,
        _padded(target_BTN, Q),
        _padded(visibility.query_segments_BT, Q),
        _padded(visibility.key_segments_BS, Y),
    )

    def whole_row(row: _BatchRow) -> tile.Reductions:
        return _batch_row(config, row, bias_X, visibility, (S, Q, Y))

    result = lax.map(whole_row, rows, batch_size=together)
    result = tile.Reductions(*(_by_position(x, T) for x in result))
    return tile.finish(config, result, bias_X[:, None, None, None], target_BTN, S)


def _blocks(config: Config, B: int, T: int, N: int, S: int) -> tuple[int, int, int]:
    """(batch rows, queries, keys) of one block."""
    Q = min(64, T)
    while Q > 8 and N * Q * S > _KEPT:
        Q //= 2
    if config.blocks is not None:
        Q = min(config.blocks[0], T)
    together = min(max(_KEPT // (N * Q * S), 1), B)
    Y = 128
    while Y < 4096 and together * N * Q * (2 * Y) <= CACHED_ELEMENTS:
        Y *= 2
    if config.blocks is not None:
        Y = config.blocks[1]
    return together, Q, min(Y, S)


def _padded(x: jax.Array | None, block: int) -> jax.Array | None:
    """`x` with whole blocks along axis 1."""
    if x is None or x.shape[1] % block == 0:
        return x
    return jnp.pad(x, [(0, -x.shape[1] % block if axis == 1 else 0) for axis in range(x.ndim)])


def _by_position(x: jax.Array, T: int) -> jax.Array:
    """`[..., B, T, N]` of `[B, I, ..., K, G, Q]`, where I counts query blocks."""
    x = jnp.moveaxis(x, (0, 1, -1), (-5, -4, -3))
    *lead, B, I, Q, K, G = x.shape  # noqa: E741
    return x.reshape(*lead, B, I * Q, K * G)[..., :T, :]


def _batch_row(
    config: Config,
    row: _BatchRow,
    bias_X: jax.Array,
    visibility: Visibility,
    sizes: tuple[int, int, int],
) -> tile.Reductions:
    """Runs both loops over the rows of one batch row, `[I, ..., K, G, Q]`."""
    S, Q, Y = sizes
    K, H = row.k_SKH.shape[1:]
    G = row.q_TNH.shape[1] // K
    blocks = row.k_SKH.shape[0] // Y
    k_JYKH = row.k_SKH.reshape(blocks, Y, K, H)
    count = row.q_TNH.shape[0] // Q
    # The same bounds for every batch row, and fixed ones for a single block of queries: if `vmap`
    # makes them differ, each iteration selects between two copies of all that it carries.
    first, last = visibility.start_B.min(), visibility.start_B.max()

    def query_block(block):
        i, q_QKGH, target_QKG = block
        q_KRH = q_QKGH.transpose(1, 2, 0, 3).reshape(K, G * Q, H)
        low, high = np.int32(0), np.int32(blocks)
        if count > 1:
            causal, window = visibility.causal, visibility.window
            low, _ = key_blocks(causal, window, first + i * Q, Q, S, Y)
            _, high = key_blocks(causal, window, last + i * Q, Q, S, Y)
        target_KGQ = None if target_QKG is None else target_QKG.transpose(1, 2, 0)

        def keys(j):
            return (j * Y + jnp.arange(Y, dtype=jnp.int32))[None, None, None, :]

        def scores(j):
            # Keys first: with few queries, the other order costs XLA twice the time on a CPU.
            product_KYR = jnp.einsum(
                "YKH,KRH->KYR",
                k_JYKH[j],
                q_KRH,
                precision=dispatch.exact_dot(k_JYKH.dtype),
                preferred_element_type=jnp.float32,
            )
            query = (row.start + i * Q + jnp.arange(Q, dtype=jnp.int32))[None, None, :, None]
            segments = (None, None)
            if row.query_segments_T is not None:
                segments = (
                    lax.dynamic_slice_in_dim(row.query_segments_T, i * Q, Q)[None, None, :, None],
                    lax.dynamic_slice_in_dim(row.key_segments_S, j * Y, Y)[None, None, None, :],
                )
            mask = visibility.tile(query, keys(j), *segments)
            if S % Y:
                inside = keys(j) < S
                mask = inside if mask is None else mask & inside
            return tile.score(config, product_KYR.swapaxes(1, 2).reshape(K, G, Q, Y), mask)

        def first_loop(j, carry):
            kept_JKGQY, peak = carry
            z = scores(j)
            is_target = None if target_KGQ is None else keys(j) == target_KGQ[..., None]
            return kept_JKGQY.at[j].set(z), tile.raise_peak(peak, z, j, is_target)

        shape = (K, G, Q, Y)
        kept_JKGQY = jnp.zeros((blocks, *shape), jnp.float32)
        kept_JKGQY, peak = lax.fori_loop(
            low, high, first_loop, (kept_JKGQY, tile.no_peak(shape, target_KGQ is not None))
        )
        top, argmax, star = tile.peak(peak)
        at = argmax if target_KGQ is None else target_KGQ

        def second_loop(j, carry):
            runner_up, counts = carry
            z = tile.without_target(kept_JKGQY[j], keys(j) == at[..., None])
            added = jax.vmap(lambda *weight: tile.distractors(config, z, star, *weight))(
                bias_X, *weights_XKGQ
            )
            runner_up = jnp.maximum(runner_up, jnp.max(z, axis=-1))
            return runner_up, tuple(x + y for x, y in zip(counts, added, strict=True))

        weights_XKGQ = tile.target_weight(config, star[None], bias_X[:, None, None, None])
        zeros = jnp.zeros(weights_XKGQ[0].shape, jnp.float32)
        counts = (zeros.astype(jnp.int32), *(zeros for _ in config.degrees))
        runner_up, (active, *sums) = lax.fori_loop(
            low, high, second_loop, (jnp.full(star.shape, -jnp.inf, jnp.float32), counts)
        )
        return tile.Reductions(top, argmax, star, runner_up, active, jnp.stack(sums))

    def in_blocks(x):
        return None if x is None else x.reshape(-1, Q, K, G, *x.shape[2:])

    index_I = jnp.arange(count, dtype=jnp.int32)
    return lax.map(query_block, (index_I, in_blocks(row.q_TNH), in_blocks(row.target_TN)))
