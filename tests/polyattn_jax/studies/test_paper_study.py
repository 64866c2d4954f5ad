"""The comparison with the paper from audits to its page: items, claims, what is refused."""

import json

import pyarrow.parquet as pq
import pytest

from lm_jax.console.config_files import load_config
from lm_jax.report import slug
from lm_jax.run.config import from_plain
from lm_jax.run.finished import OtherInputsError
from lm_jax.run.results import load_result
from lm_jax.run.tables import read_table_provenance
from lm_jax.study import Work, frame
from polyattn_jax.audit import opening
from polyattn_jax.recipes.row_maps import RECIPES
from polyattn_jax.report import paper
from polyattn_jax.studies.paper import STUDY, items, report, run
from polyattn_jax.studies.paper.results import PaperSummary
from polyattn_jax.studies.paper.settings import PaperConfig
from tests.polyattn_jax.conftest import ROOT, run_study
from tests.polyattn_jax.paper_audits import LLAMA
from tests.polyattn_jax.synthetic_report import lines, parsed


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


def command(models, workdir, haystack, *flags):
    argv = [f"--models={models}", f"--workdir={workdir}", f"--config.haystack={haystack}", *flags]
    return run_study(STUDY, [f"--config={ROOT}/configs/polyattn/paper.py:smoke", *argv])


@pytest.fixture(scope="module")
def compared(tiny, haystack, tmp_path_factory):
    """The finished run of one model that is here and one that is not."""
    folder = tmp_path_factory.mktemp("paper") / "run"
    outcome = command(f"{tiny},no-such-model", folder, haystack)
    assert outcome.code == 0, outcome.err
    return folder, outcome


def test_an_unavailable_model_is_said_to_be_and_stops_nothing(compared, tiny):
    folder, outcome = compared
    summary = load_result(folder / frame.SUMMARY, PaperSummary)
    here, gone = summary.models
    assert (here.name, here.available, here.beside) == (tiny.name, True, LLAMA.name)
    assert (gone.name, gone.available, gone.folder) == ("no-such-model", False, "")
    assert gone.reason.startswith("model 'no-such-model' is no folder")
    assert "no-such-model is not available: model 'no-such-model' is no folder" in outcome.out
    page = parsed((folder / frame.REPORT).read_text("utf-8"))
    rows = {row[0]: row for row in lines(page, "Models that were asked for")}
    assert rows["no-such-model"][1] == "not available"
    assert {claim: [*finding] for claim, finding in _by_claim(summary).items()} == {
        claim.claim: [tiny.name] for claim in paper.NUMBERS.judged_claim
    }


def test_a_finished_audit_of_another_model_is_refused(tmp_path, monkeypatch):
    """The model is there: to call it unavailable would leave out a changed one unseen."""

    def execute(*args, **options):
        raise OtherInputsError("run holds the results of other inputs")

    monkeypatch.setattr(run.frame, "execute", execute)
    with pytest.raises(OtherInputsError, match="of other inputs"):
        run.measure(PaperConfig(models=("a",)), Work(tmp_path, ""))


def _by_claim(summary):
    return {claim.claim: claim.by_model for claim in summary.claims}


def test_every_row_of_the_file_is_on_the_page_with_its_two_numbers(compared, tiny):
    folder, _ = compared
    summary = load_result(folder / frame.SUMMARY, PaperSummary)
    rows = pq.read_table(folder / run.COMPARISON).to_pylist()
    assert len(rows) == summary.rows
    assert sum(row["paper"] is not None or row["paper_low"] is not None for row in rows) == (
        summary.compared
    )
    page = parsed((folder / frame.REPORT).read_text("utf-8"))
    for item in summary.items:
        own = [row for row in rows if row["item"] == item]
        shown = lines(page, f"The paper's {item} beside")
        assert len(own) == len(shown) > 0
        assert {line[0] for line in shown} == {row["cell"] + row["suite"] for row in own}
    assert {*summary.items, *(one.item for one in summary.unmeasured)} == {
        item.name for item in items.ITEMS
    }
    recorded = json.loads((folder / "provenance.json").read_text())
    assert read_table_provenance(folder / run.COMPARISON) == recorded
    assert recorded["data"].keys() == {tiny.name, "no-such-model", "config.haystack"}
    assert recorded["data"]["no-such-model"] == run.NOT_HERE


def test_other_models_in_the_same_folder_audit_nothing_again(compared, tiny, haystack, monkeypatch):
    folder, _ = compared
    rows = pq.read_table(folder / run.COMPARISON)

    def never(*arguments):
        raise AssertionError("a finished audit is read")

    monkeypatch.setattr(opening, "load", never)
    outcome = command(str(tiny), folder, haystack)
    assert outcome.code == 2 and "holds a run with config.models" in outcome.err[0]
    outcome = command(str(tiny), folder, haystack, "--resume=force")
    assert outcome.code == 0, outcome.err
    assert pq.read_table(folder / run.COMPARISON).equals(rows)
    assert [one.model for one in load_result(folder / frame.SUMMARY, PaperSummary).models] == [
        str(tiny)
    ]


def test_the_settings_of_the_paper_measure_every_item_that_can_be():
    config = from_plain(load_config(f"{ROOT}/configs/polyattn/paper.py"), PaperConfig)
    names = set(config.by_name)
    assert names >= {*RECIPES, *paper.NUMBERS.fixed_bias.accuracy["Llama-3.2-1B"]}
    # At the lengths of the paper; a list of one model may have further ones.
    sweeps = {(sweep.suite, sweep.length) for sweep in paper.SWEEPS}
    assert {one for one in config.asked_suites if one[0] not in ("copying", "induction")} == sweeps
    assert {("copying", 500), ("induction", 256)} <= {*config.asked_suites}
    assert config.ablated_suites == (("copying", paper.SETTINGS.literary_length),)
    assert (config.niah_n, config.suite_n, config.ablation_draws) == (200, 200, 20)
    assert config.calibrated_at == paper.SETTINGS.calibration_length


def test_one_file_of_a_model_s_audit_is_one_of_its_tables(tiny, haystack, tmp_path):
    """A folder of the name of a model stands beside it alone, in its own tables, unverified."""
    place = tmp_path / "Llama-3.2-3B"
    place.symlink_to(tiny)
    argv = [f"--config.model={place}", f"--config.haystack={haystack}", f"--workdir={tmp_path}/run"]
    argv += ["--config.recipes=('relu_p4_bauto','relu_p2_b0')", "--config.ablation_heads=(5,)"]
    argv += ["--config.suites=('induction@96','two_needles')", "--config.suite_lengths=(64,)"]
    outcome = run_study(STUDY, [f"--config={ROOT}/configs/polyattn/llama32_3b.py:smoke", *argv])
    assert outcome.code == 0, outcome.err
    summary = load_result(tmp_path / "run" / frame.SUMMARY, PaperSummary)
    (model,) = summary.models
    assert (model.beside, model.named, model.same) == ("Llama-3.2-3B", True, False)
    own = ("Table 23", "Table 24", "Table 25")
    assert {*own} <= {*summary.items} and not {*own} & {one.item for one in summary.unmeasured}
    assert {"Table 18"} <= {one.item for one in summary.unmeasured}
    rows = [one for one in report.read_rows(tmp_path / "run") if one.item in own]
    # Nothing of ours stands there without a number of the paper's, and none of these is judged:
    # prompts are shorter and fewer.
    assert all(one.paper is not None and len(one.causes) > 1 for one in rows)
    assert {one.causes[0] for one in rows} == {"weights of the name Llama-3.2-3B, not verified"}
    found = {(one.item, one.cell, one.quantity): one.paper for one in rows}
    assert found["Table 24", "relu_p2_b0", "change of accuracy"] == -50.0
    assert found["Table 25", "top 5 heads", "change of accuracy"] == 0.0
    assert {one.suite for one in rows if one.item == "Table 23"} == {"induction", "mqar"}
    suites = {
        row["suite"]
        for row in pq.read_table(
            place.parent / "run" / slug(place.name) / "rows.parquet"
        ).to_pylist()
    }
    assert suites == {"niah_64", "induction", "mqar", "induction_96", "two_needles_64"}
    # The file names the model already.
    outcome = run_study(
        STUDY, [f"--config={ROOT}/configs/polyattn/llama32_3b.py:smoke", *argv, "--models=a,b"]
    )
    assert outcome.code == 2 and "leave --models out" in outcome.err[0]


def test_without_a_model_the_flag_is_asked_for(tmp_path):
    outcome = run_study(
        STUDY, [f"--config={ROOT}/configs/polyattn/paper.py:smoke", f"--workdir={tmp_path}/run"]
    )
    assert outcome.code == 2 and "--models" in outcome.err[0]


def test_a_stored_result_is_read():
    summary = load_result(ROOT / "results/polyattn_paper/smollm2/summary.json", PaperSummary)
    rows = report.read_rows(ROOT / "results/polyattn_paper/smollm2")
    assert len(rows) == summary.rows
    assert summary.items == items.in_order({row.item for row in rows})
