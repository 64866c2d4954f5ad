"""Softmax attention without a whole array of scores, for training on a CPU.

The queries are cut into a few spans, and a span reads only the keys up to its own end, so that four
spans do 5/8 of the square. The backward pass forms the scores of a span again, from the logarithm
of each row's sum (Dao et al., 2022, section 3.1):

    P_ij = exp(s_ij - lse_i),  dP_ij = do_i . v_j,  ds_ij = P_ij (dP_ij - do_i . o_i)

Registered as the fused kernel "spans" of `softmax`; it knows no soft cap. Heads lie before tokens
throughout, so that each product is a plain batched one.
"""

from collections.abc import Iterator
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.visibility import Visibility
from lm_jax.attention import register_fused, softmax
from lm_jax.errors import UsageError

NAME = "spans"
# More do less of the square in products that are thinner.
SPANS = 4


class _Heads(NamedTuple):
    """Queries `[B, K, G, T, H]`, keys and values `[B, K, S, H]`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def _attend(attend: Any, q_BTNH, k_BSKH, v_BSKH, *, seen: Visibility, scale: float, cap: Any):
    del attend
    if cap is not None:
        raise UsageError(
            f"attend: the fused kernel {NAME!r} has no score soft cap; pass the attend unfused"
        )
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    heads = _Heads(q, k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2))
    out_BKGTH = _run(scale, heads, seen)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(scale: float, heads: _Heads, seen: Visibility) -> jax.Array:
    return _forward(scale, heads, seen)[0]


def _forward(scale: float, heads: _Heads, seen: Visibility) -> tuple[jax.Array, Any]:
    outs, sums = [], []
    for rows, keys in _spans(heads, seen):
        scores = _scores(scale, heads, seen, rows, keys)
        top = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
        e = jnp.exp(scores - top)
        total = e.sum(-1, keepdims=True)
        total = jnp.where(total == 0.0, 1.0, total)
        v = heads.v[:, :, keys]
        out = _product("BKGXS,BKSH->BKGXH", e.astype(v.dtype), v) / total
        outs.append(out.astype(v.dtype))
        sums.append(top + jnp.log(total))
    out, sums = jnp.concatenate(outs, 3), jnp.concatenate(sums, 3)
    return out, (heads, seen, out, sums)


def _backward(scale: float, kept: Any, d_out: jax.Array) -> tuple[_Heads, None]:
    heads, seen, out, sums = kept
    mean = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
    dq = []
    dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (heads.k, heads.v))
    for rows, keys in _spans(heads, seen):
        q, k, v = heads.q[:, :, :, rows], heads.k[:, :, keys], heads.v[:, :, keys]
        d_rows = d_out[:, :, :, rows]
        pattern = jnp.exp(_scores(scale, heads, seen, rows, keys) - sums[:, :, :, rows])
        d_pattern = _product("BKGXH,BKSH->BKGXS", d_rows, v)
        d_scores = (pattern * (d_pattern - mean[:, :, :, rows]) * scale).astype(k.dtype)
        dq.append(_product("BKGXS,BKSH->BKGXH", d_scores, k).astype(q.dtype))
        dk = dk.at[:, :, keys].add(_product("BKGXS,BKGXH->BKSH", d_scores, q))
        dv = dv.at[:, :, keys].add(_product("BKGXS,BKGXH->BKSH", pattern.astype(v.dtype), d_rows))
    d_heads = _Heads(jnp.concatenate(dq, 3), dk.astype(heads.k.dtype), dv.astype(heads.v.dtype))
    return d_heads, None


_run.defvjp(_forward, _backward)


def _spans(heads: _Heads, seen: Visibility) -> Iterator[tuple[slice, slice]]:
    """Rows of queries, and the keys that they can see."""
    T, S = heads.q.shape[3], heads.k.shape[2]
    length = -(-T // SPANS)
    for first in range(0, T, length):
        end = min(first + length, T)
        keys = S
        if seen.causal and seen.first is not None:
            keys = min(max(seen.first + end, 1), S)
        yield slice(first, end), slice(0, keys)


def _scores(scale: float, heads: _Heads, seen: Visibility, rows: slice, keys: slice) -> jax.Array:
    """Scaled scores `[B, K, G, X, S]` in float32, -inf where hidden."""
    scores = scale * _product("BKGXH,BKSH->BKGXS", heads.q[:, :, :, rows], heads.k[:, :, keys])
    query_BX1 = (seen.start_B[:, None] + jnp.arange(rows.start, rows.stop)[None])[..., None]
    mask_BXS = seen.tile(query_BX1, jnp.arange(keys.stop)[None, None])
    return scores if mask_BXS is None else jnp.where(mask_BXS[:, None, None], scores, -jnp.inf)


def _product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(letters, x, y, preferred_element_type=jnp.float32)


register_fused(softmax, NAME, _attend)
