"""Intervals count texts and not sentences, and what is specific must have an effect."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from protot_jax.studies.interventions import (
    Sentence,
    comparison,
    measure,
    numbers,
    report_text,
    results,
)
from protot_jax.studies.interventions.effects import MODES
from protot_jax.studies.interventions.matching import Match
from protot_jax.studies.interventions.results import Effect, InterventionReport
from tests.protot_jax.studies.interventions import small_models


def shown(compared):
    """What the page of a comparison says."""
    built = comparison.report_of(compared)
    return "\n".join([*built.lead, *(part.body for part in built.sections() if part)])


def test_one_value_per_cluster_gives_students_interval():
    values = np.random.default_rng(0).normal(size=9)
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval()
    result = numbers.clustered_interval(values, np.arange(9))
    assert (result.low, result.high) == pytest.approx((low, high))
    assert (result.n, result.sentences) == (9, 9)
    unclustered = numbers.mean_interval(values)
    assert (unclustered.mean, unclustered.low, unclustered.high) == pytest.approx(
        (values.mean(), low, high)
    )


def test_clusters_of_one_size_are_as_their_means():
    values = np.random.default_rng(1).normal(size=(7, 2))
    low, high = stats.ttest_1samp(values.mean(1), 0.0).confidence_interval()
    result = numbers.clustered_interval(values.ravel(), np.repeat(np.arange(7), 2))
    assert (result.low, result.high) == pytest.approx((low, high))
    assert (result.n, result.sentences) == (7, 14)


def test_intervals_over_pairs_of_one_text_cover_the_mean():
    """Seven texts with two targets each, and one of them with a single one."""
    clusters = np.repeat(np.arange(8), [2] * 7 + [1])
    rng = np.random.default_rng(2)
    covered = {"clustered": 0, "alone": 0}
    for _ in range(1_000):
        values = rng.normal(size=8)[clusters] + 0.3 * rng.normal(size=15)
        for name, result in (
            ("clustered", numbers.clustered_interval(values, clusters)),
            ("alone", numbers.mean_interval(values)),
        ):
            covered[name] += result.low <= 0.0 <= result.high
    # 99.9 % binomial limits; as 15 independent sentences, too few.
    low, high = stats.binom(1_000, 0.95).ppf([0.0005, 0.9995])
    assert low <= covered["clustered"] <= high
    assert covered["alone"] < 900


@pytest.mark.parametrize(("n", "bounded"), [(2, False), (4, False), (5, True)])
def test_fewer_than_five_texts_have_no_interval(n, bounded):
    values = np.random.default_rng(0).normal(size=n)
    result = numbers.clustered_interval(values, np.arange(n))
    assert (result.low is not None, result.high is not None) == (bounded, bounded)
    assert result.mean == pytest.approx(values.mean()) and result.n == n


@pytest.mark.parametrize(("values", "mean"), [([], None), ([3.0], 3.0), ([1.0, 2.0], 1.5)])
def test_one_text_has_no_interval(values, mean):
    result = numbers.clustered_interval(np.array(values), np.zeros(len(values), int))
    assert result == Effect(
        mean=mean, low=None, high=None, n=min(1, len(values)), sentences=len(values)
    )


def test_targets_of_one_text_are_one_cluster():
    texts = {
        "the people of the town met in a house": ("people", "house"),
        "a river and the people who met in the town": ("river", "town"),
        "the town and its river": ("town", "river"),
        "the people met in the house": ("people", "house"),
        "a house of the people": ("house", "people"),
    }
    sentences = [
        Sentence("place", target, text) for text, targets in texts.items() for target in targets
    ]
    result = measure(
        small_models.drawn(), sentences, layer=1, prototype=2, draws=1, control_draws=1, least=0.0
    )
    for one in numbers.of_seed(result, run="r", seed=1, step=4).modes:
        for name in ("effect", "sentence_perplexity"):
            assert (getattr(one, name).n, getattr(one, name).sentences) == (5, 10)
        ratios = 1 + result.change(one.mode)[1, 2, 0] / 100
        by_text = np.log(ratios).reshape(5, 2).mean(1)
        low, high = stats.ttest_1samp(by_text, 0.0).confidence_interval()
        found = np.array([one.effect.mean, one.effect.low, one.effect.high])
        geometric = stats.gmean(ratios)
        wanted = 100 * np.array([geometric - 1, np.exp(low) - 1, np.exp(high) - 1])
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_halving_and_doubling_cancel_and_no_interval_ends_below_minus_100():
    """Three targets of six at a tenth, three at ten times: their geometric mean has not moved."""
    texts = (
        "the town",
        "its town",
        "a town",
        "the river town",
        "a house in town",
        "people in town",
    )
    measured = measure(
        small_models.drawn(),
        [Sentence("place", "town", text) for text in texts],
        layer=1,
        prototype=2,
        draws=1,
        control_draws=1,
        least=0.0,
    )
    factors = np.repeat([0.1, 10.0], 3)
    baseline = np.full(6, 0.05)
    changed = {
        mode: np.ones_like(p) * baseline * factors for mode, p in measured.probability.items()
    }
    measured = dataclasses.replace(measured, baseline_N=baseline, probability=changed)
    for one in numbers.of_seed(measured, run="r", seed=1, step=4).modes:
        assert one.effect.mean == pytest.approx(0.0, abs=1e-9)
        # The ends are inverse factors of each other; of p' / p - 1 the mean would be +405 %.
        assert (1 + one.effect.low / 100) * (1 + one.effect.high / 100) == pytest.approx(1.0)
        assert -100 < one.effect.low < 0 < one.effect.high
        assert one.control.chosen == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("texts", "verdict"), [(9, None), (10, True)])
def test_few_texts_decide_nothing(texts, verdict):
    assert numbers.specific(Effect(-9.0, -10.0, -8.0, texts, texts), 0.01) is verdict


@pytest.mark.parametrize(
    ("low", "high", "p"),
    [
        (np.nan, np.nan, 0.01),
        (np.nan, -8.0, 0.01),
        (-10.0, np.nan, 0.01),
        (-np.inf, -8.0, 0.01),
        (-10.0, -8.0, np.nan),
    ],
)
def test_what_is_no_number_decides_nothing(low, high, p):
    assert numbers.specific(Effect(-9.0, low, high, 20, 20), p) is None


@pytest.fixture(scope="module")
def seed():
    """The carrier of the built model, whose ablation lowers every target."""
    texts = ("a river and the people who met", "the river of its town who met", "a river who met")
    texts += ("the river who met", "its river and the people who met")
    sentences = [Sentence("", small_models.TARGET, text) for text in texts]
    at = {"layer": 0, "prototype": small_models.CARRIER}
    result = measure(small_models.built(), sentences, **at, draws=1, control_draws=1)
    return numbers.of_seed(result, run="r", seed=1, step=4)


def changed_mode(seed, mode, **changed):
    """The seed's results with other fields in one intervention's `effect` or `control`."""
    modes = []
    for one in seed.modes:
        if one.mode == mode:
            for name, fields in changed.items():
                new = dataclasses.replace(getattr(one, name), **fields)
                one = dataclasses.replace(one, **{name: new})
        modes.append(one)
    return dataclasses.replace(seed, modes=tuple(modes))


def result(seed, concept="river", **changed):
    """An `intervention.json` of 64 prototypes."""
    control = {"n": 63, "as_low": 0, "p": 2 / 64}
    own = changed_mode(seed, numbers.ABLATION, control=control, effect={"n": 10, "sentences": 10})
    own = changed_mode(own, numbers.ABLATION, **changed)
    (one,) = (one for one in own.modes if one.mode == numbers.ABLATION)
    own = dataclasses.replace(own, specific=numbers.specific(one.effect, one.control.p))
    return InterventionReport(
        schema=results.NAME,
        version=results.VERSION,
        model=results.Model("speeches", 2, 32, 16, 100, True),
        settings=results.Settings(
            concept=concept,
            together=(),
            words=(),
            occurrences={},
            found=False,
            shipped_sentences=False,
            all_subtokens=False,
            least_probability=0.01,
            draws=1,
            control_draws=1,
            reinit_seed=0,
            gate_tokens=0,
        ),
        seeds=(own,),
        skipped=(),
    )


def test_the_carrier_is_specific_by_the_edit_that_ablates(seed):
    assert numbers.ABLATION == "zero_write"
    (one,) = (one for one in seed.modes if one.mode == "zero_write")
    assert one.effect.high < 0
    assert one.control.as_low == 0
    # Of four prototypes no rank is below 0.05, and five texts decide nothing.
    assert one.control.p == 2 / 4
    assert seed.specific is None
    findings = result(seed)
    assert findings.seeds[0].specific is True
    text, tone = report_text.conclusion(findings)
    assert tone == "good" and text.endswith("The effect is specific.")
    assert "write gate zeroed" in text and "over 10 sentences;" in text


@pytest.mark.parametrize(
    ("changed", "specific", "message"),
    [
        # The lowest of all, but its interval includes 0.
        ({"effect": {"mean": -0.1, "low": -0.5, "high": 0.3}}, False, "the interval includes 0"),
        ({"control": {"as_low": 11, "p": 24 / 64}}, False, "other prototypes do as much"),
        ({"effect": {"low": None, "high": None}}, None, "the interval or p is no number"),
        ({"effect": {"n": 9, "sentences": 9}}, None, "Undecided: fewer than 10 texts."),
        ({"effect": {"low": None, "high": None, "n": 4}}, None, "Undecided: fewer than 10 texts."),
    ],
)
def test_rank_alone_is_not_specific(seed, changed, specific, message):
    findings = result(seed, **changed)
    assert findings.seeds[0].specific is specific
    text, tone = report_text.conclusion(findings)
    assert tone == "warn" and message in text


def test_masking_does_not_decide(seed):
    findings = result(seed, effect={"mean": 0.0, "low": -0.1, "high": 0.1})
    (own,) = findings.seeds
    for mode in MODES:
        if mode != "zero_write":
            effect = {"mean": -30.0, "low": -35.0, "high": -25.0}
            own = changed_mode(own, mode, effect=effect, control={"as_low": 0, "p": 2 / 64})
    assert {one.mode for one in own.modes if one.effect.mean == -30.0} == set(MODES) - {
        "zero_write"
    }
    findings = dataclasses.replace(findings, seeds=(own,))
    assert report_text.conclusion(findings)[1] == "warn"
    # The effect of masking is reported below.
    assert any("−30.00 % [−35.00, −25.00]" in line for line in report_text.reasons(findings))


def test_several_concepts_have_p_corrected_for_their_number(seed):
    tested = [
        result(seed, name, control={"p": p, "n": 199})
        for name, p in (("a", 0.03), ("b", 0.012), ("c", 0.2))
    ]
    nothing = result(seed, "d")
    none = numbers.clustered_interval(np.array([]), np.array([]))
    modes = tuple(
        dataclasses.replace(one, control=None, effect=none) if one.mode == "zero_write" else one
        for one in seed.modes
    )
    nothing = dataclasses.replace(nothing, seeds=(dataclasses.replace(seed, modes=modes),))
    compared = comparison.compare([*tested, nothing])
    by_name = {one.concept: (one.p_holm, one.specific) for one in compared.concepts}
    # Three are tested: 0.03 alone would have been specific.
    assert by_name["a"] == (pytest.approx(0.06), False)
    assert by_name["b"] == (pytest.approx(0.036), True)
    assert by_name["c"] == (pytest.approx(0.2), False)
    assert by_name["d"] == (None, None)
    page = shown(compared)
    assert "3 concepts tested. Specific among them: b.</" in page
    # Of 200 prototypes three can be specific; of 64 the first of two has 2 x 2 / 64 at least.
    assert "None could be" not in page
    few = comparison.compare(
        [result(seed, control={"p": 0.2}), result(seed, control={"p": 0.03125})]
    )
    assert "None could be" in shown(few)
    assert "Holm&#39;s p is at least 0.062" in shown(few)
    none = shown(comparison.compare([nothing]))
    assert "0 concepts tested. Either no target is probable enough" in none


def test_a_page_without_verdicts_says_that_none_could_be_decided(seed):
    few = {"effect": {"n": 9, "sentences": 9}}
    undecided = [result(seed, name, control={"p": 0.01, "n": 199}, **few) for name in "ab"]
    page = shown(comparison.compare(undecided))
    assert "2 concepts tested. None could be decided. 2 undecided, on fewer than 10 texts" in page
    assert "None is specific" not in page and "specific among" not in page.lower()
    decided = result(seed, "c", control={"p": 0.5, "n": 199})
    page = shown(comparison.compare([*undecided, decided]))
    assert "None of those that were decided is specific. 2 undecided" in page
    page = shown(comparison.compare([decided]))
    assert "1 concept tested. None is specific.</" in page


def other(seed, number, *, p, effect, tested):
    """Another seed, by the p of its match, and the effect and the p of its ablation."""
    ablation = next(one for one in seed.modes if one.mode == numbers.ABLATION)
    changed = dataclasses.replace(
        ablation,
        effect=Effect(mean=effect, low=effect - 1, high=effect + 1, n=10, sentences=10),
        control=dataclasses.replace(ablation.control, p=tested),
    )
    modes = tuple(changed if one.mode == numbers.ABLATION else one for one in seed.modes)
    match = Match(0, 1, 0.9, 0.9, 0.5, 0.2, 0.4, 99.0, p, 24, 100)
    verdict = numbers.specific(changed.effect, tested)
    return dataclasses.replace(seed, seed=number, match=match, modes=modes, specific=verdict)


def test_what_other_seeds_say_by_hand(seed):
    first = other(seed, 1, p=1.0, effect=-6.0, tested=0.01)
    others = [
        # Alike and with the effect; 0.01 x 4 is 0.04.
        other(seed, 2, p=0.01, effect=-4.0, tested=0.02),
        # 0.015 x 3 is 0.045, but the effect is of the other sign.
        other(seed, 3, p=0.015, effect=5.0, tested=0.02),
        # 0.03 x 2 is 0.06, so not alike.
        other(seed, 4, p=0.03, effect=-5.0, tested=0.02),
        # Neither alike nor specific.
        other(seed, 5, p=0.6, effect=-0.5, tested=0.9),
    ]
    found = numbers.replication([first, *others])
    assert found.p_holm == pytest.approx((0.04, 0.045, 0.06, 0.6))
    assert (found.models, found.matched, found.repeated) == (4, 2, 1)
    mean = 100 * (stats.gmean([0.94, 0.96, 1.05, 0.95, 0.995]) - 1)
    assert (found.mean, found.lowest, found.highest) == pytest.approx((mean, -6.0, 5.0))
    assert numbers.replication([first]) is None
    report = dataclasses.replace(result(seed, "a"), replication=found)
    text = report_text.replication(report)
    assert "are in 2 of 4 other models (p by Holm 0.04, 0.045, 0.06, 0.6)" in text
    assert "in 1 its effect" in text and "of all 5 models: −2.18 %, from −6.00 to +5.00 %" in text
