"""An audit that was killed, stopped, or out of disk ends like one that was not."""

import json
import os
from pathlib import Path
import random
import re
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from polyattn_jax.audit import measure

ROOT = Path(__file__).parents[3]
TABLES = ("rows", "answers", "heads", "head_sets")


def assert_same_results(folder, reference):
    """The same rows in the same order, none twice, and the same summary."""
    for name in TABLES:
        path = f"{name}.parquet"
        assert pq.read_table(folder / path).equals(pq.read_table(reference / path)), name
    ours, theirs = (json.loads((f / "summary.json").read_text()) for f in (folder, reference))
    # Only when and how often it was started differs.
    assert ours.pop("provenance") != theirs.pop("provenance")
    assert ours == theirs
    assert not list(folder.rglob("*.tmp"))


def shards(folder, store):
    return len(list(folder.glob(f"{store}/*.parquet")))


@pytest.fixture
def start(audit_arguments, tmp_path):
    """`start()`: the audit of `audited` in `tmp_path / "run"`, in a process of its own."""
    flags = [*audit_arguments, f"--workdir={tmp_path / 'run'}"]
    # The programs of one start serve the next, so that what is timed is not compilation.
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def process():
        return subprocess.Popen(
            [sys.executable, "-m", "iaj", "polyattn", "audit", *flags],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return process


@pytest.mark.slow
@pytest.mark.nightly
def test_ten_kills_at_any_moment_leave_the_same_rows(audited, start, tmp_path):
    folder, draw = tmp_path / "run", random.Random(0)

    def written():
        return sum(shards(folder, store) for store in ("rows", "answers", "losses", "features"))

    def starts():
        log = folder / "log.txt"
        return len(re.findall("(started|resumed) at", log.read_text())) if log.exists() else 0

    for kill in range(10):
        # Of two kills one comes when a shard has been written, one soon after the start.
        count = written if kill % 2 == 0 else starts
        before, process = count(), start()
        deadline = time.monotonic() + 120
        while count() == before:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.02 if kill % 2 == 0 else 0.5))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = start()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert_same_results(folder, audited)


def test_a_stop_signal_saves_what_is_done_and_exits_75(audited, run_audit, tmp_path, monkeypatch):
    calls, diagnose = [], measure.diagnose

    def stopping(*arguments, **options):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return diagnose(*arguments, **options)

    monkeypatch.setattr(measure, "diagnose", stopping)
    outcome = run_audit(tmp_path / "run")
    assert outcome.code == 75
    assert len(outcome.refusals) == 1
    assert "stopped on request during diagnose; run the same command again" in outcome.refusals[0]
    assert (len(calls), shards(tmp_path / "run", "rows")) == (4, 1)
    outcome = run_audit(tmp_path / "run")
    assert outcome.code == 0, outcome.err
    # 14 prompts in all, one a batch: none of the first four is diagnosed twice.
    assert len(calls) == 14
    assert_same_results(tmp_path / "run", audited)
