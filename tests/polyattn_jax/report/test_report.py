"""A report shows the numbers of the summary, whatever is absent or hostile."""

import dataclasses

import numpy as np
import pyarrow as pa

from lm_jax.report.markup import number
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.report import figures, findings
from tests.polyattn_jax.synthetic_report import (
    CORRECT,
    PROMPTS,
    SETTINGS,
    audit,
    build,
    diagnosed_rows,
    lines,
    parsed,
    percent,
    text_of,
)

COUNTS = ("false_negative", "false_negative_eps", "false_positive")
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m{{ 7 * 7 }} ]]> & [red]x"


def test_the_tables_hold_the_numbers_of_the_summary(finding):
    result, tree = finding[0], parsed(build(*finding))
    swept = {row[0].split("b = ")[0]: row for row in lines(tree, "Needle probe at 64 tokens")}
    verdicts = {v.recipe: v for v in result.verdicts}
    for entry in result.sweep:
        row, accuracy = swept[entry.recipe], entry.accuracy
        low, high = percent(accuracy.low), percent(accuracy.high)
        assert row[2] == f"{percent(accuracy.estimate)}[{low}, {high}]"
        assert row[5] == f"{entry.loss:.2f}"
        if entry.recipe == "softmax":
            control = next(
                e.softmax
                for e in result.prevalence
                if (e.suite, e.bias_kind) == ("niah_64", "auto")
            )
            assert row[8].split("[")[0] == percent(1 - control.estimate)
        if verdict := verdicts.get(entry.recipe):
            assert row[1].split()[-1] == verdict.verdict
            assert row[3].startswith(percent(entry.delta.estimate, "+.1f"))
            assert row[4] == f"{entry.p_value:.2g}{entry.lost} lost, {entry.won} won"
            safe = verdict.safe
            assert row[8].split("[")[0] == (percent(safe.estimate) if safe else "–")
    unsafe = {row[0]: row for row in lines(tree, "Unsafe share")}
    for entry in result.prevalence:
        name, tokens = (
            findings.suite_name(entry.suite),
            1024 if "1024" in entry.suite else 64,
        )
        bias = "b = 0" if entry.bias_kind == "zero" else "b_auto"
        row = unsafe[f"{name}{tokens:,} tokens, {bias}"]
        shares = [entry.softmax, *entry.unsafe.values()]
        found_shares = [cell.split("[")[0] for cell in row[1:6]]
        assert found_shares == [percent(share.estimate) for share in shares]
        assert row[6] == number(entry.median.s_2)
        assert row[-1] == f"{entry.active_rows}of {entry.rows}"
    assert f"{PROMPTS} prompts per line" in text_of(tree)
    reasons = {row[0]: row[2] for row in lines(tree, "Reasons and next steps")}
    assert list(reasons) == ["relu_p4_b0, relu_p8_bauto", "relu_p4_bauto, sigmoid_b0"]
    assert reasons["relu_p4_b0, relu_p8_bauto"].startswith("the loss is larger than 5 points; part")
    bound = [e for e in result.bound if e.suite != "induction"]
    counted = [
        [str(e.p), percent(e.agree.estimate), *(str(getattr(e, name)) for name in COUNTS)]
        for e in findings.by_suite(bound)
    ]
    folded = [d for d in tree.iter("details") if "other suites" in text_of(d.find("summary"))]
    printed_rows = [[cell.split("[")[0] for cell in row] for row in lines(folded[1], "Predicted")]
    assert [[*row[1:5], row[6]] for row in printed_rows] == counted


def test_the_certified_tie_is_a_false_negative_only_without_tolerance(finding):
    result, rows, _ = finding
    entry = next(e for e in result.bound if (e.suite, e.bias_kind, e.p) == ("niah_64", "zero", 2))
    assert (entry.false_negative, entry.false_negative_eps) == (1, 0)
    columns = figures.argmax_rows(rows, "niah_64", "zero")
    drawn = figures.bound_scatter(columns, degree=2, seed=0, where="here")
    (groups,) = (
        layer["encoding"]["color"]["scale"]["domain"]
        for layer in drawn.to_dict()["layer"]
        if "color" in layer["encoding"]
    )
    assert "tie (S₂ = 1)" in groups and "certified, unsafe" not in groups


def test_the_ablation_is_reported_at_every_size_with_the_flag_of_the_paper():
    sets = {"softmax": 12, "top-1": 9, "bottom-1": 8, "top-2": 1, "bottom-2": 12}
    sets |= {f"random-1-{seed}": 9 + (seed > 0) for seed in range(20)}
    sets |= {f"random-2-{seed}": 2 + seed // 2 for seed in range(20)}
    finding = audit(dataclasses.replace(SETTINGS, ablation_draws=20), CORRECT, sets)
    text = findings.in_part(finding[0])
    assert "K = 1: highest S₂ 9, lowest 8, random 9 to 10; K = 2: highest S₂ 1" in text
    assert "19 of 20 at K = 1 (not decisive), 20 of 20 at K = 2 (decisive)" in text
    rows = lines(parsed(build(*finding)), "Prompts answered with the recipe in K heads")
    assert [(row[0], row[3], row[4], row[5]) for row in rows] == [
        ("1", "9 to 10", "19 of 20", "no"),
        ("2", "2 to 11", "20 of 20", "yes"),
    ]


def test_absent_parts_leave_a_valid_page():
    config = dataclasses.replace(
        SETTINGS, niah_lengths=(64,), ablation_heads=(), induction_n=0, mqar_n=0
    )
    rows = diagnosed_rows(suites=("niah_64",))
    dead = pa.array(np.full(rows.num_rows, Status.DEAD), pa.int8())
    rows = rows.set_column(rows.column_names.index("status"), "status", dead)
    result, rows, by_head = audit(config, {"softmax": 12, "sigmoid_b0": 0}, {}, rows, second=np.nan)
    assert np.isinf(by_head["s_2"]).all()
    assert np.isnan(by_head["relative_margin"]).all()
    assert set(by_head["type"]) == {"unknown"} and np.isnan(by_head["induction"]).all()
    tree = parsed(build(result, rows, by_head))
    titles = [text_of(title) for title in tree.iter("h2")]
    assert not any(title.startswith(("Ablation", "Head types")) for title in titles)
    assert "Nothing to show." in text_of(tree)
    assert "The controls do not hold" in text_of(tree.find("header"))


def test_hostile_text_stays_text(finding):
    result, rows, by_head = finding
    first, *others = result.verdicts
    result = dataclasses.replace(
        result,
        model=HOSTILE,
        weights=(HOSTILE,),
        ranking_suite=HOSTILE,
        config=dataclasses.replace(result.config, haystack=HOSTILE),
        verdicts=(dataclasses.replace(first, finding=HOSTILE), *others),
        sweep=tuple(
            dataclasses.replace(entry, recipe=HOSTILE, cell=HOSTILE)
            if entry.recipe == "relu_p4_b0"
            else entry
            for entry in result.sweep
        ),
        provenance=dataclasses.replace(result.provenance, command=HOSTILE),
    )
    tree = parsed(build(result, rows, by_head))
    assert not {"img", "x"} & {node.tag for node in tree.iter()}
    assert {node.get("type") for node in tree.iter("script")} == {"application/json"}
    assert "onerror=alert(1)>" in text_of(tree.find("header"))
    assert "{{ 7 * 7 }}" in text_of(tree.find("footer"))


def test_walls_and_points_of_the_phase_plot(finding, monkeypatch):
    _, _, by_head = finding
    drawn = {}

    def scatter(groups, **options):
        drawn.update(options, groups=groups)

    monkeypatch.setattr(figures.report, "scatter", scatter)
    figures.phase_plot(by_head, caption="")
    assert [wall.label for wall in drawn["boundaries"]] == [f"p = {p}" for p in (2, 4, 8, 16)]
    for p, wall in zip((2, 4, 8, 16), drawn["boundaries"], strict=True):
        # On a wall A (1 - rho)^p = 1, the bound of Corollary 4.3.
        np.testing.assert_allclose(wall.y * (1 - wall.x) ** p, 1)
    points = {pair for group in drawn["groups"] for pair in zip(group.x, group.y, strict=True)}
    assert points == set(zip(by_head["relative_margin"], by_head["active"], strict=True))
