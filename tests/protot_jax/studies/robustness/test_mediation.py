"""PMR by hand, its undefined cases, and the difference of the two means in the paper's table."""

import math

import numpy as np
import pytest
from scipy import stats

from lm_jax.assets import papers
from lm_jax.errors import UsageError
from protot_jax.studies.robustness import FLOOR, PMR, numbers, paper, pmr


def test_by_hand():
    found = pmr([0.4, 0.2, 0.1], [0.1, 0.2, 0.2])
    # Ratios 3/4, 0 and -1; sums 0.7 and 0.5.
    assert found == PMR(
        mean_of_ratios=pytest.approx(-1 / 12),
        ratio_of_means=pytest.approx(1 - 0.5 / 0.7),
        median=0.0,
        below_floor=0.0,
    )


def test_pairs_below_the_floor_are_counted_and_give_no_ratio():
    found = pmr([0.4, 0.0, FLOOR / 2, 0.4], [0.2, 0.0, 0.3, 0.2])
    assert found.mean_of_ratios == found.median == pytest.approx(0.5)
    assert found.below_floor == 0.5
    assert found.ratio_of_means == pytest.approx(1 - 0.7 / 0.8, abs=1e-6)
    nothing = pmr([0.0], [0.0], floor=0.0)
    assert nothing.below_floor == 1 and all(map(math.isnan, nothing[:3]))


def test_holding_that_removes_everything_is_one_and_that_does_nothing_is_zero():
    base = np.random.default_rng(0).uniform(0.01, 0.6, 20)
    assert pmr(base, np.zeros(20)) == PMR(1, 1, 1, 0)
    assert pmr(base, base) == PMR(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("base", "clamped", "message"),
    [
        ([], [], "not empty"),
        ([0.1], [0.1, 0.2], "one length"),
        ([-0.1], [0.1], "js_base has values that are negative"),
        ([0.1], [math.nan], "js_clamped"),
    ],
)
def test_bad_input(base, clamped, message):
    with pytest.raises(UsageError, match=message):
        pmr(base, clamped)


def test_the_papers_means_of_ratios_hide_its_ratios_of_means():
    """behaviour of Table 4: punctuation and typos, where the printed means say 0."""
    found = {
        name: paper.mediated(name)["ratio_of_means"] for name in papers.tables("protot")["table_4"]
    }
    rounded = {name: round(value, 3) for name, value in found.items()}
    assert rounded["punctuation"] == 0.191 and rounded["typo"] == 0.106
    assert rounded["morphology"] == -0.02 and rounded["spelling"] == 0.038
    assert abs(paper.mediated("punctuation")["mean"]) < 1e-9


def test_statistics_of_mediation_by_hand():
    base, clamped = np.array([0.4, 0.2, 0.1, 0.0]), np.array([0.1, 0.2, 0.2, 0.0])
    sentences = np.array(["a", "b", "c", "d"])
    found = numbers.mediated(base, clamped, sentences, seed=0)
    assert found.positive == pytest.approx(1 / 3) and found.pairs == 4
    assert found.below_floor == 0.25
    assert found.deviation == pytest.approx(np.std([0.75, 0, -1], ddof=1))
    # Too few sentences above the floor: a resample could be 0 / 0.
    assert found.ratio_of_means.low is None
    few = numbers.mediated(base[:3], clamped[:3], sentences[:3], seed=0).ratio_of_means
    assert few.mean == pytest.approx(2 / 7) and few.low is few.high is None
    base, clamped = np.tile(base[:3], 2), np.tile(clamped[:3], 2)
    whole = numbers.mediated(base, clamped, np.array(list("abcdef")), seed=0).ratio_of_means
    # Of so few sentences Student's, from the residuals of clamped = (5 / 7) base over mean base.
    residuals = (clamped - 5 / 7 * base) / (0.7 / 3)
    reach = stats.t.ppf(0.975, 5) * stats.sem(residuals)
    assert (whole.low, whole.high) == pytest.approx((2 / 7 - reach, 2 / 7 + reach))


def test_a_model_is_compared_by_paired_differences():
    js = np.random.default_rng(0).uniform(0.1, 0.6, 40)
    sentences = np.arange(40).astype(str)
    sign = np.where(np.arange(40) % 2, 1, -1)
    # A difference has little spread over pairs, whatever the spread of the divergences.
    parted = numbers.compared([js + 0.01, js + 1e-4 * sign, js + 0.02 + 1e-4 * sign], sentences)
    reach = stats.t.ppf(0.975, 39) * 1e-4 / np.sqrt(39)
    assert [one.low for one in parted.excess[1:]] == pytest.approx([-0.01 - reach, 0.01 - reach])
    assert parted.p[0] == 1 and max(parted.p[1:]) < 1e-9
    # A mean that is more by 0.001, of differences of 0.1 either way.
    close = numbers.compared([js, js + 0.001 + 0.1 * sign], sentences)
    assert close.excess[1].low < 0 < close.excess[1].high and close.p[1] > 0.9
    tied = numbers.compared([js, js], sentences)
    assert tied.p == (1, None) and tied.excess[1].mean == 0 and tied.excess[1].low is None


def test_a_model_without_divergences_is_not_compared():
    js, nothing = np.full(3, 0.2), np.full(3, np.nan)
    sentences = np.array(["a", "b", "c"])
    found = numbers.compared([js, nothing, js + 0.1], sentences)
    assert found.excess[1].mean is None and found.p[1] is None
    assert found.excess[2].mean == pytest.approx(0.1)
    assert numbers.compared([nothing, js], sentences) is None
    assert numbers.compared([js], sentences) is None
