"""Relation of half-life and token repetition: do prototypes of short half-life repeat tokens?

Prototype Transformer, appendix A.8, Table 21: Spearman's correlation of half-life with token
repetition, and the mean repetition in quartiles of half-life with Cohen's d of the first against
the last, over all prototypes of a model. Half-life and repetition may both change with depth, which
correlates them without any other relation. So those numbers are reported as in the paper but not
tested, and the tests compare the prototypes of one layer:

1. `spearman`: correlation of the ranks of half-life and repetition, both ranked in their layer.
2. `cohens_d`: of repetition less the mean of the layer, shortest against longest quarter of
   half-lives in each layer.
3. p: repetition is permuted within each layer. Hypothesis: it is related to half-life in no layer.
4. Interval: each resample draws half of the texts, which changes the repetition scores, and then
   prototypes of each layer with replacement.

A value that cannot be computed, such as a correlation with a constant, is None.
"""

from collections.abc import Callable, Iterator

import numpy as np
from scipy import stats as scipy_stats

from lm_jax.run.results import finite
from protot_jax.studies.concepts import results
from protot_jax.studies.concepts.resampling import percentiles, permutation_p
from protot_jax.studies.concepts.results import Locality

_NAN = float("nan")
_QUARTERS = (0.25, 0.5, 0.75)

# From half-lives and repetition scores `[S, Q]` of prototypes in layers to S values.
Statistic = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def half_life_repetition(
    half_life_Q: np.ndarray,
    repetition_Q: np.ndarray,
    layer_Q: np.ndarray,
    resampled_SQ: np.ndarray,
    *,
    texts: int,
    seed: int,
) -> Locality:
    """Relates the half-lives of Q prototypes to their repetition scores.

    Args:
      half_life_Q: half-lives in tokens.
      repetition_Q: repetition scores from all texts.
      layer_Q: the layer of each.
      resampled_SQ: repetition in S samples of half of the texts; there are as many permutations.
      texts: number of texts, for the report.
      seed: seed of permutations and of samples of prototypes.
    """
    if not len(half_life_Q):
        nothing = results.Statistic.none(0, texts)
        return Locality(nothing, nothing, None, None, (None,) * 4, (None,) * 3)
    one_layer_Q = np.zeros_like(layer_Q)
    quartile_Q = _quartiles(half_life_Q[None])[0]
    groups = [repetition_Q[quartile_Q == q] for q in range(4)]

    def tested(statistic: Statistic) -> results.Statistic:
        return _tested(
            statistic, half_life_Q, repetition_Q, layer_Q, resampled_SQ, texts=texts, seed=seed
        )

    def overall(statistic: Statistic) -> float | None:
        return finite(statistic(half_life_Q[None], repetition_Q[None], one_layer_Q)[0])

    return Locality(
        spearman=tested(_spearman),
        cohens_d=tested(_cohens_d),
        overall_spearman=overall(_spearman),
        overall_cohens_d=overall(_cohens_d),
        quartiles=tuple(float(group.mean()) if len(group) else None for group in groups),
        edges=tuple(np.quantile(half_life_Q, _QUARTERS).tolist()),
    )


def _tested(
    statistic: Statistic,
    half_life_Q: np.ndarray,
    repetition_Q: np.ndarray,
    layer_Q: np.ndarray,
    resampled_SQ: np.ndarray,
    *,
    texts: int,
    seed: int,
) -> results.Statistic:
    S, Q = resampled_SQ.shape
    value = float(statistic(half_life_Q[None], repetition_Q[None], layer_Q)[0])
    if not np.isfinite(value):
        return results.Statistic.none(Q, texts)
    rng = np.random.default_rng(seed)
    half_life_SQ = np.broadcast_to(half_life_Q, (S, Q))
    owner_SQ, drawn_SQ = (np.tile(np.arange(Q), (S, 1)) for _ in range(2))
    for member_R in _layers(layer_Q):
        owner_SQ[:, member_R] = rng.permuted(owner_SQ[:, member_R], axis=1)
        drawn_SQ[:, member_R] = rng.choice(member_R, (S, len(member_R)))
    null_S = statistic(half_life_SQ, repetition_Q[owner_SQ], layer_Q)
    resampled_SQ = np.take_along_axis(resampled_SQ, drawn_SQ, axis=1)
    replicates_S = statistic(half_life_Q[drawn_SQ], resampled_SQ, layer_Q)
    # A sample may repeat one prototype only; where layers are small, most samples do.
    known_S = replicates_S[np.isfinite(replicates_S)]
    low, high = percentiles(known_S) if len(known_S) > S / 2 else (_NAN, _NAN)
    return results.Statistic.of(value, low, high, permutation_p(null_S, value), Q, texts)


def _spearman(
    half_life_SQ: np.ndarray, repetition_SQ: np.ndarray, layer_Q: np.ndarray
) -> np.ndarray:
    products_S, squares_2S = 0.0, np.zeros((2, len(half_life_SQ)))
    for member_R in _layers(layer_Q):
        x_SR, y_SR = (
            # The mean of ranks, with or without ties.
            scipy_stats.rankdata(values[:, member_R], axis=1) - (len(member_R) + 1) / 2
            for values in (half_life_SQ, repetition_SQ)
        )
        products_S = products_S + (x_SR * y_SR).sum(1)
        squares_2S += np.square([x_SR, y_SR]).sum(2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return products_S / np.sqrt(squares_2S.prod(0))


def _cohens_d(
    half_life_SQ: np.ndarray, repetition_SQ: np.ndarray, layer_Q: np.ndarray
) -> np.ndarray:
    first_SQ, last_SQ = np.zeros((2, *half_life_SQ.shape), bool)
    score_SQ = np.array(repetition_SQ, float)
    for member_R in _layers(layer_Q):
        quartile_SR = _quartiles(half_life_SQ[:, member_R])
        first_SQ[:, member_R], last_SQ[:, member_R] = quartile_SR == 0, quartile_SR == 3
        score_SQ[:, member_R] -= score_SQ[:, member_R].mean(1, keepdims=True)
    # `lm_jax.statistics.cohens_d` takes one pair at a time; here are thousands.
    count_2S = np.sum([first_SQ, last_SQ], axis=2)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_2S = np.sum([score_SQ * first_SQ, score_SQ * last_SQ], axis=2) / count_2S
        deviation_SQ = score_SQ - np.where(first_SQ, mean_2S[0, :, None], mean_2S[1, :, None])
        squares_S = (np.square(deviation_SQ) * (first_SQ | last_SQ)).sum(1)
        effect_S = (mean_2S[0] - mean_2S[1]) / np.sqrt(squares_S / (count_2S.sum(0) - 2))
    # Equal scores less their mean differ by rounding.
    return np.where((count_2S.min(0) >= 2) & (squares_S > 1e-20), effect_S, _NAN)


def _quartiles(half_life_SR: np.ndarray) -> np.ndarray:
    """Quartile of each value in its row, 0 to 3; an edge is in the lower one, as in Table 21."""
    edges_3S = np.quantile(half_life_SR, _QUARTERS, axis=1)
    return (edges_3S[..., None] < half_life_SR).sum(0)


def _layers(layer_Q: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of the prototypes of each layer."""
    return (np.flatnonzero(layer_Q == layer) for layer in np.unique(layer_Q))
