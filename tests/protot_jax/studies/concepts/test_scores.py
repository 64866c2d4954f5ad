"""Scores of a judge by layer, and their lead over random texts, with intervals."""

import types

import numpy as np
import pytest
from scipy import stats

from lm_jax.evaluate import judge, judge_prompt
from protot_jax.studies.concepts import scores
from tests.protot_jax.studies.concepts import synthetic_report


def test_intervals_by_layer_hold_the_mean_and_grow_with_uncertainty():
    content = synthetic_report.build(2, 9)
    results = {one.group: one for one in scores.by_layer(synthetic_report.typed(content))}
    assert list(results) == ["layer 0", "layer 1", "all layers", "random texts"]
    for group in results.values():
        members = (
            content["baseline"]
            if group.group == "random texts"
            else [
                p
                for p in content["prototypes"]
                if group.group in (f"layer {p['layer']}", "all layers")
            ]
        )
        labels = [one["label"] for one in members if one["label"]]
        assert (group.asked, group.labelled) == (len(members), len(labels))
        for score, interval in group.intervals.items():
            values = [label[score] for label in labels]
            assert interval.estimate == pytest.approx(np.mean(values)) and interval.n == len(values)
            assert 1 <= interval.low < interval.estimate < interval.high <= 10
    widths = [
        results[name].intervals["coverage"].high - results[name].intervals["coverage"].low
        for name in ("all layers", "layer 0")
    ]
    assert widths[0] < widths[1]


def test_the_lead_over_random_texts_is_a_difference_of_means():
    content = synthetic_report.build(2, 9)
    for one in content["prototypes"]:
        if one["label"]:
            one["label"]["coverage"] = 9
    for i, one in enumerate(content["baseline"]):
        one["label"]["coverage"] = 3 + i % 2
    result = scores.lead(synthetic_report.typed(content))["coverage"]
    random = [one["label"]["coverage"] for one in content["baseline"] if one["label"]]
    assert result.estimate == pytest.approx(5.5)
    # Only random texts vary, so that Welch's interval is Student's of their mean.
    reach = stats.t.ppf(0.975, len(random) - 1) * stats.sem(random)
    assert (result.low, result.high) == pytest.approx((5.5 - reach, 5.5 + reach))


def test_a_difference_has_welchs_interval_within_the_scale():
    rng = np.random.default_rng(3)
    ours, random = rng.integers(4, 9, 40).astype(float), rng.integers(3, 7, 10).astype(float)
    found = scores.difference(ours, random)
    wanted = stats.ttest_ind(ours, random, equal_var=False).confidence_interval()
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-12)
    assert (found.estimate, found.n) == (ours.mean() - random.mean(), 40)
    wide = scores.difference(np.array([1.0, 10.0]), np.array([1.0, 10.0]))
    assert (wide.low, wide.high) == (-9, 9)
    flat = scores.difference(np.full(3, 7.0), np.full(2, 5.0))
    assert (flat.low, flat.high) == (2, 2)


def test_the_interval_of_few_scores_stays_on_the_scale():
    """Student's of 10, 10, 4 would reach from -0.6 to 16.6."""
    labels = [judge.Label("theme", 10.0, float(x), 11 - x, "") for x in (10, 10, 4)]
    members = [types.SimpleNamespace(label=label) for label in labels]
    found = scores.group("layer 0", members, 0).intervals
    assert (found["coverage"].low, found["coverage"].high) == (1, 10)
    assert (found["themes"].low, found["themes"].high) == (1, 10)


def test_too_few_labels_have_no_interval():
    content = synthetic_report.typed(synthetic_report.build(1, 4, judge="null"))
    assert [one.intervals["themes"] for one in scores.by_layer(content)] == [None, None]
    assert scores.lead(content) == dict.fromkeys(judge_prompt.SCORES)
