"""Rows of the paper's tables beside an audit's: both numbers, and what differs."""

import dataclasses

import numpy as np
import pytest

from lm_jax.statistics import Interval
from polyattn_jax.audit.results import SuiteAblation, SuiteResult
from polyattn_jax.report import findings, paper
from polyattn_jax.report.beside import Audit
from polyattn_jax.studies.paper.numbers import compare
from tests.polyattn_jax.paper_audits import LLAMA, audit_of
from tests.polyattn_jax.report.test_report_paper import like_the_paper
from tests.polyattn_jax.synthetic_report import condition


def suite(name, length, accuracy, n=200):
    """One suite at one length, with these accuracies by recipe."""
    entries = tuple(condition(recipe, share, n) for recipe, share in accuracy.items())
    return SuiteResult(name, length, entries, {}, {}, {})


def numbers(audit, item):
    """By suite, cell and quantity: the paper's number, ours, and the causes."""
    return {
        (one.suite, one.cell, one.quantity): (one.paper, one.ours, one.causes)
        for one in compare(audit)
        if one.item == item
    }


def test_a_model_of_the_paper_at_its_settings_differs_in_dtype_alone(finding):
    result = like_the_paper(finding[0], dtype="float32")
    audit = audit_of(finding, result, same=True)
    audit = dataclasses.replace(
        audit, beside=dataclasses.replace(LLAMA, layers=result.layers, heads=result.heads)
    )
    rows = numbers(audit, "Table 3")
    by_recipe = {entry.recipe: entry for entry in result.sweep}
    for (suite_name, recipe, quantity), (theirs, ours, causes) in rows.items():
        assert suite_name == "niah_1536"
        if recipe == "softmax":
            assert (quantity, theirs, ours) == ("accuracy", 100.0, 100.0)
        else:
            assert theirs == LLAMA.needle[recipe]
            assert ours == 100 * by_recipe[recipe].delta.estimate
        assert causes == ("float32 (paper: bfloat16)",)
    assert len(rows) == len(result.sweep)


def test_every_difference_of_another_model_is_named(finding):
    rows = numbers(audit_of(finding), "Table 3")
    shared = ("another model than Llama-3.2-1B", "float32 (paper: bfloat16)")
    probe = ("prompts of 64 tokens (paper: 1,500)", "12 prompts (paper: 200)")
    assert rows["niah_64", "sigmoid_b0", "change of accuracy"][2] == (*shared, *probe)
    calibrated = rows["niah_64", "relu_p4_bauto", "change of accuracy"][2]
    assert calibrated == (*shared, *probe, "b_auto of 64 tokens (paper: 1,024)")


def test_rows_of_prevalence_are_those_of_the_summary(finding):
    summary = finding[0]
    audit = audit_of(finding)
    entry = next(e for e in summary.prevalence if (e.suite, e.bias_kind) == ("induction", "zero"))
    of_1, of_10 = numbers(audit, "Table 1"), numbers(audit, "Table 10")
    for p, theirs in ((2, 19.6), (4, 10.3), (8, 4.7)):
        row = of_1["induction", f"p = {p}, b = 0", "unsafe rows"]
        assert row[:2] == (theirs, 100 * entry.unsafe_active[str(p)].estimate)
    assert of_10["induction", "b = 0", "median S_2"][:2] == (0.107, entry.median.s_2)
    assert of_10["induction", "b = 0", "dead rows"][:2] == (0.0, 100 * entry.dead.estimate)
    assert numbers(audit, "Table 11")["mqar", "p = 2, b_auto", "unsafe rows"][0] == 71.3
    bound = next(
        e for e in summary.bound if (e.suite, e.bias_kind, e.p) == ("induction", "zero", 2)
    )
    of_8 = numbers(audit, "Table 8")
    assert of_8["induction", "p = 2, b = 0", "false positives"][:2] == (
        41_666.0,
        bound.false_positive,
    )


def test_suites_stand_beside_their_tables_at_every_length(finding):
    shares = {"softmax": 0.9, "relu_p2_b0": 0.25, "relu_p16_b0": 0.5}
    suites = (
        suite("two_needles", 400, shares),
        suite("decoys", 512, shares),
        suite("copying", 500, shares),
        suite("induction", 256, {"softmax": 0.1}),
    )
    audit = audit_of(finding, dataclasses.replace(finding[0], suites=suites))
    two = numbers(audit, "Table 19")
    assert two.keys() == {("two_needles_400", r, "accuracy") for r in ("softmax", "relu_p2_b0")}
    theirs, ours, causes = two["two_needles_400", "relu_p2_b0", "accuracy"]
    assert (theirs, ours, len(causes)) == (81.0, 25.0, 2)
    theirs, _, causes = numbers(audit, "Table 21")["decoys_512", "softmax", "accuracy"]
    assert (theirs, causes[-1]) == (99.5, "prompts of 512 tokens (paper: 1,500)")
    (softmax,) = (one for one in compare(audit) if one.item == "Table 2" and one.cell == "softmax")
    assert softmax.causes[-1] == "54 openings (paper: 200)"
    assert (softmax.paper, softmax.paper_low, softmax.paper_high) == (None, 74.5, 79.0)
    assert numbers(audit, "Appendix I")["induction_256", "softmax", "accuracy"][:2] == (13.0, 10.0)


def test_head_sets_stand_beside_the_figure_and_its_draws(finding):
    summary, _, _ = finding
    gemma = next(model for model in paper.MODELS if model.name == "Gemma-4-E2B")
    sizes = {1: 20, 2: 40}
    moved = dataclasses.replace(
        summary,
        decisiveness=tuple(
            dataclasses.replace(e, size=sizes[e.size]) for e in summary.decisiveness
        ),
        ablation=tuple(
            dataclasses.replace(
                e,
                cell=e.cell.replace("-1", "-20", 1).replace("-2", "-40", 1)
                if not e.cell.startswith(("top-1", "bottom-1", "random-1"))
                else e.cell.replace("-1", "-20", 1),
            )
            for e in summary.ablation
        ),
    )
    audit = audit_of(finding, moved, beside=gemma)
    figure = numbers(audit, "Figure 4")
    # 12 prompts right before; 1 with the top two heads replaced, 12 with the bottom two.
    assert figure["niah_64", "top 40 heads", "change of accuracy"][:2] == (
        -100.0,
        pytest.approx(-1100 / 12),
    )
    assert figure["niah_64", "bottom 20 heads", "change of accuracy"][:2] == (0.0, 0.0)
    draws = numbers(audit, "Table 17")
    beaten = draws["niah_64", "top 40 heads against 2 random sets", "random sets that do better"]
    assert beaten[:2] == (20.0, 2.0)
    assert "2 random sets (paper: 20)" in beaten[2]


def test_literary_head_sets_stand_beside_their_own_figure(finding):
    summary, _, _ = finding
    (first, *_) = summary.decisiveness
    sets = {"softmax": 1.0, "top-40": 0.5, "bottom-40": 1.0, "random-40-0": 0.75}
    conditions = tuple(
        condition(name, share, 12, delta=Interval(share - 1.0, -1.0, 1.0, 12))
        for name, share in sets.items()
    )
    entry = dataclasses.replace(first, size=40, top=6, bottom=12, random=(9,), beaten=1)
    ablated = SuiteAblation("copying", 500, conditions, (entry,))
    result = dataclasses.replace(summary, suite_ablation=(ablated,))
    qwen = next(model for model in paper.MODELS if model.name == "Qwen3-1.7B")
    audit = audit_of(finding, result, beside=qwen)
    figure, draws = numbers(audit, "Figure 3"), numbers(audit, "Table 27")
    assert figure["copying_500", "top 40 heads", "change of accuracy"][:2] == (-62.5, -50.0)
    cell = ("copying_500", "top 40 heads against 1 random sets")
    assert draws[*cell, "worst random set"][:2] == (-43.0, -25.0)
    assert draws[*cell, "best random set"][0] is None
    (top, bottom) = (one for one in compare(audit_of(finding, result)) if one.item == "Figure 3")
    assert {(one.paper, one.paper_low, one.paper_high) for one in (top, bottom)} == {
        (None, -7.0, 7.0)
    }


def test_single_heads_are_counted_and_ranked_beside_table_26(finding):
    summary, _, by_head = finding
    # By head 0 to 5; the median S_2 of heads 1, 4 and 5 is given.
    s_2 = np.where(np.isin(np.arange(6), (1, 4, 5)), [0, 3.0, 0, 0, 2.0, 1.0], by_head["s_2"])
    cells = {"softmax": 0.0, "single-0-1": -0.25, "single-2-0": 0.0, "single-2-1": 0.5}
    entries = tuple(
        condition(name, 0.5 + change, 12, delta=Interval(change, -1.0, 1.0, 12))
        for name, change in cells.items()
    )
    qwen = next(model for model in paper.MODELS if model.name == "Qwen3-1.7B")
    result = dataclasses.replace(summary, single_heads=entries)
    audit = Audit(result, by_head | {"s_2": s_2}, qwen, False)
    rows = numbers(audit, "Table 26")
    place = ("niah_64", "3 heads of both ends of the ranking")
    theirs, ours, causes = rows[*place, "heads that change the accuracy"]
    assert (theirs, ours) == (0, 2) and "3 heads (paper: 40)" in causes
    # S_2 of 3, 2, 1 and changes that rise: the ranks are reversed.
    assert rows[*place, "rank correlation of S_2 and change"][:2] == (None, pytest.approx(-1.0))
    assert findings.single_heads(result) == (
        "In one head alone, for each of the 3 at both ends of the ranking: 2 of them change the "
        "number of right prompts, by -3 to +6 of 12."
    )


def test_where_the_paper_has_no_number_none_is_made_up(finding):
    for one in compare(audit_of(finding, beside=None)):
        assert (one.paper, one.paper_low, one.paper_high, one.beside) == (None,) * 4
        assert one.causes == ("the paper has no number of it",)
    pythia = paper.MODELS[-1]
    suites = (suite("pass_key", 64, {"softmax": 1.0}),)
    audit = audit_of(finding, dataclasses.replace(finding[0], suites=suites), beside=pythia)
    assert numbers(audit, "Table 22")["pass_key_64", "softmax", "accuracy"] == (
        None,
        100.0,
        ("the paper has no number of it",),
    )


def further(name):
    return next(model for model in paper.NUMBERS.further_model if model.name == name)


def test_a_further_model_stands_in_its_own_tables_where_the_paper_has_a_number(finding):
    summary, _, _ = finding
    qwen = further("Qwen3-8B")
    audit = audit_of(finding, like_the_paper(summary), beside=qwen)
    entry = next(e for e in summary.prevalence if (e.suite, e.bias_kind) == ("induction", "zero"))
    rows = {
        key: found[:2] for key, found in numbers(audit, "Table 18").items() if key[0] == "induction"
    }
    shares = {p: 100 * entry.unsafe_active[str(p)].estimate for p in (2, 4, 8)}
    assert rows == {
        ("induction", "p = 2, b = 0", "unsafe rows"): (95.9, shares[2]),
        ("induction", "p = 4, b = 0", "unsafe rows"): (81.6, shares[4]),
        ("induction", "p = 8, b = 0", "unsafe rows"): (44.9, shares[8]),
        ("induction", "b = 0", "median relative margin"): (0.197, entry.median.relative_margin),
        ("induction", "b = 0", "median active distractors"): (251, entry.median.active),
    }
    # Numbers that the paper prints of the four alone have none of theirs here.
    others = [one for one in compare(audit) if one.item != "Table 18"]
    assert {one.item for one in others} >= {"Table 3", "Table 8", "Table 10", "Figure 5"}
    for one in others:
        assert (one.paper, one.paper_low) == (None, None)
        assert one.causes == ("the paper has no number of it",)


def test_the_ablation_of_the_3b_stands_beside_table_25_with_its_five_sets(finding):
    summary, _, _ = finding
    (first, *_) = summary.decisiveness
    sets = {"softmax": 1.0, "top-40": 0.75, "bottom-40": 1.0, "random-40-0": 0.75}
    sets["random-40-1"] = 0.5
    conditions = tuple(
        condition(name, share, 12, delta=Interval(share - 1.0, -1.0, 1.0, 12))
        for name, share in sets.items()
    )
    entry = dataclasses.replace(first, size=40, top=9, bottom=12, random=(9, 6), beaten=0, n=12)
    ablated = SuiteAblation("copying", 500, conditions, (entry,))
    of_copying = suite("copying", 500, {"softmax": 0.5})
    result = dataclasses.replace(summary, suite_ablation=(ablated,), suites=(of_copying,))
    rows = numbers(audit_of(finding, result, beside=further("Llama-3.2-3B")), "Table 25")
    cell = ("copying_500", "top 40 heads against 2 random sets")
    theirs, ours, causes = rows[*cell, "mean of the random sets"]
    # 3 and 6 of 12 prompts are lost.
    assert (theirs, ours) == (-1.2, pytest.approx(-37.5))
    assert "2 random sets (paper: 5)" in causes
    assert rows["copying_500", "top 40 heads", "change of accuracy"][:2] == (0.0, -25.0)
    assert rows["copying_500", "softmax", "accuracy"][:2] == (79.0, 50.0)
    assert len([key for key in rows if key[0] == "copying_500"]) == 4
    # What Table 25 does not print stays in the table of the four, without a number.
    qwen = next(model for model in paper.MODELS if model.name == "Qwen3-1.7B")
    for beside in (further("Llama-3.2-3B"), qwen):
        audit = audit_of(finding, result, beside=beside)
        names = {key[2] for key in numbers(audit, "Table 27")}
        assert names == {"random sets that do better", "worst random set", "best random set"}


def test_a_suite_at_a_second_length_stands_in_table_1_where_the_paper_has_that_length(finding):
    """Table 1 has Pythia's rows at 1,024 tokens in its caption, of no other model."""
    summary, _, _ = finding
    (entry,) = (e for e in summary.prevalence if (e.suite, e.bias_kind) == ("mqar", "zero"))
    entries = [dataclasses.replace(entry, suite=name) for name in ("mqar", "mqar_1024", "mqar_512")]
    config = dataclasses.replace(summary.config, mqar_length=4096)
    result = dataclasses.replace(summary, prevalence=tuple(entries), config=config)
    found = {}
    for beside in (paper.MODELS[-1], LLAMA):
        rows = numbers(audit_of(finding, result, beside=beside), "Table 1")
        found[beside.name] = {key[0]: row[0] for key, row in rows.items() if "p = 2" in key[1]}
    assert found == {
        "Pythia-1.4b": {"mqar": 95.3, "mqar_1024": 63.4},
        "Llama-3.2-1B": {"mqar": 21.4},
    }
