"""The prefix mean in float64 numpy, twice, by formulas that the package does not use.

`quadratic` forms every share as a softmax over the past in log space, so that no gate and no decay
underflows. `filtered` is the pair of linear filters N and D by `scipy.signal`, for long sequences.
"""

import numpy as np
from scipy.signal import lfilter


def quadratic(
    write_BTR: np.ndarray,
    value_BTE: np.ndarray,
    decay_R: np.ndarray,
    read_BTR: np.ndarray,
    total_BRE: np.ndarray | None = None,
    mass_BR: np.ndarray | None = None,
    *,
    log_write: bool = False,
    mass_normalisation: bool = True,
) -> dict[str, np.ndarray]:
    """The output, and N and D after the last step; with log gates the last mean and ln D.

    The state before the first step, if there is one, counts as a write at step 0.
    """
    B, T, R = write_BTR.shape
    with np.errstate(divide="ignore"):
        log_write_BTR = write_BTR if log_write else np.log(write_BTR)
        log_start_BR = np.log(np.zeros((B, R)) if mass_BR is None else mass_BR)
    log_decay_R = np.log(decay_R)
    start_BRE = np.zeros((B, R, value_BTE.shape[-1]))
    if total_BRE is not None:
        start_BRE = total_BRE / mass_BR[..., None]
    value_BTRE = np.repeat(value_BTE[:, :, None], R, 2)
    entry_BJRE = np.concatenate([start_BRE[:, None], value_BTRE], 1)
    log_entry_BJR = np.concatenate([log_start_BR[:, None], log_write_BTR], 1)
    # Entry 0 is the state, at time 0; entry j the write of step j - 1, seen from time j on.
    born_J = np.concatenate([[0], np.arange(T)])
    seen_IJ = np.concatenate(
        [np.ones((T + 1, 1), bool), np.arange(T + 1)[:, None] > np.arange(T)[None]], 1
    )
    lag_IJ = np.arange(T + 1)[:, None] - born_J[None]
    log_BIJR = log_entry_BJR[:, None] + (lag_IJ[..., None] * log_decay_R)[None]
    log_BIJR = np.where(seen_IJ[None, :, :, None], log_BIJR, -np.inf)
    top_BIR = log_BIJR.max(2)
    top_BIR = np.where(np.isneginf(top_BIR), 0.0, top_BIR)
    part_BIJR = np.exp(log_BIJR - top_BIR[:, :, None])
    sum_BIR = part_BIJR.sum(2)
    mean_BIRE = np.einsum("BIJR,BJRE->BIRE", part_BIJR, entry_BJRE)
    mean_BIRE /= np.where(sum_BIR > 0, sum_BIR, 1.0)[..., None]
    with np.errstate(divide="ignore"):
        log_mass_BIR = top_BIR + np.log(sum_BIR)
    total_BIRE = mean_BIRE * np.exp(log_mass_BIR)[..., None]
    memory_BIRE = mean_BIRE if mass_normalisation else total_BIRE
    return {
        "out": np.einsum("BIR,BIRE->BIE", read_BTR, memory_BIRE[:, :T]),
        "total": mean_BIRE[:, T] if log_write else total_BIRE[:, T],
        "mass": log_mass_BIR[:, T] if log_write else np.exp(log_mass_BIR[:, T]),
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
