"""Metrics against closed forms, scipy and the paper's own constant rows; undefined cases."""

import math

from hypothesis import given
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lm_jax.assets import papers
from protot_jax.studies.glue import metrics
from protot_jax.studies.glue.tasks import EMBEDDED, OFFICIAL

BINARY = OFFICIAL["mrpc"]


def labels(tp, tn, fp, fn):
    """Targets and predictions of two classes with these counts."""
    targets = np.repeat([1.0, 0.0, 0.0, 1.0], [tp, tn, fp, fn])
    predictions = np.repeat([1.0, 0.0, 1.0, 0.0], [tp, tn, fp, fn])
    return targets, predictions


def test_of_two_classes_by_hand():
    targets, predictions = labels(tp=6, tn=3, fp=1, fn=2)
    assert metrics.scores(BINARY, targets, predictions) == {
        "f1": pytest.approx(12 / 15),
        "accuracy": pytest.approx(9 / 12),
    }
    wanted = (6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5)
    assert metrics.score("matthews", targets, predictions, 2) == pytest.approx(wanted)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=30))
def test_matthews_is_pearson_of_the_indicators_where_that_is_defined(pairs):
    targets, predictions = np.array(pairs, float).T
    result = metrics.score("matthews", targets, predictions, 2)
    if np.ptp(targets) and np.ptp(predictions):
        # Both are a ratio of integers under a root: a few units in the last place.
        assert result == pytest.approx(stats.pearsonr(targets, predictions).statistic, abs=1e-14)
    else:
        assert result == 0.0


@pytest.mark.parametrize(
    ("counts", "f1", "matthews", "accuracy"),
    [
        ((0, 5, 0, 0), 0.0, 0.0, 1.0),
        ((5, 0, 0, 0), 1.0, 0.0, 1.0),
        ((0, 3, 0, 2), 0.0, 0.0, 0.6),
        ((3, 0, 2, 0), 0.75, 0.0, 0.6),
        ((0, 0, 2, 2), 0.0, -1.0, 0.0),
    ],
)
def test_constant_and_wholly_wrong_predictions(counts, f1, matthews, accuracy):
    pair = labels(*counts)
    result = [metrics.score(name, *pair, 2) for name in ("f1", "matthews", "accuracy")]
    assert result == [f1, matthews, accuracy]


def test_correlations_are_those_of_scipy_with_ties():
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 6, 200).astype(float)
    predictions = np.round(targets + rng.normal(size=200), 1)
    # Sums of 200 products in another order.
    for name, oracle in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        wanted = oracle(targets, predictions).statistic
        assert metrics.score(name, targets, predictions, 1) == pytest.approx(wanted, abs=1e-13)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_correlations_with_a_constant_are_undefined_not_zero(name):
    varied, constant = np.arange(4.0), np.full(4, 2.5)
    assert math.isnan(metrics.score(name, varied, constant, 1))
    assert math.isnan(metrics.score(name, constant, varied, 1))


def test_sums_on_the_device_give_the_metrics_of_whole_arrays():
    rng = np.random.default_rng(1)
    targets, predictions = rng.integers(0, 2, (2, 50))
    parts = [
        metrics.counts_of(jnp.array(p), jnp.array(t), jnp.array(w), 2)
        for t, p, w in (
            (targets[:30], predictions[:30], np.ones(30, np.float32)),
            # Rows of padding do not count, whatever they hold.
            (np.pad(targets[30:], (0, 10)), np.pad(predictions[30:], (0, 10)), PADDED),
        )
    ]
    sums = {metrics.COUNTS: np.sum(parts, axis=0)}
    for name in ("accuracy", "f1", "matthews"):
        wanted = metrics.score(name, targets.astype(float), predictions.astype(float), 2)
        assert metrics.from_sums(name, sums) == wanted


PADDED = np.repeat(np.array([1, 0], np.float32), [20, 10])


def test_moments_give_pearson_within_the_rounding_of_their_sums():
    rng = np.random.default_rng(2)
    targets = rng.normal(size=64).astype(np.float32)
    predictions = (targets + rng.normal(size=64)).astype(np.float32)
    moments = metrics.moments_of(*map(jnp.array, (predictions, targets, np.ones(64, np.float32))))
    wanted = stats.pearsonr(predictions.astype(float), targets.astype(float)).statistic
    # Each of the six sums is off by at most 64 roundings of 2^-24 of its absolute terms; means are
    # near 0, so that the differences lose little.
    result = metrics.from_sums("pearson", {metrics.MOMENTS: np.asarray(moments, np.float64)})
    assert result == pytest.approx(wanted, abs=6 * 64 * 2**-24)
    constant = metrics.moments_of(*map(jnp.array, (np.zeros(4), np.arange(4.0), np.ones(4))))
    assert math.isnan(metrics.pearson(np.asarray(constant, np.float64)))


# The official counts of labels 0 and 1 of the development splits.
COUNTS = {
    "cola": (322, 721),
    "sst2": (428, 444),
    "mrpc": (129, 279),
    "wnli": (40, 31),
    "rte": (146, 131),
    "qnli": (2702, 2761),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_constant_row_of_the_paper_tables_follows_from_the_counts_of_labels(name):
    task, (zeros, ones) = OFFICIAL[name], COUNTS[name]
    targets = np.repeat([0.0, 1.0], [zeros, ones])
    constant = metrics.constant_prediction(task, targets, task.main)
    assert constant == float(ones > zeros)
    result = metrics.score(task.main, targets, np.full_like(targets, constant), 2)
    assert round(100 * result, 1) == papers.tables("protot")["table_10"]["constant"][name]


def test_the_constant_score_is_the_mean():
    assert metrics.constant_prediction(EMBEDDED["films_rating"], [0.0, 1.0, 5.0], "pearson") == 2.0


def test_the_constant_of_f1_is_class_1_however_rare_and_of_accuracy_the_most_frequent():
    """As on QQP, where 63 % are no duplicates and "no" everywhere has an F1 of 0."""
    constants = metrics.constant_predictions(OFFICIAL["qqp"], [0.0, 0.0, 1.0])
    assert constants == {"f1": 1.0, "accuracy": 0.0}
    # All constants have a Matthews correlation of 0.
    assert metrics.constant_predictions(OFFICIAL["cola"], [0, 1, 1])["matthews"] == 1.0


def test_printed_averages_are_not_those_of_the_printed_columns():
    """The finding that the report states: 71.1 for LLaMA, not 71.6."""
    row = papers.tables("protot")["table_2"]["llama"]
    nine = [value for name, value in row.items() if name != "glue" and not name.startswith("mnli")]
    nine.append((row["mnli"] + row["mnli_mismatched"]) / 2)
    assert len(nine) == 9
    assert round(sum(nine) / 9, 1) == 71.1 != row["glue"]
