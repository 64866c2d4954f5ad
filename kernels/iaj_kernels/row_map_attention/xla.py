"""Attention by a row map without Pallas: whole rows of scores, a block of queries at a time.

A block of C queries has scores `[B, K, G, C, S]`, so memory is O(B N C S) and not O(B N T S); the
backward pass recomputes them from two numbers per row (`tile.py`). Where the call is causal and
the position of its first query is static, the queries are cut into a few spans, and a span reads
only the keys up to its own end. Heads precede tokens, so that each product is one batched matrix
product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.attention.batches import in_groups, rows_within
from iaj_kernels.attention.visibility import Visibility
from iaj_kernels.core import dispatch
from iaj_kernels.row_map_attention import streaming, tile
from iaj_kernels.row_map_attention.config import Call, Config, Rows
from iaj_kernels.row_map_attention.maps import SOFTMAX, RowMap

# Scores of one block; more does not run faster, and a smaller block makes thinner products.
BLOCK_ELEMENTS = 2**21
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 256
# Four spans do 5/8 of the square, and the triangle is half of it.
SPANS = 4


class _Span(NamedTuple):
    """Blocks `first .. first + count - 1` of queries, and how many keys they can see."""

    first: int
    count: int
    keys: int

    def within(self) -> slice:
        return slice(self.first, self.first + self.count)

    def numbers(self) -> jax.Array:
        return jnp.arange(self.first, self.first + self.count)


def forward(config: Config, call: Call, visible_BT: jax.Array) -> tuple[jax.Array, Rows]:
    """`out_BTNH` in the dtype of v, and `Rows`; `visible_BT` counts the keys of each query."""
    q_BTNH, k_BSKH, v_BSKH, bias_N, heads_N, visibility = call
    B, T, N, _ = q_BTNH.shape
    K = k_BSKH.shape[2]
    block, spans = _spans(config, q_BTNH, k_BSKH, visibility)
    of_heads = _per_head(bias_N, heads_N, K)
    q_IBKGCH = _blocks(q_BTNH, block, K)
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)

    def one_span(span: _Span) -> tuple[jax.Array, ...]:
        k, v = k_BKSH[:, :, : span.keys], v_BKSH[:, :, : span.keys]

        def one_block(of_block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            i, q_BKGCH = of_block
            dot = _product("BKGCH,BKSH->BKGCS", q_BKGCH, k)
            mask = _mask(visibility, i, block, T, span.keys)
            visible = _count(visible_BT, i, block)
            w, scale, pivot, factor = of_heads(
                config.row_map,
                lambda row_map, bias: _forward_rows(config, row_map, dot, bias, mask, visible),
            )
            out = _product("BKGCS,BKSH->BKGCH", w.astype(v.dtype), v) * scale[..., None]
            return out.astype(v.dtype), pivot, factor

        return lax.map(one_block, (span.numbers(), q_IBKGCH[span.within()]))

    results = [one_span(span) for span in spans]
    out, pivot, factor = (jnp.concatenate(parts) for parts in zip(*results, strict=True))
    rows = (x.transpose(1, 2, 3, 0, 4).reshape(B, N, -1)[:, :, :T] for x in (pivot, factor))
    return _whole(out, T), Rows(*rows)


def backward(
    config: Config, call: Call, rows: Rows, out_BTNH: jax.Array, d_out_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients by q, k, v, in their dtypes, and bias."""
    # The mean of d_out v is more exact from whole rows than from the output.
    del out_BTNH
    q_BTNH, k_BSKH, v_BSKH, bias_N, heads_N, visibility = call
    _, T, N, _ = q_BTNH.shape
    K = k_BSKH.shape[2]
    block, spans = _spans(config, q_BTNH, k_BSKH, visibility)
    of_heads = _per_head(bias_N, heads_N, K)
    q_IBKGCH, d_out_IBKGCH = _blocks(q_BTNH, block, K), _blocks(d_out_BTNH, block, K)
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)

    def one_span(span: _Span) -> Any:
        k, v = k_BKSH[:, :, : span.keys], v_BKSH[:, :, : span.keys]

        def one_block(sums: tuple[jax.Array, ...], of_block: tuple[jax.Array, ...]):
            dk, dv, d_bias_KG = sums
            i, q_BKGCH, d_out_BKGCH = of_block
            dot = _product("BKGCH,BKSH->BKGCS", q_BKGCH, k)
            g = _product("BKGCH,BKSH->BKGCS", d_out_BKGCH, v)
            mask = _mask(visibility, i, block, T, span.keys)
            row = [_row(x, i, block, K) for x in rows]
            w, d_bias, ds = of_heads(
                config.row_map,
                lambda row_map, bias: _backward_rows(config, row_map, dot, g, bias, mask, *row),
            )
            dk += _product("BKGCS,BKGCH->BKSH", ds.astype(k.dtype), q_BKGCH)
            dv += _product("BKGCS,BKGCH->BKSH", w.astype(v.dtype), d_out_BKGCH)
            dq = config.scale * _product("BKGCS,BKSH->BKGCH", ds.astype(k.dtype), k)
            return (dk, dv, d_bias_KG + d_bias.sum((0, 3))), dq.astype(q_BTNH.dtype)

        zeros = (jnp.zeros(shape, jnp.float32) for shape in (k.shape, v.shape, (K, N // K)))
        blocks = span.numbers(), q_IBKGCH[span.within()], d_out_IBKGCH[span.within()]
        return lax.scan(one_block, tuple(zeros), blocks)

    dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (k_BKSH, v_BKSH))
    d_bias_KG = jnp.zeros((K, N // K), jnp.float32)
    parts = []
    for span in spans:
        (span_dk, span_dv, span_d_bias_KG), dq = one_span(span)
        dk = dk.at[:, :, : span.keys].add(span_dk)
        dv = dv.at[:, :, : span.keys].add(span_dv)
        d_bias_KG += span_d_bias_KG
        parts.append(dq)
    dk = (config.scale * dk).astype(k_BSKH.dtype).swapaxes(1, 2)
    dv = dv.astype(v_BSKH.dtype).swapaxes(1, 2)
    return _whole(jnp.concatenate(parts), T), dk, dv, d_bias_KG.reshape(N)


def _forward_rows(config, row_map, dot, bias, mask, visible):
    """Weights `[B, K, G, C, S]` of whole rows, and `closed` of them."""
    u, _ = tile.logits(row_map, dot, bias, config.scale, config.soft_cap)
    u = u.hidden(mask)
    visible = jnp.broadcast_to(visible, dot.shape[:-1])
    centre = tile.moved(row_map, tile.first_centre(row_map, visible), u.largest(-1))
    w = tile.weight(row_map, u, tile.pivot(row_map, centre)[..., None])
    return w, *tile.closed(row_map, centre, w.sum(-1), visible)


def _backward_rows(config, row_map, dot, g, bias, mask, pivot, factor):
    """The pattern, the gradient by the bias `[B, K, G, C]`, and by the scores before their cap."""
    u, cap_slope = tile.logits(row_map, dot, bias, config.scale, config.soft_cap)
    weights = tile.weight_and_slope(row_map, u.hidden(mask), pivot[..., None])
    pattern = weights.weight * factor[..., None]
    if row_map.normalised:
        g = g - (pattern * g).sum(-1, keepdims=True)
    slope = tile.row_slope(row_map, pivot, factor)
    by_score = weights.slope * g
    ds = by_score * slope[..., None]
    if config.bias_moves and row_map.biased:
        terms = tile.bias_terms(row_map, weights, g, by_score)
        d_bias = slope * tile.bias_gradient(*(x.sum(-1) for x in terms))
    else:
        d_bias = jnp.zeros_like(factor)
    return pattern, d_bias, ds if cap_slope is None else ds * cap_slope


def _per_head(bias_N: jax.Array, heads_N: jax.Array | None, K: int) -> Callable:
    """Applies a function of a row map to every head, with softmax in heads that have no map.

    Which heads have the map is data, so both are computed and one is selected.
    """
    bias_KG11 = bias_N.reshape(K, -1)[:, :, None, None]

    def run(row_map: RowMap, of_map: Callable) -> tuple[jax.Array, ...]:
        mapped = of_map(row_map, bias_KG11[None])
        if heads_N is None:
            return mapped
        heads_KG = heads_N.reshape(K, -1)
        by_softmax = of_map(SOFTMAX, bias_KG11[None])
        return tuple(
            jnp.where(heads_KG.reshape(1, *heads_KG.shape, *[1] * (x.ndim - 3)), x, y)
            for x, y in zip(mapped, by_softmax, strict=True)
        )

    return run


def _spans(
    config: Config, q_BTNH: jax.Array, k_BSKH: jax.Array, visibility: Visibility
) -> tuple[int, list[_Span]]:
    """The length of a block of queries, and the spans of blocks."""
    B, T, N, _ = q_BTNH.shape
    S = k_BSKH.shape[1]
    fitting = max(BLOCK_ELEMENTS // (B * N * S), 1)
    first = config.first if visibility.causal else None
    block = 1 << (fitting.bit_length() - 1)
    if first is not None:
        block = min(block, 1 << (-(-T // SPANS) - 1).bit_length())
    block = min(max(block, SMALLEST_BLOCK), LARGEST_BLOCK, T)
    count = -(-T // block)
    if first is None:
        return block, [_Span(0, count, S)]
    length = -(-count // SPANS)
    spans = []
    for begin in range(0, count, length):
        end = min(begin + length, count)
        keys = min(max(first + end * block, 1), S)
        spans.append(_Span(begin, end - begin, keys))
    return block, spans


def _blocks(x_BTNH: jax.Array, block: int, K: int) -> jax.Array:
    """The queries in blocks, `[I, B, K, G, C, H]`; zeros past the end."""
    B, T, N, H = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, -T % block), (0, 0), (0, 0)))
    return x.reshape(B, -1, block, K, N // K, H).transpose(1, 0, 3, 4, 2, 5)


def _whole(x_IBKGCH: jax.Array, T: int) -> jax.Array:
    """The inverse of `_blocks`."""
    _, B, K, G, _, H = x_IBKGCH.shape
    return x_IBKGCH.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, K * G, H)[:, :T]


def _row(x_BNT: jax.Array, i: jax.Array, block: int, K: int) -> jax.Array:
    """Block i of a number per row, `[B, K, G, C]`; 1 past the end."""
    B, N, T = x_BNT.shape
    x = jnp.pad(x_BNT, ((0, 0), (0, 0), (0, -T % block)), constant_values=1.0)
    return lax.dynamic_slice_in_dim(x, i * block, block, axis=2).reshape(B, K, N // K, block)


def _count(visible_BT: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """Block i of the visible keys, at least 1, `[B, 1, 1, C]`."""
    visible_B1T = visible_BT[:, None].astype(jnp.float32)
    return jnp.maximum(_row(visible_B1T, i, block, 1), 1.0)


def _mask(visibility: Visibility, i: jax.Array, block: int, T: int, S: int) -> jax.Array | None:
    """`[B, 1, 1, C, S]`; False past the last query."""
    row_C = i * block + jnp.arange(block, dtype=jnp.int32)
    query_BC1 = (visibility.start_B[:, None] + row_C[None])[..., None]
    key_11S = jnp.arange(S, dtype=jnp.int32)[None, None]
    segments = (None, None)
    if visibility.query_segments_BT is not None and visibility.key_segments_BS is not None:
        padded = jnp.pad(
            visibility.query_segments_BT, ((0, 0), (0, -T % block)), constant_values=-1
        )
        query_segments = lax.dynamic_slice_in_dim(padded, i * block, block, axis=1)
        segments = (query_segments[..., None], visibility.key_segments_BS[:, None, :S])
    mask = visibility.tile(query_BC1, key_11S, *segments)
    if T % block:
        inside = (row_C < T)[None, :, None]
        mask = inside if mask is None else mask & inside
    return None if mask is None else mask[:, None, None]


def _product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum with float32 sums; of float32 operands it is never rounded to TF32."""
    precision = dispatch.exact_dot(x.dtype)
    return jnp.einsum(letters, x, y, precision=precision, preferred_element_type=jnp.float32)


_run = streaming.differentiable(forward, backward)


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """Computes `reference.run` in groups of batch rows, of which a block stays in the cache."""
    B, T, N, _ = call.q_BTNH.shape
    elements = N * min(SMALLEST_BLOCK, T) * call.k_BSKH.shape[1]
    return in_groups(lambda part, _: _run(config, part), call, rows_within(B, elements))
