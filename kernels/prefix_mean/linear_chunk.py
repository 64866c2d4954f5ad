"""One chunk of the prefix mean in plain JAX: forward, and backward by hand.

Within a chunk of C steps let i read and j write, both counted from the chunk's start, and let
(N, D) be the state before it. With W the writes, G the reads, c_ir = G_ir / D_ir:

1. D_ir = beta_r^i D_r + sum_{j<i} beta_r^(i-j) W_jr.
2. A_ij = sum_r c_ir beta_r^(i-j) W_jr for j < i, and out_i = sum_j A_ij v_j + sum_r c_ir beta_r^i
   N_r.
3. N becomes beta^C N + sum_j beta^(C-j) W_j v_j, and D likewise.

The powers stand in tables with exponents of at least 0, and 1 / D is 0 for a mass at the floor, so
nothing overflows.

The backward, with B_ij = <dout_i, v_j> and (dN, dD) the cotangents of the state after the chunk:

    dG_ir = (sum_j beta^(i-j) W_jr B_ij + beta^i <dout_i, N_r>) / D_ir
    dW_jr = sum_i beta^(i-j) c_ir (B_ij - dG_ir) + beta^(C-j) (<dN_r, v_j> + dD_r)
    dv_j  = sum_i A_ij dout_i + sum_r beta^(C-j) W_jr dN_r
    d ln beta_r = C (<dN_r, N'_r> + dD_r D'_r) - sum_j j W_jr dW_jr        (N', D' after the chunk)

The last line needs no product of its own: the weights of a mean sum to one, so moving every
exponent beta^i of row i moves nothing, and beta^(i-j) is left with its part in j. Positions count
from the chunk's start: counted from the sequence's, the two terms would cancel to no digits. The
gradient is exact in ln beta, as a logit or a half-life asks for it; d beta has its rounding / beta.
Without normalisation c = G, dG has no divisor, dW no -dG, and row i adds i G_ir dG_ir to the last.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from kernels.prefix_mean.config import Config
from kernels.prefix_mean.state import MASS_FLOOR, State, log_of_decay


class Tables(NamedTuple):
    """Powers of the decay: beta^(i-j) for j < i, else 0; beta^i; beta^(C-j); beta^C."""

    pair_IJR: jax.Array
    start_IR: jax.Array
    end_JR: jax.Array
    whole_R: jax.Array


def tables(C: int, decay_R: jax.Array) -> Tables:
    """The tables of a chunk of C steps."""
    log_R = log_of_decay(decay_R)
    step_C = jnp.arange(C, dtype=jnp.float32)
    lag_IJ1 = (step_C[:, None] - step_C[None, :])[..., None]
    pair_IJR = jnp.exp(jnp.maximum(lag_IJ1, 0) * log_R[None, None])
    return Tables(
        jnp.where(lag_IJ1 > 0, pair_IJR, 0.0),
        jnp.exp(step_C[:, None] * log_R[None]),
        jnp.exp((C - step_C)[:, None] * log_R[None]),
        jnp.exp(C * log_R),
    )


def advance(table: Tables, write_BJR: jax.Array, value_BJE: jax.Array, state: State) -> State:
    """The state after the chunk."""
    total_BRE, mass_BR = state
    kept_BJR = write_BJR * table.end_JR[None]
    # XLA's CPU product is faster with its left side already transposed in memory.
    kept_BRJ = lax.optimization_barrier(kept_BJR.swapaxes(1, 2))
    return State(
        table.whole_R[None, :, None] * total_BRE + _dot("BRJ,BJE->BRE", kept_BRJ, value_BJE),
        table.whole_R[None] * mass_BR + kept_BJR.sum(1),
    )


def forward(
    config: Config,
    table: Tables,
    write_BJR: jax.Array,
    value_BJE: jax.Array,
    read_BIR: jax.Array,
    state: State,
) -> tuple[jax.Array, State]:
    """`out_BIE`, and the state after the chunk."""
    gain_BIR = read_BIR * _inverse_mass(config, table, write_BJR, state)
    out_BIE = _dot("BIR,BRE->BIE", gain_BIR * table.start_IR[None], state.total_BRE)
    if write_BJR.shape[1] > 1:
        weight_BIJ = _dot("BIR,IJR,BJR->BIJ", gain_BIR, table.pair_IJR, write_BJR)
        out_BIE += _dot("BIJ,BJE->BIE", weight_BIJ, value_BJE)
    return out_BIE, advance(table, write_BJR, value_BJE, state)


def backward(
    config: Config,
    table: Tables,
    write_BJR: jax.Array,
    value_BJE: jax.Array,
    read_BIR: jax.Array,
    state: State,
    d_out_BIE: jax.Array,
    d_state: State,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, State]:
    """Gradients of write, value, ln decay (`[R]`), read, and of the state before the chunk."""
    C = write_BJR.shape[1]
    total_BRE, mass_BR = state
    d_total_BRE, d_mass_BR = d_state
    inverse_BIR = _inverse_mass(config, table, write_BJR, state)
    gain_BIR = read_BIR * inverse_BIR
    started_BIR = gain_BIR * table.start_IR[None]
    kept_BJR = write_BJR * table.end_JR[None]
    product_BIJ = _dot("BIE,BJE->BIJ", d_out_BIE, value_BJE)

    past_BIR = _dot("IJR,BJR,BIJ->BIR", table.pair_IJR, write_BJR, product_BIJ)
    past_BIR += table.start_IR[None] * _dot("BIE,BRE->BIR", d_out_BIE, total_BRE)
    d_read_BIR = inverse_BIR * past_BIR
    d_end_BJR = _dot("BJE,BRE->BJR", value_BJE, d_total_BRE)
    d_write_BJR = table.end_JR[None] * (d_end_BJR + d_mass_BR[:, None])
    # The difference first: its terms cancel where one write holds nearly all of the mass.
    turned_BIJR = product_BIJ[..., None]
    if config.mass_normalisation:
        turned_BIJR -= d_read_BIR[:, :, None]
    d_write_BJR += _dot("IJR,BIJR->BJR", table.pair_IJR, gain_BIR[:, :, None] * turned_BIJR)
    d_value_BJE = _dot("BJR,BRE->BJE", kept_BJR, d_total_BRE)
    if C > 1:
        weight_BIJ = _dot("BIR,IJR,BJR->BIJ", gain_BIR, table.pair_IJR, write_BJR)
        d_value_BJE += _dot("BIJ,BIE->BJE", weight_BIJ, d_out_BIE)

    flux_BR = (kept_BJR * (d_end_BJR + d_mass_BR[:, None])).sum(1) + table.whole_R[None] * (
        (d_total_BRE * total_BRE).sum(-1) + d_mass_BR * mass_BR
    )
    step_C = jnp.arange(C, dtype=jnp.float32)[None, :, None]
    moved_BR = (step_C * write_BJR * d_write_BJR).sum(1)
    if not config.mass_normalisation:
        moved_BR -= (step_C * read_BIR * d_read_BIR).sum(1)
    d_log_decay_R = (C * flux_BR - moved_BR).sum(0)
    d_total_BRE = table.whole_R[None, :, None] * d_total_BRE
    d_total_BRE += _dot("BIR,BIE->BRE", started_BIR, d_out_BIE)
    d_mass_BR = table.whole_R[None] * d_mass_BR
    if config.mass_normalisation:
        d_mass_BR -= (started_BIR * d_read_BIR).sum(1)
    return d_write_BJR, d_value_BJE, d_log_decay_R, d_read_BIR, State(d_total_BRE, d_mass_BR)


def _inverse_mass(config: Config, table: Tables, write_BJR: jax.Array, state: State) -> jax.Array:
    """1 / D_ir, 0 for no mass; 1 without normalisation."""
    if not config.mass_normalisation:
        return jnp.ones_like(write_BJR)
    mass_BIR = table.start_IR[None] * state.mass_BR[:, None]
    mass_BIR += _dot("IJR,BJR->BIR", table.pair_IJR, write_BJR)
    held_BIR = mass_BIR > MASS_FLOOR
    return jnp.where(held_BIR, 1.0 / jnp.where(held_BIR, mass_BIR, 1.0), 0.0)


def _dot(letters: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(letters, *arrays, precision="highest")
