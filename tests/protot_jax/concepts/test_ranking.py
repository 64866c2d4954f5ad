"""Top texts, top tokens and repetition of gates that are written out."""

import numpy as np
import pytest
from scipy import stats

from protot_jax.concepts import ranking
from protot_jax.concepts.locality import half_life_repetition


def test_texts_go_by_mean_or_sum_of_the_tokens_that_count():
    gate_NTR = np.array([[[0.9], [0.4], [0.4]], [[0.9], [0.5], [0.0]]])
    counted_NT = np.array([[False, True, True], [False, True, False]])
    mean_NR, sum_NR = ranking.text_scores(gate_NTR, counted_NT)
    np.testing.assert_allclose(mean_NR[:, 0], [0.4, 0.5])
    np.testing.assert_allclose(sum_NR[:, 0], [0.8, 0.5])
    assert ranking.top_texts(mean_NR[:, 0], 5).tolist() == [1, 0]
    assert ranking.top_texts(sum_NR[:, 0], 1).tolist() == [0]


def test_of_equal_texts_the_earlier_comes_first():
    assert ranking.top_texts(np.array([0.1, 0.3, 0.1, 0.3]), 3).tolist() == [1, 3, 0]


def test_a_token_needs_some_occurrences_to_be_a_top_token():
    token_M = np.array([7] * 5 + [8] * 10 + [9])
    gate_MR = np.concatenate([np.full(5, 0.6), np.full(10, 0.4), [1.0]])[:, None]
    (by_mean,) = ranking.top_tokens(token_M, gate_MR, 3, "mean")
    (by_sum,) = ranking.top_tokens(token_M, gate_MR, 3, "sum")
    assert [token.id for token in by_mean] == [7, 8]
    assert [token.id for token in by_sum] == [8, 7]
    assert (by_mean[0].mean, by_mean[0].sum, by_mean[0].count) == pytest.approx((0.6, 3.0, 5))


def test_repetition_counts_the_most_activating_tokens_of_each_text():
    token_NT = np.array([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8, 9]])
    gate_NT = np.array([[9, 1, 1, 1, 1, 0, 9], [0, 2, 2, 2, 2, 2, 0]]) / 10
    counted_NT = np.ones((2, 7), bool)
    counted_NT[0, 0] = False
    # 7, 2, 3, 4, 5 of the first text, 2, 3, 4, 5, 8 of the second: 6 of 10 differ.
    assert ranking.repetition(token_NT, gate_NT, counted_NT, [0, 1]) == pytest.approx(0.4)
    assert ranking.repetition(token_NT, gate_NT, counted_NT, [1]) == 0.0


def test_a_falling_repetition_is_found_with_its_quartiles():
    rng = np.random.default_rng(0)
    half_life_Q = np.linspace(1, 30, 40)
    repetition_Q = 0.6 - 0.01 * half_life_Q + 0.02 * rng.normal(size=40)
    found = half_life_repetition(half_life_Q, repetition_Q, permutations=199, seed=0)
    assert found.spearman.value < -0.9
    # Two-sided, and no permutation comes near.
    assert found.spearman.p == pytest.approx(2 / 200)
    assert found.spearman.low < found.spearman.value < found.spearman.high < -0.8
    assert found.spearman.n == 40
    assert found.quartiles == pytest.approx(
        [repetition_Q[start : start + 10].mean() for start in range(0, 40, 10)]
    )
    assert found.cohens_d.value > 3
    assert found.cohens_d.p < 0.02
    assert found.cohens_d.n == 20


def test_spearman_and_its_p_are_those_of_scipy():
    rng = np.random.default_rng(1)
    half_life_Q = rng.random(60)
    repetition_Q = np.round(rng.random(60) - 0.1 * half_life_Q, 1)
    found = half_life_repetition(half_life_Q, repetition_Q, permutations=999, seed=0).spearman
    expected = stats.spearmanr(half_life_Q, repetition_Q)
    assert found.value == pytest.approx(expected.statistic, rel=1e-12)
    assert 0.01 < expected.pvalue < 0.5
    # Three standard errors of a share of 999.
    error = (expected.pvalue * (1 - expected.pvalue) / 999) ** 0.5
    assert found.p == pytest.approx(expected.pvalue, abs=3 * error + 0.005)


@pytest.mark.parametrize("size", [0, 3, 12])
def test_what_cannot_be_computed_is_nan(size):
    found = half_life_repetition(np.full(size, 6.58), np.full(size, 0.5), permutations=99, seed=0)
    assert np.isnan([found.spearman.value, found.spearman.p, found.cohens_d.value]).all()
    assert found.spearman.n == size
