"""The command on tiny files: it learns what can be learned, resumes, exports, and refuses."""

import csv
import dataclasses
import re
import shutil

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.console.config_files import load_config
from lm_jax.errors import DivergedError, UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.decoder import param_spec
from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json, write_json
from lm_jax.run.results import load_result
from lm_jax.study import frame
from lm_jax.text.tokenizer_training import train_tokenizer
from protot_jax.mixers.models import build_model
from protot_jax.studies.glue import STUDY, finetune, metrics, report
from protot_jax.studies.glue import run as study_run
from protot_jax.studies.glue.results import ROWS, FineTuneResult, GlueSummary
from protot_jax.studies.glue.settings import GlueConfig
from protot_jax.studies.glue.tasks import OFFICIAL
from protot_jax.training.config import PretrainConfig
from protot_jax.training.saved_run import TrainedModel
from tests.protot_jax.studies.glue import learnable_files

# Run by `make test-all`.
pytestmark = pytest.mark.long

SETTINGS = GlueConfig(
    runs=("tiny=nowhere",),
    tasks=("sst2", "stsb"),
    folder="replaced",
    learning_rates=(1e-7, 2e-2),
    warmups=(0.1,),
    search_tasks=("sst2",),
    seeds=(0, 1),
    batch_size=4,
    epochs=10,
    patience=3,
    max_length=16,
    resamples=100,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return learnable_files.write(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def model():
    """A model of one layer that was not trained."""
    words = [*learnable_files.FILLERS, "good", "bad", "[ sep ]"]
    tokenizer = train_tokenizer([" ".join(words)] * 3, vocab_size=120)
    cfg, mixer = build_model(
        "protot",
        hidden_size=16,
        num_layers=1,
        vocab_size=tokenizer.vocab_size,
        context=16,
        tie_embeddings=True,
        num_prototypes=3,
    )
    params = params_lib.init(jax.random.key(0), param_spec(cfg, mixer))
    return TrainedModel(cfg, mixer, params, tokenizer, PretrainConfig(), 1, 7, "ab" * 32)


@pytest.fixture(scope="module")
def launch(files, model):
    """Runs the study with that model in place of a run; returns the text of the terminal."""
    settings = dataclasses.replace(SETTINGS, folder=str(files))

    def launch(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(study_run, "load_run", lambda *_, **__: model)
            summary = frame.execute(STUDY, settings, folder)
        return "\n".join(report.build(settings, summary, folder).lines)

    return launch


@pytest.fixture(scope="module")
def done(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "glue"
    printed = launch(folder)
    return folder, load_result(folder / "summary.json", GlueSummary), printed


def test_it_learns_what_one_word_decides_and_says_that_it_is_above_the_constant(done):
    _, summary, printed = done
    (sst2, _), (split,) = summary.results, summary.results[0].splits
    assert split.metrics["accuracy"].lowest == 1.0
    assert split.constant == {"accuracy": 0.5}
    assert split.above and split.gain.estimate == 0.5
    # Eight of sixteen won, none lost: 2 of 2^8 outcomes are as far apart.
    assert [(test.b, test.c) for test in split.mcnemar] == [(0, 8)] * 2
    assert split.mcnemar[0].p_value == pytest.approx(2 / 2**8)
    assert re.search(r"tiny +sst2 +dev +accuracy +100\.0", printed)
    assert len(sst2.steps) == 2


def test_the_rate_of_the_best_selection_metric_is_taken_for_all_tasks(done):
    folder, summary, _ = done
    (model,) = summary.models
    slow, fast = model.grid
    assert (slow.learning_rate, fast.learning_rate) == (1e-7, 2e-2)
    assert slow.mean < fast.mean == 1.0
    assert (model.learning_rate, model.warmup) == (2e-2, 0.1)
    places = sorted(path.parent.name for path in folder.glob("tiny/*/*/result.json"))
    chosen = [f"lr_0.02_warmup_0.1_seed_{seed}" for seed in (0, 0, 1, 1)]
    assert places == [*chosen, "lr_1e-07_warmup_0.1_seed_0"]
    # Checkpoints go once the predictions are there.
    assert not list(folder.rglob("checkpoints"))


def test_training_stops_after_evaluations_without_gain_and_takes_the_best(done):
    folder, _, _ = done
    slow = load_result(folder / "tiny/sst2/lr_1e-07_warmup_0.1_seed_0/result.json", FineTuneResult)
    # A rate of 1e-7 changes no answer: three evaluations after the first gain nothing.
    assert (slow.best_step, slow.steps, slow.stopped_early) == (16, 64, True)
    evaluations = pq.read_table(
        folder / "tiny/sst2/lr_0.02_warmup_0.1_seed_0/evaluations.parquet"
    ).to_pylist()
    by_step = {e["step"]: e["value"] for e in evaluations if e["name"] == "selection/accuracy"}
    fast = load_result(folder / "tiny/sst2/lr_0.02_warmup_0.1_seed_0/result.json", FineTuneResult)
    assert fast.selection == max(by_step.values()) == by_step[fast.best_step]
    assert fast.best_step == min(step for step, one in by_step.items() if one == fast.selection)


def test_the_numbers_of_the_summary_follow_from_the_rows(done):
    folder, summary, _ = done
    rows = pq.read_table(folder / "rows.parquet")
    assert rows.schema.remove_metadata().equals(ROWS)
    assert rows.num_rows == 2 * (16 + 6 + 6 + 3)
    for result in summary.results:
        task = OFFICIAL[result.task]
        for seed in (0, 1):
            kept = [
                row
                for row in rows.to_pylist()
                if (row["task"], row["split"], row["seed"]) == (result.task, "dev", seed)
            ]
            targets, predictions = (
                np.array([row[name] for row in kept]) for name in ("target", "prediction")
            )
            again = metrics.scores(task, targets, predictions)
            for name, values in result.splits[0].metrics.items():
                assert values.lowest - 1e-12 <= again[name] <= values.highest + 1e-12
    hidden = [row["target"] for row in rows.to_pylist() if row["split"].endswith(".tsv")]
    assert len(hidden) == 2 * (6 + 3) and set(hidden) == {None}


def test_scores_are_in_the_unit_of_the_task_and_clipped(done):
    folder, summary, _ = done
    rows = pq.read_table(folder / "rows.parquet").to_pylist()
    scores = [row["prediction"] for row in rows if row["task"] == "stsb"]
    assert min(scores) >= 0.0 and max(scores) <= 5.0
    # The training scores are 0 and 5: standard deviation 2.5 about 2.5.
    unclipped = [
        (row["prediction"], 2.5 + 2.5 * row["outputs"][0])
        for row in rows
        if row["task"] == "stsb" and 0 < row["prediction"] < 5
    ]
    assert all(one == pytest.approx(other, abs=1e-6) for one, other in unclipped)
    (split,) = summary.results[1].splits
    assert np.isnan(split.constant["pearson"]) and split.mcnemar == ()


def test_submission_files_are_in_the_official_layout(done):
    folder, summary, _ = done
    (submission,) = summary.submissions
    assert submission.files == ("SST-2.tsv", "STS-B.tsv")
    assert len(submission.missing) == 9
    own = folder / "submission/tiny"
    assert sorted(path.name for path in own.iterdir()) == ["SST-2.tsv", "STS-B.tsv"]
    with (own / "SST-2.tsv").open(encoding="utf-8") as file:
        lines = list(csv.reader(file, delimiter="\t"))
    assert lines[0] == ["index", "prediction"]
    assert [line[0] for line in lines[1:]] == [str(i) for i in range(6)]
    # The test sentences hold "bad" and "good" in turn.
    assert [line[1] for line in lines[1:]] == ["0", "1"] * 3
    text = (own / "STS-B.tsv").read_text("utf-8")
    assert all(re.fullmatch(r"\d\t[0-5]\.\d{3}", line) for line in text.splitlines()[1:])


def test_other_weights_or_lengths_are_refused(done, model, files, tmp_path, monkeypatch):
    """Every fine-tuning knows its weights and text."""
    copied = tmp_path / "glue"
    shutil.copytree(done[0], copied)
    (copied / "finished.json").unlink()
    settings = dataclasses.replace(SETTINGS, folder=str(files))
    monkeypatch.setattr(
        study_run, "load_run", lambda *_, **__: dataclasses.replace(model, sha256="cd" * 32)
    )
    with pytest.raises(UsageError, match="holds a fine-tuning of another model or another text"):
        frame.execute(STUDY, settings, copied)
    # As of a version that cut them at another length.
    for stored in copied.rglob("result.json"):
        write_json(stored, read_json(stored) | {"length": 3})
    with pytest.raises(UsageError, match=r"on rows of 3 ids, and rows have [0-9]+ now"):
        frame.execute(STUDY, settings, copied)


def test_stored_fine_tunings_of_other_settings_are_refused_by_force_too(
    done, model, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(study_run, "load_run", lambda *_, **__: model)
    folder = shutil.copytree(done[0], tmp_path / "glue")

    def force(**changes):
        settings = dataclasses.replace(SETTINGS, folder=str(files), **changes)
        frame.execute(STUDY, settings, folder, resume="force")

    message = (
        r"holds a fine-tuning with config\.dtype = \"float32\", not \"bfloat16\", config\.epochs"
    )
    with pytest.raises(UsageError, match=message):
        force(epochs=5, dtype="bfloat16")
    # What no fine-tuning depends on.
    force(resamples=101, tasks=("sst2",))
    assert len(load_result(folder / "summary.json", GlueSummary).results) == 1
    # Those of earlier versions have no settings.
    next(folder.glob("tiny/sst2/lr_1e-07*")).joinpath("config.json").unlink()
    with pytest.raises(UsageError, match="is of an earlier version, which did not store"):
        force(resamples=102, tasks=("sst2",))


def test_a_fine_tuning_that_diverges_ends_neither_the_search_nor_its_task(
    done, launch, tmp_path, monkeypatch
):
    """The better rate diverges in the search, and of the other one a seed, then a whole task."""
    folder, trained = shutil.copytree(done[0], tmp_path / "glue"), []
    for name in (
        "finished.json",
        "summary.json",
        "tiny/sst2/lr_0.02_warmup_0.1_seed_0/result.json",
    ):
        (folder / name).unlink()
    real = finetune.train

    def train(own, *args):
        trained.append(f"{own.parent.name} {own.name}")
        if "lr_0.02" in own.name or own.name.endswith("seed_1") or own.parent.name == "stsb":
            raise DivergedError(f"step 3 has loss nan ({own}/diverged.json)")
        return real(own, *args)

    monkeypatch.setattr(finetune, "train", train)
    printed = launch(folder)
    place = "lr_1e-07_warmup_0.1_seed"
    fast = "sst2 lr_0.02_warmup_0.1_seed_0"
    wanted = [fast, f"sst2 {place}_1", f"stsb {place}_0", f"stsb {place}_1"]
    assert trained == wanted
    summary = load_result(folder / "summary.json", GlueSummary)
    (chosen,) = summary.models
    assert chosen.learning_rate == 1e-7
    assert [point.diverged for point in chosen.grid] == [(), ("sst2",)]
    (result,) = summary.results
    assert (result.task, result.splits[0].metrics["accuracy"].n) == ("sst2", 1)
    named = [(one.task, one.learning_rate, one.seed) for one in summary.diverged]
    assert named == [("sst2", 2e-2, 0), ("sst2", 1e-7, 1), ("stsb", 1e-7, 0), ("stsb", 1e-7, 1)]
    assert {one.reason for one in summary.diverged} == {"step 3 has loss nan (diverged.json)"}
    assert re.search(r"tiny +stsb +Pearson +diverged with every seed", printed)
    assert "tiny on sst2 diverged at a rate of 0.02, warm-up 10 %, seed 0: step 3" in printed
    page = (folder / "report.html").read_text("utf-8")
    assert "diverged with every seed" in page and "Fine-tunings that diverged." in page
    # None is trained again.
    (folder / "finished.json").unlink()
    launch(folder)
    assert trained == wanted
    assert load_result(folder / "summary.json", GlueSummary) == summary


BAD = {
    "runs": ({"runs": ()}, "config.runs is empty; name work folders of iaj protot pretrain"),
    "two of a name": (
        {"runs": ("a/x", "b/x")},
        "config.runs: two are called 'x'; write NAME=FOLDER",
    ),
    "a name with a slash": ({"runs": ("a/b=c",)}, "'a/b=c' is not FOLDER or NAME=FOLDER"),
    "task": ({"tasks": ("sst",)}, "there is no task 'sst'; did you mean 'sst2'?"),
    "folder": ({"folder": ""}, "config.folder is missing, and sst2 is read from official files"),
    "rates": ({"learning_rates": (0.0,)}, "config.learning_rates = (0.0,) must be different rates"),
    "warmups": ({"warmups": (1.0,)}, "config.warmups = (1.0,) must be one or more different"),
    "seeds": ({"seeds": (1, 1)}, "config.seeds = (1, 1) must be one or more different values"),
    "pooling": ({"pooling": "first"}, "config.pooling = 'first' must be one of mean, last"),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_that_cannot_be_used_are_named_with_a_remedy(case):
    changes, message = BAD[case]
    with pytest.raises(UsageError, match=re.escape(message)):
        dataclasses.replace(SETTINGS, **changes).named_runs()


def test_the_official_mode_is_the_protocol_of_the_paper():
    config = from_plain(load_config("configs/protot/glue.py:official"), GlueConfig)
    assert config.tasks == tuple(OFFICIAL)
    assert len(config.learning_rates) * len(config.warmups) == 22
    assert config.searching_tasks() == ("sst2", "mnli")
    assert (config.batch_size, config.epochs, config.max_length) == (16, 3, 512)
    # Of the released code, where appendix A.4 is silent.
    assert (config.weight_decay, config.head_dropout) == (0.01, 0.1)
    assert (config.patience, config.min_gain, config.eval_every) == (2, 1e-3, 0)
    assert len(config.seeds) == 3
