"""Every config of protot_jax builds whole, and its smoke mode runs as a command."""

import contextlib
import dataclasses
import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lm_jax.console.config_files import load_config
from lm_jax.errors import DivergedError, UsageError
from lm_jax.run.config import from_plain, to_plain
from lm_jax.run.files import read_json, write_json
from lm_jax.run.results import load_result
from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.study import frame
from lm_jax.text.preparation import prepare_corpus
from protot_jax.studies import ablations as study
from protot_jax.studies.pretraining.run import run_in
from protot_jax.training import saved_run, study_config
from protot_jax.training.config import PretrainConfig
from protot_jax.training.results import DivergedRun, PretrainSummary, StudySummary
from protot_jax.training.seeds import over_seeds
from tests.protot_jax.small_runs import settings

OF_A_CPU = ("paper_cpu", "newer_cpu", "ablations_cpu")
STUDIES = (
    *(*OF_A_CPU, "alpha", "context_variants", "dropout", "kernel_size", "layer0_routing"),
    *("long_context", "mass_and_rank", "num_prototypes"),
)


def load(name, mode):
    return from_plain(load_config(f"configs/protot/{name}.py{mode}"), study_config.StudyConfig)


@pytest.mark.parametrize("name", STUDIES)
def test_the_smoke_mode_of_a_study_keeps_what_the_study_varies(name):
    def mixers(config):
        runs = [own for v in config.variants for _, own in study_config.each_run(config, v)]
        return {saved_run.model(own, own.corpus.vocab_size)[1] for own in runs}, runs

    (wanted, _), (result, runs) = (mixers(load(name, mode)) for mode in ("", ":smoke"))
    # Every mixer of the table once.
    assert result == wanted and len(runs) == len(wanted)
    # Contexts are an eighth of those of the study.
    long = name in ("long_context", "context_variants")
    assert {own.context for own in runs} == ({256} if long else {32})
    assert {own.max_steps for own in runs} == {2}
    # The text that comes with the quickstart.
    assert {own.corpus.source for own in runs} == {"sotu"}


@pytest.mark.parametrize("name", OF_A_CPU)
def test_the_small_mode_of_a_table_for_a_cpu_halves_what_it_says(name):
    whole, small = (load(name, mode) for mode in ("", ":small"))
    assert small.variants == whole.variants and not small.smoke
    # Table 1 is of test text.
    assert small.paper_split == whole.paper_split == "test"
    for field in ("train_documents", "context", "hidden_size"):
        assert 2 * getattr(small.base, field) == getattr(whole.base, field)
    assert 2 * small.base.corpus.vocab_size == whole.base.corpus.vocab_size
    assert 2 * small.base.prototypes.num_prototypes == whole.base.prototypes.num_prototypes
    assert small.base.epochs == whole.base.epochs == 3


@pytest.mark.parametrize("name", OF_A_CPU)
def test_the_whole_mode_of_such_a_table_is_the_paper_s_protocol(name):
    config = load(name, ":whole")
    # What every field of the default is, but for the corpus, its limits and the early stop.
    default = PretrainConfig()
    same = dataclasses.replace(
        config.base,
        corpus=default.corpus,
        train_documents=default.train_documents,
        validation_documents=default.validation_documents,
        test_documents=default.test_documents,
        early_stop=default.early_stop,
    )
    assert same == default
    assert (config.base.corpus.vocab_size, config.base.train_documents) == (16_000, 18_000)


@pytest.mark.slow
@pytest.mark.real("sotu")
def test_the_smoke_mode_of_a_study_runs(tmp_path):
    """As a command: a config that imported the running module once defined its flags again."""
    config, folder = "configs/protot/paper_cpu.py", tmp_path / "w"
    argv = [*("-m", "protot_jax.studies.ablations"), f"--config={config}:smoke"]
    # A process that hangs must not block the other tests.
    ended = subprocess.run(
        [sys.executable, *argv, f"--workdir={folder}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    assert "nan" not in ended.stdout
    for variant in load("paper_cpu", ":smoke").variants:
        assert f"\n{variant.name} " in ended.stdout
        (summary,) = (folder / variant.name).rglob("summary.json")
        (seed,) = read_json(summary)["seeds"]
        assert seed["steps"] == 2


def _study(text):
    base = from_plain(settings(text, max_steps=2, eval_every=1), PretrainConfig)
    variants = (
        study_config.Variant("two", ("prototypes.num_prototypes=2",), (1e-3,), paper=98.5),
        study_config.Variant("llama", ("model=llama", "dropout=0.0")),
    )
    return study_config.StudyConfig(base, variants, "Table 0")


def test_a_row_is_the_variant_at_its_best_rate_with_an_interval_over_seeds():
    results = {0.1: (8.0, 6.0, 7.0), 0.2: (5.0, 6.0, 5.5), 0.3: (4.0, 9.0, 5.0)}
    rows = [
        study.SeedRow(
            variant="two",
            learning_rate=rate,
            seed=0,
            steps=4,
            tokens_seen=10,
            train_documents=1_234,
            validation_documents=56,
            test_documents=7,
            best_step=2,
            validation_perplexity=perplexity,
            # The worst on validation text is the best on this, which must not be asked.
            test_perplexity=30.0 - perplexity,
            last_validation_perplexity=99.0,
            last_test_perplexity=99.0,
            steps_per_second=2.0,
            alpha=perplexity / 10,
            write_gini=0.25,
            write_top_1=0.5,
        )
        for rate, perplexities in results.items()
        for perplexity in perplexities
    ]
    variants = (study_config.Variant("two", paper=7.0), study_config.Variant("untrained"))
    config = study_config.StudyConfig(PretrainConfig(), variants, "Table 0", "test")
    (row,) = table = study.best_of_variants(config, rows)
    assert (row.learning_rate, row.rates_tried) == (0.2, 3)
    assert (row.tokens_seen, row.steps_per_second, row.paper) == (10, 2.0, 7.0)
    # Of 5, 5.5 and 6 the deviation is a half, and Student's quantile with two degrees 4.303.
    reach = 4.302653 * 0.5 / math.sqrt(3)
    own = {"mean": 5.5, "low": 5.5 - reach, "high": 5.5 + reach, "lowest": 5.0, "highest": 6.0}
    assert dataclasses.asdict(row.perplexity.validation) == pytest.approx(own | {"n": 3})
    assert row.perplexity.test.mean == pytest.approx(24.5)
    assert row.first_routing.alpha.mean == pytest.approx(0.55)
    text = study.format_table(StudySummary("Table 0", "test", table)).splitlines()
    # The paper's number is of test text here, and is printed with ours of that text.
    assert "5.50 (95 % 4.26 to 6.74, seeds 5.00 to 6.00, n = 3)" in text[2]
    assert "validation" in text[2] and not text[2].endswith(" 7.0")
    assert "24.50" in text[3] and text[3].endswith(" 7.0")
    assert text[-1].split() == ["two", "0.550", "0.250", "0.500"]
    assert "Documents used: train 1,234, validation 56, test 7" in text
    # A rate with a run that diverged is none to choose.
    lost = [DivergedRun("two", 0.2, "step 3 has loss nan")]
    (row,) = study.best_of_variants(config, rows, lost)
    assert (row.learning_rate, row.rates_tried) == (0.3, 3)


@pytest.fixture
def diverging(run, tmp_path, monkeypatch):
    """A study in which rates above 1 diverge and others are the stored run, and what it trained."""
    base = from_plain(read_json(run / CONFIG_FILE), PretrainConfig)
    variants = (
        study_config.Variant("some", (), (base.learning_rate, 9.0)),
        study_config.Variant("none", (), (9.0, 99.0)),
    )
    trained = []

    def train(own, folder, **_):
        trained.append(folder.relative_to(tmp_path).as_posix())
        if own.learning_rate > 1:
            folder.mkdir(exist_ok=True)
            write_json(folder / CONFIG_FILE, to_plain(own))
            raise DivergedError(f"step 3 has loss nan ({folder / 'seed_1/diverged.json'})")
        if not folder.exists():
            shutil.copytree(run, folder)

    monkeypatch.setattr(study, "run_in", train)
    return study_config.StudyConfig(base, variants, "Table 0"), trained


def test_a_run_that_diverges_ends_neither_the_study_nor_its_variant(diverging, tmp_path):
    config, trained = diverging
    summary = study.run(config, tmp_path)
    assert trained == ["some/lr_0.5", "some/lr_9", "none/lr_9", "none/lr_99"]
    (row,) = summary.rows
    assert (row.variant, row.learning_rate, row.rates_tried) == ("some", 0.5, 2)
    reason = "step 3 has loss nan (seed_1/diverged.json)"
    lost = [("some", 9.0), ("none", 9.0), ("none", 99.0)]
    assert summary.diverged == tuple(DivergedRun(*one, reason) for one in lost)
    assert load_result(tmp_path / study.TABLE, StudySummary) == summary
    text = study.format_table(summary)
    assert re.search(r"\nnone +diverged at every rate", text)
    assert f"some diverged at a rate of 9: {reason}" in text
    # They are not trained again, as the first is not, which pretraining sees itself.
    trained.clear()
    assert study.run(config, tmp_path) == summary and trained == ["some/lr_0.5"]


def test_a_stored_run_of_other_settings_is_no_row_of_a_study(diverging, tmp_path):
    config, trained = diverging
    study.run(config, tmp_path)
    trained.clear()
    other = dataclasses.replace(config, base=dataclasses.replace(config.base, dropout=0.3))
    with pytest.raises(
        UsageError, match=r"some/lr_0\.5 holds a run with config\.dropout = 0\.0, not"
    ):
        study.run(other, tmp_path, only=["none"], resume="force")
    assert not trained
    # Of other seeds it has those that are asked for.
    seeds = dataclasses.replace(config, base=dataclasses.replace(config.base, seeds=(2, 3)))
    (row,) = study.run(seeds, tmp_path, only=["some"], resume="force").rows
    assert row.perplexity.validation.n == 1


def test_a_mean_over_seeds_has_its_sample_size():
    assert str(over_seeds([90.5])) == "90.50 (one run)"
    # Two seeds have a range alone.
    assert str(over_seeds([90.0, 91.0])) == "90.50 (seeds 90.00 to 91.00, n = 2)"
    lost = over_seeds([math.inf, 3.0, 4.0])
    assert (lost.mean, lost.low, lost.highest) == (math.inf, None, math.inf)
    with pytest.raises(UsageError, match="one per seed"):
        over_seeds([])


@pytest.mark.slow
def test_a_study_resumes_and_can_be_moved(text, tmp_path):
    config = _study(text)
    first = study.run(config, tmp_path, only=["two"])
    assert load_result(tmp_path / study.TABLE, StudySummary) == first
    (row,) = first.rows
    summary = load_result(tmp_path / "two/lr_0.001" / frame.SUMMARY, PretrainSummary)
    best = summary.seeds[0].best
    assert row.perplexity.validation == over_seeds([best.validation_perplexity])
    assert row.perplexity.test == over_seeds([best.test_perplexity])
    assert (row.rates_tried, row.paper) == (1, 98.5)
    # Two prototypes: the larger gate is above a half.
    assert 0.5 < row.first_routing.top_1.mean <= 1
    # One corpus serves all runs, through a link that moves with the folder.
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert saved_run.load_run(moved / "two/lr_0.001").step == 2
    checkpoints = moved / "two/lr_0.001/seed_234/checkpoints"
    before = {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}
    second = study.run(config, moved)
    assert [row.variant for row in second.rows] == ["two", "llama"]
    assert second.rows[0] == row and second.rows[1].first_routing is None
    assert before == {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}

    # Another seed is refused, unless by force, and the finished one is not trained again.
    more = dataclasses.replace(config, base=dataclasses.replace(config.base, seeds=(234, 7)))
    with pytest.raises(UsageError, match=r"config.seeds.*--resume=force"):
        study.run(more, moved, only=["two"])
    third = study.run(more, moved, only=["two"], resume="force")
    perplexity = third.rows[0].perplexity.validation
    assert perplexity.n == 2 and best.validation_perplexity in (
        perplexity.lowest,
        perplexity.highest,
    )
    assert before == {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}


def test_a_study_says_which_variant_is_wrong(text):
    base = _study(text).base
    wrong = {
        "prototypes.num_prototype=2": "variant x: config.prototypes.num_prototype is not a field",
        "prototype.alpha=2": "variant x: prototype in 'prototype.alpha' is no section",
        "model": "variant x: 'model' has no value",
        "dropout=much": "variant x: config.dropout = 'much'",
    }
    for change, message in wrong.items():
        with pytest.raises(UsageError, match=message):
            study_config.changed(base, study_config.Variant("x", (change,)))
    with pytest.raises(UsageError, match="a name of its own"):
        study_config.StudyConfig(base, (study_config.Variant("x"), study_config.Variant("x")))
    with pytest.raises(UsageError, match="no variant 'llamas'"):
        study.run(_study(text), None, only=["llamas"])


def test_a_shared_corpus_of_other_settings_is_refused(text, tmp_path):
    config = settings(text, max_steps=1)
    prepare_corpus(tmp_path / "data", from_plain(config, PretrainConfig).corpus)
    config.corpus.words = 59
    with pytest.raises(UsageError, match=r"words = 60, not 59"):
        run_in(config, tmp_path / "b", data=tmp_path / "data")


def test_a_study_of_which_every_run_diverged_ends_in_an_error(diverging, monkeypatch, tmp_path):
    config, _ = diverging
    only = dataclasses.replace(config, variants=config.variants[1:])
    monkeypatch.setattr(study, "from_plain", lambda plain, cls: only)
    opened = contextlib.nullcontext(SimpleNamespace(path=tmp_path))
    monkeypatch.setattr(study, "open_workdir", lambda *args, **_: opened)
    options = SimpleNamespace(only=())
    arguments = SimpleNamespace(config=None, folder=tmp_path, resume="auto", options=options)
    with pytest.raises(DivergedError, match=r"all runs so far diverged \(none\); lower the"):
        study.main(arguments)
    assert load_result(tmp_path / study.TABLE, StudySummary).rows == ()
