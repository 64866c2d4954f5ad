"""The verdict is a test on counts: at the tolerance, near no discordant pairs, by enumeration."""

import bisect
import itertools

import numpy as np
import pytest
from scipy import stats as oracle

from lm_jax.errors import UsageError
from lm_jax.statistics import Interval
import polyattn_jax
from polyattn_jax.audit import decision


def outcomes(lost, won, kept, neither=0):
    """Answers of softmax and of a recipe with these counts of pairs."""
    counts = [lost, won, kept, neither]
    return np.repeat([True, False, True, False], counts), np.repeat(
        [False, True, True, False], counts
    )


def name_of(*counts, **options):
    return polyattn_jax.verdict(*outcomes(*counts), **options).name


@pytest.mark.parametrize(
    ("lost", "won", "kept", "neither", "name"),
    [
        # 5 points exactly, of 20, 40, 60 and 100 prompts: the interval reaches to both sides
        (1, 0, 19, 0, "undecided"),
        (1, 0, 18, 1, "undecided"),
        (2, 0, 38, 0, "undecided"),
        (3, 0, 57, 0, "undecided"),
        (5, 0, 95, 0, "undecided"),
        # too few prompts to exclude a loss of 5 points, though none is lost
        (0, 0, 4, 0, "undecided"),
        (0, 0, 20, 0, "undecided"),
        (0, 0, 72, 0, "undecided"),
        (0, 0, 73, 0, "preserve"),
        (0, 0, 200, 0, "preserve"),
        (1, 0, 108, 0, "undecided"),
        (1, 0, 109, 0, "preserve"),
        # the test finds a loss: of exactly 5 points, and of more
        (10, 0, 190, 0, "undecided"),
        (11, 0, 189, 0, "no-go"),
        (12, 1, 187, 0, "no-go"),
        (8, 0, 12, 0, "no-go"),
        (200, 0, 0, 0, "no-go"),
        # a loss beyond the tolerance that the test does not tell from chance
        (3, 0, 17, 0, "undecided"),
        # a gain
        (2, 20, 178, 0, "preserve"),
        # softmax does not solve the probe, whatever the recipe does
        (0, 0, 0, 200, "undecided"),
        (12, 0, 0, 8, "undecided"),
        (0, 200, 0, 0, "undecided"),
    ],
)
def test_the_verdict_on_counts(lost, won, kept, neither, name):
    assert name_of(lost, won, kept, neither) == name


def controls(needle, without=(0, 50), losses=(12.5, 1.25)):
    """The arguments of `unmet_controls`, of counts (right, n) with and without the needle."""

    def accuracy(right, n):
        ends = oracle.binomtest(right, n).proportion_ci(method="wilson")
        return Interval(right / n, ends.low, ends.high, n)

    return accuracy(*needle), None if without is None else accuracy(*without), *losses


@pytest.mark.parametrize(
    ("result", "unmet"),
    [
        (controls((20, 20)), []),
        (controls((7, 7), (0, 3)), []),
        (controls((20, 20), None), []),
        # 14 of 20 reaches down to 48 %, 15 of 20 to 53 %
        (controls((14, 20)), ["solves"]),
        (controls((15, 20)), []),
        # Wilson intervals meet at 84 %
        (controls((20, 20), (13, 20)), []),
        (controls((20, 20), (14, 20)), ["left out"]),
        (controls((20, 20), (0, 1)), []),
        (controls((20, 20), (1, 1)), ["left out"]),
        # less than half of the first loss, not half of it
        (controls((20, 20), losses=(12.5, 6.2)), []),
        (controls((20, 20), losses=(12.5, 6.25)), ["half"]),
        (controls((20, 20), losses=(12.5, float("nan"))), ["half"]),
        (controls((3, 20), (3, 20), (12.5, 13.0)), ["solves", "left out", "half"]),
    ],
)
def test_the_controls_that_are_not_met_are_named(result, unmet):
    words = decision.unmet_controls(*result)
    assert len(words) == len(unmet)
    assert all(part in text for part, text in zip(unmet, words, strict=True))


@pytest.mark.parametrize("tolerance", [0.07, 0.1, 0.29])
def test_a_loss_of_exactly_the_tolerance_is_not_beyond_it(tolerance):
    n = 100
    at = round(tolerance * n)
    result = polyattn_jax.verdict(*outcomes(at, 0, n - at), tolerance=tolerance)
    # in floats 0.07 * 100 is above 7 and 1 - 0.71 below 0.29
    assert (result.p < 0.05, result.name) == (True, "undecided")
    assert name_of(at + 1, 0, n - at - 1, tolerance=tolerance) == "no-go"


def test_a_verdict_holds_the_paired_change():
    result = polyattn_jax.verdict(*outcomes(7, 1, 12, 1))
    assert result.change == -6 / 21
    assert result.p == pytest.approx(oracle.binomtest(7, 8).pvalue)
    # Tango's interval of this table in Fagerland, Lydersen and Laake, Statistics in Medicine 2014
    assert (round(result.low, 3), round(result.high, 3)) == (-0.517, -0.026)
    wider = polyattn_jax.verdict(*outcomes(7, 1, 12, 1), level=0.99)
    assert wider.low < result.low and wider.high > result.high


def test_more_losses_never_make_a_verdict_better():
    rank = {"no-go": 0, "undecided": 1, "preserve": 2}
    for won, n in itertools.product((0, 3), (40, 120)):
        names = [rank[name_of(lost, won, n - lost - won)] for lost in range(n // 2)]
        assert names == sorted(names, reverse=True)
        assert names[-1] == 0


@pytest.mark.parametrize("n", [40, 73, 100, pytest.param(200, marks=pytest.mark.slow)])
def test_a_recipe_that_loses_the_tolerance_seldom_preserves(n):
    """Where the true loss is 5 points: the exact chance of "preserve", over all counts."""

    def preserves(lost, won):
        return name_of(lost, won, n - lost - won) == "preserve"

    # of every number of gains, the number of losses from which on it no longer preserves
    won = np.arange(n + 1)
    limit = [bisect.bisect(range(n - c + 1), -1, key=lambda b: -preserves(b, c)) for c in won]
    for gain in (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.475):
        few = oracle.binom.cdf(np.array(limit) - 1, n - won, (gain + 0.05) / (1 - gain))
        assert (oracle.binom.pmf(won, n, gain) * few).sum() < 0.03


@pytest.mark.parametrize(
    ("tolerance", "level"), [(0.05, 0.95), (0.1, 0.95), (0.02, 0.9), (0.5, 0.99), (0.9, 0.95)]
)
def test_the_fewest_prompts_that_can_preserve(tolerance, level):
    n = decision.least_prompts(tolerance, level)
    arguments = {"tolerance": tolerance, "level": level}
    assert name_of(0, 0, n, **arguments) == "preserve"
    assert name_of(0, 0, n - 1, **arguments) == "undecided"


@pytest.mark.parametrize("n", [12, 20, 73, 200])
def test_the_detectable_loss_is_found_with_the_stated_power(n):
    loss = decision.detectable_loss(n)
    refused = [name_of(lost, 0, n - lost) == "no-go" for lost in range(n + 1)]
    chance = oracle.binom.pmf(np.arange(n + 1), n, loss)
    assert chance[refused].sum() == pytest.approx(0.8, abs=1e-9)


def test_too_few_prompts_detect_no_loss():
    assert decision.detectable_loss(3) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([True], [True, False]), "of one length"),
        (([], []), "not empty"),
        (([0.5], [1]), "values other than 0 and 1"),
    ],
)
def test_what_is_no_pair_of_outcomes_is_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        polyattn_jax.verdict(*arguments)


@pytest.mark.parametrize("name", ["tolerance", "level"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.05, float("nan")])
def test_a_tolerance_and_a_level_are_rates(name, value):
    with pytest.raises(UsageError, match=f"verdict: {name}="):
        polyattn_jax.verdict([True], [True], **{name: value})
