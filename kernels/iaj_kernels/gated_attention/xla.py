"""Bernoulli-gated attention in blocks of plain XLA: the path of CPUs, and the fallback of GPUs.

FlashAttention-2 with the gates of `tile`:

1. The batch is cut into groups of which a tile stays in the cache.
2. Keys and values are laid out head before position, once; the G query heads that share a key head
   are rows of one matrix, so no key is copied per head.
3. Forward: for each block of queries, the blocks of keys that it can see go through `tile.absorb`.
   The log-sum-exp of each row is all that is saved beside the arguments and the output.
4. Backward: the same blocks again. Noise is recomputed from its counters, so the gates are those of
   the forward pass.

Nothing of size T x S is formed: a block takes B N X Y floats.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.attention.batches import CACHED_ELEMENTS, in_groups, rows_within
from iaj_kernels.attention.visibility import Visibility, key_blocks
from iaj_kernels.core import counts, dispatch, noise
from iaj_kernels.gated_attention import tile
from iaj_kernels.gated_attention.config import Call, Config

# The smallest and the largest side of a tile.
_SMALLEST, _LARGEST = 64, 256


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`out_BTNH`, `expected_BN` and `opened_BN`; see `api.gated_attention`."""
    B, T, N, _ = call.q_BTNH.shape
    X, Y = config.blocks or (min(_SMALLEST, T), min(_SMALLEST, call.k_BSKH.shape[1]))

    def of_rows(call: Call, first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _run(config, call._replace(origin_2=call.origin_2.at[0].add(first)))

    return in_groups(of_rows, call, rows_within(B, N * X * Y))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(config: Config, call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _forward(config, call)[0]


class _Padded(NamedTuple):
    """The arrays of a call as its blocks read them; T and S are padded to whole blocks."""

    q_BKGTH: jax.Array
    k_BKSH: jax.Array
    v_BKSH: jax.Array
    bias_1KG11: jax.Array
    stream_BKG11: jax.Array
    visibility: Visibility


class _Saved(NamedTuple):
    """Log-sum-exp in bits and open softmax mass of every row, by query block."""

    lse_IBKGX: jax.Array
    mass_IBKGX: jax.Array


def _blocks(config: Config, B: int, N: int, T: int, S: int) -> tuple[int, int]:
    """(queries, keys) of a tile."""
    if config.blocks is not None:
        return config.blocks
    side = _SMALLEST
    while side < _LARGEST and B * N * (2 * side) * (2 * side) <= CACHED_ELEMENTS:
        side *= 2
    X = min(side, T)
    # Few queries, as in decoding, leave room for more keys.
    Y = side
    while Y < S and B * N * X * (2 * Y) <= CACHED_ELEMENTS:
        Y *= 2
    return X, min(Y, S)


def _laid_out(call: Call, X: int, Y: int) -> _Padded:
    q, k, v, bias_N, seed, origin_2, visibility = call
    B, _, N, _ = q.shape
    K = k.shape[2]
    head_KG = jnp.arange(N, dtype=jnp.int32).reshape(K, N // K) + origin_2[1]
    batch_B = jnp.arange(B, dtype=jnp.int32) + origin_2[0]
    stream_BKG = noise.stream(seed, batch_B[:, None, None], head_KG[None])
    segments = [
        None if ids is None else _padded(ids, block, -1)
        for ids, block in ((visibility.query_segments_BT, X), (visibility.key_segments_BS, Y))
    ]
    return _Padded(
        q_BKGTH=_grouped(q, K, X),
        k_BKSH=_padded(k, Y).transpose(0, 2, 1, 3),
        v_BKSH=_padded(v, Y).transpose(0, 2, 1, 3),
        bias_1KG11=bias_N.reshape(1, K, N // K, 1, 1),
        stream_BKG11=stream_BKG[..., None, None],
        visibility=dataclasses.replace(
            visibility, query_segments_BT=segments[0], key_segments_BS=segments[1]
        ),
    )


def _padded(x: jax.Array, block: int, value: int = 0) -> jax.Array:
    """`x` with whole blocks along axis 1."""
    pads = [(0, 0)] * x.ndim
    pads[1] = (0, -x.shape[1] % block)
    return jnp.pad(x, pads, constant_values=value)


def _grouped(x_BTNH: jax.Array, K: int, X: int) -> jax.Array:
    """`[B, K, G, T, H]` with T in whole blocks of X."""
    x_BTNH = _padded(x_BTNH, X)
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)


def _ungrouped(x_IBKGXH: jax.Array, T: int) -> jax.Array:
    """`[B, T, N, H]` from query blocks."""
    count, B, K, G, X, H = x_IBKGXH.shape
    x_BTNH = x_IBKGXH.transpose(1, 0, 4, 2, 3, 5).reshape(B, count * X, K * G, H)
    return x_BTNH[:, :T]


def _rows(x_BKGTH: jax.Array, i: jax.Array, X: int) -> jax.Array:
    """Block `i` of the queries as the rows of one matrix per key head, `[B, K, G X, H]`."""
    x_BKGXH = lax.dynamic_slice_in_dim(x_BKGTH, i * X, X, 3)
    B, K, G, _, H = x_BKGXH.shape
    return x_BKGXH.reshape(B, K, G * X, H)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Operands in the dtype of `right`, sums in float32."""
    return jnp.einsum(
        equation,
        left.astype(right.dtype),
        right,
        precision=dispatch.exact_dot(right.dtype),
        preferred_element_type=jnp.float32,
    )


def _bits_and_mask(config: Config, padded: _Padded, i, j, X: int, Y: int, T: int, S: int):
    """Random bits of tile (i, j), None where no gate is drawn, and its visibility mask."""
    visibility = padded.visibility
    row_X = i * X + jnp.arange(X, dtype=jnp.int32)
    key_Y = j * Y + jnp.arange(Y, dtype=jnp.int32)
    query_B11X1 = (visibility.start_B[:, None] + row_X[None])[:, None, None, :, None]
    key_1111Y = key_Y[None, None, None, None, :]
    segments = (None, None)
    if visibility.query_segments_BT is not None and visibility.key_segments_BS is not None:
        segments = (
            lax.dynamic_slice_in_dim(visibility.query_segments_BT, i * X, X, 1)[
                :, None, None, :, None
            ],
            lax.dynamic_slice_in_dim(visibility.key_segments_BS, j * Y, Y, 1)[:, None, None, None],
        )
    mask = visibility.tile(query_B11X1, key_1111Y, *segments)
    for tail, inside in (
        (T % X, (row_X < T)[None, None, None, :, None]),
        (S % Y, key_1111Y < S),
    ):
        if tail:
            mask = inside if mask is None else mask & inside
    bits = None
    if config.mode == "sample":
        bits = noise.bits(padded.stream_BKG11, query_B11X1, key_1111Y)
    return bits, mask


def _range(visibility: Visibility, i, X: int, Y: int, S: int) -> tuple[jax.Array, jax.Array]:
    """The key blocks that some batch row of query block `i` can see."""
    causal, window, start_B = visibility.causal, visibility.window, visibility.start_B
    low, _ = key_blocks(causal, window, start_B.min() + i * X, X, S, Y)
    _, high = key_blocks(causal, window, start_B.max() + i * X, X, S, Y)
    return jnp.minimum(low, high), high


def _forward(config: Config, call: Call):
    B, T, N, H = call.q_BTNH.shape
    S, K = call.k_BSKH.shape[1:3]
    G = N // K
    X, Y = _blocks(config, B, N, T, S)
    padded = _laid_out(call, X, Y)

    def query_block(sums, i):
        q_BKXH = _rows(padded.q_BKGTH, i, X)

        def key_block(j, carry):
            rows, mass_BKGX, sum_BKXH = carry
            k_BKYH, v_BKYH = (
                lax.dynamic_slice_in_dim(x, j * Y, Y, 2) for x in (padded.k_BKSH, padded.v_BKSH)
            )
            raw = _product("BKXH,BKYH->BKXY", q_BKXH, k_BKYH).reshape(B, K, G, X, Y)
            bits, mask = _bits_and_mask(config, padded, i, j, X, Y, T, S)
            rows, weight, decay = tile.absorb(config, rows, raw, padded.bias_1KG11, bits, mask)
            mass_BKGX = mass_BKGX * decay + weight.sum(-1)
            added = _product("BKXY,BKYH->BKXH", weight.reshape(B, K, G * X, Y), v_BKYH)
            return rows, mass_BKGX, sum_BKXH * decay.reshape(B, K, G * X, 1) + added

        empty = (
            tile.no_rows((B, K, G, X)),
            jnp.zeros((B, K, G, X), jnp.float32),
            jnp.zeros((B, K, G * X, H), jnp.float32),
        )
        rows, mass_BKGX, sum_BKXH = lax.fori_loop(
            *_range(padded.visibility, i, X, Y, S), key_block, empty
        )
        out_BKGXH, lse_BKGX = tile.finish(rows, sum_BKXH.reshape(B, K, G, X, H))
        mass_BKGX = mass_BKGX / jnp.where(rows.total == 0.0, 1.0, rows.total)
        if config.renormalise:
            out_BKGXH = out_BKGXH / jnp.where(mass_BKGX == 0.0, 1.0, mass_BKGX)[..., None]
        expected, opened = sums
        result = rows.opened.astype(jnp.int32).sum(-1, dtype=jnp.int32)
        sums = (expected + rows.expected.sum(-1), counts.add(opened, result))
        return sums, (out_BKGXH.astype(call.v_BSKH.dtype), _Saved(lse_BKGX, mass_BKGX))

    zeros = (jnp.zeros((B, K, G), jnp.float32), jnp.zeros((B, K, G), jnp.int32))
    count = jnp.arange(-(-T // X), dtype=jnp.int32)
    (expected, opened), (out, saved) = lax.scan(query_block, zeros, count)
    outputs = (_ungrouped(out, T), expected.reshape(B, N), opened.reshape(B, N))
    return outputs, saved


def _run_forward(config, call):
    outputs, saved = _forward(config, call)
    return outputs, (call, outputs[0], saved)


def _run_backward(config, residuals, cotangents):
    call, *rows = residuals
    floats, (out_BTNH, saved), (d_out_BTNH, d_expected_BN) = dispatch.first_order(
        "gated_attention", (call[:4], rows, cotangents[:2])
    )
    call = Call._make((*floats, *call[4:]))
    B, T, N, H = call.q_BTNH.shape
    S, K = call.k_BSKH.shape[1:3]
    G = N // K
    X, Y = _blocks(config, B, N, T, S)
    padded = _laid_out(call, X, Y)
    d_out_BKGTH = _grouped(d_out_BTNH, K, X)
    delta_BTN1 = jnp.einsum(
        "BTNH,BTNH->BTN", d_out_BTNH.astype(jnp.float32), out_BTNH.astype(jnp.float32)
    )[..., None]
    delta_BKGT1 = _grouped(delta_BTN1, K, X)
    d_expected_BKG11 = d_expected_BN.reshape(B, K, G, 1, 1)

    def query_block(carry, block):
        i, saved = block
        q_BKXH, d_out_BKXH = (_rows(x, i, X) for x in (padded.q_BKGTH, d_out_BKGTH))
        delta = lax.dynamic_slice_in_dim(delta_BKGT1, i * X, X, 3)
        lse = saved.lse_IBKGX[..., None]
        shift = jnp.zeros_like(delta)
        if config.renormalise:
            # out = sum A P v / D for D = sum A P: the gradient of A_ij P_ij is (g - delta) / D, and
            # the rows of the softmax's gradient then sum to zero by themselves.
            mass = saved.mass_IBKGX[..., None]
            inverse = 1.0 / jnp.where(mass == 0.0, 1.0, mass)
            d_out_BKXH *= inverse.reshape(B, K, G * X, 1).astype(d_out_BKXH.dtype)
            shift, delta = delta * inverse, shift

        def key_block(j, carry):
            d_q, d_k, d_v, d_bias = carry
            k_BKYH, v_BKYH = (
                lax.dynamic_slice_in_dim(x, j * Y, Y, 2) for x in (padded.k_BKSH, padded.v_BKSH)
            )
            raw = _product("BKXH,BKYH->BKXY", q_BKXH, k_BKYH).reshape(B, K, G, X, Y)
            g = _product("BKXH,BKYH->BKXY", d_out_BKXH, v_BKYH).reshape(B, K, G, X, Y)
            if config.renormalise:
                g -= shift
            bits, mask = _bits_and_mask(config, padded, i, j, X, Y, T, S)
            weight, d_gate, d_raw = tile.backward(
                config, raw, padded.bias_1KG11, bits, mask, lse, g, delta, d_expected_BKG11
            )
            weight, d_raw = (x.reshape(B, K, G * X, Y) for x in (weight, d_raw))
            d_q += _product("BKXY,BKYH->BKXH", d_raw, k_BKYH)
            d_k = _add_at(d_k, _product("BKXY,BKXH->BKYH", d_raw, q_BKXH), j * Y)
            d_v = _add_at(d_v, _product("BKXY,BKXH->BKYH", weight, d_out_BKXH), j * Y)
            return d_q, d_k, d_v, d_bias + d_gate.sum((0, 3, 4))

        empty = jnp.zeros((B, K, G * X, H), jnp.float32)
        d_q, *carry = lax.fori_loop(
            *_range(padded.visibility, i, X, Y, S), key_block, (empty, *carry)
        )
        d_q = (config.scale * d_q).reshape(B, K, G, X, H)
        return tuple(carry), d_q.astype(call.q_BTNH.dtype)

    zeros = jnp.zeros(padded.k_BKSH.shape, jnp.float32)
    count = jnp.arange(-(-T // X), dtype=jnp.int32)
    (d_k, d_v, d_bias), d_q = lax.scan(
        query_block, (zeros, zeros, jnp.zeros((K, G), jnp.float32)), (count, saved)
    )
    d_k, d_v = (x[:, :, :S].transpose(0, 2, 1, 3) for x in (d_k, d_v))
    gradients = (
        _ungrouped(d_q, T),
        (config.scale * d_k).astype(call.k_BSKH.dtype),
        d_v.astype(call.v_BSKH.dtype),
        d_bias.reshape(N),
    )
    # None: no gradient.
    return (Call._make((*gradients, *(None for _ in call[4:]))),)


def _add_at(total_BKSH: jax.Array, block_BKYH: jax.Array, first: jax.Array) -> jax.Array:
    held = lax.dynamic_slice_in_dim(total_BKSH, first, block_BKYH.shape[2], 2)
    return lax.dynamic_update_slice_in_dim(total_BKSH, held + block_BKYH, first, 2)


_run.defvjp(_run_forward, _run_backward)
