"""The answer on top of a page: only models that solve a task have a circuit of it."""

import dataclasses
import re

import pytest

from lm_jax.statistics import Interval
from sparse_jax.studies.circuits import report, report_curves, report_text
from sparse_jax.studies.circuits.report_lead import lead
from sparse_jax.studies.circuits.results import (
    CircuitSummary,
    CurvePoint,
    CurveResult,
    HeadEffect,
    ModelFacts,
    TaskFacts,
    TaskResult,
    Transfer,
)
from sparse_jax.studies.circuits.settings import CircuitConfig

SIZES = {"dense": 20.0, "control": 8.0, "sparse": 2.0}


def interval(value):
    return Interval(value, value - 0.5, value + 0.5, 30)


def result(role, *, solved):
    """Its explained effect is a thousand where the task is not solved."""
    effect = 0.95 if solved else 1000.0
    points = tuple(CurvePoint(size, effect, effect / 10, effect, effect) for size in (1, 64))
    curves = tuple(
        CurveResult(
            "heads",
            "counterfactual",
            ranking,
            "prompt",
            points,
            interval(60.0 if ranking == "random" else SIZES[role]),
            1,
            0,
            1,
        )
        for ranking in ("signed", "absolute", "random")
    )
    of = {"heads": 64}
    return TaskResult(
        "ioi", role, interval(0.9), solved, *[interval(1.0)] * 3, of, {"heads": 64.0}, (), curves
    )


def summary(solving, roles=tuple(SIZES)):
    config = CircuitConfig(dense="a", tasks=("ioi",), components=("heads",))
    return CircuitSummary(
        config=config,
        models=tuple(
            ModelFacts(role, role, "0" * 64, "llama", 4, 16, role == "sparse") for role in roles
        ),
        tasks=(),
        results=tuple(result(role, solved=role in solving) for role in roles),
        ratios=(),
        transfers=(),
        device="cpu",
    )


@pytest.mark.parametrize(
    ("solving", "roles", "sizes"),
    [
        (
            ("dense", "control", "sparse"),
            tuple(SIZES),
            "ioi: dense 20.0, 20.0 by absolute effect, 60.0 in random order; control 8.00, 8.00 by "
            "absolute effect, 60.0 in random order; sparse 2.00, 2.00 by absolute effect, 60.0 in "
            "random order; of 64.",
        ),
        (
            ("control", "sparse"),
            tuple(SIZES),
            "ioi: control 8.00, 8.00 by absolute effect, 60.0 in random order; sparse 2.00, 2.00 "
            "by absolute effect, 60.0 in random order; of 64.",
        ),
        ((), tuple(SIZES), "ioi is solved by no model."),
        (
            ("dense",),
            ("dense",),
            "20.0, 20.0 by absolute effect, 60.0 in random order of 64 on ioi.",
        ),
        ((), ("dense",), "ioi is solved by no model."),
    ],
)
def test_the_answer_has_sizes_of_models_that_solve_the_task(solving, roles, sizes):
    answer, table = lead(summary(solving, roles), ["ioi"])
    assert f"of a prompt's metric: {sizes}" in answer.unescape()
    # A row for each ranking.
    assert len(re.findall("not solved", table)) == 3 * (len(roles) - len(solving))


def with_heads(shown, direction="noising"):
    """The summary with effects of two heads of each model, on prompts of a known metric."""
    heads = (
        HeadEffect(5, 1, Interval(-2.75, -3.0, -2.5, 30), 0.25),
        HeadEffect(3, 0, Interval(-0.5, -0.75, -0.25, 30), 2.5),
    )
    results = [
        dataclasses.replace(each, clean=interval(3.0), heads=heads) for each in shown.results
    ]
    facts = TaskFacts("ioi", None, "logit_difference", 0, 30, 30, {}, "", 9, 9, "", "", (), ())
    return dataclasses.replace(
        shown,
        config=dataclasses.replace(shown.config, direction=direction),
        tasks=(facts,),
        results=tuple(results),
    )


def test_page_and_terminal_open_with_the_head_that_carries_the_task():
    shown = with_heads(summary(("dense",), ("dense",)))
    said = (
        "L5H1 carries ioi in dense: with its output of the corrupt prompt in a clean run, the "
        "logit difference goes from 3.00 to 0.25 (change −2.75 [−3.00, −2.50], n = 30). "
        "Then L3H0 −0.50."
    )
    banner, _ = lead(shown, ["ioi"])
    assert banner.unescape().index(said) < banner.unescape().index("of a prompt's metric")
    assert report_text.findings(shown)[0] == said
    denoised = with_heads(summary(("dense",), ("dense",)), "denoising")
    assert (
        "of the clean prompt in a corrupt run, the logit difference goes from 1.00"
        in (report_text.findings(denoised)[0])
    )
    (unsolved, *_) = report_text.findings(with_heads(summary((), ("dense",))))
    assert unsolved == "dense does not solve ioi, so no head carries it."


def test_curves_have_the_axis_of_models_that_solve_the_task():
    shown = summary(("control", "sparse"))
    chart = report_curves.chart(shown, list(shown.results), "heads", "counterfactual", "prompt")
    scales = [
        layer["encoding"]["y"]["scale"]["domain"]
        for layer in chart.to_dict()["layer"]
        if "scale" in layer.get("encoding", {}).get("y", {})
    ]
    # 0.95 with a band of a tenth, and a margin; not the thousand of the other model.
    assert scales and all(low == 0 and 1.045 <= high < 1.2 for low, high in scales), scales


def test_transfers_have_numbers_of_models_that_solve_both_wordings():
    own = summary(("control", "sparse"))
    other = [
        dataclasses.replace(each, task="other", solved=each.model == "sparse")
        for each in own.results
    ]
    transfers = [
        Transfer(role, "ioi", "other", size, 0.25, 0.125, 0.5, interval(7.0), interval(8.0))
        for role, size in zip(SIZES, (20, 8, 2), strict=True)
    ]
    shown = dataclasses.replace(own, results=(*own.results, *other), transfers=tuple(transfers))
    page = str(report.transfers(shown))
    *_, dense, control, sparse = page.split("<tr>")
    assert "7.00" in sparse and "0.25" in sparse and "not solved" not in sparse
    for row, missing in ((dense, "ioi, other"), (control, "other")):
        assert f"<small>not solved: {missing}</small>" in row
        assert "7.00" not in row and "0.25" not in row
