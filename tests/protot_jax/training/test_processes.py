"""Two processes on loopback are one run: same parameters, one writer, one end."""

import random
import signal
import textwrap
import time

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.checkpoint.manager import FOLDER, saved_steps, step_folder
from lm_jax.model.params import by_path
from lm_jax.run.files import read_json
from lm_jax.train.metrics import TIMING
from protot_jax.training import saved_run
from tests.lm_jax.weights.parity_pairs import LIMIT, end, launch, launch_pair

pytestmark = pytest.mark.slow
COMMAND = "iaj protot pretrain"
STEPS = 90


@pytest.fixture(scope="module")
def config(text, tmp_path_factory):
    """A config file whose mesh splits every parameter over two devices."""
    path = tmp_path_factory.mktemp("config") / "config.py"
    path.write_text(
        textwrap.dedent(
            f"""
            from tests.protot_jax.small_runs import settings

            def get_config():
                return settings(
                    {str(text)!r}, max_steps={STEPS}, epochs=9, eval_every=3, mesh=(1, 2, 1),
                    dtype="float32",
                )
            """
        )
    )
    return path


def next_checkpoint(folder):
    """Returns when there is one more than now."""
    saved = saved_run.seed_folder(folder, 234) / FOLDER
    last, until = max(saved_steps(saved), default=0), time.monotonic() + LIMIT
    while max(saved_steps(saved), default=0) <= last:
        assert time.monotonic() < until, "no checkpoint came"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The flag that has a command take what another one has compiled."""
    return f"--compilation_cache={tmp_path_factory.mktemp('compiled')}"


@pytest.fixture(scope="module")
def alone(config, compiled, tmp_path_factory):
    """The run of one process with two devices."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    (code,), _, errs = end([launch(COMMAND, config, folder, devices=2, flags=(compiled,))])
    assert code == 0, errs
    return folder


def test_stopped_and_killed_they_end_in_the_parameters_of_one(config, compiled, alone, tmp_path):
    folder = tmp_path / "run"
    pair = launch_pair(COMMAND, config, folder, compiled)
    next_checkpoint(folder)
    pair[1].send_signal(signal.SIGUSR1)
    assert end(pair)[0] == [75, 75]

    pair = launch_pair(COMMAND, config, folder, compiled)
    next_checkpoint(folder)
    pair[0].kill()
    codes = end(pair)[0]
    assert 0 not in codes

    codes, outs, errs = end(launch_pair(COMMAND, config, folder, compiled))
    assert codes == [0, 0], errs
    # One speaks, and each keeps a log.
    assert ["validation perplexity" in out for out in outs] == [True, False]
    assert [f"train: {STEPS}/{STEPS}" in err for err in errs] == [True, False]
    assert f"step {STEPS}: loss" in (folder / "log.1.txt").read_text("utf-8")

    assert_equal_runs(folder, alone)


# Two processes take twice the time to start, and are killed half as often.
@pytest.mark.nightly
@pytest.mark.parametrize(("count", "kills"), [(1, 10), (2, 5)])
def test_killed_again_and_again_it_ends_in_the_parameters_of_an_uninterrupted_run(
    config, alone, count, kills, tmp_path
):
    """Also with what was compiled kept, and processes killed as they write that."""
    folder, flag = tmp_path / "run", f"--compilation_cache={tmp_path / 'compiled'}"

    def start():
        if count == 2:
            return launch_pair(COMMAND, config, folder, flag)
        return [launch(COMMAND, config, folder, devices=2, flags=(flag,))]

    draw = random.Random(count)
    for _ in range(kills):
        running = start()
        next_checkpoint(folder)
        time.sleep(draw.uniform(0.0, 0.2))
        for process in draw.sample(running, count):
            process.kill()
        assert end(running)[0] == [-signal.SIGKILL] * count
    codes, _, errs = end(start())
    assert codes == [0] * count, errs
    assert_equal_runs(folder, alone)
    saved = saved_run.seed_folder(folder, 234) / FOLDER
    notes = read_json(step_folder(saved, STEPS) / "MANIFEST.json")["notes"]
    assert " order=grain:" in notes["fingerprint"]


def assert_equal_runs(folder, alone):
    """The same parameters to the last bit, the same rows, the same summary."""
    pair = [saved_run.load_run(each, best=False).params for each in (folder, alone)]
    result, want = (by_path(jax.tree.map(np.asarray, params)) for params in pair)
    assert result.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(result[path], value, err_msg=path)
    for name in ("metrics.parquet", "evaluations.parquet"):
        tables = [
            pq.read_table(saved_run.seed_folder(each, 234) / name) for each in (folder, alone)
        ]
        result, want = (
            table.select([c for c in table.column_names if c not in TIMING]) for table in tables
        )
        assert result.equals(want), name
    assert read_json(folder / "summary.json") == read_json(alone / "summary.json")


def test_what_process_0_refuses_as_it_prepares_is_refused_by_all(config, tmp_path):
    """And the folder is left to the corrected command."""
    folder = tmp_path / "run"
    flag = f"--config.corpus.source={tmp_path / 'absent'}"
    codes, _, errs = end(launch_pair(COMMAND, config, folder, flag))
    assert codes == [3, 3], errs
    assert "absent" in errs[0]
    assert errs[1].splitlines()[-1].startswith("error: process 0 ended with an error")
    left = {path.name for path in folder.iterdir() if path.name[0] != "."}
    assert left == {"log.txt", "log.1.txt"}
    logs = [(folder / name).read_text("utf-8") for name in ("log.txt", "log.1.txt")]
    assert ["Traceback" in log for log in logs] == [True, False]
