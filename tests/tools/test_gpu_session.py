"""A session on a GPU: processes share out every case once, and keep what they have in time."""

import json
import subprocess

import pytest

from iaj_kernels.suites import SUITES
from tools import gpu_session
from tools.bench import timing


def taken(step, out):
    """Operation, implementation and case of every process of a step."""
    for _, arguments in gpu_session.commands(step, out):
        given = dict(each.removeprefix("--").split("=", 1) for each in arguments)
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
            return start([line[0], "-c", scripts[line[-1]]], **others)

        monkeypatch.setattr(gpu_session, "commands", lambda step, out: [(n, [n]) for n in scripts])
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
