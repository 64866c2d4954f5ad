"""Ratings against choix, evalica and closed forms; intervals and length control on drawn games."""

import math

import numpy as np
import pytest
import scipy.special

from lm_jax.errors import UsageError
from lm_jax.evaluate import ratings
from lm_jax.evaluate.ratings import DisconnectedError

STRENGTHS = np.array([0.9, 0.1, -0.3, -0.7])
PAIRS = np.array([(i, j) for i in range(4) for j in range(i + 1, 4)])


def drawn(games, *, ties=0.0, seed=0):
    """Games of players of known strength: indices of both, and scores of the first."""
    rng = np.random.default_rng(seed)
    first, second = PAIRS[rng.integers(len(PAIRS), size=games)].T
    score = (rng.random(games) < scipy.special.expit(STRENGTHS[first] - STRENGTHS[second])) * 1.0
    return first, second, np.where(rng.random(games) < ties, 0.5, score)


def counted(first, second, score, players=4):
    wins = np.zeros((players, players))
    np.add.at(wins, (first, second), score)
    np.add.at(wins, (second, first), 1 - score)
    return wins


def test_two_players_have_the_log_ratio_of_their_wins():
    strength = ratings.bradley_terry([[5, 30], [10, 0]])
    # The gradient of a game, at most 1e-12, over the curvature p (1 - p) = 3 / 16 of the gap.
    np.testing.assert_allclose(strength, [math.log(3) / 2, -math.log(3) / 2], rtol=0, atol=1e-11)


def test_wins_in_the_stated_proportions_give_back_the_strengths():
    wins = 100 * scipy.special.expit(STRENGTHS[:, None] - STRENGTHS)
    np.testing.assert_allclose(
        ratings.bradley_terry(wins), STRENGTHS - STRENGTHS.mean(), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_strengths_are_those_of_choix(ridge):
    import choix

    first, second, score = drawn(300)
    games = [
        (int(a), int(b)) if s else (int(b), int(a))
        for a, b, s in zip(first, second, score, strict=True)
    ]
    wanted = choix.opt_pairwise(4, games, alpha=ridge, tol=1e-12)
    strength = ratings.bradley_terry(counted(first, second, score), ridge=ridge)
    np.testing.assert_allclose(strength, wanted - wanted.mean(), rtol=0, atol=1e-6)
    assert abs(strength.mean()) < 1e-12


def winners(evalica, score):
    names = {1.0: evalica.Winner.X, 0.0: evalica.Winner.Y, 0.5: evalica.Winner.Draw}
    return [names[float(one)] for one in score]


def test_strengths_with_ties_are_those_of_evalica():
    import evalica

    first, second, score = drawn(400, ties=0.3)
    result = evalica.bradley_terry(
        first.tolist(), second.tolist(), winners(evalica, score), tolerance=1e-12, limit=10_000
    )
    wanted = np.log(result.scores.sort_index().to_numpy())
    strength = ratings.bradley_terry(counted(first, second, score))
    np.testing.assert_allclose(strength, wanted - wanted.mean(), rtol=0, atol=1e-6)


def test_elo_is_that_of_evalica():
    import evalica

    first, second, score = drawn(200, ties=0.3)
    result = evalica.elo(first.tolist(), second.tolist(), winners(evalica, score))
    wanted = result.scores.sort_index().to_numpy()
    found = ratings.elo_in_order(first, second, score, 4)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_elo_of_two_games_by_hand():
    """After a win at even odds 2 points move; then 1 / (1 + 10^(-4 / 400)) is expected."""
    expected = 1 / (1 + 10 ** (-4 / 400))
    found = ratings.elo_in_order([0, 0], [1, 1], [1.0, 0.5], 2)
    moved = 2 + 4 * (0.5 - expected)
    np.testing.assert_allclose(found, [1000 + moved, 1000 - moved], rtol=1e-15)


def test_elo_over_orders_keeps_its_mean_and_has_no_spread_where_the_order_is_nothing():
    first, second, score = drawn(300)
    rated = ratings.elo(first, second, score, 4, permutations=50)
    # Each game moves points from one player to another: 300 roundings of 1000 points.
    assert abs(np.mean([each.estimate for each in rated]) - 1000) < 300 * 1000 * 2.0**-52
    assert all(each.low < each.estimate < each.high and each.n == 300 for each in rated)
    same = ratings.elo([0] * 9, [1] * 9, [1.0] * 9, 2, permutations=20)
    assert same[0].low == same[0].high
    orders = np.array([[0, 1, 2], [2, 0, 1]])
    games = [np.asarray(x)[orders] for x in (first[:3], second[:3], score[:3])]
    for row, order in zip(ratings.elo_in_order(*games, 4), orders, strict=True):
        alone = ratings.elo_in_order(first[order], second[order], score[order], 4)
        np.testing.assert_array_equal(row, alone)


@pytest.mark.parametrize(
    ("wins", "what"),
    [
        ([[0, 3], [0, 0]], "player 0 never lost|player 1 never won"),
        ([[0, 1, 2], [1, 0, 2], [0, 0, 0]], "player 2 never won|player 0, 1 never lost"),
        ([[0, 1, 0], [1, 0, 0], [0, 0, 0]], "never (lost|won) against the others"),
    ],
)
def test_wins_without_finite_strengths_are_refused_unless_shrunk(wins, what):
    with pytest.raises(DisconnectedError, match=what):
        ratings.bradley_terry(wins)
    strength = ratings.bradley_terry(wins, ridge=0.01)
    assert np.isfinite(strength).all() and abs(strength.mean()) < 1e-9
    assert strength[0] >= strength[-1]


@pytest.mark.parametrize(
    ("wins", "match"),
    [
        ([[0, 1]], "must be square"),
        ([[0]], "must be square"),
        ([[0, -1], [1, 0]], "finite and 0 or more"),
        ([[0, np.nan], [1, 0]], "finite and 0 or more"),
    ],
)
def test_counts_that_are_none_are_refused(wins, match):
    with pytest.raises(UsageError, match=match):
        ratings.bradley_terry(wins)


def test_the_bootstrap_draws_prompts_and_not_games():
    """Copies of each prompt's games say nothing new, and must not narrow the intervals."""
    rng = np.random.default_rng(1)
    wins_QPP = np.zeros((60, 2, 2))
    won = rng.random(60) < 0.6
    wins_QPP[:, 0, 1], wins_QPP[:, 1, 0] = won, ~won
    once = ratings.bootstrap(wins_QPP, resamples=400)
    tenfold = ratings.bootstrap(10 * wins_QPP, resamples=400)
    for a, b in zip(once, tenfold, strict=True):
        np.testing.assert_allclose([a.low, a.high], [b.low, b.high], rtol=0, atol=1e-6)
        assert a.n == 60
    # Half the logit of a share: its standard error by the delta method, 1.96 of it each way.
    share = won.mean()
    wide = 1.96 / (2 * math.sqrt(60 * share * (1 - share)))
    assert once[0].high - once[0].low == pytest.approx(2 * wide, rel=0.25)


def test_a_resample_without_finite_strengths_is_refused():
    wins_QPP = np.zeros((5, 2, 2))
    wins_QPP[:4, 0, 1] = wins_QPP[4, 1, 0] = 1
    with pytest.raises(DisconnectedError, match=r"resample \d+ of the prompts"):
        ratings.bootstrap(wins_QPP)
    assert ratings.bootstrap(wins_QPP, ridge=0.1)[0].high < 10
    with pytest.raises(UsageError, match="no bootstrap interval"):
        ratings.bootstrap(wins_QPP[:1])


def test_length_control_takes_away_what_length_explains():
    """A judge that goes by length alone: the long-winded player leads only without control."""
    rng = np.random.default_rng(2)
    first, second, _ = drawn(4000)
    length_G2 = rng.integers(20, 80, (4000, 2)) + 30 * np.stack([first == 0, second == 0], 1)
    a, b = length_G2.T
    x = (a - b) / (a + b + 1)
    score = (rng.random(4000) < scipy.special.expit(4 * x)) * 1.0
    plain = ratings.bradley_terry(counted(first, second, score))
    controlled, weight = ratings.length_controlled(first, second, score, length_G2, 4)
    assert plain[0] > 0.4 and np.abs(controlled).max() < 0.15
    # Standard error of a weight in logistic regression is at most 1 / sqrt(G / 5) here.
    assert weight == pytest.approx(4 * math.sqrt(np.mean(x**2)), abs=4 / math.sqrt(4000 / 5))


def test_length_control_without_lengths_is_bradley_terry():
    first, second, score = drawn(200, ties=0.2)
    lengths = np.full((200, 2), 50)
    controlled, weight = ratings.length_controlled(first, second, score, lengths, 4, ridge=0.25)
    plain = ratings.bradley_terry(counted(first, second, score), ridge=0.25)
    np.testing.assert_allclose(controlled, plain, rtol=0, atol=1e-9)
    assert weight == 0


@pytest.mark.parametrize(
    ("first", "second", "kappa"),
    [
        # Two raters of 50 items: observed 0.7, expected 0.5 (Cohen's own arithmetic).
        (["y"] * 25 + ["n"] * 25, ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15, 0.4),
        (["a", "b", "tie"], ["a", "b", "tie"], 1.0),
        # Names what stands first, whichever it is.
        (["a"] * 7, ["b"] * 7, 0.0),
        (["a", "b"], ["b", "a"], -1.0),
    ],
)
def test_kappa_of_known_tables(first, second, kappa):
    assert ratings.cohens_kappa(first, second) == pytest.approx(kappa, abs=1e-12)


def test_kappa_is_undefined_for_one_label_and_refused_without_items():
    assert math.isnan(ratings.cohens_kappa(["tie"] * 3, ["tie"] * 3))
    with pytest.raises(UsageError, match="0 and 0 labels"):
        ratings.cohens_kappa([], [])
