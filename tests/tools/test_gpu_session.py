"""A session on a GPU: processes share out every case once, and keep what they have in time."""

import argparse
import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from iaj_kernels.suites import SUITES
from tests.test_commands import assert_is_a_command
from tools import check_kernels, gpu_session
from tools.bench import timing
from tools.check_kernels import parse_tiles


def taken(step, out):
    """Operation, implementation and case of every process of a step."""
    for launch in gpu_session.commands(step, out):
        given = dict(each.removeprefix("--").split("=", 1) for each in launch.arguments)
        yield given, timing.Shard.parse(given["shard"])


def test_every_case_of_every_kernel_is_checked_by_one_process(tmp_path):
    checked = []
    for given, shard in taken("check_kernels", tmp_path):
        suite = SUITES[given["op"]]
        names = {case.name: 0 for use in ("test", "gpu") for case in suite.using(use)}
        checked += [(suite.op, given["implementation"], name) for name in shard.share(names)]
    wanted = {
        (suite.op, implementation, case.name)
        for suite in SUITES.values()
        for implementation in {suite.kernel, "mosaic"} & {*suite.implementations}
        for use in ("test", "gpu")
        for case in suite.using(use)
    }
    assert len(checked) == len(wanted) and set(checked) == wanted


def test_operations_with_tiles_are_tuned_and_time_one_at_once(tmp_path):
    processes = list(taken("tune_kernels", tmp_path))
    assert {given["op"] for given, _ in processes} == {s.op for s in SUITES.values() if s.tiles}
    assert len({given["lock"] for given, _ in processes}) == 1


def compared():
    """A row of the kernel of each operation."""
    return [
        {"op": op, "implementation": suite.kernel, "green": True}
        for op, suite in SUITES.items()
        if suite.kernel
    ]


def writes(path, rows):
    """A script that writes such a file as a checking process does."""
    text = json.dumps({"conditions": {"device": "a GPU"}, "rows": rows})
    return f"import pathlib; pathlib.Path({str(path)!r}).write_text({text!r})"


@pytest.fixture
def session(monkeypatch):
    """Makes each step run scripts, by the name of their logs."""
    start = subprocess.Popen

    def put(scripts):
        def popen(line, **others):
            if line[-1] not in scripts:
                return start(line, **others)
            return start([line[0], "-c", scripts[line[-1]]], **others)

        launches = [gpu_session.Launch(name, "none", [name]) for name in scripts]
        monkeypatch.setattr(
            gpu_session,
            "commands",
            lambda step, out: [each for each in launches if each.name.startswith(step)],
        )
        monkeypatch.setattr(subprocess, "Popen", popen)

    return put


def test_a_process_that_runs_out_of_time_is_ended_and_a_failed_check_ends_the_session(
    tmp_path, session, capsys
):
    """Nothing is timed on kernels that are wrong."""
    rows = compared()
    session(
        {
            "check_kernels_good_0": writes(tmp_path / "check_kernels_good_0.json", rows),
            "check_kernels_bad_0": writes(
                tmp_path / "check_kernels_bad_0.json", [rows[0] | {"green": False}]
            )
            + "; print('1 cases, 1 red'); raise SystemExit(1)",
            "check_kernels_long_0": "import time; print('begun', flush=True); time.sleep(600)",
        }
    )
    # Of an earlier session.
    (tmp_path / "check_kernels_good_1.json").write_text("{}")
    assert gpu_session.main([f"--out={tmp_path}", "--seconds=10"]) == 1
    out = capsys.readouterr().out
    assert "check_kernels: 1 of 3 processes" in out and "bench_kernels" not in out
    assert "check_kernels_bad_0: exit 1\n    1 cases, 1 red" in out
    assert "check_kernels_long_0: ran out of time\n    begun" in out
    joined = json.loads((tmp_path / "check_kernels.json").read_text())
    assert joined["conditions"] == {"device": "a GPU"}
    assert [row["green"] for row in joined["rows"]] == [False] + [True] * len(rows)


def test_an_operation_that_was_not_compared_ends_the_session(tmp_path, session, capsys):
    *rows, left_out = compared()
    session({"check_kernels_good_0": writes(tmp_path / "check_kernels_good_0.json", rows)})
    assert gpu_session.main([f"--out={tmp_path}", "--seconds=10"]) == 1
    out = capsys.readouterr().out
    assert f"no case of {left_out['op']} was compared" in out and "bench_kernels" not in out
    # Nor is it done the next time.
    assert gpu_session.main([f"--out={tmp_path}", "--seconds=10"]) == 1
    assert "was compared" in capsys.readouterr().out


def test_a_session_goes_on_where_the_last_one_ended(tmp_path, session, capsys):
    scripts = {
        "check_kernels_good_0": writes(tmp_path / "check_kernels_good_0.json", compared()),
        "race_check": "print('no race')",
        "train_step_a": "raise SystemExit(3)",
    }
    session(scripts)
    # A step begins if half of its time is left, or of the session's.
    assert gpu_session.main([f"--out={tmp_path}", "--seconds=60"]) == 1
    out = capsys.readouterr().out
    assert "race_check: 1 of 1 processes done" in out and "train_step_a: exit 3" in out
    assert out.count("processes done") == len(gpu_session.STEPS)
    kept = json.loads((tmp_path / "session.json").read_text())
    assert kept["steps"]["train_step"]["codes"] == {"train_step_a": 3}
    # Done steps are left out; what failed is run again, and steps that are named.
    session(scripts | {"train_step_a": "print('timed')"})
    assert gpu_session.main([f"--out={tmp_path}", "--seconds=60"]) == 0
    out = capsys.readouterr().out
    assert "train_step: 1 of 1" in out and "check_kernels" not in out and "race_check" not in out
    assert gpu_session.main([f"--out={tmp_path}", "--seconds=60", "--only", "race_check"]) == 0
    assert capsys.readouterr().out.startswith("race_check: 1 of 1")
    # Of another commit nothing is known.
    (tmp_path / "session.json").write_text(json.dumps(kept | {"commit": "another"}))
    assert gpu_session.main([f"--out={tmp_path}", "--seconds=60"]) == 0
    assert "check_kernels: 1 of 1" in capsys.readouterr().out


def test_what_runs_out_of_time_may_save_and_its_children_end_with_it(tmp_path, session):
    saved, child = tmp_path / "saved", tmp_path / "child"
    script = f"""
import pathlib, signal, subprocess, sys
def save(*_):
    pathlib.Path({str(saved)!r}).write_text("state")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
process = subprocess.Popen(["sleep", "600"])
pathlib.Path({str(child)!r}).write_text(str(process.pid))
process.wait()
"""
    session({"race_check": script})
    assert gpu_session.run("race_check", tmp_path, 3.0) == {"race_check": gpu_session.LATE}
    assert saved.read_text() == "state"
    status = Path(f"/proc/{child.read_text()}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_jax_starts_with_the_flags_of_every_process(tmp_path):
    flags = {
        launch.flags
        for step in gpu_session.STEPS
        for launch in gpu_session.commands(step.name, tmp_path)
    }
    assert len(flags) > 1
    for each in flags - {""}:
        line = [sys.executable, "-c", "import jax; jax.numpy.ones(2).block_until_ready()"]
        environment = os.environ | {"XLA_FLAGS": each, "JAX_PLATFORMS": "cpu"}
        subprocess.run(line, env=environment, check=True, capture_output=True)


def test_what_no_time_is_left_for_is_named(tmp_path, session, capsys):
    session(
        {
            "check_kernels_good_0": writes(tmp_path / "check_kernels_good_0.json", compared()),
            "race_check_long": "import time; time.sleep(600)",
        }
    )
    assert gpu_session.main([f"--out={tmp_path}", "--seconds=6"]) == 1
    out = capsys.readouterr().out
    assert "race_check_long: ran out of time" in out
    assert "left: train_step, attention, bench_kernels," in out


def test_the_session_takes_25_minutes_at_most():
    assert gpu_session.WHOLE <= 25 * 60


@pytest.mark.parametrize("step", [step.name for step in gpu_session.STEPS])
def test_every_process_is_a_command_with_its_flags(step, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_session.shutil, "which", lambda name: f"/opt/{name}")
    launches = list(gpu_session.commands(step, tmp_path))
    assert launches and len({each.name for each in launches}) == len(launches)
    for each in launches:
        assert each.line[len(each.under) : len(each.under) + 3] == [
            sys.executable,
            "-m",
            each.module,
        ]
        words = ["iaj"] if each.module == "iaj" else ["python", "-m", each.module]
        assert_is_a_command([*words, *each.arguments], capsys)
        if each.module != "iaj":
            assert importlib.util.find_spec(each.module) is not None


def test_the_tiles_that_were_wrong_once_are_those_that_are_checked(tmp_path):
    (alone, *_) = gpu_session.commands("race_check", tmp_path)
    tiles = next(each for each in alone.arguments if each.startswith("--tiles="))
    assert parse_tiles(tiles.removeprefix("--tiles=")) == {"chunk": 32, "num_warps": 2}
    with pytest.raises(SystemExit):
        check_kernels.main(["--op=selective_scan", "--interpret", "--tiles=chunk=32"])
    for text in ("chunk", "chunk=two"):
        with pytest.raises(argparse.ArgumentTypeError, match="write chunk=32,num_warps=2"):
            parse_tiles(text)
