"""Resuming a run: on other devices, with other weights, under another config."""

import shutil

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.checkpoint.folder import MANIFEST
from lm_jax.checkpoint.manager import FOLDER, saved_steps, step_folder
from lm_jax.console import cli
from lm_jax.errors import CorruptError, StoppedError, UsageError
from lm_jax.parallel import sharding
from lm_jax.run import stop
from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json
from lm_jax.study import frame
from lm_jax.train.state import LOSS_WINDOW
from sparse_jax.studies.posttrain import STUDY, export, report, training
from sparse_jax.studies.posttrain import task as task_module
from sparse_jax.studies.posttrain.settings import PosttrainConfig
from tests.lm_jax.train.tiny_run import stepwise
from tests.sparse_jax.small_runs import command, run_folder, save_base, settings

# Run by `make test-all`.
pytestmark = pytest.mark.long


@pytest.fixture
def stop_at(monkeypatch):
    """A function that arranges a request to stop after that many steps."""
    train = training.train

    def arrange(step):
        def on_step(now):
            if now == step:
                stop.request()

        monkeypatch.setattr(training, "train", stepwise(train, on_step))

    yield arrange
    stop._stop.clear()


def start_again(monkeypatch):
    monkeypatch.undo()
    stop._stop.clear()


@pytest.fixture
def movable(base, tmp_path):
    """A copy of the model, whose weights a test may replace."""
    return shutil.copytree(base, tmp_path / "model")


def replace_weights(model):
    shutil.rmtree(model)
    save_base(model, seed=1)


def losses(folder):
    return pq.read_table(run_folder(folder) / "metrics.parquet")["loss"].to_numpy()


def summary_of(folder):
    return read_json(folder / frame.SUMMARY)


def test_a_run_stopped_on_four_devices_resumes_on_two_with_another_mesh(
    base, text, tmp_path, stop_at, monkeypatch, capsys
):
    """From the checkpoint before a damaged one; recent losses for `skip_sigma` are stored."""
    folder = tmp_path / "run"
    stop_at(6)
    with pytest.raises(StoppedError, match="after step 7"):
        command(settings(base, text, skip_sigma=4.0), folder)
    before = (folder / task_module.DENSE).read_bytes()
    saved = run_folder(folder) / FOLDER
    assert saved_steps(saved) == [6, 7]
    manifest = step_folder(saved, 7) / MANIFEST
    stored = read_json(manifest)
    assert stored["notes"]["mesh"] == {"data": 2, "fsdp": 2, "tensor": 1}
    assert stored["arrays"]["losses_W"]["shape"] == [LOSS_WINDOW]
    manifest.write_text("{}")

    start_again(monkeypatch)
    make_mesh = sharding.make_mesh
    monkeypatch.setattr(
        sharding, "make_mesh", lambda *ways: make_mesh(*ways, devices=jax.devices()[:2])
    )
    # A second evaluation may change the last bit of the dense loss, and the bound with it.
    monkeypatch.setattr(task_module, "evaluate", None)
    config = settings(base, text, mesh=(-1, 1, 1), skip_sigma=4.0)
    with pytest.raises(
        CorruptError, match=r"give --config\.allow_fallback to continue from step_0*6"
    ):
        command(config, folder)
    config.allow_fallback = True
    command(config, folder)
    error = capsys.readouterr().err
    assert "step_000006 was saved with mesh fsdp = 2, not 1: the run continues" in error
    assert "not bit for bit" in error
    assert (folder / task_module.DENSE).read_bytes() == before
    (run,) = summary_of(folder)["runs"]
    # Every step is in the metrics once.
    steps = pq.read_table(run_folder(folder) / "metrics.parquet")["step"].to_pylist()
    assert run["steps"] == 12 and steps == list(range(1, 13))
    assert run["target"] == read_json(folder / task_module.DENSE)["loss"] + 0.05


@pytest.mark.slow
def test_with_force_other_weights_are_trained_from_the_start_and_compared_with_their_own(
    movable, text, tmp_path
):
    folder = tmp_path / "run"
    config = settings(movable, text, steps=4, eval_every=4, targets=(6.0,), control=True)
    command(config, folder)
    before = summary_of(folder)
    replace_weights(movable)
    command(config, folder, resume="force")
    after = summary_of(folder)
    assert after["model_sha256"] == lm_jax.load_pretrained(movable).sha256
    assert after["model_sha256"] != before["model_sha256"]
    for name in ("seed_234/target_6.0000", "seed_234/control"):
        table, old = (
            pq.read_table(folder / each / export.WINDOWS)["dense_nll"].to_numpy()
            for each in (name, f"{name}.replaced_1")
        )
        assert table.sum() / after["validation_tokens"] == pytest.approx(after["dense_loss"])
        assert old.sum() / before["validation_tokens"] == pytest.approx(before["dense_loss"])
        assert not np.allclose(table, old)


@pytest.mark.slow
def test_with_force_another_config_is_trained_and_its_numbers_are_reported(
    base, text, tmp_path, capsys
):
    folder = tmp_path / "run"
    command(settings(base, text, steps=6), folder)
    first = losses(folder)
    changed = settings(base, text, steps=4, eval_every=4, learning_rate=1e-2)
    with pytest.raises(UsageError, match="--resume=force"):
        command(changed, folder)
    command(changed, folder, resume="force")
    captured = capsys.readouterr()
    name = run_folder_name(folder)
    assert f"{name} was trained with config.eval_every = 6, not 4" in captured.err
    assert f"set aside as {name}.replaced_1" in captured.err
    (run,) = summary_of(folder)["runs"]
    assert (run["steps"], len(losses_in(folder / run["folder"]))) == (4, 4)
    # The same first step, and then another rate.
    result = losses_in(folder / run["folder"])
    assert result[0] == first[0] and not np.array_equal(result, first[:4])
    assert np.array_equal(losses_in(folder / f"{run['folder']}.replaced_1"), first)
    assert read_json(folder / run["folder"] / export.RESULT)["steps"] == 4


def run_folder_name(folder):
    (run,) = summary_of(folder)["runs"]
    return run["folder"].rpartition("/")[2]


def losses_in(folder):
    return pq.read_table(folder / "metrics.parquet")["loss"].to_numpy()


@pytest.mark.slow
def test_with_force_other_texts_are_reported_without_training_again(base, text, tmp_path):
    folder = tmp_path / "run"
    config = settings(base, text, steps=4, eval_every=4)
    command(config, folder)
    own = run_folder(folder)
    saved = {file: file.stat().st_mtime_ns for file in (own / FOLDER).rglob("*")}
    before = read_json(own / export.RESULT)
    config.texts = ("three boats on the way home",)
    command(config, folder, resume="force")
    assert {file: file.stat().st_mtime_ns for file in (own / FOLDER).rglob("*")} == saved
    assert read_json(own / export.RESULT) == before
    (text,) = read_json(own / export.PATTERNS)
    assert text["text"].strip() == "three boats on the way home"
    assert not list(folder.glob("seed_*/*.replaced_*"))


def test_another_export_keeps_the_bound_over_the_control(base, text, tmp_path):
    """The control is evaluated again, with another rounding; no run is trained again for that."""
    folder = tmp_path / "run"
    over = {"control": True, "slack_over": "control", "slacks": (0.5,), "paired": True}
    config = settings(base, text, steps=4, eval_every=4, dtype="bfloat16", distill=0.0, **over)
    command(config, folder)
    control = folder / "seed_234" / task_module.CONTROL
    (before,) = summary_of(folder)["controls"]
    first = read_json(control / task_module.LOSS)["loss"]
    assert before["loss"]["estimate"] == first
    # As a folder from before there was this file.
    (control / task_module.LOSS).unlink()
    config.export_dtype = "float32"
    command(config, folder, resume="force")
    summary = summary_of(folder)
    assert summary["controls"][0]["loss"]["estimate"] != first
    assert not list(folder.glob("seed_*/*.replaced_*"))
    assert summary["runs"][0]["target"] == first + 0.5
    assert read_json(control / task_module.LOSS)["loss"] == first
    # The page has the bound of each update.
    read = frame.load_summary(STUDY, folder)
    (run,) = report.read_runs(from_plain(config, PosttrainConfig), read, folder)
    np.testing.assert_allclose(run.moving, losses_in(control) + 0.5, rtol=1e-12)


def test_a_stop_is_obeyed_during_evaluations(base, text, tmp_path, monkeypatch, capsys):
    """That of the dense model before training, and the last comparison after it."""
    folder, config = tmp_path / "run", settings(base, text, steps=4, eval_every=4)

    def main(arguments):
        del arguments
        command(config, folder)

    for module, name in ((task_module, "evaluate"), (training, "compare")):
        evaluate = getattr(module, name)

        def interrupted(*args, evaluate=evaluate, **kwargs):
            stop.request()
            return evaluate(*args, **kwargs)

        monkeypatch.setattr(module, name, interrupted)
        assert cli.run(main, ["posttrain"], workdir_required=False) == 75
        assert "stopped on request after batch 1 of" in capsys.readouterr().err
        assert not list(folder.glob("seed_*/target_*/result.json"))
        assert (folder / task_module.DENSE).exists() == (module is training)
        monkeypatch.undo()
    assert cli.run(main, ["posttrain"], workdir_required=False) == 0
    assert summary_of(folder)["runs"][0]["steps"] == 4
