"""A killed run resumes to the same result; a run that diverges names the step."""

import dataclasses
import itertools
import json
import logging
import os
from pathlib import Path
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.checkpoint import manager
from lm_jax.checkpoint.folder import MANIFEST
from lm_jax.console import cli
from lm_jax.errors import BadInputError, CorruptError, DivergedError, UsageError
from lm_jax.model.flops import CONVENTIONS
from lm_jax.model.mixers import AttentionMixer
from lm_jax.parallel import sharding
from lm_jax.run.files import read_json
from lm_jax.train import loop, optim
from lm_jax.train.launch import LaunchOptions, launched_with
from lm_jax.train.metrics import DIVERGED, METRICS
from lm_jax.train.state import state_shardings
from lm_jax.train.throughput import RATES, format_rates, measured_peak
from tests import rounding
from tests.lm_jax.checkpoint.test_manager import flip
from tests.lm_jax.train import tiny_training as tiny
from tests.lm_jax.train.tiny_run import (
    UPKEEP,
    Killed,
    evaluations,
    kill_at,
    metrics,
    train,
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nothing interrupts, and its folder."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return train(folder), folder


def test_rows_and_checkpoints_of_a_run(straight):
    train_result, folder = straight
    rows = metrics(folder)
    assert rows["step"] == list(range(1, 13))
    assert rows["loss"][-1] < rows["loss"][0]
    assert rows["tokens"] == [
        int((tiny.BATCHES.at(k)["tokens"][:, 1:] != 0).sum()) for k in range(12)
    ]
    # The peak times a cosine of 0 and two constants, in float32.
    assert rows["learning_rate"][0] == pytest.approx(tiny.CONFIG.learning_rate, rel=8 * tiny.U)
    result = evaluations(folder)
    assert [(row["step"], row["name"].split("/")[1]) for row in result] == list(
        itertools.product((6, 12), ("perplexity", "batch_mean_perplexity"))
    )
    assert train_result.history.best_step == 12
    assert train_result.history.best == pytest.approx(np.log(result[2]["value"]), rel=1e-12)
    assert int(train_result.state.step) == 12
    assert manager.saved_steps(train_result.checkpoints) == [8, 12]


def test_killed_at_random_steps_it_ends_in_the_same_bits(straight, tmp_path):
    folder = tmp_path / "run"
    for step in sorted(random.Random(0).sample(range(1, 12), 3)):
        with pytest.raises(Killed):
            train(folder, on_step=kill_at(step))
    train_result = train(folder)
    tiny.assert_bitwise(train_result.state, straight[0].state)
    assert train_result.history == straight[0].history
    assert metrics(folder) == metrics(straight[1])
    assert evaluations(folder) == evaluations(straight[1])


def test_a_local_checkpoint_is_newer_than_the_shared_one(straight, tmp_path, caplog):
    """Of every step, where shared ones are of 4 and 6; no start that is refused removes it."""
    folder, node = tmp_path / "run", tmp_path / "node"
    caplog.set_level(logging.INFO)
    with launched_with(LaunchOptions(local_checkpoints=node, local_every=1)):
        with pytest.raises(Killed):
            train(folder, on_step=kill_at(7), params=tiny.initial_params)
        saved = folder / manager.FOLDER
        assert manager.saved_steps(saved) == [4, 6]
        with pytest.raises(UsageError, match="seed"):
            train(folder, seed=tiny.SEED + 1)
        flip(manager.step_folder(saved, 6) / MANIFEST)
        with pytest.raises(CorruptError, match="step_000006"):
            train(folder)
        policy = dataclasses.replace(UPKEEP, allow_fallback=True)
        train_result = train(folder, policy=policy, params=lambda: pytest.fail("drawn again"))
    assert "continuing from step 7" in caplog.text
    tiny.assert_bitwise(train_result.state, straight[0].state)
    assert train_result.history == straight[0].history
    assert metrics(folder) == metrics(straight[1])
    # A finished run leaves nothing there.
    assert not list(node.rglob("step_*"))


@pytest.mark.parametrize("how", ["deleted", "set back"])
def test_local_checkpoints_do_not_resume_a_folder_that_was(straight, how, tmp_path, caplog):
    """To nothing, or to a copy from after step 5, whose local checkpoint has its rows there."""
    folder, node, copy = (tmp_path / name for name in ("run", "node", "copy"))
    caplog.set_level(logging.INFO)

    def on_step(step):
        if step == 5:
            shutil.copytree(folder, copy)
        if step == 7:
            raise Killed

    with launched_with(LaunchOptions(local_checkpoints=node, local_every=1)):
        with pytest.raises(Killed):
            train(folder, on_step=on_step)
        shutil.rmtree(folder)
        if how == "set back":
            copy.rename(folder)
        train_result = train(folder)
    resumed = re.findall(r"continuing from step (\d+)", caplog.text)
    assert resumed == {"deleted": [], "set back": ["5"]}[how]
    assert train_result.history == straight[0].history
    assert metrics(folder) == metrics(straight[1])
    assert evaluations(folder) == evaluations(straight[1])


def test_a_run_on_one_device_takes_the_steps_of_four(straight, tmp_path):
    """From the same state, at every step: the loss under the same dropout, and its gradient.

    Two whole runs drift apart: Adam makes a step of the rate's length out of rounding where the
    gradient is nothing else.
    """
    key = jax.random.split(jax.random.key(tiny.SEED))[1]
    tokens_KBS = np.stack([tiny.BATCHES.at(k)["tokens"] for k in range(tiny.CONFIG.steps)])
    result, trajectory = {1: [], 4: []}, []
    state = jax.device_get(tiny.fresh_state(tiny.mesh(4)))
    for tokens_BS in tokens_KBS:
        trajectory.append((state.params, state.opt_state[0].mu))
        for ways, rows in result.items():
            mesh = tiny.mesh(ways)
            places = state_shardings(mesh, tiny.SPEC, optim.adamw(tiny.SPEC, tiny.CONFIG))
            update = loop.make_train_step(tiny.OBJECTIVE, mesh, tiny.CONFIG, decays=optim.is_weight)
            batch = sharding.shard_batch(mesh, tokens_BS)
            after, row = jax.device_get(update(jax.device_put(state, places), (), batch, key))
            rows.append((row["loss"], after.opt_state[0].mu))
        state = after
    train(tmp_path / "run", mesh=tiny.mesh(1))
    one, four = metrics(tmp_path / "run"), metrics(straight[1])
    assert one["tokens"] == four["tokens"]
    assert one["loss"][0] == result[1][0][0]
    assert four["loss"] == [loss for loss, _ in result[4]]

    def step(params, moment, tokens_BS, k):
        """The loss, and the first moment after the step."""
        normalizers, rng = tiny.OBJECTIVE.normalizers(tokens_BS), jax.random.fold_in(key, k)
        loss, gradient = jax.value_and_grad(
            lambda params: tiny.OBJECTIVE.loss_terms(params, (), None, tokens_BS, normalizers, rng)[
                0
            ]
        )(params)
        return loss, jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moment, gradient)

    wanted = rounding.expected(
        lambda *stacked: jax.lax.map(lambda each: step(*each), stacked),
        *jax.tree.map(lambda *leaves: np.stack(leaves), *trajectory),
        *(tokens_KBS, np.arange(len(tokens_KBS))),
    )
    for rows in result.values():
        rounding.assert_within(jax.tree.map(lambda *leaves: np.stack(leaves), *rows), wanted)


def test_dropout_differs_for_every_step_and_seed():
    mesh = tiny.mesh(4)
    update = loop.make_train_step(tiny.OBJECTIVE, mesh, tiny.CONFIG, decays=optim.is_weight)
    tokens_BS = sharding.shard_batch(mesh, tiny.BATCHES.at(0)["tokens"])

    def loss(step, seed):
        state = tiny.fresh_state(mesh)
        now = jax.device_put(np.int32(step), sharding.replicated(mesh))
        _, metrics = update(state.replace(step=now), (), tokens_BS, jax.random.key(seed))
        return float(metrics["loss"])

    assert loss(3, 0) == loss(3, 0)
    assert len({loss(3, 0), loss(4, 0), loss(3, 1)}) == 3


def test_a_finished_run_trains_no_further(straight, tmp_path):
    train_result, folder = straight
    before = {path: path.stat().st_mtime_ns for path in train_result.checkpoints.rglob("*")}
    again = train(folder, on_step=kill_at(13))
    tiny.assert_bitwise(again.state, train_result.state)
    assert {path: path.stat().st_mtime_ns for path in train_result.checkpoints.rglob("*")} == before


# After step 6 there is an evaluation; the signal comes while the step before is being finished.
@pytest.mark.parametrize("when", [5, 6])
def test_a_sigterm_saves_and_the_same_command_goes_on_from_there(straight, tmp_path, capsys, when):
    folder, result = tmp_path / "run", []

    def command(signal_at):
        def on_step(now):
            if now == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)

        def main(arguments):
            del arguments
            result.append(train(folder, on_step=on_step))

        return cli.run(main, ["train"], workdir_required=False)

    assert command(when - 1) == 75
    assert f"stopped on request after step {when}, saved in {folder}" in capsys.readouterr().err
    assert manager.saved_steps(folder / "checkpoints")[-1] == when
    assert command(None) == 0
    tiny.assert_bitwise(result[0].state, straight[0].state)


def test_a_sigterm_ends_an_evaluation_that_has_nothing_to_save(capsys):
    """Between two batches, and not once it is at its end."""
    mesh, read = tiny.mesh(4), []

    class Signalled(tiny.FakeBatches):
        def at(self, k):
            read.append(k)
            if k == self.per_epoch - 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().at(k)

    def main(arguments):
        del arguments
        look = loop.make_eval_step(tiny.OBJECTIVE, mesh)
        params = tiny.initial_params()
        loop.evaluate(look, params, Signalled(per_epoch=5), mesh, stoppable=True)

    assert cli.run(main, ["evaluate"], workdir_required=False) == 75
    assert read == [0, 1, 2]
    assert "stopped on request after batch 3 of 5 of an evaluation" in capsys.readouterr().err


def test_a_batch_that_is_not_finite_stops_before_the_next_save_with_its_documents(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(DivergedError) as caught:
        train(folder, batches=tiny.FakeBatches(bad=(6,)))
    assert caught.value.exit_code == 4
    said = str(caught.value)
    assert "step 7 has loss nan" in said
    assert "documents 48, 49, 50, 51, 52, 53, 54, 55 (" in said
    assert str(folder / "checkpoints" / "step_000006") in said
    assert manager.saved_steps(folder / "checkpoints") == [4, 6]
    noted = json.loads((folder / DIVERGED).read_text())
    assert (noted["step"], noted["batch"], noted["loss"]) == (7, 6, None)
    assert noted["documents"] == list(range(48, 56))
    # The data was mended: the same folder continues from the last good checkpoint.
    tiny_end = train(folder)
    assert int(tiny_end.state.step) == 12
    assert np.isfinite(metrics(folder)["loss"]).all()


def test_a_run_of_other_settings_data_or_seed_is_refused(straight):
    folder = straight[1]
    longer = dataclasses.replace(tiny.CONFIG, steps=13)
    with pytest.raises(UsageError, match=r"config\.train\.steps = 12, not 13"):
        train(folder, config=longer)
    with pytest.raises(UsageError, match=r"config\.seed = 234, not 1"):
        train(folder, seed=1)
    with pytest.raises(UsageError, match="data fake, not other"):
        train(folder, batches=tiny.FakeBatches(fingerprint="other"))
    with pytest.raises(UsageError, match=r"data without order=x:1; .* in another order, so choose"):
        train(folder, batches=tiny.FakeBatches(fingerprint="fake order=x:1"))
    other = dataclasses.replace(tiny.OBJECTIVE, mixer=AttentionMixer(pattern_dropout=True))
    with pytest.raises(UsageError, match=r"mixer\.pattern_dropout = false, not true"):
        train(folder, objective=other)
    with pytest.raises(UsageError, match=r"dropout = 0\.1, not 0\.2"):
        train(folder, objective=dataclasses.replace(tiny.OBJECTIVE, dropout=0.2))
    with pytest.raises(BadInputError, match="was trained over a base model with weights none, not"):
        train(folder, base_sha256="c" * 64)
    with pytest.raises(UsageError, match="batch of 6 does not divide"):
        train(folder, batches=tiny.FakeBatches(rows=6))


def test_a_flipped_checkpoint_is_named_and_one_step_back_ends_in_the_same_bits(straight, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        train(folder, on_step=kill_at(9))
    arrays = folder / "checkpoints" / "step_000008" / "arrays"
    file = max((p for p in arrays.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=file.name):
        train(folder)
    train_result = train(folder, policy=dataclasses.replace(UPKEEP, allow_fallback=True))
    tiny.assert_bitwise(train_result.state, straight[0].state)


def test_further_numbers_of_an_evaluation_are_kept(tmp_path):
    def measure(params, step, result):
        return {
            "router/gini": 0.25 * step,
            "tokens": result.tokens,
            "norm": float(np.asarray(params["final"]["scale"]).sum()),
        }

    train(tmp_path / "run", measure=measure)
    rows = {(row["step"], row["name"]): row["value"] for row in evaluations(tmp_path / "run")}
    assert rows[6, "router/gini"] == 1.5
    assert rows[12, "router/gini"] == 3.0
    assert rows[6, "norm"] > 0


def test_progress_and_rates_are_logged(tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO)
    train(tmp_path / "run", mesh=tiny.mesh())
    rows = pq.read_table(tmp_path / "run" / METRICS).to_pylist()
    flops = {each: tiny.OBJECTIVE.flops(8, 12, each) for each in CONVENTIONS}
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        for name in CONVENTIONS:
            rate = row[f"flops_per_second_{name}"]
            assert rate == pytest.approx(flops[name] / row["seconds"])
            share = rate / measured_peak("float32")
            assert row[f"peak_share_{name}"] == pytest.approx(share)
        assert row["peak_share_triangle"] < row["peak_share_square"] < 1
    # Of the steps that were settled together, here three.
    pace = {name: rows[2][name] for name in RATES}
    pace["tokens_per_second"] = sum(row["tokens"] for row in rows[:3]) / (3 * rows[0]["seconds"])
    line = f"loss {rows[2]['loss']:.4f}, gradient norm {rows[2]['grad_norm']:.3g}, "
    assert f"step 3: {line}{format_rates(pace)}" in caplog.text
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert (
        "train: 12/12 steps, " in last_line and f"left, loss {rows[11]['loss']:.4f}, " in last_line
    )
    assert "tokens/s, " in last_line and "of peak (visible pairs alone: " in last_line


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.nightly)])
def test_kill_minus_nine_at_random_times_ends_in_the_same_bits(kills, tmp_path):
    """A real process, killed by the kernel while it computes or saves."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from lm_jax.run.workdir import open_workdir\n"
        "from tests.lm_jax.train.tiny_run import train\n"
        "from lm_jax.train.config import CheckpointPolicy\n"
        "with open_workdir(sys.argv[1], {}) as run:\n"
        "    train(run.path / 'train', policy=CheckpointPolicy(log_every=1, save_every=1))\n"
    )
    root = Path(__file__).parents[3]
    # The first run compiles, and the others take what it has compiled.
    compiled = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def start(folder):
        return subprocess.Popen(
            [sys.executable, script, folder],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)} | compiled,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    assert start(tmp_path / "whole").wait(300) == 0
    killed, draw = tmp_path / "killed", random.Random(1)
    saved = killed / "train" / "checkpoints"
    for target, during_save in zip(range(1, kills + 1), itertools.cycle((False, True))):
        process = start(killed)
        while max(manager.saved_steps(saved), default=0) < target:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.005)
        while during_save and not any(saved.glob(".step_*.tmp")):
            assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.0 if during_save else draw.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert start(killed).wait(300) == 0
    assert not any(saved.glob(".*"))

    def last(folder):
        mesh, spec = tiny.mesh(4), tiny.SPEC
        optimizer = optim.adamw(spec, tiny.CONFIG)
        where = folder / "train" / "checkpoints"
        manifest = json.loads((where / "step_000012" / "MANIFEST.json").read_text())
        notes = manifest["notes"]
        identity = manager.Identity(
            **{field.name: notes[field.name] for field in dataclasses.fields(manager.Identity)}
        )
        target = loop.abstract_state(mesh, spec, optimizer)
        return manager.load(where, manager.newest(where, identity), target).state

    tiny.assert_bitwise(last(killed), last(tmp_path / "whole"))
    assert metrics(killed / "train") == metrics(tmp_path / "whole" / "train")
    assert read_json(killed / "config.json") == {}
    assert jax.device_count() == 4
