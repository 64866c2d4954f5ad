"""The command: a user's own task in one line, options that set fields, refusals in one line."""

import contextlib
import io
from pathlib import Path
import shutil

from absl import flags
import pytest

from lm_jax.console.flags import apply, apply_shortcuts, define_flags
from lm_jax.run.config import from_plain
from lm_jax.run.results import load_result
from lm_jax.study import command, frame
from sparse_jax.studies.circuits import STUDY, report, settings
from sparse_jax.studies.circuits.results import CircuitSummary
from sparse_jax.studies.circuits.settings import CircuitConfig, task_name
from tests import tiny
from tests.sparse_jax.circuits.small_study import COUNT, save_models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def run(*arguments):
    return command.run(STUDY, ["iaj", "--compilation_cache=off", *arguments])


def asked(*arguments):
    """The settings of a command with these flags."""
    values, config = flags.FlagValues(), STUDY.settings("smoke")
    define_flags(CircuitConfig, values)
    values(["iaj", *arguments])
    apply_shortcuts(CircuitConfig, values, config)
    apply(CircuitConfig, values, config)
    return from_plain(config, CircuitConfig)


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """A study of a user's own task that wrote below runs/, its flags and what it printed."""
    place, out = tmp_path_factory.mktemp("place"), io.StringIO()
    model = shutil.copytree(models / "dense", place / "dense")
    task = shutil.copy(models / "mine.jsonl", place / "mine.jsonl")
    given = [f"--dense={model}", f"--task={task}"]
    given += ["--config=sparse/circuits:smoke", "--config.components=('heads',)"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(place)
        assert run(*given) == 0
    return place / "runs" / "circuits" / "dense-mine", given, out.getvalue()


def test_a_users_own_task_takes_one_command(finished):
    """Without a work folder it writes below runs/."""
    folder, given, printed = finished
    summary = load_result(folder / frame.SUMMARY, CircuitSummary)
    (facts,) = summary.tasks
    assert (facts.name, facts.kept, facts.seed) == ("mine", COUNT, None)
    assert f"--dense={summary.config.dense}" == given[0] and not summary.ratios
    assert not summary.results[0].solved
    assert "mine, heads that explain 90 %" in " ".join(printed.split())
    built = report.build(summary.config, summary, folder)
    assert "Attention patterns of the needed heads" in [each.title for each in built.sections()]


def test_a_finished_study_is_not_shown_for_a_model_that_was_changed(finished, capsys):
    """Its config.json, its tokenizer or the prompts were edited in place, and the weights not."""
    folder, given, _ = finished
    given = [*given, f"--workdir={folder}"]
    place = folder.parents[2]
    assert run(*given) == 0
    assert capsys.readouterr().out.startswith("finished ")
    rope = {"rope_type": "default", "rope_theta": 777.0}
    task = place / "mine.jsonl"
    for file, changes, part in (
        (place / "dense/config.json", {"rope_parameters": rope}, "dense: configuration"),
        (place / "dense/tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "dense: tokenizer"),
        (task, None, f"file {task}: content"),
    ):
        before = file.read_text()
        if changes:
            tiny.edit_json(file, **changes)
        else:
            file.write_text(before + "\n")
        assert run(*given) == 3
        printed = capsys.readouterr()
        assert "finished" not in printed.out and part in printed.err
        file.write_text(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dens=x"], "--dens is not a flag of this command; did you mean 'dense'?"),
        (["--tasks=ioi"], "--tasks is not a flag of this command; did you mean 'task'?"),
        (["--task=iio"], "config.tasks has 'iio', which is no task and no .jsonl file; did you"),
        (["--config.ablation=zero"], "--config.ablation is not a field; did you mean"),
        (["--config=sparse/circuit"], "did you mean 'sparse/circuits'?"),
        (
            ["--config=sparse/circuits:quik"],
            "mode 'quik' is not one of iaj sparse circuits",
        ),
        (["--dense=smollm3"], "--dense=smollm3: model 'smollm3' is no folder or .gguf file"),
        (["--dense=smollm3"], "it takes a Hugging Face folder, a .gguf file, a folder made by iaj"),
        (["dense=smollm2"], "'dense=smollm2' is not a flag; arguments are written --dense=VALUE"),
    ],
)
def test_a_typo_is_one_line_that_names_the_nearest(arguments, message, tmp_path, capsys):
    assert run(*arguments, f"--workdir={tmp_path / 'run'}") in (2, 3)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_a_pair_gives_all_three_models_and_its_text(monkeypatch, tmp_path):
    folders = {"dense": Path("p/d"), "control": Path("p/c"), "sparse": Path("p/s")}
    monkeypatch.setattr(settings, "model_folders", lambda folder: folders)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "posttrain.jsonl").touch()
    config = asked(f"--pair={tmp_path}", "--sparse=other")
    # A flag of its own comes before the pair.
    assert config.models == {"dense": "p/d", "control": "p/c", "sparse": "other"}
    assert config.trained_on == (str(tmp_path / "text" / "posttrain.jsonl"),)


def test_flags_set_the_fields_of_their_names():
    config = asked("--dense=a", "--control=b", "--task=copy,x/mine.jsonl")
    assert config.models == {"dense": "a", "control": "b"}
    assert [task_name(task) for task in config.tasks] == ["copy", "mine"]
    assert str(config.default_folder()) == "runs/circuits/a-b-copy-mine"
