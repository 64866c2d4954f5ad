"""A group of chunks of the prefix mean in plain JAX: forward, and backward by hand.

Within a chunk of C steps let i read and j write, both counted from the chunk's start, and let
(N, D) be the state before it. With W the writes, G the reads, c_ir = G_ir / D_ir:

1. D_ir = beta_r^i D_r + sum_{j<i} beta_r^(i-j) W_jr.
2. A_ij = sum_r c_ir beta_r^(i-j) W_jr for j < i, and out_i = sum_j A_ij v_j + sum_r c_ir beta_r^i
   N_r.
3. N becomes beta^C N + sum_j beta^(C-j) W_j v_j, and D likewise.

The chunks of a group, over the batch, are one leading axis X of every product. Only the states go
from chunk to chunk: what each chunk adds to them, the sums of 3, is one product for all, and an
elementwise loop carries them through.

The powers are in tables with exponents of at least 0, and 1 / D is 0 for a mass at the floor, so
nothing overflows. beta^(i-j) W_jr is formed for every pair of a chunk, C R numbers a step, and A is
one small product of a row with them. Cutting A into products of matrices, by whose middle an
exponent splits in two, takes fewer operations and more time.

The backward, with B_ij = <dout_i, v_j> and (dN, dD) the cotangents of the state after the chunk,
which go from chunk to chunk as the states do, last chunk first:

    dG_ir = (sum_j beta^(i-j) W_jr B_ij + beta^i <dout_i, N_r>) / D_ir
    dW_jr = sum_i beta^(i-j) c_ir (B_ij - dG_ir) + beta^(C-j) (<dN_r, v_j> + dD_r)
    dv_j  = sum_i A_ij dout_i + sum_r beta^(C-j) W_jr dN_r
    d ln beta_r = C (<dN_r, N'_r> + dD_r D'_r) - sum_j j W_jr dW_jr        (N', D' after the chunk)
    before the chunk: beta^C dN_r + sum_i c_ir beta^i dout_i, beta^C dD_r - sum_i c_ir beta^i dG_ir

A reset before step s of a chunk takes every product of a step before s with one from s on out of
these sums: the tables are zero there.

The line of ln beta needs no product of its own: the weights of a mean sum to one, so moving every
exponent beta^i of row i moves nothing, and beta^(i-j) is left with its part in j. Positions count
from the chunk's start: counted from the sequence's, the two terms would cancel to no digits. The
gradient is exact in ln beta, as a logit or a half-life asks for it; d beta has its rounding / beta.
Without normalisation c = G, dG has no divisor, dW no -dG, and row i adds i G_ir dG_ir to the last.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.prefix_mean.config import Config
from iaj_kernels.prefix_mean.state import MASS_FLOOR, State, log_of_decay

# Chunks in one product, over the batch. Their states and pairs should stay in a core's cache: 64
# and more take longer where it is cold.
TOGETHER = 32


class Tables(NamedTuple):
    """Powers of the decay: beta^(i-j) for j < i, else 0; beta^i; beta^(C-j); beta^C.

    X is 1 where the chunks of a group have the same.
    """

    pair_XIJR: jax.Array
    start_XIR: jax.Array
    end_XJR: jax.Array
    whole_XR: jax.Array


def chunks_together(B: int) -> int:
    """The largest number of chunks of a sequence in one call."""
    return max(1, TOGETHER // B)


def tables(C: int, decay_R: jax.Array) -> Tables:
    """The tables of a chunk of C steps."""
    log_R = log_of_decay(decay_R)
    step_C = np.arange(C, dtype=np.float32)
    lag_IJ = step_C[:, None] - step_C[None]
    pair_IJR = jnp.exp(np.maximum(lag_IJ, 0.0)[..., None] * log_R[None, None])
    of_a_chunk = (
        jnp.where(lag_IJ[..., None] > 0, pair_IJR, 0.0),
        jnp.exp(step_C[:, None] * log_R[None]),
        jnp.exp((C - step_C)[:, None] * log_R[None]),
        jnp.exp(C * log_R),
    )
    return Tables(*(x[None] for x in of_a_chunk))


def cut(table: Tables, resets_BT: jax.Array) -> Tables:
    """The tables of the chunks of a group whose state is emptied before some steps."""
    C = table.start_XIR.shape[1]
    # How many resets of its chunk are not after a step.
    count_XC = jnp.cumsum(resets_BT.reshape(-1, C), 1)
    masks = Tables(
        count_XC[:, :, None] == count_XC[:, None],
        count_XC == 0,
        count_XC == count_XC[:, -1:],
        count_XC[:, -1] == 0,
    )
    return jax.tree.map(lambda mask, power: jnp.where(mask[..., None], power, 0.0), masks, table)


def forward(
    config: Config,
    table: Tables,
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    read_BTR: jax.Array,
    state: State,
) -> tuple[jax.Array, State]:
    """`out_BTE` of the T steps of a group, whole chunks, and the state after it."""
    before, state = _states(table, write_BTR, value_BTE, state)
    write_XJR, value_XJE, read_XIR = _chunks(table, write_BTR, value_BTE, read_BTR)
    gain_XIR = read_XIR * _inverse_mass(config, table, write_XJR, before)
    # Several products read the gain: XLA would repeat the division in each.
    gain_XIR = lax.optimization_barrier(gain_XIR)
    out_XIE = _dot("XIR,XRE->XIE", gain_XIR * table.start_XIR, before.total_BRE)
    if write_XJR.shape[1] > 1:
        weight_XIJ = _dot("XIR,XIJR->XIJ", gain_XIR, _pairs(table, write_XJR))
        out_XIE += _dot("XIJ,XJE->XIE", weight_XIJ, value_XJE)
    return out_XIE.reshape(value_BTE.shape), state


def backward(
    config: Config,
    table: Tables,
    write_BTR: jax.Array,
    value_BTE: jax.Array,
    read_BTR: jax.Array,
    state: State,
    d_out_BTE: jax.Array,
    d_state: State,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, State]:
    """Gradients of write, value, ln decay (`[R]`), read, and of the state before the group."""
    before, _ = _states(table, write_BTR, value_BTE, state)
    write_XJR, value_XJE, read_XIR, d_out_XIE = _chunks(
        table, write_BTR, value_BTE, read_BTR, d_out_BTE
    )
    C = table.start_XIR.shape[1]
    inverse_XIR = lax.optimization_barrier(_inverse_mass(config, table, write_XJR, before))
    gain_XIR = read_XIR * inverse_XIR
    started_XIR = gain_XIR * table.start_XIR
    kept_XJR = write_XJR * table.end_XJR
    product_XIJ = _dot("XIE,XJE->XIJ", d_out_XIE, value_XJE)

    past_XIR = table.start_XIR * _dot("XIE,XRE->XIR", d_out_XIE, before.total_BRE)
    pair_XIJR = _pairs(table, write_XJR)
    past_XIR += _dot("XIJ,XIJR->XIR", product_XIJ, pair_XIJR)
    d_read_XIR = lax.optimization_barrier(inverse_XIR * past_XIR)

    # What each chunk's own reads add to the cotangent of the state before it.
    d_mass_XR = jnp.zeros_like(before.mass_BR)
    if config.mass_normalisation:
        d_mass_XR -= _sum_over(C, lambda i: started_XIR[:, i] * d_read_XIR[:, i])
    added = State(_outer(started_XIR, d_out_XIE), d_mass_XR)
    d_after, d_state = _carry(table, d_state, added, reverse=True)

    d_end_XJR = _dot("XJE,XRE->XJR", value_XJE, d_after.total_BRE)
    d_end_XJR = lax.optimization_barrier(d_end_XJR + d_after.mass_BR[:, None])

    def turned_XJR(i: int) -> jax.Array:
        turned_XJR = product_XIJ[:, i, :, None]
        if config.mass_normalisation:
            # The difference first: its terms cancel where one write holds nearly all of the mass.
            turned_XJR -= d_read_XIR[:, None, i]
        return table.pair_XIJR[:, i] * (gain_XIR[:, None, i] * turned_XJR)

    d_write_XJR = table.end_XJR * d_end_XJR + _sum_over(C, turned_XJR)
    d_value_XJE = _dot("XJR,XRE->XJE", kept_XJR, d_after.total_BRE)
    d_value_XJE += _outer(_dot("XIR,XIJR->XIJ", gain_XIR, pair_XIJR), d_out_XIE)

    carried_XR = _sum_over(C, lambda j: kept_XJR[:, j] * d_end_XJR[:, j])
    carried_XR += table.whole_XR * d_after.mass_BR * before.mass_BR
    # Over the chunks first: a sum along E, the last axis, is one addition after another.
    flux_R = carried_XR.sum(0)
    passed_XRE = table.whole_XR[..., None] * d_after.total_BRE * before.total_BRE
    flux_R += passed_XRE.sum(0).sum(-1)
    moved_XR = _sum_over(C, lambda j: j * write_XJR[:, j] * d_write_XJR[:, j])
    if not config.mass_normalisation:
        moved_XR -= _sum_over(C, lambda i: i * read_XIR[:, i] * d_read_XIR[:, i])
    d_log_decay_R = C * flux_R - moved_XR.sum(0)
    return (
        d_write_XJR.reshape(write_BTR.shape),
        d_value_XJE.reshape(value_BTE.shape),
        d_log_decay_R,
        d_read_XIR.reshape(read_BTR.shape),
        d_state,
    )


def _chunks(table: Tables, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The chunks of arrays `[B, T, ...]` along one leading axis X, sequence by sequence."""
    C = table.start_XIR.shape[1]
    return tuple(x.reshape(-1, C, x.shape[-1]) for x in arrays)


def _states(
    table: Tables, write_BTR: jax.Array, value_BTE: jax.Array, state: State
) -> tuple[State, State]:
    """The states before the X chunks of a group, and the one after it."""
    write_XJR, value_XJE = _chunks(table, write_BTR, value_BTE)
    kept_XJR = write_XJR * table.end_XJR
    mass_XR = _sum_over(table.end_XJR.shape[1], lambda j: kept_XJR[:, j])
    return _carry(table, state, State(_outer(kept_XJR, value_XJE), mass_XR))


def _carry(table: Tables, state: State, added: State, reverse: bool = False) -> tuple[State, State]:
    """Carries a state through the X chunks: what reaches each of them, and what leaves the last."""
    B = state.mass_BR.shape[0]
    n = added.mass_BR.shape[0] // B
    added = jax.tree.map(lambda x: x.reshape(B, n, *x.shape[1:]), added)
    whole_XR = table.whole_XR
    whole_BnR = jnp.broadcast_to(whole_XR, (B * n, whole_XR.shape[1])).reshape(B, n, -1)

    def step(k: jax.Array, carry: tuple[State, State]) -> tuple[State, State]:
        state, reached = carry
        k = n - 1 - k if reverse else k
        put = functools.partial(lax.dynamic_update_index_in_dim, index=k, axis=1)
        reached = jax.tree.map(put, reached, state)
        new, whole_BR = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, k, 1, keepdims=False), (added, whole_BnR)
        )
        whole = State(whole_BR[..., None], whole_BR)
        return jax.tree.map(lambda w, x, y: w * x + y, whole, state, new), reached

    last, reached = lax.fori_loop(0, n, step, (state, jax.tree.map(jnp.zeros_like, added)))
    return jax.tree.map(lambda x: x.reshape(B * n, *x.shape[2:]), reached), last


def _pairs(table: Tables, write_XJR: jax.Array) -> jax.Array:
    """beta^(i-j) W_jr for j < i, else 0."""
    # Materialised: fused into the product, they would turn it into a slow sum.
    return lax.optimization_barrier(table.pair_XIJR * write_XJR[:, None])


def _inverse_mass(config: Config, table: Tables, write_XJR: jax.Array, before: State) -> jax.Array:
    """1 / D_ir, 0 for no mass; 1 without normalisation."""
    if not config.mass_normalisation:
        return jnp.ones_like(write_XJR)
    mass_XIR = table.start_XIR * before.mass_BR[:, None]
    C = write_XJR.shape[1]
    mass_XIR += _sum_over(C, lambda j: table.pair_XIJR[:, :, j] * write_XJR[:, None, j])
    held_XIR = mass_XIR > MASS_FLOOR
    return jnp.where(held_XIR, 1.0 / jnp.where(held_XIR, mass_XIR, 1.0), 0.0)


def _sum_over(C: int, term: Callable[[int], jax.Array]) -> jax.Array:
    """The sum of term(0) .. term(C - 1), written out: XLA makes one vectorised loop of it."""
    total = term(0)
    for c in range(1, C):
        total += term(c)
    return total


def _outer(x_XCR: jax.Array, y_XCE: jax.Array) -> jax.Array:
    """The sum over C."""
    # XLA's CPU product is faster with its left side already transposed in memory.
    x_XRC = lax.optimization_barrier(x_XCR.swapaxes(1, 2))
    return _dot("XRC,XCE->XRE", x_XRC, y_XCE)


def _dot(letters: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(letters, *arrays, precision="highest")
