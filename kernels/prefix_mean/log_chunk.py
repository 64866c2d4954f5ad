"""One chunk of the prefix mean with log gates: as `linear_chunk`, with shares in place of masses.

The gates come as logarithms, and the state is a mean m and the logarithm l of its mass, so nothing
underflows: the share of write j in the mean that step i reads,

    p_ijr = exp((i-j) ln beta_r + log W_jr - l_ir),

is formed pair by pair, as are p_ir = exp(i ln beta_r + l_r - l_ir) of the state before the chunk,
and l_ir, the logsumexp of what stands before -l_ir. Row i = C is the state after the chunk. A pair
lives for one chunk: B C C R numbers.

The backward, with B_ij = <dout_i, v_j>, X_jr = <dm_r, v_j> and (dm, dl) the cotangents of the state
after the chunk, q its shares and m' its mean:

    dG_ir     = sum_j p_ijr B_ij + p_ir <dout_i, m_r>
    dlogW_jr  = sum_i G_ir p_ijr (B_ij - dG_ir) + q_jr (X_jr - <dm_r, m'_r> + dl_r)
    dv_j      = sum_ir G_ir p_ijr dout_i + sum_r q_jr dm_r
    d ln beta = C dl - sum_j j dlogW_j
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.prefix_mean.config import Config
from kernels.prefix_mean.state import LogState, log_of_decay


class Tables(NamedTuple):
    """(i-j) ln beta for j < i, else -inf; i ln beta. Rows i = 0 .. C."""

    pair_IJR: jax.Array
    start_IR: jax.Array


def chunks_together(B: int) -> int:
    """How many chunks of a sequence one call is given: one, for the memory of the pairs."""
    del B
    return 1


def tables(C: int, decay_R: jax.Array) -> Tables:
    """The tables of a chunk of C steps."""
    log_R = log_of_decay(decay_R)
    step_I = jnp.arange(C + 1, dtype=jnp.float32)
    lag_IJ = step_I[:, None] - step_I[None, :C]
    pair_IJR = lag_IJ[..., None] * log_R[None, None]
    return Tables(
        jnp.where(lag_IJ[..., None] > 0, pair_IJR, -jnp.inf), step_I[:, None] * log_R[None]
    )


def _advance(
    table: Tables, log_write_BJR: jax.Array, value_BJE: jax.Array, state: LogState
) -> LogState:
    """The state after the chunk."""
    last = Tables(table.pair_IJR[-1:], table.start_IR[-1:])
    pair_BIJR, start_BIR, log_mass_BIR = _shares(last, log_write_BJR, state)
    mean_BRE = start_BIR[:, 0, :, None] * state.mean_BRE
    mean_BRE += _dot("BJR,BJE->BRE", pair_BIJR[:, 0], value_BJE)
    return LogState(mean_BRE, log_mass_BIR[:, 0])


def forward(
    config: Config,
    table: Tables,
    log_write_BJR: jax.Array,
    value_BJE: jax.Array,
    read_BIR: jax.Array,
    state: LogState,
) -> tuple[jax.Array, LogState]:
    """`out_BIE`, and the state after the chunk."""
    del config
    before = Tables(table.pair_IJR[:-1], table.start_IR[:-1])
    pair_BIJR, start_BIR, _ = _shares(before, log_write_BJR, state)
    out_BIE = _dot("BIR,BRE->BIE", read_BIR * start_BIR, state.mean_BRE)
    weight_BIJ = _dot("BIR,BIJR->BIJ", read_BIR, pair_BIJR)
    out_BIE += _dot("BIJ,BJE->BIE", weight_BIJ, value_BJE)
    return out_BIE, _advance(table, log_write_BJR, value_BJE, state)


def backward(
    config: Config,
    table: Tables,
    log_write_BJR: jax.Array,
    value_BJE: jax.Array,
    read_BIR: jax.Array,
    state: LogState,
    d_out_BIE: jax.Array,
    d_state: LogState,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, LogState]:
    """Gradients of log write, value, ln decay (`[R]`), read, and of the state before the chunk."""
    del config
    C = log_write_BJR.shape[1]
    mean_BRE = state.mean_BRE
    d_mean_BRE, d_log_mass_BR = d_state
    pair_BIJR, start_BIR, _ = _shares(table, log_write_BJR, state)
    pair_BIJR, end_BJR = pair_BIJR[:, :-1], pair_BIJR[:, -1]
    start_BIR, whole_BR = start_BIR[:, :-1], start_BIR[:, -1]

    product_BIJ = _dot("BIE,BJE->BIJ", d_out_BIE, value_BJE)
    product_BIR = _dot("BIE,BRE->BIR", d_out_BIE, mean_BRE)
    d_read_BIR = _dot("BIJR,BIJ->BIR", pair_BIJR, product_BIJ) + start_BIR * product_BIR
    read_pair_BIJR = read_BIR[:, :, None] * pair_BIJR
    read_start_BIR = read_BIR * start_BIR

    end_product_BJR = _dot("BRE,BJE->BJR", d_mean_BRE, value_BJE)
    before_product_BR = (d_mean_BRE * mean_BRE).sum(-1)
    after_product_BR = whole_BR * before_product_BR + (end_BJR * end_product_BJR).sum(1)
    centre_BR = d_log_mass_BR - after_product_BR

    turned_BIJR = product_BIJ[..., None] - d_read_BIR[:, :, None]
    d_log_write_BJR = (read_pair_BIJR * turned_BIJR).sum(1)
    d_log_write_BJR += end_BJR * (end_product_BJR + centre_BR[:, None])
    d_value_BJE = _dot("BIJ,BIE->BJE", read_pair_BIJR.sum(-1), d_out_BIE)
    d_value_BJE += _dot("BJR,BRE->BJE", end_BJR, d_mean_BRE)
    step_J = jnp.arange(C, dtype=jnp.float32)[None, :, None]
    d_log_decay_R = (C * d_log_mass_BR - (step_J * d_log_write_BJR).sum(1)).sum(0)
    d_before = LogState(
        whole_BR[..., None] * d_mean_BRE + _dot("BIR,BIE->BRE", read_start_BIR, d_out_BIE),
        whole_BR * (before_product_BR + centre_BR)
        + (read_start_BIR * (product_BIR - d_read_BIR)).sum(1),
    )
    return d_log_write_BJR, d_value_BJE, d_log_decay_R, d_read_BIR, d_before


def _shares(
    table: Tables, log_write_BJR: jax.Array, state: LogState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """p_ijr, p_ir and l_ir; an empty mean has no shares and the log mass -inf."""
    pair_BIJR = table.pair_IJR[None] + log_write_BJR[:, None]
    start_BIR = table.start_IR[None] + state.log_mass_BR[:, None]
    top_BIR = jnp.maximum(pair_BIJR.max(2), start_BIR)
    safe_BIR = jnp.where(jnp.isneginf(top_BIR), 0.0, top_BIR)
    pair_BIJR = jnp.exp(pair_BIJR - safe_BIR[:, :, None])
    start_BIR = jnp.exp(start_BIR - safe_BIR)
    # At least 1, the top's own term, unless the past is empty.
    sum_BIR = pair_BIJR.sum(2) + start_BIR
    inverse_BIR = 1.0 / jnp.where(sum_BIR > 0, sum_BIR, 1.0)
    log_mass_BIR = top_BIR + jnp.log(jnp.maximum(sum_BIR, 1.0))
    return pair_BIJR * inverse_BIR[:, :, None], start_BIR * inverse_BIR, log_mass_BIR


def _dot(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(letters, a, b, precision="highest")
