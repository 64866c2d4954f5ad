"""A report shows the numbers of the summary, whatever is absent or hostile."""

import dataclasses
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.report.markup import number
from lm_jax.run.files import write_json
from lm_jax.run.results import load_result
from lm_jax.statistics import wilson
from polyattn_jax.audit.columns import columns
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.report import figures, findings
from tests.polyattn_jax.synthetic_report import (
    CALIBRATION,
    CORRECT,
    CURVE,
    PROMPTS,
    SETTINGS,
    audit,
    build,
    diagnosed_rows,
    lines,
    parsed,
    percent,
    printed,
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


def test_the_comparison_with_softmax_holds_the_numbers_of_the_summary(finding):
    result, tree = finding[0], parsed(build(*finding))
    printed_rows = [
        [text_of(cell) for cell in row]
        for figure in tree.iter("figure")
        if text_of(figure.find("figcaption")).startswith("rᵖ against softmax")
        for row in figure.find(".//tbody")
    ]
    entries = findings.by_suite(result.against_softmax)
    # The suite of the sweep comes first, the others are folded.
    ordered = [e for e in entries if e.suite == "niah_64"]
    ordered += [e for e in entries if e.suite != "niah_64"]
    assert len(printed_rows) == len(ordered) == 4 * 2 * 4
    for row, entry in zip(printed_rows, ordered, strict=True):
        assert row[1] == str(entry.p)
        names = ("lost", "lost_of_concentrated", "sharpened", "balance", "change")
        for cell, name in zip(row[2:7], names, strict=True):
            spec, interval = "+.1f" if name == "balance" else ".1f", getattr(entry, name)
            low, high = percent(interval.low, spec), percent(interval.high, spec)
            assert cell == f"{percent(interval.estimate, spec)}[{low}, {high}]"
        assert row[8] == str(entry.undecided)
        assert row[9].startswith(number(entry.rows))


def test_b_auto_has_the_digits_of_its_interval(finding):
    result, tree = finding[0], parsed(build(*finding))
    (row,) = lines(tree, "b_auto is solved exactly")
    assert row[:2] == ["1.50 [1.31, 1.67]", "64"]
    (figure,) = (
        figure
        for figure in tree.iter("figure")
        if text_of(figure.find("figcaption")).startswith("b_auto of the first tokens of the")
    )
    assert "read off a grid of step 0.00400" in text_of(figure.find("figcaption"))
    rows = [[text_of(cell) for cell in row] for row in figure.find(".//tbody")]
    for one in CURVE:
        ends = [f"{value:g}" for value in (one.bias, one.low, one.high)]
        assert ["all texts, 95 % interval", str(one.length), *ends] in rows
        for series, bias in (("smallest", one.least), ("largest", one.most)):
            assert any(
                row[:3] == [f"{series} of one text", str(one.length), f"{bias:g}"] for row in rows
            )
    assert "At other lengths it would be 0.75 at 16 tokens, 1.50 at 64." in text_of(tree)
    assert "b_auto = 1.50 [1.31, 1.67] (95 % over 8 texts of 64" in " ".join(
        printed(result).split()
    )
    for half, text in ((0.012, "1.501 [1.489, 1.513]"), (0.4, "1.50 ["), (2.0, "1.5 [")):
        ends = {"low": 1.5012345 - half, "high": 1.5012345 + half}
        assert findings.b_auto(dataclasses.replace(CALIBRATION, **ends)).startswith(text)


def test_head_types_are_counted_at_both_ends_and_say_what_was_averaged(finding):
    result, _, by_head = finding
    kinds = ["sink", "sink", "induction", "local", "diffuse", "diffuse"]
    # the sixth has a weight of 0.3 on the first key and 0.5 on the planted one, no more
    assert list(by_head["type"]) == kinds
    ranked = [kinds[head] for head in np.argsort(by_head["rank"])]
    printed_rows = {row[0]: row[1:4] for row in lines(parsed(build(*finding)), "Heads by type")}
    for kind in ("sink", "induction", "local", "diffuse"):
        ends = ranked[:2].count(kind), ranked[-2:].count(kind)
        assert printed_rows[kind] == [str(kinds.count(kind)), *map(str, ends)]
        assert result.head_types.top[kind] == ends[0]
    text = text_of(parsed(build(*finding)))
    assert "averages over all query rows of 2 induction prompts of 64 tokens" in text


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


def test_controls_come_first_and_the_verdict_names_what_may_be_replaced(finding):
    tree = parsed(build(*finding))
    controls_banner, verdict_banner = (
        div for div in tree.find("header").iter("div") if "verdict" in div.get("class")
    )
    assert "12 of 12 prompts at 64 tokens" in text_of(controls_banner)
    assert "0 of 50" not in text_of(controls_banner)
    low = 100 * wilson(12, 12).low
    assert f"{low:.0f} to 100 % with the needle" in text_of(controls_banner)
    assert "None of the 4 recipes tried is shown to lose less than 5 points" in text_of(
        verdict_banner
    )
    assert "undecided: relu_p4_bauto (12 of 12), sigmoid_b0 (11 of 12)" in text_of(verdict_banner)
    # of one recipe the quantile is that of 97.5 %, of the first of four that of 99.375 %
    needed = "takes 73 prompts or more, 119 after Holm for 4 recipes. With the 12 of this run a"
    assert needed in text_of(verdict_banner)
    assert (
        "relu_p2_bauto in K heads only, right of 12 (softmax 12), 2 random sets per K: K = 1: "
        "highest S₂ 11, lowest 12, random 12; K = 2: highest S₂ 1, lowest 12, random 5 to 9. "
        "Whether the ranking by S₂ is decisive (worse than every random set) is not stated below "
        "19 draws." in text_of(verdict_banner)
    )


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


def test_a_summary_read_back_from_json_gives_the_same_page(finding, tmp_path):
    result, rows, by_head = finding
    write_json(tmp_path / "summary.json", result)
    pq.write_table(pa.table(by_head), tmp_path / "heads.parquet")
    heads = columns(pq.read_table(tmp_path / "heads.parquet"))
    read = load_result(tmp_path / "summary.json", AuditSummary)
    assert read == result
    assert build(read, rows, heads) == build(*finding)


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


def test_the_sample_of_the_scatter_is_fixed_and_its_size_in_the_caption(finding, monkeypatch):
    columns = figures.argmax_rows(finding[1], "induction", "auto")
    total = len(columns["p_star"])
    monkeypatch.setattr(figures, "MOST_ROWS", 20)
    first, second, other = (
        figures.bound_scatter(columns, degree=2, seed=seed, where="here") for seed in (0, 0, 1)
    )
    assert first.to_dict() == second.to_dict() != other.to_dict()
    assert f"a fixed random 20 of {total} rows" in first.description
    hidden = re.match(r"(\d+) value", first.usermeta["remark"])
    assert len(first.data.values) + (int(hidden[1]) if hidden else 0) == 20
    # Every point is one of the rows.
    points = {
        (row["predicted: sufficient degree p*"], row["measured: S₂"]) for row in first.data.values
    }
    assert points <= set(zip(columns["p_star"].tolist(), columns["s_2"].tolist(), strict=True))


def test_the_histogram_has_every_row_in_a_bar_or_in_words(finding):
    p_star = figures.argmax_rows(finding[1], "induction", "auto")["p_star"]
    p_star = np.r_[p_star, np.inf]
    drawn = figures.degree_histogram(
        p_star, figures.degree_edges([p_star], (2, 4)), (2, 4), where="here"
    )
    in_bars = [row["count"] for row in drawn.data.values]
    none_needed = int(np.sum(p_star == 0))
    assert f"{none_needed} rows that need no degree" in drawn.description
    assert "1 for which none suffices" in drawn.description
    assert sum(in_bars) + none_needed + 1 == len(p_star)


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
