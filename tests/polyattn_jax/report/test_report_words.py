"""Sentences, verdicts and the console follow the numbers of the summary."""

import dataclasses
import io
import math

import numpy as np
import pyarrow as pa
import pytest

from lm_jax.console.output import printable
from lm_jax.statistics import Interval
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.report import findings, recipes, sharpness
from tests.polyattn_jax.synthetic_report import (
    SETTINGS,
    audit,
    build,
    diagnosed_rows,
    parsed,
    printed,
    text_of,
)


@pytest.mark.parametrize(
    ("s_p", "softmax", "says"),
    [
        (2.0, 0.5, "spreads more rows than softmax at p = 2, 4, 8 and 16."),
        (0.5, 2.0, "spreads fewer than softmax at p = 2, 4, 8 and 16."),
        (2.0, 2.0, "spreads as many as softmax, within the interval, at p = 2, 4, 8 and 16."),
    ],
)
def test_the_words_on_sharpness_follow_the_numbers(s_p, softmax, says):
    rows = diagnosed_rows(suites=("niah_64",))
    for name, value in [("s_softmax", softmax), *((f"s_{p}", s_p) for p in (2, 4, 8, 16))]:
        column = pa.array(np.full(rows.num_rows, value, np.float32))
        rows = rows.set_column(rows.column_names.index(name), name, column)
    status = pa.array(np.full(rows.num_rows, Status.ACTIVE, np.int8))
    rows = rows.set_column(rows.column_names.index("status"), "status", status)
    result = audit(rows=rows)[0]
    text = sharpness.sentence(result)
    assert says in text
    assert f"outweigh the best one in {100 * (softmax > 1):.1f} % of the" in text
    assert ("softmax concentrates it loses" in text) == (softmax < 1)
    for entry in sharpness.entries(result, "auto"):
        moved = f"{100 * entry.change.estimate:.0f} % (p = {entry.p})"
        assert moved in text.split("head's output change by more than")[1]
    # An unsafe share by itself says nothing of the recipe.
    assert "warns that" not in text_of(parsed(build(*audit(rows=rows))))


@pytest.mark.parametrize(
    ("correct", "tone", "part"),
    [
        (
            {"softmax": 6, "relu_p4_b0": 6},
            "warn",
            "No verdict on Other-1B: softmax itself is right",
        ),
        ({"softmax": 12, "relu_p4_b0": 3}, "bad", "The recipe tried does not preserve"),
        (
            {"softmax": 12, "relu_p4_b0": 3, "sigmoid_b0": 4},
            "bad",
            "the best, sigmoid_b0, is right",
        ),
        (
            {"softmax": 12, "relu_p4_b0": 12},
            "warn",
            "The recipe tried is not shown to lose less than 5 points",
        ),
    ],
)
def test_the_overall_sentence(correct, tone, part):
    result = findings.overall(audit(correct=correct)[0])
    assert result.tone == tone
    assert part in result.text


def test_of_many_recipes_one_preserves_only_after_holm():
    """12 of 12 shows a loss below 30 points for one or two recipes tried, and not for three."""
    settings = dataclasses.replace(SETTINGS, tolerance=0.3)
    right = {"softmax": 12, "relu_p4_b0": 12, "sigmoid_b0": 0, "relu_p8_bauto": 0}
    for tried, shown in ((2, True), (3, False)):
        result, *_ = audit(settings, dict(list(right.items())[: tried + 1]))
        first, *rest = result.verdicts
        assert (first.recipe, first.verdict) == ("relu_p4_b0", "preserve")
        assert first.loss_p < 0.025 and first.loss_p_holm == pytest.approx(tried * first.loss_p)
        assert (first.loss_p_holm <= 0.025) == shown
        assert all(one.loss_p_holm > 0.5 for one in rest)
        found = findings.overall(result)
        assert found.tone == ("good" if shown else "warn")
        assert f"after Holm's correction for {tried} recipes" in found.text
        assert ("1 would preserve: relu_p4_b0 (12 of 12" in found.text) != shown


@pytest.mark.parametrize(
    ("softmax", "right", "recipe", "verdict", "reason"),
    [
        (12, 12, "relu_p4_bauto", "undecided", "anything from −24.2 to +24.2 points"),
        (12, 10, "relu_p4_bauto", "undecided", "do not tell whether the loss is smaller than 5"),
        (12, 0, "relu_p4_bauto", "no-go", "part of the rows is measured safe"),
        (12, 0, "sigmoid_b0", "no-go", "S_p is not measured for this map"),
        (6, 0, "relu_p4_bauto", "undecided", "softmax itself is right in 6 of 12 prompts"),
    ],
)
def test_a_verdict_gives_the_reason_that_holds(softmax, right, recipe, verdict, reason):
    result = audit(correct={"softmax": softmax, recipe: right})[0]
    (decided,) = result.verdicts
    assert decided.verdict == verdict
    assert reason in decided.reason
    assert decided.could_decide == softmax
    (entry,) = (e for e in result.sweep if e.recipe == recipe)
    assert entry.verdict == verdict


def test_the_console_prints_text_as_text_in_any_encoding(finding, monkeypatch):
    result = dataclasses.replace(finding[0], model="models/[red]x\x1b[31m漢")
    text = printed(result)
    assert "[red]x" in text and "漢" in text
    assert "\x1b" not in text
    assert "S_2" in text
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert printable(text).isascii() and "[red]x" in printable(text)


@pytest.mark.parametrize("ends", [(0.0, math.inf), (-math.inf, math.inf)])
def test_a_perplexity_of_one_text_has_no_interval_as_its_loss_has_none(ends):
    """It is the exponential of a loss, whose ends are 0 and inf, or of a change of it."""
    loss = Interval(1.0, *ends, 1)
    perplexity = Interval(math.e, *map(math.exp, ends), 1)
    for shown in (loss, perplexity):
        assert recipes.stacked(shown, ".3f", scale=1.0).note == findings.NO_INTERVAL
    two = recipes.stacked(Interval(2.0, 1.0, math.inf, 2), ".4g", scale=1.0)
    assert two.note != findings.NO_INTERVAL
