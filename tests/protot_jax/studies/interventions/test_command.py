"""The command chooses a prototype, measures it in every seed, and writes valid results."""

import html
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from lm_jax.run.files import file_digest
from lm_jax.run.results import parse_result
from lm_jax.run.tables import read_table_provenance
from lm_jax.study import command, frame
from protot_jax.studies.interventions import STUDY, report
from protot_jax.studies.interventions import run as run_of_study
from protot_jax.studies.interventions.effects import MODES
from protot_jax.studies.interventions.results import ROWS, InterventionReport
from protot_jax.studies.interventions.sentences import shipped_digest
from protot_jax.studies.interventions.settings import InterventionConfig
from tests.browser import without_scripts

FILE = (
    '{"concept": "place", "target": "house", "text": "the people of the town met in a house"}\n'
    '{"concept": "place", "target": "river", "text": "its people met in the river & <b>town</b>"}\n'
    '{"concept": "place", "target": "river", "text": "a house of the town"}\n'
)
# Untrained models may think every target improbable.
KEPT = "--least_probability=0"
FAST = ("--reinit_draws=3", "--control_draws=1", "--perplexity_rows=8", "--gate_rows=16")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentences") / "places.jsonl"
    path.write_text(FILE, "utf-8")
    return path


def start(*arguments) -> int:
    return command.run(STUDY, ["intervene", *arguments])


@pytest.fixture(scope="module")
def folder(run, file):
    """The work folder of a prototype chosen in the first seed and matched in the second."""
    assert start(f"--run={run}", f"--sentences={file}", "--concept=place", KEPT, *FAST) == 0
    return run / "interventions" / "place"


def test_the_result_fits_its_schema(folder):
    result = json.loads((folder / "summary.json").read_text("utf-8"))
    settings = result["settings"]
    assert settings["found"] and not settings["shipped_sentences"]
    assert settings["words"] == ["house", "river"]
    first, second = result["seeds"]
    assert (first["seed"], first["place"], second["seed"]) == (1, 1, 2)
    assert first["match"] is None
    assert second["match"]["layer"] == second["layer"]
    top = first["ranking"][0]
    assert (first["layer"], first["prototype"]) == (top["layer"], top["prototype"])
    for seed in result["seeds"]:
        assert [mode["mode"] for mode in seed["modes"]] == list(MODES)
        assert seed["kept"] + seed["excluded"] == len(seed["sentences"]) == 2
    assert [one["where"] for one in result["skipped"]] == ["places.jsonl:3"]


def test_there_is_a_row_for_every_measurement(folder):
    result = json.loads((folder / "summary.json").read_text("utf-8"))
    table = pq.read_table(folder / "interventions.parquet")
    assert table.schema.equals(ROWS)
    recorded = json.loads((folder / "provenance.json").read_text("utf-8"))
    assert read_table_provenance(folder / "interventions.parquet") == recorded
    prototypes, sentences, seeds = 2 * 3, 2, 2
    draws = (prototypes - 1) * (4 + 1) + (4 + 3)
    assert table.num_rows == draws * sentences * seeds
    frame = table.to_pylist()
    first = result["seeds"][0]
    for mode in first["modes"]:
        for n in range(sentences):
            own = [
                row["change"]
                for row in frame
                if row["seed"] == 1
                and row["chosen"]
                and (row["mode"], row["sentence"]) == (mode["mode"], n)
            ]
            mean = 100 * (stats.gmean(1 + np.divide(own, 100)) - 1)
            assert mode["sentences"][n]["mean"] == pytest.approx(mean)


def test_the_page_shows_the_numbers_and_no_markup_of_a_sentence(folder):
    page = without_scripts((folder / "report.html").read_text("utf-8"))
    result = json.loads((folder / "summary.json").read_text("utf-8"))
    first = result["seeds"][0]
    assert f"Effect of prototype L{first['layer']} P{first['prototype']} on place" in page
    assert "<b>" not in page
    assert "src=" not in page and 'href="http' not in page
    assert "places.jsonl:3" in page
    assert "The same prototype in other seeds" in page
    # A target with markup is shown as text.
    hostile = json.loads(json.dumps(result))
    hostile["seeds"][0]["sentences"][0] |= {"text": "a <b>x</b> house", "target": "house"}
    shown = report.sentences(parse_result(hostile, InterventionReport))
    assert html.escape("<b>x</b>") in shown.body


def test_a_run_matches_its_own_copy(run, file, tmp_path, capsys):
    """With other runs, all of their seeds; a copy has the same prototype and the same effects."""
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(run, copy)
    flags = (f"--sentences={file}", "--concept=place", f"--other_runs={copy}", KEPT, *FAST)
    assert start(f"--run={run}", f"--workdir={out}", *flags) == 0
    report = frame.load_summary(STUDY, out)
    assert [one.seed for one in report.seeds] == [1, 2, 1, 2]
    first, second, same, again = report.seeds
    assert (same.layer, same.prototype) == (first.layer, first.prototype)
    assert same.match.similarity == pytest.approx(1) and same.match.percentile == 100
    # As high as the copy is no prototype of either seed with another one.
    assert same.match.p_value == pytest.approx(1 / (1 + same.match.others))
    assert same.modes == first.modes and again.modes == second.modes
    found = report.replication
    effects = [one.modes[MODES.index("zero_write")].effect.mean for one in report.seeds]
    mean = 100 * (stats.gmean(1 + np.divide(effects, 100)) - 1)
    assert found.models == 3 and found.mean == pytest.approx(mean)
    assert (found.lowest, found.highest) == (min(effects), max(effects))
    wanted = "alike than different prototypes are in"
    text, page = capsys.readouterr().out, (out / "report.html").read_text("utf-8")
    assert wanted in " ".join(text.split()) and wanted in page


def test_several_concepts_are_compared(run, tmp_path, capsys):
    file = tmp_path / "two.jsonl"
    file.write_text(FILE.replace('"concept": "place"', '"concept": "other"', 1), "utf-8")
    folder = tmp_path / "out"
    same = (f"--run={run}", f"--sentences={file}", "--concept=place,other", f"--workdir={folder}")
    assert start(*same, "--nomatch_seeds", KEPT, *FAST) == 0
    out = capsys.readouterr().out
    compared = json.loads((folder / "summary.json").read_text("utf-8"))
    assert [one["concept"] for one in compared["concepts"]] == ["place", "other"]
    single = []
    for one in compared["concepts"]:
        result = json.loads((folder / one["concept"] / "summary.json").read_text("utf-8"))
        assert result["settings"]["together"] == ["place", "other"]
        (mode,) = (m for m in result["seeds"][0]["modes"] if m["mode"] == "zero_write")
        assert (one["effect"], one["p"]) == (mode["effect"], mode["control"]["p"])
        single.append(one["p"])
        assert f"{one['p_holm']:.3f}" in out
        page = (folder / one["concept"] / "report.html").read_text("utf-8")
        assert "2 concepts were tested at once" in page
    assert sorted(one["p_holm"] for one in compared["concepts"])[0] == min(1, 2 * min(single))
    assert "p, Holm" in (folder / "report.html").read_text("utf-8")


def test_no_concept_is_measured_where_the_word_of_another_is_not_in_the_text(run, tmp_path, capsys):
    file = tmp_path / "two.jsonl"
    other = {"concept": "other", "target": "riverhouse", "text": "a town has a riverhouse"}
    file.write_text(f"{FILE}{json.dumps(other)}\n", "utf-8")
    folder = tmp_path / "out"
    same = (f"--run={run}", f"--sentences={file}", "--concept=place,other", f"--workdir={folder}")
    assert start(*same, *FAST) == 3
    assert "'riverhouse' does not occur" in capsys.readouterr().err
    assert not folder.exists()


def test_a_named_prototype_with_the_numbers_of_the_paper(run, tmp_path, capsys):
    """All targets are too improbable for this model; the page has the paper's numbers too."""
    text = "Our people and its house are good for the mental health of the town."
    file = tmp_path / "own.tsv"
    file.write_text(f"concept\ttarget\ttext\nmental health\tthe\t{text}\n", "utf-8")
    folder = tmp_path / "out"
    named = ("--layer=1", "--prototype=2", "--concept=mental health", "--least_probability=0.99")
    arguments = (f"--run={run}", f"--sentences={file}", f"--workdir={folder}", *named, *FAST)
    assert start(*arguments, "--nomatch_seeds", "--nocontrols") == 0
    assert "No conclusion" in capsys.readouterr().out
    result = json.loads((folder / "summary.json").read_text("utf-8"))
    assert len(result["seeds"]) == 1
    assert result["seeds"][0]["modes"][0]["control"] is None
    page = (folder / "report.html").read_text("utf-8")
    assert "Table 9 of the paper" in page
    assert "L6 P9" in page


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "no sentences are named"),
        (("--run=", "--concept=war"), 2, "--run is missing"),
        (("--concept=wars",), 2, "did you mean 'war'"),
        (("--concept=war,Congres",), 2, "did you mean 'Congress'"),
        (
            ("--concept=war,Congress", "--words=war"),
            2,
            "--words chooses the prototype of one concept",
        ),
        (("--concept=war", "--layer=1"), 2, "--layer and --prototype go together"),
        (("--concept=war", "--layer=1", "--prototype=3"), 2, r"prototype = 3 is outside 0..2"),
        (("--concept=war", "--words=łóżko"), 3, "the word 'łóżko' is not in the vocabulary"),
        (("--concept=war", "--run_seed=9"), 2, "seed = 9 is none of 1, 2"),
        (("--sentences=none.tsv",), 3, "none.tsv: No such file"),
    ],
)
def test_invalid_options_are_refused(run, tmp_path, capsys, arguments, code, message):
    folder = f"--workdir={tmp_path / 'out'}"
    assert start(f"--run={run}", folder, "--nomatch_seeds", *FAST, *arguments) == code
    assert message in capsys.readouterr().err


def test_the_prepared_text_and_the_sentences_are_inputs(tmp_path, file):
    (tmp_path / "data").mkdir()
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_text("{}")
    asked = InterventionConfig(run=str(tmp_path))
    prepared = {"prepared text": file_digest(manifest)["sha256"]}
    assert run_of_study.text_inputs(asked) == prepared | {"sentences": shipped_digest()}
    asked = InterventionConfig(run=str(tmp_path), sentences=str(file))
    own = {"sentences": file_digest(file)["sha256"]}
    assert run_of_study.text_inputs(asked) == prepared | own


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"concept": ("women and girls",)}, "women-and-girls"),
        ({"concept": ("war", "Mexico", "war")}, "war-mexico"),
        ({"concept": ("war",), "layer": 2, "prototype": 5}, "war-l2-p5"),
        ({"sentences": "{file}"}, "house-river"),
        ({"sentences": "{file}", "words": ("town",)}, "town"),
        ({"sentences": "{file}", "layer": 0, "prototype": 1}, "places-l0-p1"),
    ],
)
def test_without_a_folder_the_results_are_below_the_run(file, given, name):
    filled = {key: str(file) if value == "{file}" else value for key, value in given.items()}
    folder = InterventionConfig(run="runs/a", **filled).default_folder()
    assert folder.as_posix() == f"runs/a/interventions/{name}"
