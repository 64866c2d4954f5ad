"""The paper's tables beside audits: its numbers, ours, what differs, and the claims."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.run.config import from_plain
from lm_jax.run.config_files import load_config
from lm_jax.run.results import load_result
from lm_jax.run.tables import read_table_provenance
from lm_jax.statistics import Interval
from polyattn_jax import paper
from polyattn_jax.config import AuditConfig
from polyattn_jax.paper_study import __main__ as study
from polyattn_jax.paper_study import claims, items, tables
from polyattn_jax.paper_study.beside import Audit
from polyattn_jax.paper_study.results import PaperSummary
from polyattn_jax.paper_study.rows import compare
from polyattn_jax.report import findings
from polyattn_jax.results import SuiteAblation
from polyattn_jax.row_maps import RECIPES
from polyattn_jax.suite_results import SuiteResult
from polyattn_jax.suites import named
from tests.polyattn_jax.conftest import ROOT, run
from tests.polyattn_jax.synthetic_report import condition, lines, parsed, text_of
from tests.polyattn_jax.test_report_paper import like_the_paper

LLAMA = paper.MODELS[0]


def audit_of(finding, result=None, *, beside=LLAMA, same=False):
    summary, _, by_head = finding
    return Audit(result or summary, by_head, beside, same)


def suite(name, length, accuracy, n=200):
    """One suite at one length, with these accuracies by recipe."""
    entries = tuple(condition(recipe, share, n) for recipe, share in accuracy.items())
    return SuiteResult(name, length, entries, {}, {})


def numbers(audit, item):
    """By suite, cell and quantity: the paper's number, ours, and the causes."""
    return {
        (one.suite, one.cell, one.quantity): (one.paper, one.ours, one.causes)
        for one in compare(audit)
        if one.item == item
    }


# Published numbers


def test_the_paper_s_tables_agree_where_they_print_the_same_cell():
    by_name = {model.name: model for model in paper.MODELS}
    for name, row in tables.FIXED_BIAS.accuracy.items():
        assert row["relu_p4_b0"] == by_name[name].needle_accuracy("relu_p4_b0")
    # The best key is the answer, and S_p the same number, whatever the recipe of one bias.
    for rows in tables.ANSWER_KEY.values():
        at_b_auto = {row[:2] for recipe, row in rows.items() if recipe.endswith("bauto")}
        assert len(at_b_auto) == 1
    for name, rows in tables.ENDS.items():
        for recipe, ends in rows.items():
            for field, (low, high) in ends._asdict().items():
                assert low <= getattr(tables.MATCHED[name][recipe], field) <= high
    # Table 4: three of its eight cells.
    of = tables.MATCHED
    assert of[tables.QWEN]["relu_p8_bauto"][:3:2] == (66.3, 21.9)
    assert of[tables.LLAMA]["relu_p2_b0"][:3:2] == (72.3, 30.4)
    assert of[tables.GEMMA]["relu_p8_bauto"][:3:2] == (18.3, 6.1)


def test_tables_have_the_sums_and_the_order_that_they_must_have():
    for rows in tables.COMPOSITION.values():
        for size, counts in rows.items():
            assert (sum(counts[:3]), sum(counts[3:])) == (size, size)
    # Section 5.4 rounds them: 85, 88, 100 and 73 % diffuse at K = 40.
    diffuse = [tables.COMPOSITION[model.name][40][2] / 0.4 for model in paper.MODELS]
    assert diffuse == [85.0, 87.5, 100.0, 72.5]
    for row in tables.RULER_UNSAFE.values():
        assert list(row.values()) == sorted(row.values(), reverse=True)
    for sweep in tables.SWEEPS:
        assert sweep.suite in named.NAMES
        for row in sweep.accuracy.values():
            assert set(row) <= {"softmax", *RECIPES}
            # 200 or 50 prompts.
            assert all((share * sweep.prompts / 100).is_integer() for share in row.values())


def test_every_table_and_figure_is_listed_once():
    names = [item.name for item in items.ITEMS]
    printed = [f"Table {i}" for i in range(1, 33)] + [f"Figure {i}" for i in range(1, 7)]
    assert names == [*printed, "Appendix I", "Appendix J"]
    assert all(
        bool(item.reason) != bool(item.settings)
        or item.name == "Table 3"
        or item.name == "Appendix J"
        for item in items.ITEMS
    )


# Rows


def test_a_model_of_the_paper_at_its_settings_differs_in_dtype_alone(finding):
    result = like_the_paper(finding[0])
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
        assert row[:2] == (theirs, 100 * entry.unsafe[str(p)].estimate)
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
    assert (softmax.paper, softmax.paper_low, softmax.paper_high) == (None, 74.5, 79.0)
    assert numbers(audit, "Appendix I")["induction_256", "softmax", "accuracy"][:2] == (13.0, 10.0)


def test_head_sets_stand_beside_the_figure_and_its_draws(finding):
    summary, _, _ = finding
    gemma = next(model for model in paper.MODELS if model.name == tables.GEMMA)
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
    qwen = next(model for model in paper.MODELS if model.name == tables.QWEN)
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
    qwen = next(model for model in paper.MODELS if model.name == tables.QWEN)
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


def test_safe_rows_of_the_sigmoid_stand_beside_table_15(finding):
    summary, _, _ = finding
    share = Interval(0.25, 0.2, 0.3, 12)
    verdicts = [
        dataclasses.replace(entry, safe=share) if entry.recipe == "sigmoid_b0" else entry
        for entry in summary.verdicts
    ]
    audit = audit_of(finding, dataclasses.replace(summary, verdicts=tuple(verdicts)))
    assert {key: row[:2] for key, row in numbers(audit, "Table 15").items()} == {
        ("niah_64", "sigmoid_b0", "safe rows"): (0.5, 25.0)
    }


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


# Claims


def test_over_models_the_worst_verdict_counts():
    assert claims.overall(["holds", "fails", "undecided"]) == "fails"
    assert claims.overall(["holds", "not measured", "undecided"]) == "undecided"
    assert claims.overall(["holds", "not measured"]) == "holds"
    assert claims.overall(["not measured"]) == claims.overall([]) == "not measured"


def sweep_of(finding, **verdicts):
    """The audit with these verdicts, and no other recipe but softmax."""
    entries = [condition("softmax", 1.0, 200, verdict="preserve")]
    entries += [condition(name, 0.5, 200, verdict=verdict) for name, verdict in verdicts.items()]
    return audit_of(finding, dataclasses.replace(finding[0], sweep=tuple(entries)))


@pytest.mark.parametrize(
    ("verdicts", "wanted"),
    [
        ({"relu_p4_b0": "no-go", "relu_p8_b0": "no-go"}, "holds"),
        ({"relu_p4_b0": "no-go", "relu_p8_b0": "preserve"}, "fails"),
        ({"relu_p4_b0": "no-go", "relu_p8_b0": "undecided"}, "undecided"),
        ({"relu_p1_over_L": "preserve"}, "not measured"),
    ],
)
def test_no_recipe_replaces_softmax_where_each_is_shown_to_lose(finding, verdicts, wanted):
    assert claims.no_drop_in(sweep_of(finding, **verdicts)).verdict == wanted


def test_a_recipe_without_normaliser_that_preserves_contradicts_the_paper(finding):
    assert claims.un_normalised(sweep_of(finding, relu_p1_over_L="preserve")).verdict == "fails"
    assert claims.un_normalised(sweep_of(finding, relu_p1_over_L="no-go")).verdict == "holds"


@pytest.mark.parametrize(
    ("share", "wanted"),
    [
        (Interval(0.8, 0.75, 0.85, 200), "holds"),
        (Interval(0.8, 0.65, 0.85, 20), "undecided"),
        (Interval(0.3, 0.2, 0.4, 200), "fails"),
        (Interval(0.3, 0.3, 0.3, 9), "undecided"),
    ],
)
def test_the_share_of_unsafe_rows_is_judged_by_its_interval(finding, share, wanted):
    entries = tuple(
        dataclasses.replace(entry, unsafe={"2": share}) for entry in finding[0].prevalence
    )
    audit = audit_of(finding, dataclasses.replace(finding[0], prevalence=entries))
    result = claims.mostly_unsafe(audit)
    assert (result.verdict, result.text.endswith("% over 2 suites")) == (wanted, True)


@pytest.mark.parametrize(
    ("safe", "verdict", "low", "high"),
    [
        (0.03, "no-go", "holds", "not measured"),
        (0.03, "preserve", "fails", "not measured"),
        (0.031, "no-go", "not measured", "holds"),
        (0.031, "preserve", "not measured", "fails"),
    ],
)
def test_the_screen_is_at_three_percent(finding, safe, verdict, low, high):
    (entry, *_) = finding[0].matched
    measured = dataclasses.replace(entry.all, measured=Interval(safe, 0.0, 1.0, 200))
    audit = sweep_of(finding, **{entry.recipe: verdict})
    summary = dataclasses.replace(
        audit.summary, matched=(dataclasses.replace(entry, all=measured),)
    )
    audit = dataclasses.replace(audit, summary=summary)
    assert claims.screen(audit).verdict == low
    assert claims.no_promise(audit).verdict == high


def test_a_false_negative_that_is_no_tie_refutes_the_bound(finding):
    assert claims.sound_bound(audit_of(finding)).verdict == "holds"
    (entry, *rest) = finding[0].bound
    broken = dataclasses.replace(entry, false_negative=1, false_negative_eps=1)
    result = dataclasses.replace(finding[0], bound=(broken, *rest))
    assert claims.sound_bound(audit_of(finding, result)).verdict == "fails"


def test_a_ranking_is_judged_from_19_draws_on(finding):
    assert claims.decisive(audit_of(finding)).verdict == "not measured"
    entries = {
        flag: dataclasses.replace(finding[0].decisiveness[0], size=20, decisive=flag)
        for flag in (True, False, None)
    }
    for flag, wanted in ((True, "holds"), (False, "fails"), (None, "undecided")):
        result = dataclasses.replace(finding[0], decisiveness=(entries[flag],))
        assert claims.decisive(audit_of(finding, result)).verdict == wanted


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ({64: (0.2, 0.15, 0.25), 256: (0.28, 0.2, 0.35)}, "holds"),
        ({64: (0.2, 0.15, 0.25), 256: (0.32, 0.2, 0.45)}, "undecided"),
        ({64: (0.2, 0.15, 0.25), 256: (0.6, 0.5, 0.7)}, "fails"),
    ],
)
def test_the_share_over_length_is_flat_within_ten_points(finding, shares, wanted):
    (entry, *_) = (e for e in finding[0].prevalence if e.bias_kind == "zero")
    entries = tuple(
        dataclasses.replace(entry, suite=f"induction_{length}", unsafe={"2": Interval(*share, 200)})
        for length, share in shares.items()
    )
    audit = audit_of(finding, dataclasses.replace(finding[0], prevalence=entries))
    assert claims.flat_over_length(audit).verdict == wanted


# The command


def command(models, workdir, haystack, *flags):
    argv = [f"--models={models}", f"--workdir={workdir}", f"--config.haystack={haystack}", *flags]
    return run(
        study.main,
        [f"--config={ROOT}/configs/polyattn/paper.py:smoke", *argv],
        config="polyattn/paper",
        options=study.Options,
    )


@pytest.fixture(scope="module")
def compared(tiny, haystack, tmp_path_factory):
    """The finished run of one model that is here and one that is not."""
    folder = tmp_path_factory.mktemp("paper") / "run"
    outcome = command(f"{tiny},no-such-model", folder, haystack)
    assert outcome.code == 0, outcome.err
    return folder, outcome


def test_an_unavailable_model_is_said_to_be_and_stops_nothing(compared, tiny):
    folder, outcome = compared
    summary = load_result(folder / study.SUMMARY, PaperSummary)
    here, gone = summary.models
    assert (here.name, here.available, here.beside) == (tiny.name, True, LLAMA.name)
    assert (gone.name, gone.available, gone.folder) == ("no-such-model", False, "")
    assert gone.reason.startswith("model 'no-such-model' is no folder")
    assert "no-such-model is not available: model 'no-such-model' is no folder" in outcome.out
    page = parsed((folder / study.REPORT).read_text("utf-8"))
    rows = {row[0]: row for row in lines(page, "Models that were asked for")}
    assert rows["no-such-model"][1] == "not available"
    assert {claim: [*finding] for claim, finding in _by_claim(summary).items()} == {
        claim.claim: [tiny.name] for claim in claims.CLAIMS
    }


def _by_claim(summary):
    return {claim.claim: claim.by_model for claim in summary.claims}


def test_every_row_of_the_file_is_on_the_page_with_its_two_numbers(compared, tiny):
    folder, _ = compared
    summary = load_result(folder / study.SUMMARY, PaperSummary)
    rows = pq.read_table(folder / study.COMPARISON).to_pylist()
    assert len(rows) == summary.rows
    assert sum(row["paper"] is not None or row["paper_low"] is not None for row in rows) == (
        summary.compared
    )
    page = parsed((folder / study.REPORT).read_text("utf-8"))
    for item in summary.items:
        own = [row for row in rows if row["item"] == item]
        shown = lines(page, f"The paper's {item} beside")
        assert len(own) == len(shown) > 0
        assert {line[0] for line in shown} == {row["cell"] + row["suite"] for row in own}
    assert {*summary.items, *(one.item for one in summary.unmeasured)} == {
        item.name for item in items.ITEMS
    }
    recorded = json.loads((folder / "provenance.json").read_text())
    assert read_table_provenance(folder / study.COMPARISON) == recorded
    assert recorded["data"].keys() == {tiny.name}


def test_the_page_opens_with_the_answer_and_every_claim(compared):
    folder, outcome = compared
    summary = load_result(folder / study.SUMMARY, PaperSummary)
    page = parsed((folder / study.REPORT).read_text("utf-8"))
    head = text_of(page.find("header"))
    first = next(line for line in outcome.out.splitlines() if line.startswith("Of "))
    assert " ".join(head.split()).find(first.strip()) >= 0
    table = lines(page, "Claims of")
    assert [row[0] for row in table] == [
        f"{claim.claim}the paper, {claim.where}: {claim.paper}; ours from {claim.evidence}"
        for claim in summary.claims
    ]


def test_the_same_command_audits_nothing_again(compared, tiny, haystack, monkeypatch):
    folder, _ = compared
    rows = pq.read_table(folder / study.COMPARISON)

    def never(*arguments):
        raise AssertionError("a finished audit is read")

    monkeypatch.setattr(study.audit, "load", never)
    outcome = command(str(tiny), folder, haystack)
    assert outcome.code == 0, outcome.err
    assert pq.read_table(folder / study.COMPARISON).equals(rows)
    assert [one.model for one in load_result(folder / study.SUMMARY, PaperSummary).models] == [
        str(tiny)
    ]


@pytest.mark.parametrize(
    ("models", "flags", "code", "said"),
    [
        ("no-such-model,nor-this", (), 3, "nor-this: model 'nor-this' is no folder"),
        ("a/same,b/same", (), 2, "has two of one name"),
        ("x", ("--config.model=y",), 2, "name it by --models=y"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, haystack, models, flags, code, said):
    outcome = command(models, tmp_path / "run", haystack, *flags)
    assert outcome.code == code
    assert said in " ".join(outcome.refusals)


def test_the_settings_of_the_paper_measure_every_item_that_can_be():
    config = from_plain(load_config(f"{ROOT}/configs/polyattn/paper.py"), AuditConfig)
    names = set(config.by_name)
    assert names >= {*RECIPES, *tables.FIXED_BIAS.accuracy[tables.LLAMA]}
    assert {sweep.suite for sweep in tables.SWEEPS} | {"copying", "induction"} == {*config.suites}
    assert (config.niah_n, config.suite_n, config.ablation_draws) == (200, 200, 20)
    assert config.calibrated_at == paper.CALIBRATION_LENGTH
