"""Ratings of players from pairwise games: Bradley-Terry, Elo, length control, agreement.

1. `bradley_terry` fits strengths s so that i beats j with probability sigmoid(s_i - s_j) [1]. A tie
   is half a win each way. Finite strengths exist where every player is linked to every other by
   wins in both directions [2]; elsewhere `ridge` shrinks them.
2. `bootstrap` resamples whole prompts, the independent units: the two orders of a pair, and all
   pairs of a prompt, share its text.
3. `elo` is the online rating of Chatbot Arena [3] over random orders of the games.
4. `length_controlled` adds the relative difference of lengths to the fit, as FastChat does [3].
5. `cohens_kappa` compares the verdicts of two orders with the agreement that their rates give [4].

Arrays end in their axes: P players, Q prompts, G games.

[1] Bradley & Terry, Biometrika 1952.  [2] Ford, American Mathematical Monthly 1957.
[3] Chiang et al., Chatbot Arena, 2024.  [4] Cohen, Educational and Psychological Measurement 1960.
[5] Sun & Tran-Dinh, Generalized self-concordant functions, Mathematical Programming 2019.
"""

from collections.abc import Hashable, Sequence
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special
from scipy.sparse import csgraph

from lm_jax.errors import BadInputError, UsageError
from lm_jax.statistics import Interval

# Of Chatbot Arena: ratings start here, and 400 points are odds of 10 to 1.
START = 1000.0
POINTS = 400 / math.log(10)
K = 4.0
# Weight of the squares of all parameters of `length_controlled`, as FastChat's default.
LENGTH_RIDGE = 0.25
# A fit ends at a gradient of this for each game, or after so many steps.
_GRADIENT = 1e-12
_STEPS = 200


class DisconnectedError(BadInputError):
    """Wins that leave a strength infinite."""


def bradley_terry(wins: ArrayLike, *, ridge: float = 0.0) -> np.ndarray:
    """The strengths of maximum likelihood, natural log-odds with mean zero.

    Args:
      wins: [P, P]; wins[i, j] is how often i beat j, with half of each tie. The diagonal counts
        for nothing.
      ridge: weight of the sum of squared strengths that is taken off the log-likelihood; with any
        positive one strengths are finite.

    Raises:
      UsageError: `wins` is not square, negative or not finite, or `ridge` is negative.
      DisconnectedError: without `ridge`, some players never lost, or never won, against the rest.
    """
    wins = np.array(wins, float)
    if wins.ndim != 2 or wins.shape[0] != wins.shape[1] or len(wins) < 2:
        raise UsageError(f"wins {wins.shape} must be square, one row for each of 2 or more players")
    if not (np.isfinite(wins).all() and (wins >= 0).all()):
        raise UsageError("wins must be finite and 0 or more; count a tie as half a win each way")
    if not ridge >= 0:
        raise UsageError(f"ridge = {ridge} must be 0 or more")
    np.fill_diagonal(wins, 0.0)
    if ridge == 0:
        _check_connected(wins)
    first, second = np.triu_indices(len(wins), 1)
    design = _pairs(first, second, len(wins))
    return _fit(design, wins[first, second], wins[second, first], ridge)


def bootstrap(
    wins_QPP: np.ndarray,
    *,
    ridge: float = 0.0,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Interval]:
    """Strengths of `bradley_terry` with percentile intervals over resampled prompts.

    `wins_QPP` holds the wins on each prompt. `n` of the intervals counts prompts.

    Raises:
      UsageError: as `bradley_terry`, or there are fewer than 2 prompts.
      DisconnectedError: as `bradley_terry`, for the wins of all prompts or of a resample.
    """
    prompts = len(wins_QPP)
    if prompts < 2:
        raise UsageError(f"wins of {prompts} prompt have no bootstrap interval; judge 2 or more")
    strength_P = bradley_terry(wins_QPP.sum(0), ridge=ridge)
    rng = np.random.default_rng(seed)
    replicates = []
    for count in range(resamples):
        weight_Q = np.bincount(rng.integers(prompts, size=prompts), minlength=prompts)
        try:
            drawn = bradley_terry(np.tensordot(weight_Q, wins_QPP, 1), ridge=ridge)
        except DisconnectedError as error:
            raise DisconnectedError(f"resample {count} of the prompts: {error}") from error
        replicates.append(drawn)
    tail = (1 - confidence) / 2
    low_P, high_P = np.quantile(replicates, [tail, 1 - tail], axis=0)
    return [
        Interval(float(strength), float(low), float(high), prompts)
        for strength, low, high in zip(strength_P, low_P, high_P, strict=True)
    ]


def elo_in_order(
    first_G: ArrayLike, second_G: ArrayLike, score_G: ArrayLike, players: int, *, k: float = K
) -> np.ndarray:
    """Online Elo ratings after games in one order, or in several at once.

    Before each game the first player is expected to score 1 / (1 + 10^((R_2 - R_1) / 400)); k times
    what it scores above that moves from the second player to it.

    Args:
      first_G: indices of the first player, [G] or [orders, G]; `second_G` likewise.
      score_G: score of the first player: 1 for a win, 0.5 for a tie, 0 for a loss.
      players: number of players.
      k: the most points that a game moves.

    Returns:
      Ratings, [P] or [orders, P], whose mean stays at 1000.
    """
    first, second, score = (np.atleast_2d(np.asarray(x)) for x in (first_G, second_G, score_G))
    ratings, row = np.full((len(first), players), START), np.arange(len(first))
    for one, other, result in zip(first.T, second.T, score.T, strict=True):
        gap = (ratings[row, one] - ratings[row, other]) / POINTS
        moved = k * (result - special.expit(gap))
        ratings[row, one] += moved
        ratings[row, other] -= moved
    return ratings if np.ndim(first_G) > 1 else ratings[0]


def elo(
    first_G: ArrayLike,
    second_G: ArrayLike,
    score_G: ArrayLike,
    players: int,
    *,
    k: float = K,
    permutations: int = 200,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Interval]:
    """Mean online Elo over random orders of the games, with the interval of single orders.

    The interval says how much the order matters and nothing of other prompts; `n` counts games.
    """
    first_G, second_G, score_G = (np.asarray(x) for x in (first_G, second_G, score_G))
    rng = np.random.default_rng(seed)
    orders = rng.permuted(np.tile(np.arange(score_G.size), (permutations, 1)), axis=1)
    ratings = elo_in_order(first_G[orders], second_G[orders], score_G[orders], players, k=k)
    tail = (1 - confidence) / 2
    low_P, high_P = np.quantile(ratings, [tail, 1 - tail], axis=0)
    return [
        Interval(float(mean), float(low), float(high), score_G.size)
        for mean, low, high in zip(ratings.mean(0), low_P, high_P, strict=True)
    ]


def length_controlled(
    first_G: ArrayLike,
    second_G: ArrayLike,
    score_G: ArrayLike,
    length_G2: ArrayLike,
    players: int,
    *,
    ridge: float = LENGTH_RIDGE,
) -> tuple[np.ndarray, float]:
    """Strengths at equal length, and the log-odds that one standard unit of length adds.

    The log-odds of a game are s_first - s_second + c x, with x = (a - b) / (a + b + 1) of the
    lengths a and b, divided by its root mean square over the games.

    Args:
      first_G: indices of the first player, `[G]` or `[orders, G]`, with `second_G` and `score_G` as
        in `elo_in_order`.
      length_G2: lengths of the first and second player's texts.
      players: number of players.
      ridge: weight of the sum of squares of all parameters, as in `bradley_terry`.
    """
    a_G, b_G = np.asarray(length_G2, float).T
    x_G = (a_G - b_G) / (a_G + b_G + 1)
    size = math.sqrt(np.mean(x_G**2))
    design = _pairs(np.asarray(first_G), np.asarray(second_G), players)
    design = np.column_stack([design, x_G / size if size else x_G])
    score_G = np.asarray(score_G, float)
    *strengths, weight = _fit(design, score_G, 1 - score_G, ridge)
    return np.array(strengths), float(weight)


def cohens_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """Agreement of two ratings of the same items beyond that of independent ones of equal rates.

    kappa = (p_o - p_e) / (1 - p_e), with p_o the share of items that agree and p_e the sum over
    labels of the product of their rates; NaN if both give one and the same label to all.
    """
    if len(first) != len(second) or not first:
        raise UsageError(
            f"cohens_kappa: {len(first)} and {len(second)} labels; give two for each of the items"
        )
    n = len(first)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    expected = sum(first.count(label) * second.count(label) for label in set(first)) / n**2
    return (observed - expected) / (1 - expected) if expected < 1 else math.nan


def _check_connected(wins: np.ndarray) -> None:
    """Refuses wins whose graph, from winner to loser, is not strongly connected [2]."""
    count, part_P = csgraph.connected_components(wins > 0, connection="strong")
    if count == 1:
        return
    for part in range(count):
        inside = part_P == part
        for beaten, what in ((wins[~inside][:, inside], "lost"), (wins[inside][:, ~inside], "won")):
            if not beaten.any():
                names = ", ".join(map(str, np.flatnonzero(inside)))
                raise DisconnectedError(
                    f"wins: player {names} never {what} against the others, so that no finite "
                    "strengths fit; judge more prompts, or give a ridge"
                )


def _pairs(first_G: np.ndarray, second_G: np.ndarray, players: int) -> np.ndarray:
    """[G, P]: 1 for the first player of a game and -1 for the second."""
    return np.eye(players)[first_G] - np.eye(players)[second_G]


def _fit(design: np.ndarray, won: np.ndarray, lost: np.ndarray, ridge: float) -> np.ndarray:
    """Logistic regression without intercept, on counts of wins and losses for each row.

    Newton's method with the step log(1 + d) / d, where d is the largest change of a log-odds: it
    converges from anywhere without evaluating the loss, whose roundoff would end it too early [5].
    The likelihood does not change if all strengths grow by a constant; steps of least norm from
    zero keep their mean at zero.
    """
    x = np.zeros(design.shape[1])
    games = max(float(won.sum() + lost.sum()), 1.0)
    for _ in range(_STEPS):
        p = special.expit(design @ x)
        gradient = design.T @ ((won + lost) * p - won) + 2 * ridge * x
        if np.abs(gradient).max() <= _GRADIENT * games:
            return x
        curvature = (design.T * ((won + lost) * p * (1 - p))) @ design
        step = np.linalg.lstsq(curvature + 2 * ridge * np.eye(len(x)), gradient)[0]
        change = np.abs(design @ step).max()
        x = x - step * (math.log1p(change) / change if change else 1.0)
    raise BadInputError(f"strengths did not converge in {_STEPS} steps; give a larger ridge")
