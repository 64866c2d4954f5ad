"""Training on a cluster, played by processes of one machine: they grow, shrink, hang and die."""

import os
import random
import re
import shutil
import signal
import time

import jax
import numpy as np
import portpicker
import pyarrow.parquet as pq
import pytest

from lm_jax.checkpoint import manager
from lm_jax.parallel import sharding
from lm_jax.run.files import read_json
from lm_jax.text.examples import Batches
from lm_jax.train.metrics import METRICS
from tests import rounding
from tests.lm_jax.checkpoint.test_manager import flip
from tests.lm_jax.train import small_cluster as cluster
from tests.lm_jax.train import tiny_training as tiny
from tests.lm_jax.weights import parity_pairs

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def end(running):
    return parity_pairs.end(running, cluster.LIMIT)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The flag that has a process take what another one has compiled."""
    return f"--compilation_cache={tmp_path_factory.mktemp('compiled')}"


@pytest.fixture(scope="module")
def start(folder, compiled):
    """Starts the processes of a run on the prepared documents."""
    return lambda run, *flags, **how: cluster.start(folder, run, compiled, *flags, **how)


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """The run of one process with two devices, which nothing interrupts."""
    run = tmp_path_factory.mktemp("straight") / "run"
    codes, _, errs = end(start(run))
    assert codes == [0], errs
    return run


def parameters(run, step):
    target = sharding.abstract(cluster.OBJECTIVE.spec)
    params = manager.load_params(run / cluster.TRAINING / manager.FOLDER, step, target)
    return jax.tree.map(np.asarray, params)


def assert_batches(run, folder):
    """The processes of every step together read the batch that one process would."""
    batches = Batches(cluster.examples(folder), batch_size=cluster.ROWS, seed=cluster.SEED)
    wanted = {k: batches.at(k)["document"].tolist() for k in range(cluster.STEPS)}
    assert cluster.batches_read(run) == wanted


def assert_losses(run, folder):
    """The loss of every step is that of the parameters saved before it, within rounding."""
    batches = Batches(cluster.examples(folder), batch_size=cluster.ROWS, seed=cluster.SEED)
    steps = range(1, cluster.STEPS)
    key = jax.random.split(jax.random.key(cluster.SEED))[1]

    def loss(params, tokens_BS, k):
        normalizers, rng = cluster.OBJECTIVE.normalizers(tokens_BS), jax.random.fold_in(key, k)
        return cluster.OBJECTIVE.loss_terms(params, (), None, tokens_BS, normalizers, rng)[0]

    wanted = rounding.expected(
        lambda *stacked: jax.lax.map(lambda each: loss(*each), stacked),
        jax.tree.map(lambda *leaves: np.stack(leaves), *(parameters(run, k) for k in steps)),
        np.stack([batches.at(k)["tokens"] for k in steps]),
        np.array(steps),
    )
    rows = pq.read_table(run / cluster.TRAINING / METRICS)
    assert rows["step"].to_pylist() == [*range(1, cluster.STEPS + 1)]
    rounding.assert_within(rows["loss"].to_numpy()[1:], wanted)


def test_on_other_devices_and_processes_it_goes_on_with_the_same_batches(start, folder, tmp_path):
    """One process of eight devices, two of four, one of eight, each on another mesh."""
    run = tmp_path / "run"
    legs = [
        (1, 8, (1, 8, 1), 4, 75),
        (2, 4, (2, 2, 2), 9, 75),
        (1, 8, (8, 1, 1), 0, 0),
    ]
    for count, devices, mesh, stop_after, code in legs:
        flags = (f"--config.mesh={mesh}", f"--config.stop_after={stop_after}")
        codes, _, errs = end(start(run, *flags, count=count, devices=devices))
        assert codes == [code] * count, errs
    saved = run / cluster.TRAINING / manager.FOLDER
    notes = [
        read_json(manager.step_folder(saved, step) / "MANIFEST.json")["notes"]
        for step in (5, 10, cluster.STEPS)
    ]
    assert [tuple(each["mesh"].values()) for each in notes] == [mesh for _, _, mesh, _, _ in legs]
    assert_batches(run, folder)
    assert_losses(run, folder)


def test_one_process_then_two_then_one_end_in_the_bits_of_one(start, straight, folder, tmp_path):
    """On two devices of one mesh all the way."""
    run = tmp_path / "run"
    for count, stop_after, code in ((1, 4, 75), (2, 9, 75), (1, 0, 0)):
        flag = f"--config.stop_after={stop_after}"
        codes, _, errs = end(start(run, flag, count=count, devices=2 // count))
        assert codes == [code] * count, errs
    assert_batches(run, folder)
    tiny.assert_bitwise(parameters(run, cluster.STEPS), parameters(straight, cluster.STEPS))


def test_a_stopped_process_is_found_and_the_others_end_with_their_stacks(
    start, tmp_path, monkeypatch
):
    """Ten minutes before the runtime would miss its heartbeat."""
    monkeypatch.setenv("HEARTBEAT", "600")
    run = tmp_path / "run"
    pair = start(run, "--hang_limit=90", count=2, devices=1)
    cluster.wait_for(lambda: cluster.newest(run) >= 2, pair)
    pair[1].send_signal(signal.SIGSTOP)
    try:
        said = pair[0].communicate(timeout=cluster.LIMIT)[1]
    finally:
        for process in pair:
            process.kill()
        pair[1].communicate()
    assert pair[0].returncode == 1
    assert "Timeout (0:01:30)!" in said
    assert "in train" in said and "loop.py" in said


def test_four_processes_wait_for_a_late_one(start, folder, tmp_path):
    """Two nodes of two, of which one process starts 20 seconds after the others."""
    run = tmp_path / "run"
    begun = time.monotonic()
    codes, _, errs = end(start(run, "--config.mesh=(2,2,1)", count=4, devices=1, late=20))
    assert codes == [0] * 4, errs
    assert time.monotonic() - begun > 20
    assert_batches(run, folder)
    assert_losses(run, folder)


# As srun: it ends when all tasks have ended, with the highest of their codes.
SRUN = """
pids=()
for index in 0 1; do
    "$@" --process=$index >> "$PIDS/log.$index" 2>&1 &
    pids+=($!)
    echo $! > "$PIDS/$index"
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid"
    ended=$?
    ((ended > code)) && code=$ended
done
exit $code
"""


def numbers(pids):
    """The ids of both processes, 0 where it is not written yet."""
    files = [pids / name for name in "01"]
    return [int(file.read_text() or 0) if file.exists() else 0 for file in files]


def test_a_supervised_run_killed_ten_times_ends_in_the_bits_of_one(
    folder, straight, compiled, tmp_path, monkeypatch
):
    """Process 0 five times and the other five times, while they compute or save."""
    run, pids = tmp_path / "run", tmp_path / "pids"
    pids.mkdir()
    (tmp_path / "srun").write_text(SRUN)
    supervise = parity_pairs.ROOT / "recipes" / "slurm" / "supervise.sh"
    for name, value in {"HEARTBEAT": "10", "PAUSE": "0", "RETRIES": "10", "PIDS": pids}.items():
        monkeypatch.setenv(name, str(value))
    coordinator = f"--coordinator=127.0.0.1:{portpicker.pick_unused_port()}"
    flags = ("--config.pause=1.0", "--processes=2", coordinator)
    before = (supervise, "bash", tmp_path / "srun")
    supervised = cluster.start(folder, run, compiled, *flags, devices=1, before=before)
    draw = random.Random(0)

    def kill(victim, killed):
        """Kills a process of the next start, once it saved a step; returns the ids of both."""
        cluster.wait_for(lambda: killed.isdisjoint(numbers(pids)), supervised)
        running, saved = numbers(pids), cluster.newest(run)
        cluster.wait_for(lambda: cluster.newest(run) > saved, supervised)
        time.sleep(draw.uniform(0.0, 0.3))
        os.kill(running[victim], signal.SIGKILL)
        return {*running}

    killed = {0}
    for victim in draw.sample([0, 1] * 5, 10):
        killed |= kill(victim, killed)
    codes, _, errs = end(supervised)
    assert codes == [0], errs
    assert errs[0].count("supervise: exit code") == 10
    assert_batches(run, folder)
    tiny.assert_bitwise(parameters(run, cluster.STEPS), parameters(straight, cluster.STEPS))


def test_it_resumes_from_the_newest_step_that_both_nodes_hold_else_from_the_shared_one(
    start, folder, straight, tmp_path
):
    """Killed three times: then all is there; a bit is flipped on one node; the other is new."""
    run, nodes = tmp_path / "run", [tmp_path / "node_0", tmp_path / "node_1"]

    def held(index):
        """The local steps of a process."""
        return {step for own in nodes[index].glob("*/*") for step in manager.saved_steps(own)}

    def launch(*flags):
        flags = ("--config.save_every=7", "--local_every=2", *flags)
        each = [(f"--local_checkpoints={node}",) for node in nodes]
        return start(run, *flags, count=2, devices=1, each=each.__getitem__)

    def killed_after(step):
        """The newest step that both hold, locally or in the shared folder."""
        pair = launch("--config.pause=1.0")
        cluster.wait_for(lambda: min(max(held(k), default=0) for k in (0, 1)) >= step, pair)
        for process in pair:
            process.kill()
        end(pair)
        return max(held(0) & held(1) | {cluster.newest(run)})

    wanted = [killed_after(4), killed_after(10)]
    newest = max(held(0))
    (shards,) = nodes[0].glob(f"*/*/step_{newest:06d}/shards.safetensors")
    flip(shards)
    wanted[1] = max((held(0) - {newest}) & held(1) | {cluster.newest(run)})
    killed_after(16)
    shutil.rmtree(nodes[1])
    wanted.append(cluster.newest(run))
    codes, _, errs = end(launch())
    assert codes == [0, 0], errs
    resumed = re.findall(r"continuing from step (\d+)", (run / "log.txt").read_text("utf-8"))
    assert [int(step) for step in resumed] == wanted
    assert_batches(run, folder)
    tiny.assert_bitwise(parameters(run, cluster.STEPS), parameters(straight, cluster.STEPS))
    # A finished run leaves nothing on its nodes.
    assert not held(0) and not held(1)
