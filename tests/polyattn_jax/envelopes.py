"""Oracles of the theorem tests: the envelopes of the paper's Table 7, and a search for a shift.

From "When Does Polynomial Attention Concentrate?", section 4 and Appendices K and L. Every envelope
is a lower bound on the target's mass for a score-maximal target (margin Delta >= 0) against A
active distractors. Table 7 prints the polynomial one with its inequality turned round; here, as in
Eq. 4, 1 / (1 + S_p) >= 1 / (1 + A (1 - Delta / r_*)^p). Arguments are scalars or arrays that
broadcast as in numpy; pass float64 for float64.
"""

from collections.abc import Callable
import dataclasses

import numpy as np
from scipy import optimize, special

ArrayLike = np.ndarray | float


def margin_envelope(
    g: Callable[[ArrayLike], ArrayLike], r_star: ArrayLike, margin: ArrayLike, active: ArrayLike
) -> ArrayLike:
    """1 / (1 + A g(r_* - Delta) / g(r_*)): Theorem 4.2 for a nondecreasing g with g(0) = 0.

    Needs r_* > 0 and Delta >= 0. At Delta >= r_* no distractor is active and the bound is 1.
    """
    runner_up = np.maximum(np.subtract(r_star, margin), 0)
    return 1 / (1 + active * g(runner_up) / g(np.asarray(r_star)))


def polynomial_envelope(active: ArrayLike, relative_margin: ArrayLike, p: ArrayLike) -> ArrayLike:
    """1 / (1 + A (1 - rho)^p), with rho = Delta / r_* (Eq. 4); 1 from rho = 1 on."""
    return 1 / (1 + active * np.maximum(1 - np.asarray(relative_margin), 0) ** p)


def softmax_envelope(active: ArrayLike, margin: ArrayLike, beta: float = 1.0) -> ArrayLike:
    """1 / (1 + A e^(-beta Delta)); for softmax every other key is an active distractor."""
    return 1 / (1 + active * np.exp(-beta * np.asarray(margin)))


def sigmoid_envelope(active: ArrayLike, u_star: ArrayLike, margin: ArrayLike) -> ArrayLike:
    """1 / (1 + A s(u_* - Delta) / s(u_*)), u_* = z_* + b, for the row-normalised sigmoid."""
    u_star = np.asarray(u_star)
    ratio = special.log_expit(u_star - margin) - special.log_expit(u_star)
    return 1 / (1 + active * np.exp(ratio))


def over_length_weight(z: ArrayLike, p: ArrayLike, length: ArrayLike, alpha: float) -> ArrayLike:
    """max(z, 0)^p / L^alpha: a weight, not a share of the row, so it depends on the length."""
    return np.maximum(z, 0) ** p / length**alpha


@dataclasses.dataclass(frozen=True)
class ShiftWitness:
    """A two-key row whose first weight moves by `change` when `shift` is added to both scores."""

    scores: tuple[float, float]
    shift: float
    change: float


def shift_counterexample(
    phi: Callable[[np.ndarray], np.ndarray],
    *,
    radius: float = 3.0,
    points: int = 13,
    tolerance: float = 1e-9,
) -> ShiftWitness | None:
    """Searches for a row that phi(z_i) / sum_j phi(z_j) treats otherwise after a shift.

    By Theorem 4.1 only exponentials among the continuous positive maps have none, and two keys are
    enough. The search is over a grid of `points` values in [-radius, radius] for both scores and
    the shift, so None says that this grid has no change above `tolerance`. Rows of zero total
    weight before or after the shift do not count.
    """

    def first_weight(z0, z1):
        first, second = phi(np.asarray(z0)), phi(np.asarray(z1))
        total = first + second
        return first / total if total > 0 else np.nan

    def negative_change(point):
        z0, z1, shift = point
        change = abs(first_weight(z0 + shift, z1 + shift) - first_weight(z0, z1))
        return 0.0 if np.isnan(change) else -change

    step = slice(-radius, radius, points * 1j)
    best, value, *_ = optimize.brute(negative_change, (step,) * 3, full_output=True, finish=None)
    if -value <= tolerance:
        return None
    z0, z1, shift = (float(x) for x in best)
    return ShiftWitness((z0, z1), shift, float(-value))
