"""List of the open edges of gated attention, for circuits and attribution graphs.

A map `[B, N, T, S]` is never formed. Blocks of queries are visited in (batch, head, query) order; a
running sum over the open gates of a block gives their indices in the list.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core import counts, dispatch, noise
from iaj_kernels.gated_attention import tile
from iaj_kernels.gated_attention.config import Call, Config

# Queries of a block; a block holds this many times S scores.
_QUERIES = 128


class EdgeList(NamedTuple):
    """Open edges in (batch, head, query, key) order; unused slots hold -1 and weight 0.

    Attributes:
      batch: int32 `[capacity]`, as are the next three: indices into q and k, not positions.
      head: index of the query head.
      query: index of the query.
      key: index of the key.
      weight: float32 `[capacity]`, the gated attention weight A P.
      count: int32, open edges of the call, listed or not; at most 2^31 - 1.
      overflow: bool, `count` is above the capacity and the list holds the first edges alone.
    """

    batch: jax.Array
    head: jax.Array
    query: jax.Array
    key: jax.Array
    weight: jax.Array
    count: jax.Array
    overflow: jax.Array


def edge_list(config: Config, call: Call, capacity: int) -> EdgeList:
    """The open edges of a call, from the same tile functions as its output; not differentiable."""
    q_BTNH, k_BSKH, _, bias_N = lax.stop_gradient(call[:4])
    visibility = call.visibility
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    X = min(_QUERIES, T)
    blocks = -(-T // X)
    tail = blocks * X - T
    q_BIXNH = jnp.pad(q_BTNH, [(0, 0), (0, tail), (0, 0), (0, 0)]).reshape(B, blocks, X, N, H)
    segments_BIX = visibility.query_segments_BT
    if segments_BIX is not None:
        segments_BIX = jnp.pad(segments_BIX, [(0, 0), (0, tail)]).reshape(B, blocks, X)
    key_1S = jnp.arange(S, dtype=jnp.int32)[None]

    def block_weights(b, n, i):
        """Which gates of a block are open, and A P, `[X, S]`."""
        raw_XS = jnp.einsum(
            "XH,SH->XS",
            q_BIXNH[b, i, :, n],
            k_BSKH[b, :, lax.div(n, jnp.int32(N // K))],
            precision=dispatch.exact_dot(k_BSKH.dtype),
            preferred_element_type=jnp.float32,
        )
        row_X1 = i * X + jnp.arange(X, dtype=jnp.int32)[:, None]
        query_X1 = visibility.start_B[b] + row_X1
        segments = (None, None)
        if segments_BIX is not None and visibility.key_segments_BS is not None:
            segments = (segments_BIX[b, i][:, None], visibility.key_segments_BS[b][None])
        mask_XS = visibility.tile(query_X1, key_1S, *segments)
        mask_XS = row_X1 < T if mask_XS is None else mask_XS & (row_X1 < T)
        bits_XS = None
        if config.mode == "sample":
            stream = noise.stream(call.seed, b + call.origin_2[0], n + call.origin_2[1])
            bits_XS = noise.bits(stream, query_X1, key_1S)
        _, logit_XS = tile.logits(config, raw_XS, bias_N[n])
        is_open_XS = tile.gate(config, logit_XS, bits_XS).is_open & mask_XS
        rows, weight_XS, _ = tile.absorb(
            config, tile.no_rows((X,)), raw_XS, bias_N[n], bits_XS, mask_XS
        )
        total_X = weight_XS.sum(-1) if config.renormalise else rows.total
        return is_open_XS, weight_XS / jnp.where(total_X == 0.0, 1.0, total_X)[:, None]

    def step(result, index):
        held_rows, held_keys, held_weights, count = result
        bn, i = lax.div(index, jnp.int32(blocks)), lax.rem(index, jnp.int32(blocks))
        b, n = lax.div(bn, jnp.int32(N)), lax.rem(bn, jnp.int32(N))
        is_open_XS, weight_XS = block_weights(b, n, i)
        is_open = is_open_XS.reshape(-1)
        place = jnp.cumsum(is_open, dtype=jnp.int32) + (jnp.minimum(count, capacity) - 1)
        place = jnp.where(is_open, place, capacity)
        row_XS, key_XS = jnp.broadcast_arrays(
            bn * T + i * X + jnp.arange(X, dtype=jnp.int32)[:, None], key_1S
        )
        held = [
            into.at[place].set(values.reshape(-1), mode="drop")
            for into, values in (
                (held_rows, row_XS),
                (held_keys, key_XS),
                (held_weights, weight_XS),
            )
        ]
        return (*held, counts.add(count, is_open.sum(dtype=jnp.int32))), None

    none = jnp.full((capacity,), -1, jnp.int32)
    empty = (none, none, jnp.zeros((capacity,), jnp.float32), jnp.int32(0))
    steps = jnp.arange(B * N * blocks, dtype=jnp.int32)
    (row, key, weight, count), _ = lax.scan(step, empty, steps)
    used = row >= 0
    return EdgeList(
        batch=jnp.where(used, row // (N * T), -1),
        head=jnp.where(used, row // T % N, -1),
        query=jnp.where(used, row % T, -1),
        key=key,
        weight=weight,
        count=count,
        overflow=count > capacity,
    )
