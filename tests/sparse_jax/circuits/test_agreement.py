"""Rank correlations with intervals, and the labels of the edge graph that is drawn beside them."""

import json

import numpy as np
import pytest
from scipy import stats

from sparse_jax.circuits.agreement import rank_correlation
from sparse_jax.studies.circuits import report_figures
from sparse_jax.studies.circuits.results import DrawnPrompt, NeededEdge


def test_the_interval_is_that_of_resampled_pairs():
    rng = np.random.default_rng(0)
    first = rng.normal(size=80)
    second = first + rng.normal(size=80)
    result = rank_correlation(first, second, seed=3)
    assert result.estimate == pytest.approx(stats.spearmanr(first, second).statistic)
    assert result.n == 80

    def of_ranks(rows):
        return np.corrcoef(stats.rankdata(first[rows]), stats.rankdata(second[rows]))[0, 1]

    drawn = np.array([of_ranks(rng.integers(80, size=80)) for _ in range(4000)])
    # Ends of an interval of 1,000 resamples have a standard error of sqrt(0.025 * 0.975 / 1000) in
    # probability, those of 4,000 half of it; 4 standard errors of the difference.
    reach = 4 * np.sqrt(0.025 * 0.975 * (1 / 1000 + 1 / 4000))
    for end, level in ((result.low, 0.025), (result.high, 0.975)):
        assert abs(np.mean(drawn <= end) - level) < reach


def test_the_interval_holds_the_correlation_as_often_as_it_says():
    """Pairs of normal variables with correlation r have Spearman's 6 / pi asin(r / 2)."""
    rng = np.random.default_rng(1)
    truth = 6 / np.pi * np.arcsin(0.5 / 2)
    pairs = rng.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=(60, 60))
    held = sum(truth in rank_correlation(*each.T) for each in pairs)
    # Binomial: fewer than 49 of 60 at 95 % happens once in 20,000.
    assert held >= 49


def test_a_side_that_does_not_vary_has_no_correlation():
    assert rank_correlation(np.zeros(5), np.arange(5.0)) is None
    # One effect among zeros: some resamples leave it out, and count as no correlation.
    rare = rank_correlation(np.eye(1, 40)[0], np.arange(40.0))
    assert rare.low <= rare.estimate <= rare.high == 0


def test_the_top_row_of_the_edge_graph_is_that_of_the_logits():
    edges = tuple(NeededEdge(layer, 0, 2, 1, 0.5, 0.1) for layer in range(3))
    drawn = DrawnPrompt("ioi", "dense", ("a", "b", "c"), " d", 1.0, 0, 3, (), edges)
    chart = report_figures.edge_graph(drawn, 3).to_dict()
    (lines,) = chart["layer"]
    axis = lines["encoding"]["y"]["axis"]
    assert axis["values"] == [0, 1, 2, 3]
    assert axis["labelExpr"] == 'datum.value == 3 ? "logits" : datum.label'
    assert "the top one that of the logits" in json.dumps(chart)
