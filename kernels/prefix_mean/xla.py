"""The prefix mean in plain JAX, chunk by chunk, with its backward written by hand.

A sequence is cut into chunks of 16 steps, and the rest into one shorter chunk; a loop carries the
state from chunk to chunk. Within a chunk the steps meet in products of matrices. No array of size
B T R E is ever made: the forward keeps one state, and for the backward it saves its inputs alone.
The backward

1. runs the chunks again and keeps the state before each, R E / 16 numbers a step,
2. walks the chunks from the last to the first with the cotangents of the state.

T = 1, a step of decoding, is one chunk of one step and costs one update of the state. The
mathematics of a chunk is in `linear_chunk`, and for log gates in `log_chunk`.
"""

import functools
import types
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from kernels import dispatch
from kernels.prefix_mean import linear_chunk, log_chunk
from kernels.prefix_mean.config import Config

# The fastest on a CPU of 4 to 64, forward and backward.
CHUNK = 16


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def prefix_mean(
    config: Config,
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    decay_R: jax.Array,
    read_BTR: jax.Array,
    state: Any,
) -> tuple[jax.Array, Any]:
    """`out_BTE` and the state after the last step, in float32; see `api.prefix_mean`."""
    chunk = _mathematics(config)
    out_BTE = jnp.zeros(value_BTE.shape, jnp.float32)
    for start, count, C in _stretches(write_BTR.shape[1]):
        table = chunk.tables(C, decay_R)

        def step(k, carry, start=start, C=C, table=table):
            out_BTE, state = carry
            parts = _cut((write_BTR, value_BTE, read_BTR), start + k * C, C)
            out_BIE, state = chunk.forward(config, table, *parts, state)
            return lax.dynamic_update_slice_in_dim(out_BTE, out_BIE, start + k * C, 1), state

        out_BTE, state = lax.fori_loop(0, count, step, (out_BTE, state))
    return out_BTE, state


def _mathematics(config: Config) -> types.ModuleType:
    return log_chunk if config.log_write else linear_chunk


def _stretches(T: int) -> list[tuple[int, int, int]]:
    """(first step, number of chunks, their length): whole chunks, then one for what is left."""
    whole, rest = divmod(T, CHUNK)
    return [(0, whole, CHUNK)] * (whole > 0) + [(whole * CHUNK, 1, rest)] * (rest > 0)


def _cut(arrays: tuple[jax.Array, ...], start: jax.Array, C: int) -> tuple[jax.Array, ...]:
    return tuple(lax.dynamic_slice_in_dim(x, start, C, 1).astype(jnp.float32) for x in arrays)


def _forward(config, write_BTR, value_BTE, decay_R, read_BTR, state):
    saved = (write_BTR, value_BTE, decay_R, read_BTR, state)
    return prefix_mean(config, *saved), saved


def _backward(config, saved, cotangents):
    saved, cotangents = dispatch.first_order("prefix_mean", (saved, cotangents))
    write_BTR, value_BTE, decay_R, read_BTR, state = saved
    d_out_BTE, d_state = cotangents
    chunk = _mathematics(config)
    stretches = _stretches(write_BTR.shape[1])
    befores = []
    for start, count, C in stretches:
        table = chunk.tables(C, decay_R)

        def keep(state, k, start=start, C=C, table=table):
            parts = _cut((write_BTR, value_BTE), start + k * C, C)
            return chunk.advance(table, *parts, state), state

        state, before = lax.scan(keep, state, jnp.arange(count))
        befores.append((table, before))

    gradients = tuple(jnp.zeros_like(x) for x in (write_BTR, value_BTE, read_BTR))
    carry = (gradients, jnp.zeros(decay_R.shape, jnp.float32), d_state)
    for (start, count, C), (table, before) in zip(stretches[::-1], befores[::-1], strict=True):

        def step(k, carry, start=start, count=count, C=C, table=table, before=before):
            gradients, d_log_R, d_state = carry
            k = count - 1 - k
            at = start + k * C
            write, value, read, d_out = _cut((write_BTR, value_BTE, read_BTR, d_out_BTE), at, C)
            state = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, k, 0, False), before)
            d_write, d_value, d_log, d_read, d_state = chunk.backward(
                config, table, write, value, read, state, d_out, d_state
            )
            gradients = tuple(
                lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), at, 1)
                for whole, part in zip(gradients, (d_write, d_value, d_read), strict=True)
            )
            return gradients, d_log_R + d_log, d_state

        carry = lax.fori_loop(0, count, step, carry)
    (d_write_BTR, d_value_BTE, d_read_BTR), d_log_R, d_state = carry
    return d_write_BTR, d_value_BTE, d_log_R / decay_R, d_read_BTR, d_state


prefix_mean.defvjp(_forward, _backward)
