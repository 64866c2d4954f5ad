"""The prefix mean twice, by formulas that the package does not use.

`quadratic` forms every share as a softmax over the past in log space, so that no gate and no decay
underflows. It is traced by `tests.rounding.expected`, for values and gradients in float64 and for
bounds. `filtered` is the pair of linear filters N and D by `scipy.signal`, for long sequences.
"""

from typing import Any

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


def filtered(
    write_BTR: np.ndarray, value_BTE: np.ndarray, decay_R: np.ndarray, read_BTR: np.ndarray
) -> np.ndarray:
    """The output, from an empty state: N_i = beta (N_{i-1} + w v), D alike."""
    out_BTE = np.zeros(value_BTE.shape)
    for r, decay in enumerate(decay_R):
        write_BT1 = write_BTR[:, :, r, None]
        total_BTE, mass_BT1 = (
            lfilter([0.0, decay], [1.0, -decay], x, axis=1)
            for x in (write_BT1 * value_BTE, write_BT1)
        )
        out_BTE += read_BTR[:, :, r, None] * total_BTE / np.where(mass_BT1 > 0, mass_BT1, 1.0)
    return out_BTE
