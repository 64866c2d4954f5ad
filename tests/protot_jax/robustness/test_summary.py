"""Intervals over frames, and comparisons with a model that was named beforehand."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from protot_jax.interventions.results import Interval
from protot_jax.robustness import summary
from protot_jax.robustness.results import Comparison, SliceResult


def of_frames(fillings):
    """JS of five frames, each of equally many fillings that are exactly alike."""
    means = np.array([0.1, 0.4, 0.2, 0.6, 0.2])
    frames = np.repeat([f"frame {i}" for i in range(5)], fillings)
    return np.repeat(means, fillings), frames, means


def test_more_fillings_of_the_same_frames_make_no_interval_narrower():
    """The interval is Student's of the frames' means, however many fillings each has."""
    for fillings in (1, 2, 100):
        values, frames, means = of_frames(fillings)
        found = summary.interval(values, frames, seed=0)
        wanted = stats.t.interval(0.95, 4, means.mean(), stats.sem(means))
        assert found.n == 5 and found.mean == pytest.approx(means.mean(), rel=1e-12)
        assert (found.low, found.high) == pytest.approx(wanted, rel=1e-9)
        assert summary.p_value(values - 0.1, frames) == pytest.approx(
            stats.ttest_1samp(means - 0.1, 0).pvalue, rel=1e-9
        )


def test_a_sentence_without_a_frame_is_its_own_cluster():
    rows = {"frame": np.array(["", "", "f", "f"]), "text": np.array(["a", "b", "c", "d"])}
    assert summary.clusters(rows).tolist() == ["a", "b", "f", "f"]


def test_the_interval_of_a_ratio_is_over_frames():
    """Where every frame keeps the same share, there is nothing to vary."""
    base, frames, _ = of_frames(7)
    found = summary.mediated(base, 0.75 * base, frames, seed=0).ratio_of_means
    assert (found.mean, found.low, found.high) == pytest.approx((0.25,) * 3, abs=1e-12)
    # By the delta method: residuals of each frame, over the mean of what is divided by.
    left = np.array([0.1, 0.2, 0.2, 0.1, 0.2])
    means = of_frames(1)[2]
    ratio = left.sum() / means.sum()
    error = stats.sem((left - ratio * means) / means.mean())
    found = summary.mediated(base, np.repeat(left, 7), frames, seed=0).ratio_of_means
    reach = stats.t.ppf(0.975, 4) * error
    assert (found.low, found.high) == pytest.approx((1 - ratio - reach, 1 - ratio + reach))


def test_the_reference_is_the_first_model_whatever_its_divergence():
    rng = np.random.default_rng(0)
    sentences = np.array([f"s{i}" for i in range(40)])
    js = rng.uniform(0.2, 0.4, (3, 40))
    js[1] -= 0.1
    found = summary.compared(list(js), sentences, seed=0)
    assert [one.mean for one in found.excess] == pytest.approx((js - js[0]).mean(1))
    wanted = [stats.ttest_rel(js[m], js[0]).pvalue for m in (1, 2)]
    assert found.p[0] == 1 and found.p[1:] == pytest.approx(wanted)
    assert found.excess[1].high < 0
    assert summary.compared([js[0]], sentences, seed=0) is None


def test_values_are_corrected_over_all_slices_and_models_of_a_kind():
    def sliced(name, kind, *p):
        comparison = Comparison((Interval(0.0, None, None, 9),) * len(p), p, p)
        return SliceResult(name, kind, 9, 9, 0, 1.0, None, 0, 0, ("a", "b"), (), comparison)

    slices = [
        sliced("a", "noise", 1.0, 0.01, 0.04),
        sliced("b", "meaning", 1.0, 0.01, None),
        sliced("c", "noise", 1.0, 0.02, 0.03),
        dataclasses.replace(sliced("d", "noise", 1.0), comparison=None),
    ]
    a, b, c, d = summary.corrected(slices)
    # Of four: 4 x 0.01, 3 x 0.02, then 2 x 0.03 and 1 x 0.04, none below the one before.
    assert a.comparison.corrected == pytest.approx((1.0, 0.04, 0.06))
    assert c.comparison.corrected == pytest.approx((1.0, 0.06, 0.06))
    assert b.comparison.corrected == (1.0, 0.01, None) and d.comparison is None
    assert a.comparison.p == (1.0, 0.01, 0.04)
