"""One chunk of the prefix mean, forward and backward, as pure functions of tiles.

Prototype Transformer, Eq. 2, for C consecutive steps that start from the state (N, D):

    D_i   = beta^i D + sum_{j<i} beta^(i-j) w_j            c_i = read_i / D_i
    A_ij  = sum_r c_ir beta_r^(i-j) w_jr    (j < i)
    out_i = sum_j A_ij v_j + sum_r c_ir beta_r^i N_r

The powers are factored in the dyadic way, so that every one has an exponent >= 0 and nothing can
overflow. Two steps j < i first part at some level: a block of 2h steps with j in its earlier and i
in its later half. With m the first step of the later half,

    beta^(i-j) = beta^(i-m) beta^(m-j)

and log2(C) levels cover every pair once. Sums over steps become matrix products, one per level.

The gradient, with y' the cotangent of out and B_ij = <y'_i, v_j>:

    read'_i  = (sum_{j<i} beta^(i-j) w_j B_ij + beta^i <y'_i, N>) / D_i
    v'_j     = sum_{i>j} A_ij y'_i + sum_r beta^(n-j) w_jr N'_r
    w'_j     = sum_{i>j} beta^(i-j) c_i (B_ij - read'_i) + beta^(n-j) (<N', v_j> + D')
    N'_start = beta^n N' + sum_i beta^i c_i y'_i
    D'_start = beta^n D' - sum_i beta^i c_i read'_i

where n <= C steps are real and (N', D') is the cotangent of the state after them. That of ln beta
is sum_j F_(j+1), with F_t = <N'_t, N_t> + D'_t D_t the flux through the state before step t; a mean
does not change when its past is scaled, so F_j = F_(j+1) - w_j w'_j, and nothing else is needed.
Reads that are not normalised (D = 1 throughout) add read_j read'_j to F_j.

Letters: C steps of a chunk, R prototypes, E value width. Writes of steps that do not exist are 0.

With bfloat16 values, out and v' come from products of operands rounded to bfloat16. B_ij - read'_i
and the steps of F cancel, so whatever they come from keeps 16 bits (`_wide_dot`): operands rounded
to bfloat16 would leave a gradient of ln beta that, for short half-lives, is rounding alone.
"""

from collections.abc import Mapping
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from iaj_kernels.core import dispatch
from iaj_kernels.prefix_mean.state import MASS_FLOOR

# Two programs for each multiprocessor of an H100 or H200 hide some of one another's latency.
_PROGRAMS = 264


def default_tiles(sizes: Mapping[str, int], dtype: Any) -> dict[str, int]:
    """The tiles of a call that tuning has not measured."""
    B, T, R, E = (sizes[letter] for letter in "BTRE")
    # Enough segments to fill the device, none so short that its state outweighs its values.
    wanted = -(-_PROGRAMS // B)
    segment = max(64, 1 << max(-(-T // wanted) - 1, 0).bit_length())
    return {
        "chunk": 16,
        "segment": segment,
        "block_e": min(E, 256),
        "num_warps": 4,
        "num_stages": 2,
        "backward_chunk": 16,
        "backward_segment": segment,
        "backward_num_warps": 8 if R * E > 4096 or dtype == jnp.float32 else 4,
        "backward_num_stages": 1,
    }


class Level(NamedTuple):
    """beta^(i-m) in later halves, else 0, and beta^(m-j) in earlier halves, else 0."""

    half: int
    since_CR: jax.Array
    until_CR: jax.Array


class Decays(NamedTuple):
    """The powers that do not depend on the data: by level, and beta^i since the chunk's start."""

    levels: tuple[Level, ...]
    since_start_CR: jax.Array


def decays(C: int, log2_decay_1R: jax.Array) -> Decays:
    """The powers of a chunk of C steps, C a power of two."""
    step_C1 = _steps(C)
    levels = []
    half = 1
    while half < C:
        later_C1 = (step_C1 & half) != 0
        inside_C1 = step_C1 & (half - 1)
        since_CR = jnp.where(later_C1, _power(inside_C1, log2_decay_1R), 0.0)
        until_CR = jnp.where(later_C1, 0.0, _power(half - inside_C1, log2_decay_1R))
        levels.append(Level(half, since_CR, until_CR))
        half *= 2
    return Decays(tuple(levels), _power(step_C1, log2_decay_1R))


def until_end(C: int, log2_decay_1R: jax.Array, length: jax.Array | int) -> jax.Array:
    """beta^(length - j), where the first `length` steps of the chunk are real; 1 for the others."""
    return _power(jnp.maximum(length - _steps(C), 0), log2_decay_1R)


def advance(
    until_end_CR: jax.Array, write_CR: jax.Array, value_CE: jax.Array, *, wide: bool = True
) -> tuple[jax.Array, jax.Array]:
    """The state [R, E], [1, R] that a chunk leaves when it starts empty.

    Without `wide` the products are rounded like those of an output.
    """
    kept_CR = write_CR * until_end_CR
    dot = _wide_dot if wide else _dot
    return dot(kept_CR.T, value_CE, value_CE.dtype), jnp.sum(kept_CR, axis=0, keepdims=True)


def past_mass(powers: Decays, write_CR: jax.Array, mass_1R: jax.Array) -> jax.Array:
    """D_i before each step."""
    mass_CR = powers.since_start_CR * mass_1R
    for half, since_CR, until_CR in powers.levels:
        mass_CR += since_CR * _block_sums(write_CR * until_CR, 2 * half)
    return mass_CR


def per_mass(mass_CR: jax.Array) -> jax.Array:
    """1 / D, and 0 where the past has no mass that float32 can hold."""
    some_CR = mass_CR > MASS_FLOOR
    return jnp.where(some_CR, 1.0 / jnp.where(some_CR, mass_CR, 1.0), 0.0)


def mixing(powers: Decays, scaled_read_CR: jax.Array, write_CR: jax.Array, dtype) -> jax.Array:
    """A_ij: how much of value j is read at step i; zero for j >= i."""
    C = write_CR.shape[0]
    mixing_CC = jnp.zeros((C, C), jnp.float32)
    for half, since_CR, until_CR in powers.levels:
        product_CC = _dot(scaled_read_CR * since_CR, (write_CR * until_CR).T, dtype)
        mixing_CC += jnp.where(_together(C, half), product_CC, 0.0)
    return mixing_CC


def output(
    powers: Decays,
    scaled_read_CR: jax.Array,
    write_CR: jax.Array,
    value_CE: jax.Array,
    total_RE: jax.Array,
) -> jax.Array:
    """out_i, float32; `scaled_read_CR` is c, `total_RE` is N at the chunk's start."""
    dtype = value_CE.dtype
    mixing_CC = mixing(powers, scaled_read_CR, write_CR, dtype)
    past_CE = _dot(scaled_read_CR * powers.since_start_CR, total_RE, dtype)
    return _dot(mixing_CC, value_CE, dtype) + past_CE


def read_gradient(
    powers: Decays,
    write_CR: jax.Array,
    value_CE: jax.Array,
    d_out_CE: jax.Array,
    total_RE: jax.Array,
    per_mass_CR: jax.Array,
) -> jax.Array:
    """The gradient read'_i of the read gates, float32."""
    C, dtype = write_CR.shape[0], value_CE.dtype
    inner_CC = _dot(d_out_CE, value_CE.T, dtype)
    d_read_CR = powers.since_start_CR * _wide_dot(d_out_CE, total_RE.T, dtype)
    for half, since_CR, until_CR in powers.levels:
        # Rows outside later halves are zeroed by `since_CR`, columns by `until_CR`.
        level_CC = jnp.where(_together(C, half), inner_CC, 0.0)
        d_read_CR += since_CR * _wide_dot(level_CC, write_CR * until_CR, dtype)
    return d_read_CR * per_mass_CR


def write_gradient(
    powers: Decays,
    until_end_CR: jax.Array,
    scaled_read_CR: jax.Array,
    mass_pull_CR: jax.Array | None,
    value_CE: jax.Array,
    d_out_CE: jax.Array,
    d_total_RE: jax.Array,
    d_mass_1R: jax.Array,
) -> jax.Array:
    """The gradient w'_j of the write gates, float32.

    Args:
      mass_pull_CR: c_i read'_i, by which every read lowers with its mass; None if none does.
      d_total_RE: N' after the chunk; `d_mass_1R` likewise.
    """
    C, dtype = scaled_read_CR.shape[0], value_CE.dtype
    inner_transposed_CC = _dot(value_CE, d_out_CE.T, dtype)
    d_write_CR = until_end_CR * (_wide_dot(value_CE, d_total_RE.T, dtype) + d_mass_1R)
    for half, since_CR, until_CR in powers.levels:
        level_CC = jnp.where(_together(C, half), inner_transposed_CC, 0.0)
        later_CR = _wide_dot(level_CC, scaled_read_CR * since_CR, dtype)
        if mass_pull_CR is not None:
            later_CR -= _block_sums(mass_pull_CR * since_CR, 2 * half)
        d_write_CR += until_CR * later_CR
    return d_write_CR


def value_gradient(
    powers: Decays,
    until_end_CR: jax.Array,
    scaled_read_CR: jax.Array,
    write_CR: jax.Array,
    d_out_CE: jax.Array,
    d_total_RE: jax.Array,
) -> jax.Array:
    """v'_j, float32; `d_total_RE` is N' after the chunk."""
    dtype = d_out_CE.dtype
    mixing_CC = mixing(powers, scaled_read_CR, write_CR, dtype)
    later_CE = _dot(write_CR * until_end_CR, d_total_RE, dtype)
    return _dot(mixing_CC.T, d_out_CE, dtype) + later_CE


def retreat(
    powers: Decays,
    scaled_read_CR: jax.Array,
    mass_pull_CR: jax.Array | None,
    d_out_CE: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """What a chunk's reads add to the cotangent of the state [R, E], [1, R] at its start."""
    reach_CR = scaled_read_CR * powers.since_start_CR
    d_total_RE = _wide_dot(reach_CR.T, d_out_CE, d_out_CE.dtype)
    if mass_pull_CR is None:
        return d_total_RE, jnp.zeros((1, reach_CR.shape[1]), jnp.float32)
    return d_total_RE, -jnp.sum(mass_pull_CR * powers.since_start_CR, axis=0, keepdims=True)


def flux_gradient(
    flux_1R: jax.Array, lost_CR: jax.Array, length: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The cotangent of ln beta within a chunk, and the flux at its start.

    Args:
      flux_1R: the flux F at the chunk's end.
      lost_CR: F_(j+1) - F_j for each step.
    """
    # Steps are counted from the chunk's start: a large count would multiply rounding.
    step_C1 = _steps(lost_CR.shape[0]).astype(jnp.float32)
    length = jnp.asarray(length, jnp.float32)
    d_log_decay_1R = length * flux_1R - jnp.sum(step_C1 * lost_CR, axis=0, keepdims=True)
    return d_log_decay_1R, flux_1R - jnp.sum(lost_CR, axis=0, keepdims=True)


def _steps(C: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (C, 1), 0)


def _power(exponent_C1: jax.Array, log2_decay_1R: jax.Array) -> jax.Array:
    return jnp.exp2(exponent_C1.astype(jnp.float32) * log2_decay_1R)


def _together(C: int, half: int) -> jax.Array:
    """True where two steps are in the same block of 2 half steps."""
    row_CC = lax.broadcasted_iota(jnp.int32, (C, C), 0)
    column_CC = lax.broadcasted_iota(jnp.int32, (C, C), 1)
    return (row_CC ^ column_CC) < 2 * half


def _block_sums(x_CR: jax.Array, block: int) -> jax.Array:
    """The sum of the block of rows that each row belongs to, in every row."""
    C, R = x_CR.shape
    sums = jnp.sum(x_CR.reshape(C // block, block, R), axis=1, keepdims=True)
    return jnp.broadcast_to(sums, (C // block, block, R)).reshape(C, R)


def _dot(a: jax.Array, b: jax.Array, dtype) -> jax.Array:
    """`a @ b` with operands of `dtype`."""
    return jnp.dot(
        a.astype(dtype),
        b.astype(dtype),
        precision=dispatch.exact_dot(dtype),
        preferred_element_type=jnp.float32,
    )


def _wide_dot(a: jax.Array, b: jax.Array, dtype) -> jax.Array:
    """`a @ b` to 16 bits or better, where an operand is float32 or exact in `dtype` as it is.

    For bfloat16, float32 operands are split into two bfloat16 terms each (Henry, Tang and Heinecke,
    "Leveraging the bfloat16 artificial intelligence datatype", 2019). TF32 has 11 bits.
    """
    if dtype == jnp.float32:
        return _dot(a, b, dtype)
    # The product of the two low terms is below what the others lose.
    products = [
        _dot(a_term, b_term, dtype)
        for i, a_term in enumerate(_terms(a, dtype))
        for j, b_term in enumerate(_terms(b, dtype))
        if i + j < 2
    ]
    return functools.reduce(jnp.add, products)


def _terms(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    if x.dtype == dtype:
        return (x,)
    high = x.astype(dtype)
    return high, (x - high.astype(x.dtype)).astype(dtype)
