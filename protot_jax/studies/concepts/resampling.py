"""Resampling of texts, and the two-sided p-values of the concept report's tests.

Texts are the independent units: tokens of one text are not, and prototypes of one model read the
same texts.

1. `bootstrap_counts` draws texts with replacement. It serves statistics that are sums over texts.
2. `half_samples` draws half of the texts without replacement, which has the spread of a bootstrap
   (Shao & Wu, Annals of Statistics 1989, the delete-half jackknife). It serves statistics that
   would change if a text were counted twice, such as the repetition of tokens in the top texts.
"""

import numpy as np

# 95 %, both tails together.
TAIL = 0.025


def bootstrap_counts(N: int, draws: int, seed: int) -> np.ndarray:
    """How often each of N texts is in each bootstrap sample of N, `[draws, N]`."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(N, np.full(N, 1 / N), size=draws).astype(np.float64)


def half_samples(N: int, draws: int, seed: int) -> np.ndarray:
    """Which texts are in each sample of half of them, `[draws, N]` bool."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(N) < N // 2, (draws, 1)), axis=1)


def percentiles(replicates_S: np.ndarray) -> tuple[float, float]:
    """The percentile interval of a bootstrap."""
    low, high = np.quantile(replicates_S, [TAIL, 1 - TAIL])
    return float(low), float(high)


def bootstrap_p(replicates_S: np.ndarray) -> float:
    """Two-sided p of the hypothesis that the statistic is 0, by inverting the interval."""
    return _two_sided(replicates_S >= 0.0, replicates_S <= 0.0)


def permutation_p(null_S: np.ndarray, value: float) -> float:
    """Two-sided p of a permutation test, with the observed value among the permutations."""
    # Sums of the same numbers in another order must count as equal.
    slack = 1e-9 * max(1.0, abs(value))
    return _two_sided(null_S >= value - slack, null_S <= value + slack)


def means(
    sums_NF: np.ndarray, tokens_N: np.ndarray, counts_SN: np.ndarray
) -> list[tuple[float, float, float]]:
    """Means per token of F quantities, each with its bootstrap interval over texts.

    Args:
      sums_NF: sums of each quantity over the tokens of each text.
      tokens_N: number of tokens of each text.
      counts_SN: counts from `bootstrap_counts`.
    """
    means_F = sums_NF.sum(0) / tokens_N.sum()
    means_SF = counts_SN @ sums_NF / (counts_SN @ tokens_N)[:, None]
    return [
        (float(mean), *percentiles(means_S))
        for mean, means_S in zip(means_F, means_SF.T, strict=True)
    ]


def _two_sided(above_S: np.ndarray, below_S: np.ndarray) -> float:
    tail = 1 + min(np.count_nonzero(above_S), np.count_nonzero(below_S))
    return min(1.0, 2 * float(tail) / (len(above_S) + 1))
