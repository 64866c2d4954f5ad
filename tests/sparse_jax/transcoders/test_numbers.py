"""A transcoder against its controls: paired scores, and who leaves less at equal activity."""

import dataclasses

import pytest

from sparse_jax.graphs.graph import GraphScores
from sparse_jax.graphs.influence import Scores
from sparse_jax.studies.transcoders import numbers, report
from sparse_jax.studies.transcoders.results import (
    Control,
    PromptScores,
    Reconstruction,
    Substitution,
    TranscoderSummary,
)

OWN = (0.5, 0.9, 0.6, 0.8, 0.7)


def scores(by_prompt, **changes):
    mean = Scores(sum(by_prompt) / len(by_prompt), 0.9, 0.9)
    result = PromptScores(len(by_prompt), 8, "ab" * 32, 0, 64, GraphScores(mean, mean), by_prompt)
    return dataclasses.replace(result, **changes)


def control(name, l0, unexplained, by_prompt=OWN):
    graphs = None if by_prompt is None else scores(by_prompt)
    return Control(name, 48, 100, l0, unexplained, None, graphs)


def summary(*controls, unexplained=0.4):
    return TranscoderSummary(
        model="m",
        model_sha256="0",
        family="llama",
        kind="jumprelu",
        window=None,
        features=48,
        parameters=100,
        steps=10,
        tokens_seen=100,
        ended="steps",
        validation_tokens=50,
        reconstruction=Reconstruction(30.0, (30.0,), unexplained, (unexplained,)),
        batch_topk=None,
        substitution=Substitution(40, 0.5, 0.5),
        graphs=scores(OWN),
        controls=controls,
        dead=0.0,
        device="cpu",
    )


def test_a_constant_difference_has_an_interval_of_no_width_though_prompts_differ():
    less = tuple(x - 0.125 for x in OWN)
    difference = numbers.replacement_over(scores(OWN), scores(less))
    assert (difference.estimate, difference.low, difference.high, difference.n) == (
        *[pytest.approx(0.125, abs=1e-12)] * 3,
        5,
    )
    alone = numbers.replacement(scores(OWN))
    assert alone.estimate == pytest.approx(0.7) and alone.low < 0.65 and alone.high > 0.75


def test_scores_are_not_paired_across_other_or_missing_prompts():
    own = scores(OWN)
    assert numbers.replacement_over(own, scores(OWN, sha256="cd" * 32)) is None
    assert numbers.replacement_over(own, scores(OWN[1:], prompts=5, without_features=1)) is None
    assert numbers.replacement(scores(OWN[:1])) is None


@pytest.mark.parametrize(
    ("controls", "better"),
    [
        ((), None),
        # More active features may leave less; as many, rounding apart, or fewer may not.
        ((control("neurons", 700.0, 0.0, None),), None),
        ((control("largest_neurons", 30.001, 0.39),), "largest_neurons"),
        (
            (control("per_layer", 29.0, 0.39), control("largest_neurons", 30.0, 0.38)),
            "largest_neurons",
        ),
        ((control("shuffled", 30.0, 1.1),), None),
    ],
)
def test_the_verdict_is_good_only_without_a_better_control(controls, better):
    made = summary(*controls)
    found = numbers.better_control(made)
    assert (found and found.name) == better
    verdict = str(report.conclusion(made))
    assert ("verdict good" in verdict) == (better is None)
    if better is not None:
        assert f"“{report.CONTROLS[better]}” leaves less" in verdict
    assert "verdict good" not in str(report.conclusion(summary(*controls, unexplained=0.6)))
