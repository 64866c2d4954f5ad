"""The command from runs to its page: files, numbers, and what it refuses."""

from collections import Counter
import contextlib
import dataclasses
import io
import json
import re
from types import SimpleNamespace

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import UsageError
from lm_jax.run.files import file_digest
from lm_jax.run.results import json_schema, load_result
from lm_jax.study import command
from lm_jax.text.preparation import CorpusConfig, split_documents
import protot_jax
from protot_jax.studies.interventions.models import SubjectModel
from protot_jax.studies.interventions.results import Interval
from protot_jax.studies.robustness import STUDY, held_out, pmr, report, report_text
from protot_jax.studies.robustness import run as run_of_study
from protot_jax.studies.robustness.pairs import make_pairs
from protot_jax.studies.robustness.results import ROWS, Comparison, RobustnessReport
from protot_jax.studies.robustness.sentences import edit_distance, read, split_sentences
from protot_jax.studies.robustness.settings import OPTIONAL, RobustnessConfig
from tests.protot_jax import small_runs

# Run by `make test-all`.
pytestmark = pytest.mark.long

TEXTS = (
    "the house of a river and its people",
    "the people who met in town, and a house",
    "a river of the town cannot be a house",
    "who met the people of the town in its house",
)
SLICES = "--slices=typo,punctuation,contraction,gender,negation"


def launched(*flags):
    return command.run(STUDY, ["robustness", *flags])


def sections(result):
    """The body of the page."""
    built = report.build(RobustnessConfig(), result, None)
    return "\n".join(part.body for part in built.sections() if part)


def written(folder, lines):
    file = folder / "mine.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return file


@pytest.fixture(scope="module")
def llama(text, tmp_path_factory):
    """A run without prototypes."""
    folder = tmp_path_factory.mktemp("llama") / "llama"
    config = small_runs.settings(text, model="llama", dtype="float32", seeds=(7,), max_steps=2)
    small_runs.command(config, folder)
    return folder


@pytest.fixture(scope="module")
def measured(run, llama, tmp_path_factory):
    """Two seeds and LLaMA on a user's sentences and a pair, with what was printed."""
    folder = tmp_path_factory.mktemp("robust")
    given = [{"text": text} for text in TEXTS]
    given += [{"text": TEXTS[0], "perturbed": TEXTS[0].replace("river", "town"), "slice": "mine"}]
    file = written(folder, given)
    flags = (f"--run={run}", f"--run={run}/seed_2", f"--run={llama}", f"--sentences={file}")
    flags += (SLICES, "--pairs=5", f"--workdir={folder / 'out'}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert launched(*flags) == 0
    return folder / "out", flags, printed.getvalue()


def test_the_files_are_written_and_keep_to_their_schema(measured):
    folder, _, printed = measured
    names = [file.name for file in folder.glob("[!.]*")]
    assert {"pairs.jsonl", "rows.parquet"} < set(names)
    content = json.loads((folder / "summary.json").read_text("utf-8"))
    jsonschema.validate(content, json_schema(RobustnessReport))
    assert pq.read_schema(folder / "rows.parquet").remove_metadata().equals(ROWS)
    models = [(model["kind"], model["seed"], model["prototypes"]) for model in content["models"]]
    assert models == [("protot", 1, 3), ("protot", 2, 3), ("llama", 7, None)]
    found = {one["name"]: one for one in content["slices"]}
    order = ["contraction", "punctuation", "typo", "mine", "gender", "negation"]
    assert list(found) == order
    assert [found[name]["pairs"] for name in ("typo", "contraction", "mine")] == [4, 1, 1]
    assert found["gender"]["kind"] == "meaning" and found["mine"]["kind"] == "given"
    assert "contraction" in printed and str(folder / "report.html") in printed


def test_the_numbers_are_those_of_the_rows(measured):
    folder, _, _ = measured
    table = pq.read_table(folder / "rows.parquet")
    rows = {name: np.asarray(table[name].to_pylist()) for name in table.column_names}
    result = load_result(folder / "summary.json", RobustnessReport)
    for one in result.slices:
        for m, own in enumerate(one.models):
            on = (rows["slice"] == one.name) & (rows["model"] == m)
            js, clamped, control = (rows[name][on] for name in ("js", "js_clamped", "js_control"))
            assert len(js) == one.pairs
            assert own.js.mean == pytest.approx(js.mean(), rel=1e-12)
            # Too few sentences for an interval, which test_summary.py checks.
            assert own.js.n == (one.frames or one.sentences) < 5
            assert own.js.low is own.js.high is None
            assert (js <= np.log(2)).all() and (js >= 0).all()
            assert own.same_tokens == rows["same_tokens"][on].sum()
            if result.models[m].kind == "llama":
                assert own.clamp is None and np.isnan(np.r_[clamped, control]).all()
                continue
            found = pmr(js, clamped)
            assert own.clamp.pmr.below_floor == found.below_floor
            for name in ("mean_of_ratios", "median"):
                value, wanted = getattr(own.clamp.pmr, name), getattr(found, name)
                assert value == wanted or (value is None and np.isnan(wanted))
            both = np.isfinite(control)
            if both.any():
                gain = (control - clamped)[both].mean()
                assert own.clamp.gain.mean == pytest.approx(gain, rel=1e-12, abs=1e-15)
        assert one.distance == pytest.approx(rows["distance"][on].mean())
        means = [own.js.mean for own in one.models]
        excess = [own.mean for own in one.comparison.excess]
        assert excess == pytest.approx(np.subtract(means, means[0]), rel=1e-9, abs=1e-12)
    typo = rows["slice"] == "typo"
    assert (rows["distance"][typo] == 1).all() and set(rows["text"][typo]) == set(TEXTS)
    # All models read the same pairs.
    first, *others = (set(rows["perturbed"][typo & (rows["model"] == m)]) for m in (0, 1, 2))
    assert others == [first, first]


def test_the_page_has_every_slice_and_the_papers_numbers(measured):
    page = (measured[0] / "report.html").read_text("utf-8")
    for text in ("typo", "mine", "paper 0.2074", "paper 0.106", "Routing held", "Meaning flipped"):
        assert text in page
    # Table 3 of both kinds of model, whose names tell the seeds apart.
    assert "paper 0.2269" in page and "protot, seed 2" in page and "llama, seed 7" in page


def test_the_page_has_the_columns_of_table_4_and_the_mass_of_flips(measured):
    result = load_result(measured[0] / "summary.json", RobustnessReport)
    page = sections(result)
    table = page[page.index("prototype-mediated robustness") :]
    heads = re.findall(r"<th[^>]*>(.*?)</th>", page)
    for head in (
        *("Pairs", "JS, held", "Ratio of means", "Mean of ratios", "sd of ratios"),
        *("Median", "Above 0", "Below the floor", "AG, nats", "Mass of first ten"),
    ):
        assert any(head in text for text in heads)
    # Deviation and positive fraction of Table 4's row of typos, and its means.
    for printed in ("paper 0.001", "paper 0.279", "paper 0.533"):
        assert printed in table
    assert "paper 0.208" in page and "paper 0.186" in page
    flip = next(one for one in result.slices if one.name == "gender").models[0]
    assert f"{flip.mass:.3f}" in page and f"{flip.ag:.4f}" in page


def test_the_released_clamp_is_measured_only_where_it_is_asked_for(run, measured, tmp_path, capsys):
    folder = measured[0]
    pairs = folder / "pairs.jsonl"
    flags = (f"--run={run}", f"--sentences={pairs}", "--slices=gender")
    one, two = tmp_path / "default", tmp_path / "released"
    assert launched(*flags, f"--workdir={one}") == 0
    assert "as in the released code" not in capsys.readouterr().out
    assert launched(*flags, f"--workdir={two}", "--released_clamp") == 0
    assert "as in the released code" in capsys.readouterr().out
    tables = [pq.read_table(path / "rows.parquet") for path in (one, two)]
    assert tables[0].schema.remove_metadata().equals(ROWS)
    for name in ROWS.names:
        plain, more = (np.asarray(table[name].to_pylist()) for table in tables)
        assert np.array_equal(plain, more, equal_nan=plain.dtype.kind == "f")
    default, result = (load_result(path / "summary.json", RobustnessReport) for path in (one, two))
    columns = {name: np.asarray(tables[1][name].to_pylist()) for name in tables[1].column_names}
    slices = []
    for each in result.slices:
        (own,) = each.models
        on = columns["slice"] == each.name
        smaller = np.minimum(columns["js_released_write"], columns["js_released_read"])[on]
        assert own.clamp.released.js.mean == pytest.approx(smaller.mean(), rel=1e-12)
        assert own.clamp.released.pmr.below_floor == pmr(columns["js"][on], smaller).below_floor
        clamp = dataclasses.replace(own.clamp, released=None)
        slices.append(dataclasses.replace(each, models=(dataclasses.replace(own, clamp=clamp),)))
    assert dataclasses.replace(result, slices=tuple(slices)) == default
    page, asked = ((path / "report.html").read_text("utf-8") for path in (one, two))
    assert "JS, write forced" in asked and "JS, write forced" not in page


def test_a_divergence_that_is_no_number_is_printed_as_such(measured):
    result = load_result(measured[0] / "summary.json", RobustnessReport)
    first = result.slices[0]
    own = first.models[0]
    lost = dataclasses.replace(own, js=dataclasses.replace(own.js, mean=None))
    slices = (dataclasses.replace(first, models=(lost, *first.models[1:])), *result.slices[1:])
    line = next(
        line
        for line in report_text.findings(dataclasses.replace(result, slices=slices))[0].splitlines()
        if line.startswith(first.name)
    )
    assert line.split()[:4] == [first.name, str(first.pairs), "no", "number"]


def test_models_are_counted_against_the_first_by_corrected_values(measured):
    result = load_result(measured[0] / "summary.json", RobustnessReport)
    low, high = Interval(-0.1, -0.2, -0.01, 9), Interval(0.1, 0.01, 0.2, 9)
    compared = [
        Comparison((low, low, high), (1.0, 0.001, 0.001), (1.0, 0.04, 0.06)),
        Comparison((low, high, high), (1.0, 0.001, 0.001), (1.0, 0.01, 0.01)),
        Comparison((low, low, low), (1.0, 0.001, 0.001), (1.0, 0.01, 0.05)),
    ]
    slices = tuple(
        dataclasses.replace(one, comparison=own)
        for one, own in zip(result.slices, compared, strict=False)
    )
    result = dataclasses.replace(result, slices=slices)
    first, second, other, *_ = report_text.conclusion(result)
    zero, one, two = report_text.names(result)
    counts = "of 3 slices: less divergence on {}, more on {}, undecided on {} (p below 0.05"
    assert first.startswith(f"{one} against {zero}, {counts.format(2, 1, 0)}")
    assert second.startswith(f"{two} against {zero}, {counts.format(0, 1, 2)}")
    assert "another sentence's routing leaves more divergence than the right one on" in other
    assert "p = 0.06" in sections(result)


def test_pairs_of_training_text_are_left_out_and_counted(run, text, tmp_path, capsys):
    """A line of a document that the run was trained on, and one of its validation text."""
    corpus = CorpusConfig(
        source=str(text), unit="document", vocab_size=60, splits=(0.7, 0.15, 0.15)
    )
    lines = {
        split: next(split_documents(corpus, split)).splitlines() for split in ("train", "test")
    }
    known, new = lines["train"][0], lines["test"][0]
    file = written(
        tmp_path,
        [
            {"text": known, "perturbed": f"{known} a", "slice": "typo"},
            {"text": new, "perturbed": f"{new} a", "slice": "typo"},
            # Here it is the perturbed text that is known.
            {"text": f"{known} a", "perturbed": known, "slice": "mine"},
        ],
    )
    folder = tmp_path / "out"
    flags = ("--slices=typo", f"--sentences={file}", f"--workdir={folder}")
    assert launched(f"--run={run}", *flags) == 0
    result = load_result(folder / "summary.json", RobustnessReport)
    (typo,) = result.slices
    assert (typo.name, typo.pairs, typo.trained) == ("typo", 1, 1)
    assert [pair.text for pair in read(folder / "pairs.jsonl").pairs] == [new]
    assert result.models[0].trained.sentences == 1 and not result.models[0].trained.unknown
    assert [one.name for one in result.skipped] == ["mine"]
    for printed in (capsys.readouterr().out, (folder / "report.html").read_text("utf-8")):
        assert "1 of the sentences stand in its training text" in printed


def pairs_of(run, **settings):
    """The pairs that the study would measure."""
    config = RobustnessConfig(run=(str(run),), **settings)
    task = run_of_study.inputs(config).loaded
    return make_pairs(task.subjects, task.given, task.wordnet, config)


def test_without_sentences_the_validation_text_is_sampled(run):
    made = pairs_of(run, pairs=3, slices=("typo_any", "typo")).pairs
    assert Counter(pair.slice for pair in made) == {"typo_any": 3, "typo": 3}
    # Sentences of the corpus are of twelve words, and here the ends of lines end them.
    assert all(len(pair.text.split()) == 12 for pair in made)


def test_some_slices_are_made_where_they_are_named(run, tmp_path):
    senses = tmp_path / "index.sense"
    senses.write_text("house%1:06:00:: 00000001 1 9\nhome%1:06:00:: 00000001 1 1\n", "utf-8")
    file = written(tmp_path, [{"text": "the house of a king"}])
    given = {"sentences": str(file), "wordnet": str(tmp_path), "pairs": 1}
    named = pairs_of(run, **given, slices=("morphology_any", "synonym_pos")).pairs
    assert {pair.slice: pair.perturbed for pair in named} == {
        "morphology_any": "the house of a kings",
        "synonym_pos": "the home of a king",
    }
    assert not {pair.slice for pair in pairs_of(run, **given).pairs} & {*OPTIONAL}


def test_without_prototypes_nothing_is_clamped(llama):
    subjects = [SubjectModel("llama", protot_jax.load_run(llama))]
    for name, asked in (("released_clamp", {"released": True}), ("held", {"held": [(0, 0)]})):
        with pytest.raises(UsageError, match=f"{name}: none of the runs has prototypes"):
            run_of_study.check_clamps(subjects, **{"held": (), "released": False} | asked)


def test_where_the_training_text_is_gone_that_is_said(tmp_path):
    found = held_out.trained_on(
        ["five words of a sentence"], CorpusConfig(source=str(tmp_path / "gone"))
    )
    assert not found.texts and "is not there" in found.unknown


def test_sentences_are_found_within_longer_ones_and_across_lines():
    wanted = ["b c d e f", "a b c d", "c d e f x", "B c d e f"]
    # Of fewer than five words none is looked for; letters and order count.
    assert held_out.found(wanted, ["a b c\nd  e f g"]) == {"b c d e f"}


def test_its_own_pairs_give_the_same_numbers_again(run, measured, tmp_path):
    folder = measured[0]
    again = tmp_path / "again"
    assert (
        launched(
            f"--run={run}",
            f"--sentences={folder / 'pairs.jsonl'}",
            "--slices=gender",
            f"--workdir={again}",
        )
        == 0
    )
    old, new = (load_result(path / "summary.json", RobustnessReport) for path in (folder, again))
    js = {one.name: one.models[0].js.mean for one in old.slices}
    for one in new.slices:
        if one.name in ("typo", "contraction", "mine"):
            # Other batches, so other rounding.
            assert one.models[0].js.mean == pytest.approx(js[one.name], rel=1e-2, abs=1e-9)


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ([{"txt": "a b"}], (), "mine.jsonl:1: the field 'txt' is unknown"),
        ([{"text": " "}], (), "mine.jsonl:1: text must be a text that is not empty"),
        ([{"text": "a", "perturbed": 3}], (), "mine.jsonl:1: perturbed must be a text"),
        ([{"text": "a", "slice": "x"}], (), "a slice without a perturbed text"),
        ([], (), "has no sentence"),
        ([{"text": "town " * 60}], ("--slices=typo",), "more than the 32 tokens"),
        ([{"text": "a house"}], ("--slices=spelling",), "there is no pair to measure"),
        ([{"text": "a house"}], ("--slices=typos",), "did you mean 'typo'"),
        ([{"text": "a house"}], ("--slices=synonym",), "by --wordnet"),
        ([{"text": "a house"}], ("--slices=synonym_pos",), "by --wordnet"),
        ([{"text": "a house"}], ("--wordnet=nowhere",), "index.sense cannot be read"),
        ([{"text": "a house"}], ("--held=P3",), "held = 'P3' is not of the form L2P5"),
        ([{"text": "a house"}], ("--held=L0P9",), "prototype = 9 is outside 0..2"),
        ([{"text": "a house"}], ("--run_seed=9",), "seed = 9"),
    ],
)
def test_bad_input_is_one_sentence(run, lines, flags, message, tmp_path, capsys):
    file = written(tmp_path, lines)
    out = tmp_path / "none"
    assert launched(f"--run={run}", f"--sentences={file}", *flags, f"--workdir={out}") in (2, 3)
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert not (out / "summary.json").exists()


def test_runs_are_named_once_and_at_least_one(run, capsys):
    assert launched("--pairs=2") == 2
    assert "--run is missing" in capsys.readouterr().err
    assert launched(f"--run={run}", f"--run={run}/seed_1") == 2
    assert f"is the same model as {run}" in capsys.readouterr().err


def test_sentences_of_a_text():
    text = 'One two three four five. "Six seven eight nine ten!" too short\nA b c d e f\nJ. K. L'
    assert list(split_sentences([text])) == [
        "One two three four five.",
        '"Six seven eight nine ten!" too short',
        "A b c d e f",
    ]
    assert list(split_sentences(["w " * 20, "w " * 21])) == [("w " * 20).strip()]


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("same", "same", 0), ("color", "colour", 1)],
)
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == distance


def test_the_corpus_is_an_input_where_no_sentences_are_given(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("one text")
    config = SimpleNamespace(corpus=CorpusConfig(source=str(file)))
    first, digest = SubjectModel("run", SimpleNamespace(config=config)), file_digest(file)["sha256"]
    assert run_of_study.text_inputs(RobustnessConfig(), first) == {"corpus": digest}
    asked = RobustnessConfig(sentences=str(file))
    assert run_of_study.text_inputs(asked, first) == {"sentences": digest}


def test_without_a_folder_the_results_are_in_the_first_run():
    asked = RobustnessConfig(run=("runs/a/seed_2", "runs/b"))
    assert asked.default_folder().as_posix() == "runs/a/robustness"
