"""Attention masks on tiles: causal, sliding window, segments and padding.

One description for every attention kernel here. Query t of a batch row is at position `start + t`,
key s at position s. A key is visible if it is not after the query (causal), less than `window`
positions before it, and of the same segment; a negative segment is padding, which no query sees and
which sees no key.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.core import shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """The visibility of one call; `causal` is static, the rest is data or None.

    `start_B` int32 `[B]`, `window` an int32 scalar, segments int32 `[B, T]` and `[B, S]`. `first`
    is every row's start where that is known when the call is traced, else None.
    """

    causal: bool = dataclasses.field(metadata={"static": True})
    start_B: jax.Array
    window: jax.Array | None
    query_segments_BT: jax.Array | None
    key_segments_BS: jax.Array | None
    first: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def start(self) -> jax.Array | int:
        """The argument `start` of an operation: a Python number where it is known."""
        return self.start_B if self.first is None else self.first

    def tile(
        self,
        query: jax.Array,
        key: jax.Array,
        query_segments: jax.Array | None = None,
        key_segments: jax.Array | None = None,
        window: jax.Array | None = None,
    ) -> jax.Array | None:
        """Mask of a tile, true where the key is visible; None where all are.

        Args:
          query: int32 positions of the rows, shaped to broadcast against `key` (`[X, 1]`).
          key: int32 positions of the columns (`[1, Y]`).
          query_segments: segment ids of the rows, shaped as `query`; passed exactly where the call
            has segments.
          key_segments: segment ids of the columns, shaped as `key`.
          window: the window as a scalar that a kernel has loaded; the field by default.
        """
        window = self.window if window is None else window
        parts: list[jax.Array] = []
        if self.causal:
            parts.append(key <= query)
        if window is not None:
            parts.append(query - key < window)
        if query_segments is not None and key_segments is not None:
            parts.append((query_segments == key_segments) & (key_segments >= 0))
        mask = None
        for part in parts:
            mask = part if mask is None else mask & part
        return mask

    def mask_BTS(self, T: int, S: int) -> jax.Array:
        """The whole mask `[B, T, S]`, for the reference and the tests."""
        B = self.start_B.shape[0]
        query_BT1 = self.start_B[:, None, None] + jnp.arange(T, dtype=jnp.int32)[None, :, None]
        key_11S = jnp.arange(S, dtype=jnp.int32)[None, None, :]
        segments: tuple[Any, Any] = (None, None)
        if self.query_segments_BT is not None and self.key_segments_BS is not None:
            segments = (self.query_segments_BT[:, :, None], self.key_segments_BS[:, None, :])
        mask = self.tile(query_BT1, key_11S, *segments)
        return jnp.ones((B, T, S), bool) if mask is None else jnp.broadcast_to(mask, (B, T, S))

    def counts_BT(self, T: int, S: int) -> jax.Array:
        """How many of the S keys each query sees, int32 `[B, T]`; O(B T S) only with segments."""
        if self.query_segments_BT is not None:
            return self.mask_BTS(T, S).sum(-1, dtype=jnp.int32)
        query_BT = self.start_B[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        last_BT = jnp.minimum(query_BT, S - 1) if self.causal else jnp.full_like(query_BT, S - 1)
        if self.window is None:
            return jnp.maximum(last_BT + 1, 0)
        # Not query - window + 1, which wraps for the largest int32 window and a negative position.
        first_BT = jnp.maximum(query_BT + 1, self.window) - self.window
        return jnp.maximum(last_BT - first_BT + 1, 0)


def visibility(
    op: str,
    B: int,
    T: int,
    S: int,
    *,
    causal: bool,
    window: jax.Array | int | None,
    segment_ids: Any,
    start: jax.Array | int | None,
) -> Visibility:
    """The `Visibility` of a call, from the arguments that attention operations share.

    Args:
      window: keys at least this many positions before the query are hidden; None hides none.
      segment_ids: `[B, T]` where T = S, or a pair (`[B, T]`, `[B, S]`); negative is padding.
      start: position of the first query, a scalar or `[B]`; None aligns the last query with the
        last key, S - T.

    Raises:
      ValueError: a shape that does not fit, or a window below 1.
    """
    if isinstance(window, int) and window < 1:
        raise ValueError(f"{op}: window is {window}; it counts the query itself, so at least 1")
    start = S - T if start is None else start
    if jnp.ndim(start) > 1 or (jnp.ndim(start) == 1 and jnp.shape(start) != (B,)):
        raise ValueError(f"{op}: start has shape {jnp.shape(start)}; expected a scalar or [B]")
    pair = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    if segment_ids is not None:
        expected = {"B": B, "T": T, "S": S}
        if not isinstance(segment_ids, tuple | list) and T != S:
            raise ValueError(
                f"{op}: segment_ids is one array but T = {T} and S = {S}; "
                "pass a pair (segments_BT, segments_BS)"
            )
        result = shapes.sizes(op, segment_ids_BT=pair[0]) | shapes.sizes(op, segment_ids_BS=pair[1])
        for letter, size in result.items():
            if size != expected[letter]:
                raise ValueError(f"{op}: segment_ids has {letter} = {size}, not {expected[letter]}")
    segments = [None if each is None else jnp.asarray(each, jnp.int32) for each in pair]
    return Visibility(
        causal=causal,
        start_B=jnp.broadcast_to(jnp.asarray(start, jnp.int32), (B,)),
        window=None if window is None else jnp.asarray(window, jnp.int32),
        query_segments_BT=segments[0],
        key_segments_BS=segments[1],
        first=start if isinstance(start, int) else None,
    )


def key_blocks(
    causal: bool,
    window: jax.Array | None,
    first: jax.Array,
    rows: int,
    S: int,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """The half-open range of key blocks that queries at `first .. first + rows - 1` can see."""
    count = jnp.int32(-(-S // block))
    low, high = jnp.int32(0), count
    if causal:
        high = jnp.clip(jax.lax.div(first + (rows + block - 1), jnp.int32(block)), 0, count)
    if window is not None:
        # max(first - window + 1, 0), which does not wrap for the largest window.
        first_key = jnp.maximum(first + 1, window) - window
        low = jnp.where(first_key < S, jax.lax.div(first_key, jnp.int32(block)), count)
    return jnp.minimum(low, high), high


def query_blocks(
    causal: bool,
    window: jax.Array | None,
    start: jax.Array,
    first: jax.Array,
    columns: int,
    T: int,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """The half-open range of query blocks that can see keys `first .. first + columns - 1`."""
    count = jnp.int32(-(-T // block))
    low, high = jnp.int32(0), count
    if causal:
        low = jax.lax.div(jnp.maximum(first - start, 0), jnp.int32(block))
    if window is not None:
        # The last query that sees the last key is window - 1 after it. The window may be as
        # large as an int32 holds, where a layer has none, and must not wrap.
        last = first + (columns - 1) - start
        past = jnp.maximum(last + jnp.minimum(window, T - last), 0)
        high = jax.lax.div(past + (block - 1), jnp.int32(block))
    return jnp.minimum(low, high), high
