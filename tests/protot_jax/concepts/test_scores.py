"""Scores of a judge by layer, and their lead over random texts, with intervals."""

import numpy as np
import pytest

from lm_jax.evaluate import judge
from protot_jax.concepts import scores
from tests.protot_jax.concepts import synthetic_report


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
            assert min(values) <= interval.low < interval.estimate < interval.high <= max(values)
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
    assert result.estimate == pytest.approx(5.5)
    assert 5.0 < result.low < 5.5 < result.high < 6.0


def test_too_few_labels_have_no_interval():
    content = synthetic_report.typed(synthetic_report.build(1, 4, judge="null"))
    assert [one.intervals["themes"] for one in scores.by_layer(content)] == [None, None]
    assert scores.lead(content) == dict.fromkeys(judge.SCORES)
