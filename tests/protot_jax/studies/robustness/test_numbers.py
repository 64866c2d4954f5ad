"""Intervals over frames, and comparisons with a model that was named beforehand."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from protot_jax.studies.interventions.results import Interval
from protot_jax.studies.robustness import divergence, numbers, report_text
from protot_jax.studies.robustness.results import Comparison, SliceResult


def of_frames(fillings):
    """JS of five frames, each of equally many fillings that are exactly alike."""
    means = np.array([0.1, 0.4, 0.2, 0.6, 0.2])
    frames = np.repeat([f"frame {i}" for i in range(5)], fillings)
    return np.repeat(means, fillings), frames, means


def test_more_fillings_of_the_same_frames_make_no_interval_narrower():
    """The interval is Student's of the frames' means, however many fillings each has."""
    for fillings in (1, 2, 100):
        values, frames, means = of_frames(fillings)
        found = numbers.interval(values, frames)
        wanted = stats.t.interval(0.95, 4, means.mean(), stats.sem(means))
        assert found.n == 5 and found.mean == pytest.approx(means.mean(), rel=1e-12)
        assert (found.low, found.high) == pytest.approx(wanted, rel=1e-9)
        assert numbers.p_value(values - 0.1, frames) == pytest.approx(
            stats.ttest_1samp(means - 0.1, 0).pvalue, rel=1e-9
        )


def test_one_frame_of_many_pairs_is_no_finding():
    """424 sentences move by 0.01 more, and the 76 fillings of one frame by 0.2 less."""
    sentences = np.array([f"s{i}" for i in range(424)] + ["frame"] * 76)
    excess = np.where(sentences == "frame", -0.2, 0.01)
    found, p = numbers.interval(excess, sentences), numbers.p_value(excess, sentences)
    mean = (424 * 0.01 - 76 * 0.2) / 500
    # Cochran's variance of a ratio, by hand: residuals over 500 / 425 pairs of a cluster.
    squares = 424 * (0.01 - mean) ** 2 + (76 * (-0.2 - mean)) ** 2
    error = np.sqrt(425 / 424 * squares) / 500
    reach = stats.t.ppf(0.975, 424) * error
    assert (found.mean, found.low, found.high) == pytest.approx((mean, mean - reach, mean + reach))
    assert p == pytest.approx(2 * stats.t.sf(-mean / error, 424)) and p > 0.3
    compared = numbers.compared([np.zeros(500), excess], sentences)
    assert report_text.difference(compared, 1) == ""


@pytest.mark.parametrize("n", [5, 12, 60])
def test_p_is_below_5_percent_where_0_is_outside_of_the_interval(n):
    rng = np.random.default_rng(n)
    sentences = np.repeat(np.arange(n), rng.integers(1, 30, n)).astype(str)
    values = rng.normal(size=len(sentences)) + rng.normal(size=n)[sentences.astype(int)]
    values -= numbers.interval(values, sentences).low
    # The interval begins at 0, which is where p is 0.05.
    assert numbers.p_value(values, sentences) == pytest.approx(0.05, rel=1e-9)
    for shift in (-1e-6, 1e-6):
        found, p = (f(values + shift, sentences) for f in (numbers.interval, numbers.p_value))
        assert (p < 0.05) == (not found.low <= 0 <= found.high) == (shift > 0)


def test_a_frame_of_most_pairs_leaves_the_interval_finite():
    """Degrees of freedom of an effective number of frames near 1 gave ends of 1e29."""
    sentences = np.array([*"abcdef", *["frame"] * 2_000])
    values = np.append(np.linspace(0.1, 0.3, 6), np.full(2_000, 0.2))
    found = numbers.interval(values, sentences)
    assert found.n == 7 and 0.19 < found.low < found.mean < found.high < 0.21


@pytest.mark.parametrize(
    ("values", "sentences"),
    [
        ([0.1, 0.2, 0.15, 0.15], "aabb"),
        ([0.1, 0.3, 0.2, 0.4], "abcd"),
        ([0.1] * 40, range(40)),
        ([0.0] * 6, "abcdef"),
        ([0.3], "a"),
    ],
)
def test_few_clusters_or_equal_ones_have_no_interval_and_no_p(values, sentences):
    values, sentences = np.array(values), np.array(list(sentences)).astype(str)
    found = numbers.interval(values, sentences)
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.low is found.high is None and found.n == len(set(sentences))
    assert numbers.p_value(values, sentences) is None
    compared = numbers.compared([np.zeros_like(values), values], sentences)
    assert compared.p == (1, None) and report_text.difference(compared, 1) == ""
    assert numbers.interval(np.array([np.nan]), np.array(["a"])) == Interval(None, None, None, 0)


def test_ends_are_divergences():
    """Most sentences do not move, or nearly all the most that one can."""
    largest = float(divergence.LARGEST)
    values, sentences = np.array([0.0] * 5 + [0.6]), np.array(list("abcdef"))
    wide = numbers.interval(values, sentences)
    low = numbers.interval(values, sentences, (0.0, largest))
    high = numbers.interval(largest - values, sentences, (0.0, largest))
    assert wide.low < 0 == low.low and low.high == wide.high and high.high == largest


def test_a_sentence_without_a_frame_is_its_own_cluster():
    rows = {"frame": np.array(["", "", "f", "f"]), "text": np.array(["a", "b", "c", "d"])}
    assert numbers.clusters(rows).tolist() == ["a", "b", "f", "f"]


def test_the_interval_of_a_ratio_is_over_frames():
    """Where every frame keeps the same share, nothing varies and there is no interval."""
    base, frames, _ = of_frames(7)
    found = numbers.mediated(base, 0.75 * base, frames, seed=0).ratio_of_means
    assert found.mean == pytest.approx(0.25, rel=1e-12) and found.low is found.high is None
    # By the delta method: residuals of each frame, over the mean of what is divided by.
    left = np.array([0.1, 0.2, 0.2, 0.1, 0.2])
    means = of_frames(1)[2]
    ratio = left.sum() / means.sum()
    error = stats.sem((left - ratio * means) / means.mean())
    found = numbers.mediated(base, np.repeat(left, 7), frames, seed=0).ratio_of_means
    reach = stats.t.ppf(0.975, 4) * error
    assert (found.low, found.high) == pytest.approx((1 - ratio - reach, 1 - ratio + reach))


def test_the_reference_is_the_first_model_whatever_its_divergence():
    rng = np.random.default_rng(0)
    sentences = np.array([f"s{i}" for i in range(40)])
    js = rng.uniform(0.2, 0.4, (3, 40))
    js[1] -= 0.1
    found = numbers.compared(list(js), sentences)
    assert [one.mean for one in found.excess] == pytest.approx((js - js[0]).mean(1))
    wanted = [stats.ttest_rel(js[m], js[0]).pvalue for m in (1, 2)]
    assert found.p[0] == 1 and found.p[1:] == pytest.approx(wanted)
    assert found.excess[1].high < 0
    assert numbers.compared([js[0]], sentences) is None


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
    a, b, c, d = numbers.corrected(slices)
    # Of four: 4 x 0.01, 3 x 0.02, then 2 x 0.03 and 1 x 0.04, none below the one before.
    assert a.comparison.corrected == pytest.approx((1.0, 0.04, 0.06))
    assert c.comparison.corrected == pytest.approx((1.0, 0.06, 0.06))
    assert b.comparison.corrected == (1.0, 0.01, None) and d.comparison is None
    assert a.comparison.p == (1.0, 0.01, 0.04)
