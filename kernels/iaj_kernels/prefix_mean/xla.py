"""The prefix mean in plain JAX, chunk by chunk, with its backward written by hand.

A sequence is cut into chunks of 16 steps, and the rest into one shorter chunk. Within a chunk the
steps meet in products of matrices, and a group of chunks shares each product: one chunk alone is
too small for a processor's cores. A loop carries the state from group to group. No array of size
B T R E is formed: the forward keeps the states and pairs of the chunks of one group, 32 chunks
over the batch or B if that is more. For the backward it saves its inputs and the state before each
group, at most R E / 16 numbers a step. The backward walks the groups from the last to the first
with the cotangents of the state, and recomputes the states within a group.

T = 1, a step of decoding, is one chunk of one step and costs one update of the state. The
mathematics of a group is in `linear_chunk`.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core import dispatch
from iaj_kernels.prefix_mean import linear_chunk
from iaj_kernels.prefix_mean.config import Call, Config
from iaj_kernels.prefix_mean.state import State

# The fastest on a CPU of 8, 16 and 32, forward and backward.
CHUNK = 16


class Stretch(NamedTuple):
    """`count` groups of L steps from the step `start` on, and the tables of their chunks."""

    start: int
    count: int
    L: int
    table: Any

    def cut(self, k: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Group k of arrays `[B, T, ...]`, in float32."""
        at = self.start + k * self.L
        return tuple(lax.dynamic_slice_in_dim(x, at, self.L, 1).astype(jnp.float32) for x in arrays)

    def tables(self, k: jax.Array, resets_BT: jax.Array | None) -> linear_chunk.Tables:
        """The tables of group k."""
        if resets_BT is None:
            return self.table
        at = self.start + k * self.L
        return linear_chunk.cut(self.table, lax.dynamic_slice_in_dim(resets_BT, at, self.L, 1))

    def put(self, k: jax.Array, whole: jax.Array, part: jax.Array) -> jax.Array:
        """`whole` with group k replaced."""
        at = self.start + k * self.L
        return lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), at, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(config: Config, call: Call) -> tuple[jax.Array, State]:
    """`out_BTE` and the state after the last step, in float32; see `api.prefix_mean`."""
    return _run(config, call, keep=False)[0]


def _run(config: Config, call: Call, keep: bool):
    """The result, and if `keep` the states before the groups, stretch by stretch."""

    def step(stretch, carry, k):
        out_BTE, state = carry
        write, value, read = stretch.cut(k, call.write_BTR, call.value_BTE, call.read_BTR)
        table = stretch.tables(k, call.resets_BT)
        out_BLE, after = linear_chunk.forward(config, table, write, value, read, state)
        return (stretch.put(k, out_BTE, out_BLE), after), state if keep else None

    carry, befores = (jnp.zeros(call.value_BTE.shape, jnp.float32), call.state), []
    for stretch in _stretches(call.write_BTR.shape, call.decay_R):
        carry, before = lax.scan(functools.partial(step, stretch), carry, jnp.arange(stretch.count))
        befores.append(before)
    return carry, befores


def _stretches(shape: tuple[int, ...], decay_R: jax.Array) -> list[Stretch]:
    """Whole groups, a group of the chunks left, a shorter chunk of the steps left; or fewer."""
    B, T, _ = shape
    together = linear_chunk.chunks_together(B)
    start, stretches = 0, []
    for C, n in ((CHUNK, together), (CHUNK, T // CHUNK % together), (T % CHUNK, 1)):
        count = (T - start) // (C * n) if C and n else 0
        if count:
            stretches.append(Stretch(start, count, C * n, linear_chunk.tables(C, decay_R)))
            start += count * C * n
    return stretches


def _forward(config: Config, call: Call):
    result, befores = _run(config, call, keep=True)
    return result, (call[:4], befores, call.resets_BT)


def _backward(config: Config, saved: Any, cotangents: Any) -> tuple[Call]:
    *saved, resets_BT = saved
    saved, cotangents = dispatch.first_order("prefix_mean", (saved, cotangents))
    (write_BTR, value_BTE, decay_R, read_BTR), befores = saved
    d_out_BTE, d_state = cotangents
    inputs = (write_BTR, value_BTE, read_BTR)

    def step(stretch, before, k, carry):
        gradients, d_log_decay_R, d_state = carry
        k = stretch.count - 1 - k
        state = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, k, 0, keepdims=False), before)
        write, value, read, d_out = stretch.cut(k, *inputs, d_out_BTE)
        d_write, d_value, d_log, d_read, d_state = linear_chunk.backward(
            config, stretch.tables(k, resets_BT), write, value, read, state, d_out, d_state
        )
        parts = (d_write, d_value, d_read)
        gradients = tuple(stretch.put(k, *each) for each in zip(gradients, parts, strict=True))
        return gradients, d_log_decay_R + d_log, d_state

    gradients = tuple(jnp.zeros_like(x) for x in inputs)
    carry = gradients, jnp.zeros(decay_R.shape, jnp.float32), d_state
    stretches = _stretches(write_BTR.shape, decay_R)
    for stretch, before in reversed(list(zip(stretches, befores, strict=True))):
        turn = functools.partial(step, stretch, before)
        carry = lax.fori_loop(0, stretch.count, turn, carry)
    (d_write_BTR, d_value_BTE, d_read_BTR), d_log_decay_R, d_state = carry
    return (Call(d_write_BTR, d_value_BTE, d_log_decay_R / decay_R, d_read_BTR, d_state),)


run.defvjp(_forward, _backward)
