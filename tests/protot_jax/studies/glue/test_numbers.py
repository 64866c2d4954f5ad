"""Numbers beside constant predictions, averages, submission files, and the page."""

import dataclasses
from pathlib import Path
import re
import zipfile

import numpy as np
import pytest

from lm_jax.assets import papers
from lm_jax.run.files import write_json
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.study import frame
from protot_jax.studies.glue import numbers, report, report_text
from protot_jax.studies.glue.results import GlueSummary
from protot_jax.studies.glue.settings import GlueConfig
from protot_jax.studies.glue.submission import file_text
from protot_jax.studies.glue.tasks import EMBEDDED, OFFICIAL, SUBMISSION
from tests.browser import drive, without_scripts
from tests.protot_jax.studies.glue import synthetic_summary

TITLES = {"llama": "LLaMA", "mamba": "Mamba", "deltanet": "DeltaNet", "protot": "ProtoT"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("submission")
    return synthetic_summary.build(folder), folder


def page_of(result, folder):
    record_provenance(folder, collect_provenance())
    return frame.page(report.build(GlueConfig(), result, folder), folder)


@pytest.fixture(scope="module")
def page(built, tmp_path_factory):
    """Rendered from the file, as the command does."""
    path = tmp_path_factory.mktemp("page") / "summary.json"
    write_json(path, built[0])
    return page_of(load_result(path, GlueSummary), path.parent)


def split_of(task, targets, predictions, constant, **options):
    return numbers.split_result(
        "dev",
        task,
        np.array(targets, float),
        np.array(predictions, float),
        constants=dict.fromkeys((*task.metrics, "accuracy"), constant),
        resamples=options.get("resamples", 200),
    )


def test_the_gain_over_the_most_frequent_class_is_paired():
    """A model that differs from it in one answer only, and rightly, never has less."""
    targets = [1] * 30 + [0] * 10
    predictions = [[1] * 30 + [0] + [1] * 9]
    result = split_of(OFFICIAL["wnli"], targets, predictions, 1.0)
    assert result.constant == {"accuracy": 0.75}
    assert result.gain.estimate == pytest.approx(1 / 40)
    # Unpaired, the interval of an accuracy on 40 examples is 0.27 wide.
    assert result.gain.low == 0 and result.gain.high < 0.1
    assert not result.above
    (test,) = result.mcnemar
    assert (test.b, test.c, test.p_value) == (0, 1, 1.0)


def test_constant_predictions_have_no_gain_and_undefined_correlations():
    task = EMBEDDED["films_rating"]
    result = split_of(task, np.arange(20.0), [[2.0] * 20], 2.0)
    assert np.isnan(result.metrics["pearson"].mean) and result.interval is None
    assert result.gain.estimate == 0.0 and not result.above
    assert result.mcnemar == ()


def test_the_gain_of_scores_is_the_share_of_squared_error_that_is_saved():
    task, rng = EMBEDDED["films_rating"], np.random.default_rng(0)
    targets = rng.normal(size=100)
    predictions = np.stack([0.5 * targets + 0.1, 0.7 * targets])
    result = split_of(task, targets, predictions, 0.3)
    errors = [((own - targets) ** 2).mean() for own in predictions]
    wanted = 1 - np.mean(errors) / ((0.3 - targets) ** 2).mean()
    assert result.gain.estimate == pytest.approx(wanted, abs=1e-12)
    assert result.gain.low < wanted < result.gain.high and result.above
    assert result.metrics["pearson"].mean == pytest.approx(1.0)


def test_intervals_take_all_seeds_of_an_example_together():
    """Three equal seeds say no more than one."""
    task, rng = OFFICIAL["sst2"], np.random.default_rng(1)
    targets, own = rng.integers(0, 2, (2, 50))
    one = split_of(task, targets, [own], 0.0)
    three = split_of(task, targets, [own] * 3, 0.0)
    # The mean of three equal numbers is off by one rounding.
    ends = [dataclasses.astuple(result.interval) for result in (one, three)]
    assert ends[0] == pytest.approx(ends[1], abs=2**-50)
    assert three.metrics["accuracy"].n == 3


def test_averages_follow_their_formulae(built):
    result, _ = built
    assert [average.model for average in result.averages] == ["ours", "other <i>"]
    own = {one.task: one.splits for one in result.results if one.model == "ours"}
    mnli = np.mean([split.metrics["accuracy"].mean for split in own["mnli"]])
    pairs = {
        name: np.mean([own[name][0].metrics[metric].mean for metric in OFFICIAL[name].metrics])
        for name in OFFICIAL
        if name != "mnli"
    } | {"mnli": mnli}
    average = result.averages[0]
    assert average.of_pairs == pytest.approx(np.mean(list(pairs.values())))
    kept = [value for name, value in pairs.items() if name not in ("mrpc", "rte", "wnli")]
    assert average.without_three == pytest.approx(np.mean(kept))
    mains = [own[name][0].metrics[OFFICIAL[name].main].mean for name in OFFICIAL if name != "mnli"]
    assert average.of_main == pytest.approx(np.mean([*mains, mnli]))
    fewer = [one for one in result.results if one.task != "cola"]
    assert numbers.average("ours", fewer) is None


def test_the_archive_has_the_eleven_files_with_labels_as_the_server_spells_them(built):
    result, folder = built
    assert result.submissions[0].files == SUBMISSION and not result.submissions[0].missing
    with zipfile.ZipFile(folder / "protot/submission.zip") as archive:
        assert tuple(archive.namelist()) == SUBMISSION
        assert len(SUBMISSION) == 11
        labels = {}
        for name in SUBMISSION:
            text = archive.read(name).decode()
            assert text == (folder / "protot" / name).read_text("utf-8")
            head, *lines = text.splitlines()
            assert head == "index\tprediction"
            assert len(lines) == synthetic_summary.COUNT
            labels[name] = {line.split("\t")[1] for line in lines}
    assert labels["QNLI.tsv"] <= {"entailment", "not_entailment"}
    assert labels["AX.tsv"] <= {"entailment", "neutral", "contradiction"}
    assert labels["CoLA.tsv"] | labels["WNLI.tsv"] | labels["QQP.tsv"] <= {"0", "1"}


def test_a_score_is_a_number_of_three_places():
    text = file_text(OFFICIAL["stsb"], np.array([0.0, 3.14159, 5.0]))
    assert text == "index\tprediction\n0\t0.000\n1\t3.142\n2\t5.000\n"


def test_the_page_has_every_number_beside_the_constant_and_the_paper(built, page):
    result, _ = built
    text = re.sub(r"<[^>]+>", " ", without_scripts(page))
    for one in result.results:
        for split in one.splits:
            task = synthetic_summary.TASKS[one.task]
            assert report_text.over_examples(split, task.main) in text
    # The paper's ProtoT on CoLA and its constant on MRPC.
    assert "29.3" in text and "81.2" in text and "67.6" in text
    assert "other &lt;i&gt;" in page and "other <i>" not in page
    assert "left out for overlap with reported sentences 821" in text
    assert "best of 4" in text


@pytest.mark.parametrize("kind", ["protot", "raven"])
def test_a_model_that_the_paper_does_not_fine_tune_has_no_number_of_it(built, kind, tmp_path):
    own, *_ = built[0].models
    model = dataclasses.replace(own, kind=kind)
    results = [one for one in built[0].results if one.model == own.name and one.task == "films"]
    result = dataclasses.replace(
        built[0], models=(model,), results=tuple(results), averages=(), submissions=()
    )
    text = re.sub(r"<[^>]+>", " ", without_scripts(page_of(result, tmp_path)))
    name = {"mamba_ffn": "mamba"}.get(kind, kind)
    tables, rate, printed, note = papers.tables("protot"), "–", "–", "SST-2, accuracy"
    if name in tables["table_1"]:
        rate = f"{tables['appendix_a4'][name]['learning_rate']:g}, "
        printed = f"{tables['table_10'][name]['sst2']:.1f}"
        note = f"{TITLES[name]}, {note}"
    assert re.search(rf"best of 4\s+{re.escape(rate)}", text)
    assert re.search(rf"{re.escape(printed)}\s+{note}\s", text)


def test_an_undefined_metric_is_called_so(built):
    nan = float("nan")
    assert report_text.percent(nan) == "undefined"
    assert report_text.percent(-0.123) == "−12.3"
    constants = {
        one.task: one.splits[0].constant for one in built[0].results if one.model == "ours"
    }
    assert np.isnan(constants["stsb"]["pearson"])
    assert constants["cola"] == {"matthews": 0.0}


def test_the_verdict_is_good_only_if_nothing_is_lost(built):
    result, (ours, other) = built[0], built[0].models
    above = next(one for one in result.results if all(split.above for split in one.splits))
    tasks = tuple(task for task in result.tasks if task.task == above.task)
    parts = {"averages": (), "submissions": (), "search_tasks": ()}

    def verdict(models, results):
        changed = dataclasses.replace(result, models=models, tasks=tasks, results=results, **parts)
        (lead,) = report.build(GlueConfig(), changed, Path()).lead
        return lead

    assert above.model == ours.name
    good = verdict((ours,), (above,))
    assert "verdict good" in good and "no result" not in good
    lost = verdict((ours, other), (above,))
    assert "verdict warn" in lost and "above the best prediction" in lost
    assert "1 of 2 pairs of model and task have no result: diverged with every seed." in lost
    nothing = verdict((ours,), ())
    assert "verdict warn" in nothing and "There is no result." in nothing
    assert "1 of 1 pairs of model and task" in nothing


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_its_window(page, tmp_path, width):
    steps = """
      const body = page.document.scrollingElement;
      return {
        over: body.scrollWidth - page.innerWidth,
        charts: all("canvas, svg.marks").length,
        heads: all("section h2").map((one) => one.textContent),
      };
    """
    result = drive(tmp_path, page, steps, width=width)
    assert result["over"] <= 0
    assert result["charts"] >= 1
    assert result["heads"][0] == "Results" and "The paper's tables" in result["heads"]
