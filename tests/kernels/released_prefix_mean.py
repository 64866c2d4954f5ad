"""The prefix mean as the authors' released code computes it, kept to measure where it is exact.

Its arithmetic, not its code: gates are divided by beta^j + 1e-12, summed, and multiplied by
(1 - beta) beta^i; the sum is moved on by one step; the mass is at least 1e-6. In float32 this
forgets in two stages. Once beta^j is below 1e-12, after 40 half-lives, later writes are no longer
discounted against one another. Once the mass is below its clamp the mean shrinks to zero.

`python -m tests.kernels.released_prefix_mean --out=FILE` writes the data of the figure.
"""

import argparse
from collections.abc import Callable
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels import prefix_mean

DATA = (
    Path(__file__).parents[2] / "results" / "arithmetic" / "released_decay_error" / "summary.json"
)
# One step, the initial decay 0.9 of the paper's code, and a long memory.
HALF_LIVES = (1.0, float(-np.log(2) / np.log(0.9)), 50.0)
POSITIONS = tuple(range(2, 161, 2))

Form = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def released(
    write_BTR: np.ndarray, value_BTE: np.ndarray, decay_R: np.ndarray, read_BTR: np.ndarray
) -> np.ndarray:
    """`out_BTE` in float32; the first step reads zero."""
    f32 = np.float32
    step_T = np.arange(write_BTR.shape[1], dtype=f32)
    power_TR = decay_R.astype(f32) ** step_T[:, None]
    scaled_BTR = write_BTR.astype(f32) / (power_TR + f32(1e-12))
    outer_TR = (f32(1) - decay_R.astype(f32)) * power_TR
    mass_BTR = outer_TR * np.cumsum(scaled_BTR, axis=1)
    scaled_BTRE = scaled_BTR[..., None] * value_BTE.astype(f32)[:, :, None]
    total_BTRE = outer_TR[..., None] * np.cumsum(scaled_BTRE, axis=1)
    mean_BTRE = total_BTRE / np.maximum(mass_BTR, f32(1e-6))[..., None]
    mean_BTRE = np.roll(mean_BTRE, 1, axis=1)
    mean_BTRE[:, 0] = 0
    return np.einsum("BTR,BTRE->BTE", read_BTR.astype(f32), mean_BTRE)


def ours(
    write_BTR: np.ndarray, value_BTE: np.ndarray, decay_R: np.ndarray, read_BTR: np.ndarray
) -> np.ndarray:
    """`iaj_kernels.prefix_mean`."""
    arrays = (jnp.asarray(x, jnp.float32) for x in (write_BTR, value_BTE, decay_R, read_BTR))
    return np.asarray(jax.jit(prefix_mean)(*arrays))


def forgetting(form: Form, half_life: float) -> dict[str, list[float | None]]:
    """How one prototype forgets even writes, at `POSITIONS` half-lives into a sequence.

    Returns:
      discount_error: the weight of the write one half-life back over that of the last write,
        relative to beta^lag, less 1; None where the last write weighs nothing.
      mean_of_ones: the mean when every value is 1.
    """
    read_at_P = np.round(np.array(POSITIONS) * half_life).astype(int)
    lag = round(half_life)
    P, T = len(POSITIONS), read_at_P.max() + 1
    decay = np.float32(np.exp2(-1.0 / half_life))
    value_PTE = np.zeros((P, T, 3), np.float32)
    value_PTE[np.arange(P), read_at_P - 1, 0] = 1.0
    value_PTE[np.arange(P), read_at_P - 1 - lag, 1] = 1.0
    value_PTE[..., 2] = 1.0
    even_PT1 = np.full((P, T, 1), 0.5, np.float32)
    out_PTE = form(even_PT1, value_PTE, np.array([decay]), np.ones((P, T, 1), np.float32))
    last_P, older_P, ones_P = out_PTE[np.arange(P), read_at_P].T.astype(float)
    want = float(decay) ** lag
    return {
        "discount_error": [
            _short(older / last / want - 1.0) if last else None
            for last, older in zip(last_P, older_P, strict=True)
        ],
        "mean_of_ones": [_short(x) for x in ones_P],
    }


def _short(x: float) -> float:
    return float(f"{x:.3g}")


def figure_data() -> dict[str, object]:
    """Data of the figure: a curve per half-life, for the released arithmetic and for ours."""
    return {
        "half_lives": [_short(each) for each in HALF_LIVES],
        "position_in_half_lives": list(POSITIONS),
        "curves": {
            name: [forgetting(form, each) for each in HALF_LIVES]
            for name, form in (("released", released), ("ours", ours))
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes how both arithmetics forget, as JSON.")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.parse_args().out.write_text(json.dumps(figure_data(), indent=1) + "\n", "utf-8")
