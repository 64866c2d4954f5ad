"""The comparison with the paper from audits to its page: items, claims, what is refused."""

import json

import pyarrow.parquet as pq
import pytest

from lm_jax.console.config_files import load_config
from lm_jax.run.config import from_plain
from lm_jax.run.finished import OtherInputsError
from lm_jax.run.results import load_result
from lm_jax.run.tables import read_table_provenance
from lm_jax.study import Work, frame
from polyattn_jax.audit import opening
from polyattn_jax.recipes.row_maps import RECIPES
from polyattn_jax.report import paper
from polyattn_jax.studies.paper import STUDY, claims, items, report, run, tables
from polyattn_jax.studies.paper.results import PaperSummary
from polyattn_jax.studies.paper.settings import PaperConfig
from tests.polyattn_jax.conftest import ROOT, run_study
from tests.polyattn_jax.paper_audits import LLAMA
from tests.polyattn_jax.synthetic_report import lines, parsed, text_of


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
        claim.claim: [tiny.name] for claim in claims.CLAIMS
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


def test_the_page_opens_with_the_answer_and_every_claim(compared):
    folder, outcome = compared
    summary = load_result(folder / frame.SUMMARY, PaperSummary)
    page = parsed((folder / frame.REPORT).read_text("utf-8"))
    head = text_of(page.find("header"))
    first = next(line for line in outcome.out.splitlines() if line.startswith("Of "))
    assert " ".join(head.split()).find(first.strip()) >= 0
    table = lines(page, "Claims of")
    assert [row[0] for row in table] == [
        f"{claim.claim}the paper, {claim.where}: {claim.paper}; ours from {claim.evidence}"
        for claim in summary.claims
    ]


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
    config = from_plain(load_config(f"{ROOT}/configs/polyattn/paper.py"), PaperConfig)
    names = set(config.by_name)
    assert names >= {*RECIPES, *tables.FIXED_BIAS.accuracy[tables.LLAMA]}
    assert {sweep.suite for sweep in tables.SWEEPS} | {"copying", "induction"} == {*config.suites}
    assert (config.niah_n, config.suite_n, config.ablation_draws) == (200, 200, 20)
    assert config.calibrated_at == paper.CALIBRATION_LENGTH


def test_a_stored_result_is_read():
    summary = load_result(ROOT / "results/polyattn_paper/smollm2/summary.json", PaperSummary)
    rows = report.read_rows(ROOT / "results/polyattn_paper/smollm2")
    assert len(rows) == summary.rows
    assert summary.items == items.in_order({row.item for row in rows})
