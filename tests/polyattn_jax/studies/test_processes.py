"""An audit in two processes on loopback is that of one, row for row, killed or not."""

import time

import pytest

from lm_jax.run.files import read_json
from tests.lm_jax.weights.parity_pairs import LIMIT, end, launch_pair
from tests.polyattn_jax.conftest import QUESTIONS
from tests.polyattn_jax.studies.test_audit_resume import assert_same_results, shards

pytestmark = pytest.mark.slow
COMMAND = "iaj polyattn audit"


@pytest.fixture(scope="module")
def launch(audit_arguments, tmp_path_factory):
    """`launch(folder, *overrides)`: both processes of the audit of `audited`."""
    config, *flags = audit_arguments
    cache = f"--compilation_cache={tmp_path_factory.mktemp('compiled')}"

    def pair(folder, *overrides):
        name = config.removeprefix("--config=")
        return launch_pair(COMMAND, name, folder, *flags, *overrides, cache)

    return pair


def test_two_processes_share_the_prompts_and_end_with_the_rows_of_one(
    run_audit, questions_file, launch, tmp_path
):
    alone, folder = tmp_path / "alone", tmp_path / "run"
    choices = f"--config.truthfulqa={questions_file}", "--config.choices_n=0"
    outcome = run_audit(alone, *choices)
    assert outcome.code == 0, outcome.err
    codes, outs, errs = end(launch(folder, *choices))
    assert codes == [0, 0], errs
    assert_same_results(folder, alone)
    assert read_json(folder / "summary.json")["choices"]["truthfulqa_mc1"]["n"] == QUESTIONS
    # Each did its share, and one speaks.
    for store in ("rows", "answers", "losses", "features"):
        for process in (0, 1):
            done = list(folder.glob(f"{store}/rows-{process:03d}-*"))
            assert bool(done) == (store != "losses" or process == 0), (store, process)
    assert ["report:" in out for out in outs] == [True, False]
    assert ["diagnose: 14/14" in err for err in errs] == [True, False]
    device = read_json(folder / "provenance.json")["device"]
    assert (device["processes"], device["count"]) == (2, 2)


def test_after_a_stop_and_a_kill_they_end_with_the_rows_of_one(audited, launch, tmp_path):
    folder = tmp_path / "run"
    pair = launch(folder)
    _wait_for(pair, folder, "answers", 2)
    pair[1].terminate()
    assert end(pair)[0] == [75, 75]
    pair = launch(folder)
    _wait_for(pair, folder, "rows", 2)
    pair[1].kill()
    assert 0 not in end(pair)[0]
    assert not (folder / "finished.json").exists()
    codes, _, errs = end(launch(folder))
    assert codes == [0, 0], errs
    assert_same_results(folder, audited)


def _wait_for(pair, folder, store, number):
    """Returns when so many shards are there."""
    until = time.monotonic() + LIMIT
    while shards(folder, store) < number:
        assert [process.poll() for process in pair] == [None, None], end(pair)
        assert time.monotonic() < until
        time.sleep(0.002)
