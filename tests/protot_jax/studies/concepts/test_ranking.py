"""Top texts, top tokens and repetition of gates that are written out."""

import numpy as np
import pytest

from protot_jax.studies.concepts import ranking
from protot_jax.studies.concepts.resampling import half_samples


def test_texts_go_by_mean_or_sum_of_the_tokens_that_count():
    gate_NTR = np.array([[[0.9], [0.4], [0.4]], [[0.9], [0.5], [0.0]]])
    token_mask_NT = np.array([[False, True, True], [False, True, False]])
    mean_NR, sum_NR = ranking.text_scores(gate_NTR, token_mask_NT)
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
    token_mask_NT = np.ones((2, 7), bool)
    token_mask_NT[0, 0] = False
    # 7, 2, 3, 4, 5 of the first text, 2, 3, 4, 5, 8 of the second: 6 of 10 differ.
    assert ranking.repetition(token_NT, gate_NT, token_mask_NT, [0, 1]) == pytest.approx(0.4)
    assert ranking.repetition(token_NT, gate_NT, token_mask_NT, [1]) == 0.0


def test_repetition_of_samples_is_that_of_each_sample_alone():
    rng = np.random.default_rng(2)
    token_NT, gate_NT = rng.integers(1, 40, size=(60, 9)), rng.random((60, 9))
    token_mask_NT = np.arange(9) < rng.integers(5, 10, size=(60, 1))
    score_N = rng.random(60)
    included_SN = half_samples(60, 30, seed=1)
    # One sample of less than the top texts, and one of the weakest texts alone.
    included_SN[0] = np.arange(60) < 2
    included_SN[1] = score_N < np.quantile(score_N, 0.2)
    found_S = ranking.repetition_of_samples(
        token_NT, gate_NT, token_mask_NT, score_N, 3, included_SN
    )
    for result, included_N in zip(found_S, included_SN, strict=True):
        texts = np.flatnonzero(included_N)
        best = texts[ranking.top_texts(score_N[texts], 3)]
        assert result == pytest.approx(ranking.repetition(token_NT, gate_NT, token_mask_NT, best))
