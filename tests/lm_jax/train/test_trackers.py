"""Trackers, by a module that records what it is asked, and CSV: every number, once."""

import csv
import dataclasses
import importlib.machinery
import importlib.util
import re
import sys
import types

import pytest

from lm_jax.console import cli
from lm_jax.errors import UsageError
from lm_jax.train.launch import LaunchOptions, launched_with
from lm_jax.train.trackers import CSV, EVENTS, PACKAGES, Csv, TensorBoard
from tests.lm_jax.train import tiny_training as tiny
from tests.lm_jax.train.tiny_run import (
    Killed,
    evaluations,
    kill_at,
    metrics,
    train,
)


@dataclasses.dataclass
class FakeRun:
    arguments: dict
    logged: list = dataclasses.field(default_factory=list)
    finished: bool = False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def runs(monkeypatch):
    """The runs that a stand-in for each package has begun."""
    begun = []

    def init(*project, **arguments):
        begun.append(FakeRun(arguments | {"project": project}))
        return begun[-1]

    for package in PACKAGES:
        fake = types.ModuleType(package)
        fake.__spec__ = importlib.machinery.ModuleSpec(package, None)
        fake.init = init
        monkeypatch.setitem(sys.modules, package, fake)
    return begun


@pytest.mark.parametrize("package", PACKAGES)
def test_a_resumed_run_goes_on_with_the_numbers_of_the_files(package, runs, tmp_path, monkeypatch):
    """It is killed after the save of step 8."""
    folder = tmp_path / "run"
    monkeypatch.setenv("TRACKIO_PROJECT", "prototypes")
    with launched_with(LaunchOptions(track=package)):
        with pytest.raises(Killed):
            train(folder, on_step=kill_at(8))
        train(folder)
    first, second = runs
    assert first.arguments == second.arguments
    assert first.arguments["resume"] == "allow"
    if package == "wandb":
        assert first.arguments["dir"] == str(folder) and first.arguments["project"] == ()
        assert first.arguments["name"].endswith("/run") and len(first.arguments["id"]) == 16
    else:
        # Two folders of one name are two runs, though it knows them by their names alone.
        assert first.arguments["project"] == ("prototypes",)
        assert re.search(r"/run [0-9a-f]{8}$", first.arguments["name"])
    assert first.arguments["config"]["train"]["steps"] == tiny.CONFIG.steps
    assert first.finished and second.finished
    logged = [*first.logged, *second.logged]
    steps = [step for step, _ in logged]
    assert steps == sorted(steps)
    losses = [values["train/loss"] for _, values in logged if "train/loss" in values]
    assert losses == metrics(folder)["loss"]
    name = "validation/perplexity"
    perplexities = [(step, values[name]) for step, values in logged if name in values]
    assert perplexities == [
        (row["step"], row["value"]) for row in evaluations(folder) if row["name"] == name
    ]
    assert len(list((folder / EVENTS).iterdir())) == 2


def test_a_run_that_goes_on_in_the_same_second_keeps_the_events_before(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    for done in (0, 4):
        tracker = TensorBoard(tmp_path, done)
        tracker.add(done + 1, {"train/loss": 1.0})
        tracker.close()
    assert len(list((tmp_path / EVENTS).iterdir())) == 2


def test_rows_without_a_checkpoint_are_shown_again(runs, tmp_path, monkeypatch):
    """TensorBoard forgets what comes after the checkpoint that a run resumes from."""

    def killed(*args, **kwargs):
        raise Killed

    folder = tmp_path / "run"
    with launched_with(LaunchOptions(track="wandb")):
        with monkeypatch.context() as patch:
            patch.setattr("lm_jax.checkpoint.manager.save", killed)
            with pytest.raises(Killed):
                train(folder)
        train(folder)
    assert [step for step, _ in runs[0].logged] == [1, 2, 3, 4]
    again = [step for step, values in runs[1].logged if "train/loss" in values]
    assert again == metrics(folder)["step"] == list(range(1, 13))


def test_a_csv_file_has_the_numbers_of_the_tables_after_a_kill_too(tmp_path):
    """It is killed after step 10, two steps after a save."""
    folder = tmp_path / "run"
    with launched_with(LaunchOptions(track="csv")):
        with pytest.raises(Killed):
            train(folder, on_step=kill_at(10))
        train(folder)
    with (folder / CSV).open(newline="") as file:
        lines = list(csv.DictReader(file))
    losses = [(int(x["step"]), float(x["value"])) for x in lines if x["name"] == "train/loss"]
    assert losses == list(enumerate(metrics(folder)["loss"], start=1))
    rows = {(row["step"], row["name"]): row["value"] for row in evaluations(folder)}
    own = {(int(x["step"]), x["name"]): float(x["value"]) for x in lines}
    assert {key: own[key] for key in rows} == rows
    assert len(own) == len(lines)


def test_a_csv_file_drops_what_comes_after_the_checkpoint(tmp_path):
    first = Csv(tmp_path, 0)
    first.add(1, {"a": 0.1, "b, c": 1e-300})
    first.add(2, {"a": 2.0})
    first.close()
    with (tmp_path / CSV).open("a") as file:
        file.write("3")
    second = Csv(tmp_path, 1)
    second.add(2, {"a": 5.0})
    second.close()
    wanted = ["step,name,value", "1,a,0.1", '1,"b, c",1e-300', "2,a,5.0"]
    assert (tmp_path / CSV).read_text().splitlines() == wanted
    # A run from the start has nothing of another.
    Csv(tmp_path, 0).close()
    assert (tmp_path / CSV).read_text().splitlines() == wanted[:1]


@pytest.mark.parametrize("package", PACKAGES)
def test_without_the_package_a_sentence_names_the_remedy(package, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    argv = ["prog", f"--workdir={tmp_path / 'run'}", f"--track={package}"]
    assert cli.run(lambda arguments: 0, argv, training=True) == 2
    assert capsys.readouterr().err == (
        f"error: --track={package}: {package} is missing; "
        f"pip install 'interpretable-attention-jax[{package}]'\n"
    )
    assert cli.run(lambda arguments: 0, argv) == 2
    assert "--track is not a flag of this command" in capsys.readouterr().err


def test_options_of_a_launch_are_compared_with_their_bounds():
    with pytest.raises(UsageError, match="--hang_limit=-1 must be at least 0"):
        LaunchOptions(hang_limit=-1)
