"""The prefix mean twice, by formulas that the package does not use.

`quadratic` forms every share as a softmax over the past in log space, so that no gate and no decay
underflows. It is traced by `tests.rounding.expected`, for values and gradients in float64 and for
bounds. `filtered` is the pair of linear filters N and D by `scipy.signal`, for long sequences, and
`filtered_rounding` what their rounding leaves.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.signal import lfilter


def quadratic(write_BTR: jax.Array, *others: Any, **options: Any) -> dict[str, jax.Array]:
    """`quadratic_of_logarithms` of gates in place of their logarithms."""
    return quadratic_of_logarithms(jnp.log(write_BTR), *others, **options)


def quadratic_of_logarithms(
    log_write_BTR: jax.Array,
    value_BTE: jax.Array,
    decay_R: jax.Array,
    read_BTR: jax.Array,
    total_BRE: jax.Array | None = None,
    mass_BR: jax.Array | None = None,
    *,
    mass_normalisation: bool = True,
) -> dict[str, jax.Array]:
    """The output, and N and D after the last step.

    The state before the first step, if there is one, counts as a write at step 0.
    """
    B, T, R = log_write_BTR.shape
    log_start_BR, start_BRE = jnp.full((B, R), -jnp.inf), jnp.zeros((B, R, value_BTE.shape[-1]))
    if mass_BR is not None:
        log_start_BR, start_BRE = jnp.log(mass_BR), total_BRE / mass_BR[..., None]
    value_BTRE = jnp.repeat(value_BTE[:, :, None], R, 2)
    entry_BJRE = jnp.concatenate([start_BRE[:, None], value_BTRE], 1)
    log_entry_BJR = jnp.concatenate([log_start_BR[:, None], log_write_BTR], 1)
    # Entry 0 is the state, at time 0; entry j the write of step j - 1, visible from time j on.
    time_I = np.arange(T + 1)
    past_IJ = np.concatenate([np.ones((T + 1, 1), bool), time_I[:, None] > time_I[None, :T]], 1)
    lag_IJ = time_I[:, None] - np.concatenate([[0], time_I[:T]])[None]
    log_kept_IJR = np.float32(lag_IJ)[..., None] * jnp.log(decay_R)[None, None]
    log_BIJR = log_entry_BJR[:, None] + log_kept_IJR[None]
    log_BIJR = jnp.where(past_IJ[None, :, :, None], log_BIJR, -jnp.inf)
    top_BIR = jax.lax.stop_gradient(log_BIJR.max(2))
    top_BIR = jnp.where(jnp.isneginf(top_BIR), 0.0, top_BIR)
    part_BIJR = jnp.exp(log_BIJR - top_BIR[:, :, None])
    sum_BIR = part_BIJR.sum(2)
    some_BIR = sum_BIR > 0
    sum_BIR = jnp.where(some_BIR, sum_BIR, 1.0)
    mean_BIRE = jnp.einsum("BIJR,BJRE->BIRE", part_BIJR, entry_BJRE) / sum_BIR[..., None]
    log_mass_BIR = jnp.where(some_BIR, top_BIR + jnp.log(sum_BIR), -jnp.inf)
    total_BIRE = mean_BIRE * jnp.exp(log_mass_BIR)[..., None]
    memory_BIRE = mean_BIRE if mass_normalisation else total_BIRE
    return {
        "out": jnp.einsum("BIR,BIRE->BIE", read_BTR, memory_BIRE[:, :T]),
        "total": total_BIRE[:, T],
        "mass": jnp.exp(log_mass_BIR[:, T]),
    }


class Filtered(NamedTuple):
    """N and D before each step, from an empty state, and the share that is read."""

    total_BTRE: np.ndarray
    mass_BTR1: np.ndarray
    mean_BTRE: np.ndarray


def _filters(write_BTR: np.ndarray, value_BTE: np.ndarray, decay_R: np.ndarray) -> Filtered:
    """N_i = beta (N_{i-1} + w v), D alike."""
    write_BTR1 = write_BTR[..., None]
    total_BTRE, mass_BTR1 = (
        _decaying(x, decay_R) for x in (write_BTR1 * value_BTE[:, :, None], write_BTR1)
    )
    return Filtered(total_BTRE, mass_BTR1, total_BTRE / np.where(mass_BTR1 > 0, mass_BTR1, 1.0))


def _decaying(x_BTRE: np.ndarray, decay_R: np.ndarray) -> np.ndarray:
    """The sum of decay^(i - j) x_j over the j before step i."""
    out_BTRE = np.empty(x_BTRE.shape)
    for r, decay in enumerate(decay_R):
        out_BTRE[:, :, r] = lfilter([0.0, decay], [1.0, -decay], x_BTRE[:, :, r], axis=1)
    return out_BTRE


def filtered(
    write_BTR: np.ndarray, value_BTE: np.ndarray, decay_R: np.ndarray, read_BTR: np.ndarray
) -> np.ndarray:
    """The output, from an empty state."""
    mean_BTRE = _filters(write_BTR, value_BTE, decay_R).mean_BTRE
    return np.einsum("BTR,BTRE->BTE", read_BTR, mean_BTRE)


def filtered_rounding(
    write_BTR: np.ndarray, value_BTE: np.ndarray, decay_R: np.ndarray, read_BTR: np.ndarray
) -> np.ndarray:
    """The standard deviation of the recurrence's output in float32, each operation off by u.

    The variance of N is a filter too: a step adds those of the product w v, of the sum and of the
    decay, and multiplies what there is by the square of the decay. D has no product.
    """
    u = 2.0**-24
    total_BTRE, mass_BTR1, mean_BTRE = _filters(write_BTR, value_BTE, decay_R)
    write_BTR1 = write_BTR[..., None]
    product_BTRE = write_BTR1 * value_BTE[:, :, None]

    def variance(state: np.ndarray, added: np.ndarray, product: np.ndarray | float) -> np.ndarray:
        # Once for the sum, and once for its decay, which is as large before it decays.
        return _decaying(np.square(product) + 2 * np.square(state + added), np.square(decay_R))

    error_total = u * np.sqrt(variance(total_BTRE, product_BTRE, product_BTRE))
    error_mass = u * np.sqrt(variance(mass_BTR1, write_BTR1, 0.0))
    passed = np.hypot(error_total, np.abs(mean_BTRE) * error_mass)
    held = mass_BTR1 - error_mass
    passed = np.where(passed > 0, passed / np.where(held > 0, held, 1.0), 0.0)
    # A ratio is a reciprocal and a product where there is no division.
    error_mean = np.hypot(passed, 3 * u * np.abs(mean_BTRE))
    terms = np.square(read_BTR[..., None] * mean_BTRE).sum(2)
    out_BTE = np.einsum("BTR,BTRE->BTE", read_BTR, mean_BTRE)
    adding = u * np.sqrt(len(decay_R)) * np.sqrt(terms + np.square(out_BTE))
    by_means = np.sqrt(np.square(read_BTR[..., None] * error_mean).sum(2))
    return np.hypot(by_means, adding)
