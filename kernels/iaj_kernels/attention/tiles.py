"""Grids, blocks, tile ranges, masks and loads of the Triton kernels of attention operations.

A program owns one tile of queries of a head, or one tile of keys of a key head, and walks over the
tiles of the other side. Arrays keep their `[B, T, N, H]` layout and any length: a tile may reach
past the end of an array, and there a load reads zero (or `other`) and a store writes nothing. The
key head of a query head is found by block index, so grouped heads are never copied.

An operation names what its kernels read in named tuples whose fields end in the letters of their
axes (`q_BTNH`, `window_1`), and from these `Layout.specs` gives each the block a program has of it.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
import jax.numpy as jnp

from iaj_kernels.attention.visibility import Visibility, key_blocks, query_blocks
from iaj_kernels.core import dispatch

# The smallest side of a tile that a tensor core multiplies.
_LEAST = 16

# A half-open range of tiles, and whether it may hold hidden pairs.
Range = tuple[jax.Array, jax.Array, bool]


def side(size: int) -> int:
    """The smallest side of a tile, a power of two, that holds `size` entries."""
    return max(1 << max(size - 1, 0).bit_length(), _LEAST)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The static sizes of one kernel: of the call, then of a tile (X queries, Y keys)."""

    causal: bool
    T: int
    S: int
    N: int
    K: int
    H: int
    X: int
    Y: int

    @property
    def G(self) -> int:
        """Query heads per key head."""
        return self.N // self.K

    @property
    def width(self) -> int:
        """The head width in a tile, a power of two."""
        return side(self.H)

    @property
    def query_tiles(self) -> int:
        """Tiles along the queries; the last may reach past T."""
        return -(-self.T // self.X)

    @property
    def key_tiles(self) -> int:
        """Tiles along the keys; the last may reach past S."""
        return -(-self.S // self.Y)


@dataclasses.dataclass(frozen=True)
class Plan(Tiling):
    """The static half of one kernel: its tiling, warps and pipeline stages, and its target."""

    warps: int
    stages: int
    target: dispatch.Target

    def call(self, kernel: Any, name: str, **specs: Any) -> Callable[..., Any]:
        """`kernel(plan, *refs)`, to be called on arrays; `specs` as for `dispatch.triton_call`."""
        return dispatch.triton_call(
            functools.partial(kernel, self),
            target=self.target,
            name=name,
            tile=(self.X, self.Y),
            num_warps=self.warps,
            num_stages=self.stages,
            **specs,
        )


# By kernel: queries, keys, warps and stages of a tile.
Table = Mapping[str, tuple[int, int, int, int]]
ENTRIES = ("queries", "keys", "warps", "stages")


def named(table: Table) -> dict[str, int]:
    """The entries of a table as tuning names them, `<kernel>_queries` and so on."""
    return {
        f"{kernel}_{entry}": size
        for kernel, sizes in table.items()
        for entry, size in zip(ENTRIES, sizes, strict=True)
    }


def choices(kernels: Mapping[str, str]) -> tuple[Mapping[str, tuple[int, ...]], ...]:
    """The sizes that tuning tries (`Suite.tiles`).

    Args:
      kernels: the side of a tile that a program owns, queries or keys, by kernel.
    """
    other = {"queries": "keys", "keys": "queries"}
    return tuple(
        group
        for kernel, own in kernels.items()
        for group in (
            {f"{kernel}_{own}": (64, 128), f"{kernel}_warps": (4, 8)},
            {f"{kernel}_{other[own]}": (32, 64), f"{kernel}_stages": (2, 3)},
        )
    )


class Operands(Protocol):
    """Fields of an operation's named tuple that determine its tile ranges and masks.

    Window and segments are None where the call has none.
    """

    @property
    def start_B(self) -> Any: ...
    @property
    def window_1(self) -> Any: ...
    @property
    def query_segments_BT(self) -> Any: ...
    @property
    def key_segments_BS(self) -> Any: ...


def operands(visibility: Visibility) -> dict[str, Any]:
    """The arrays of a call for the fields of `Operands`."""
    return {
        "start_B": visibility.start_B,
        "window_1": None if visibility.window is None else visibility.window[None],
        "query_segments_BT": visibility.query_segments_BT,
        "key_segments_BS": visibility.key_segments_BS,
    }


def window(refs: Operands) -> jax.Array | None:
    """The window as a scalar."""
    return None if refs.window_1 is None else refs.window_1[0]


class Layout(NamedTuple):
    """The grid of a kernel, and a program's block of an array by the letters of its axes."""

    grid: tuple[int, int, int]
    blocks: Mapping[str, pl.BlockSpec]

    def specs(self, arrays: Any) -> Any:
        """Block specs of `arrays`, in a named tuple of its type; None stays None."""
        letters = (name.rpartition("_")[2] for name in arrays._fields)
        pairs = zip(letters, arrays, strict=True)
        return type(arrays)(*(None if array is None else self.blocks[of] for of, array in pairs))


def query_major(tiling: Tiling, B: int) -> Layout:
    """Grid (N, query tiles, B): a program has one tile of queries, `first_query`, and every key."""
    X, width, last = tiling.X, tiling.width, tiling.query_tiles - 1
    every_key = tiling.key_tiles * tiling.Y
    blocks = {
        "1": pl.BlockSpec((1,), lambda n, i, b: (0,)),
        "3": pl.BlockSpec((3,), lambda n, i, b: (0,)),
        "B": pl.BlockSpec((1,), lambda n, i, b: (b,)),
        "N": pl.BlockSpec((1,), lambda n, i, b: (n,)),
        "BN": pl.BlockSpec((None, 1), lambda n, i, b: (b, n)),
        "BT": pl.BlockSpec((None, X), lambda n, i, b: (b, last - i)),
        "BS": pl.BlockSpec((None, every_key), lambda n, i, b: (b, 0)),
        "BNT": pl.BlockSpec((None, None, X), lambda n, i, b: (b, n, last - i)),
        "BTNH": pl.BlockSpec((None, X, None, width), lambda n, i, b: (b, last - i, n, 0)),
        "BSKH": pl.BlockSpec(
            (None, every_key, None, width),
            lambda n, i, b: (b, 0, lax.div(n, jnp.int32(tiling.G)), 0),
        ),
    }
    return Layout((tiling.N, tiling.query_tiles, B), blocks)


def first_query(tiling: Tiling) -> jax.Array:
    """The index of the first query of this program, in the grid of `query_major`.

    The last queries see the most keys under a causal mask, and start first: the short ones fill the
    gaps at the end.
    """
    return (tiling.query_tiles - 1 - pl.program_id(1)) * tiling.X


def key_major(tiling: Tiling, B: int) -> Layout:
    """Grid (K, key tiles, B): a program has one tile of keys, and every query of its heads."""
    Y, G, width = tiling.Y, tiling.G, tiling.width
    every_query = tiling.query_tiles * tiling.X
    blocks = {
        "1": pl.BlockSpec((1,), lambda k, j, b: (0,)),
        "3": pl.BlockSpec((3,), lambda k, j, b: (0,)),
        "B": pl.BlockSpec((1,), lambda k, j, b: (b,)),
        "N": pl.BlockSpec((G,), lambda k, j, b: (k,)),
        "BN": pl.BlockSpec((None, G), lambda k, j, b: (b, k)),
        "BT": pl.BlockSpec((None, every_query), lambda k, j, b: (b, 0)),
        "BS": pl.BlockSpec((None, Y), lambda k, j, b: (b, j)),
        "BNT": pl.BlockSpec((None, G, every_query), lambda k, j, b: (b, k, 0)),
        "BTNH": pl.BlockSpec((None, every_query, G, width), lambda k, j, b: (b, 0, k, 0)),
        "BSKH": pl.BlockSpec((None, Y, None, width), lambda k, j, b: (b, j, k, 0)),
    }
    return Layout((tiling.K, tiling.key_tiles, B), blocks)


def key_ranges(
    tiling: Tiling, refs: Operands, first: jax.Array, clip: Callable[..., jax.Array] = jnp.clip
) -> list[Range]:
    """Ranges of the key tiles visible to the tile of queries at position `first`.

    Pairs may be hidden at the far edge of the window, on the diagonal and past the last key; the
    tiles between these are not masked.

    Args:
      clip: `jnp.clip` or `capped_clip`, whichever leaves the kernel fewer registers.
    """
    X, S, Y = tiling.X, tiling.S, tiling.Y
    reach = window(refs)
    low, high = key_blocks(tiling.causal, reach, first, X, S, Y)
    if refs.key_segments_BS is not None:
        return [(low, high, True)]
    whole_low, whole_high = low, jnp.int32(S // Y)
    if tiling.causal:
        whole_high = jnp.minimum(whole_high, lax.div(first + 1, jnp.int32(Y)))
    if reach is not None:
        # The last query sees the first key of such a tile.
        whole_low = _up(first + X - reach, Y)
    after = tiling.causal or S % Y != 0
    return _cut(low, whole_low, whole_high, high, reach is not None, after, clip)


def capped_clip(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """`jnp.clip` where low <= high, with its two comparisons in the other order.

    The same bounds, but ptxas allots the loops other registers: 168 and not 176 a thread to the
    forward kernel of gated attention, 149 and not 128 to the gradient of q of a sigmoid row map.
    """
    return jnp.maximum(jnp.minimum(x, high), low)


def query_ranges(tiling: Tiling, refs: Operands, first: jax.Array, *, tail: bool) -> list[Range]:
    """Ranges of the query tiles that see the tile of keys at position `first`; as `key_ranges`.

    Args:
      tail: whether queries past the last are to be hidden; they are read as zeros.
    """
    T, X = tiling.T, tiling.X
    reach, start = window(refs), refs.start_B[0]
    low, high = query_blocks(tiling.causal, reach, start, first, tiling.Y, T, X)
    if refs.key_segments_BS is not None:
        return [(low, high, True)]
    whole_low, whole_high = low, jnp.int32(T // X) if tail else high
    if tiling.causal:
        whole_low = _up(first + (tiling.Y - 1) - start, X)
    if reach is not None:
        # The window may be as large as an int32 holds, and must not wrap.
        past = first - start
        end = past + jnp.minimum(reach, tiling.query_tiles * X - past)
        whole_high = jnp.minimum(whole_high, lax.div(end, jnp.int32(X)))
    after = reach is not None or (tail and T % X != 0)
    return _cut(low, whole_low, whole_high, high, tiling.causal, after)


def _cut(low, whole_low, whole_high, high, before: bool, after: bool, clip=jnp.clip) -> list[Range]:
    # There may be no whole tile: the bounds then cross, or are below zero.
    whole_low = jnp.clip(whole_low, low, high)
    whole_high = clip(whole_high, whole_low, high)
    ranges = [(whole_low, whole_high, False)]
    if before:
        ranges.insert(0, (low, whole_low, True))
    if after:
        ranges.append((whole_high, high, True))
    return ranges


def _up(position: jax.Array, block: int) -> jax.Array:
    return lax.div(jnp.maximum(position, 0) + (block - 1), jnp.int32(block))


def walk(ranges: list[Range], body: Callable[[jax.Array, Any, bool], Any], carry: Any) -> Any:
    """`carry` after `body(index, carry, hidden)` for each index of the ranges in turn."""
    for low, high, hidden in ranges:
        carry = lax.fori_loop(low, high, lambda i, c, hidden=hidden: body(i, c, hidden), carry)
    return carry


def visible_mask(
    tiling: Tiling,
    refs: Operands,
    query: jax.Array,
    key: jax.Array,
    segments: tuple[Any, Any],
    *,
    tail: bool = False,
) -> jax.Array | None:
    """Visibility mask of a tile; None where every pair is visible.

    Args:
      query: positions of the queries along their axis of the tile; `key` along the other.
      segments: segment ids of the queries and of the keys, shaped as `query` and `key`; or None,
        None.
      tail: whether queries past the last are hidden.
    """
    visibility = Visibility(tiling.causal, refs.start_B, window(refs), None, None)
    mask = visibility.tile(query, key, *segments)
    if tiling.S % tiling.Y:
        mask = _and(mask, key < tiling.S)
    if tail and tiling.T % tiling.X:
        mask = _and(mask, query < refs.start_B[0] + tiling.T)
    return mask


def _and(mask: jax.Array | None, other: jax.Array) -> jax.Array:
    return other if mask is None else mask & other


def entries(first: Any, count: int, axis: int) -> jax.Array:
    """Numbers `first .. first + count - 1` along `axis` of a tile; the other axis has length 1."""
    return first + lax.broadcasted_iota(jnp.int32, (count, 1) if axis == 0 else (1, count), axis)


def inside(first: jax.Array, count: int, length: int) -> jax.Array | None:
    """Which of `first .. first + count - 1` are below `length`; None where whole tiles fit."""
    if length % count == 0:
        return None
    return first + lax.broadcasted_iota(jnp.int32, (count,), 0) < length


def matrix_inside(tiling: Tiling, rows_inside: jax.Array | None, rows: int) -> jax.Array | None:
    """Which entries of a tile `[rows, width]` are inside an array `[., H]`; None where all are."""
    shape = (rows, tiling.width)
    mask = None if rows_inside is None else jnp.broadcast_to(rows_inside[:, None], shape)
    if tiling.width != tiling.H:
        mask = _and(mask, lax.broadcasted_iota(jnp.int32, shape, 1) < tiling.H)
    return mask


def load(at: Any, mask: jax.Array | None, other: Any = 0) -> jax.Array:
    """The values at reference `at`, `other` outside of `mask`."""
    if mask is None:
        return plt.load(at)
    return plt.load(at, mask=mask, other=jnp.asarray(other, at.dtype))


def load_along(at: Any, mask: jax.Array | None, axis: int, other: Any = 0) -> jax.Array:
    """The vector that `at` points to, laid along `axis` of a tile."""
    vector = load(at, mask, other)
    return vector[:, None] if axis == 0 else vector[None, :]


def segments_along(ref: Any, at: Any, mask: jax.Array | None, axis: int) -> jax.Array | None:
    """The segments `ref[at]` laid along `axis`, padding outside of `mask`; None where ref is."""
    return None if ref is None else load_along(ref.at[at], mask, axis, -1)


def store(at: Any, value: jax.Array, mask: jax.Array | None) -> None:
    """Writes `value` inside of `mask`."""
    plt.store(at, value.astype(at.dtype), mask=mask)


def product(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """Contracts an axis of each; operands in the dtype of `right`, sums in float32."""
    return lax.dot_general(
        left.astype(right.dtype),
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=dispatch.exact_dot(right.dtype),
        preferred_element_type=jnp.float32,
    )
