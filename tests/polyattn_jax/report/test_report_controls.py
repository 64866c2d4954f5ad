"""Without controls that hold there is no verdict: in the summary, on the page, in print."""

import dataclasses

import pytest

from polyattn_jax.report import findings
from tests.polyattn_jax.synthetic_report import (
    ABLATION,
    PROMPTS,
    SETTINGS,
    audit,
)

# 12 prompts show a loss below 30 points, and that of all of them.
TOLERANT = dataclasses.replace(SETTINGS, tolerance=0.3)
RIGHT = {"softmax": PROMPTS, "relu_p4_b0": PROMPTS, "sigmoid_b0": 0}
SETS = ABLATION | {"top-2": 0, "bottom-2": PROMPTS}


def verdicts(result, stage="sweep"):
    return {entry.cell: entry.verdict for entry in getattr(result, stage)}


def test_where_the_controls_hold_the_prompts_decide():
    result, _, _ = audit(TOLERANT, RIGHT, SETS)
    assert result.controls.unmet == ()
    assert verdicts(result) == {"softmax": "preserve", "relu_p4_b0": "preserve"} | {
        "sigmoid_b0": "no-go"
    }
    sets = verdicts(result, "ablation")
    assert (sets["top-2"], sets["bottom-2"]) == ("no-go", "preserve")
    assert findings.controls(result).text.startswith("The controls hold")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"left_out": PROMPTS},
            "softmax finds the needle in 12 of 12 prompts where it was left out",
        ),
        (
            {"second": 12.0},
            "random tokens written twice does not fall to half: 12.5 and 12.0 nats per token",
        ),
    ],
    ids=["found where it was left out", "no drop of loss"],
)
def test_where_a_control_fails_every_verdict_is_undecided_and_says_so(changes, reason):
    result, _, _ = audit(TOLERANT, RIGHT, SETS, **changes)
    for stage in ("sweep", "ablation"):
        assert {*verdicts(result, stage).values()} == {"undecided"}
    for decided in result.verdicts:
        assert decided.verdict == "undecided"
        assert decided.reason.startswith("the controls are not shown to hold: ")
        assert reason in decided.reason
        assert "make the controls hold" in decided.next
    # the measured change is still there
    assert {e.cell: e.delta.estimate for e in result.sweep}["sigmoid_b0"] == -1
    finding = findings.overall(result)
    assert (
        finding.tone == "warn"
        and finding.text.startswith("No verdict on Other-1B")
        and reason in finding.text
    )
