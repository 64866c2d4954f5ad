"""The benchmark of the kernels prints no speed of a wrong result, and names missed bars."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from iaj_kernels.core import cases, dispatch
from iaj_kernels.suites import SUITES
from tools.bench import baselines, benchmarks, timing
from tools.bench import kernels as bench_kernels


def toy(error: float = 0.0) -> cases.Suite:
    """A product; its "xla" implementation is wrong by `error`, its baseline stores all products."""

    def call(case, arrays, implementation):
        del case
        slip = error if implementation == "xla" else 0.0
        return {"out": arrays["x"] @ arrays["x"].T * (1.0 + slip)}

    return cases.Suite(
        op="prefix_mean",
        cases=(cases.Case("one", {"B": 4, "T": 3}, uses=frozenset({"cpu"})),),
        make=lambda case, key: {"x": jax.random.normal(key, tuple(case.sizes.values()))},
        call=call,
        differentiable=("x",),
        implementations=("xla", "reference"),
    )


def stored(_case, arrays):
    x = arrays["x"]
    return {"out": (x[:, None, :] * x[None, :, :]).sum(-1)}


@pytest.fixture
def benched(monkeypatch, capsys):
    def run(suite, *arguments, **bars):
        monkeypatch.setitem(SUITES, suite.op, suite)
        monkeypatch.setattr(baselines, "BASELINES", {"stored": lambda op: stored})
        rows = [
            benchmarks.Benchmark("prefix_mean", "one", what, "stored", "xla", **bars)
            for what in ("forward", "gradient", "backward")
        ]
        monkeypatch.setattr(benchmarks, "for_device", lambda device: rows)
        code = bench_kernels.main(["--device=cpu", "--repeats=2", *arguments])
        return code, capsys.readouterr().out

    return run


def test_reached_bars_exit_with_zero_and_leave_raw_timings(benched, tmp_path):
    path = tmp_path / "new" / "bench.json"
    code, out = benched(toy(), f"--json={path}", speed=1e-9, microseconds=1e9)
    assert code == 0
    assert out.count("reached  speed >= 1e-09") == 3 and "MISSED" not in out
    written = json.loads(path.read_text())
    assert [row["what"] for row in written["rows"]] == ["forward", "gradient", "backward"]
    assert all(len(row["ours_seconds"]) == 2 for row in written["rows"])
    assert written["rows"][0]["deviations"]["d_x"][0] <= 1e-6
    assert written["conditions"]["platform"] == "cpu" and written["conditions"]["jax"]


def test_a_missed_bar_exits_with_one(benched):
    code, out = benched(toy(), speed=1e12)
    assert code == 1
    assert "MISSED   speed >= 1000000000000.0" in out
    assert "3 rows, 3 with a missed bar" in out


def test_a_wrong_result_prints_no_speed(benched):
    code, out = benched(toy(error=1e-3), speed=1e-9)
    assert code == 1
    # Hundreds of times the rounding error.
    assert len(re.findall(r"RED, no speed: d_x 1\.0e-03, \d{3}\.\d of its bound", out)) == 3
    assert "times as fast" not in out


def test_a_baseline_that_is_not_installed_is_not_run_and_reaches_no_bar(benched, monkeypatch):
    def never(*_):
        raise AssertionError("must not be built")

    outside = {"stored": baselines.Outside(lambda: "glue not installed; pip install glue", never)}
    monkeypatch.setattr(baselines, "OUTSIDE", outside)
    code, out = benched(toy(), speed=1e-9)
    assert code == 0
    assert out.count("not run: glue not installed; pip install glue") == 3
    assert "reached" not in out and "times as fast" not in out
    assert "3 rows, 0 with a missed bar or a red comparison, 3 not run" in out


def test_a_baseline_that_does_not_run_fails_its_row_and_no_other(benched, monkeypatch, tmp_path):
    measured = benchmarks.Prepared.measured
    calls = []

    def broken():
        raise jax.errors.JaxRuntimeError("no memory\nmore")

    def once(self, *arguments):
        calls.append(self.result.benchmark.what)
        if len(calls) == 2:
            self = dataclasses.replace(self, programs=[timing.Program(broken, 0), *self.programs])
        return measured(self, *arguments)

    monkeypatch.setattr(benchmarks.Prepared, "measured", once)
    path = tmp_path / "bench.json"
    code, out = benched(toy(), f"--json={path}", speed=1e-9)
    assert code == 1 and calls == ["forward", "gradient", "backward"]
    assert "FAILED: no memory\n" in out and out.count("reached  speed") == 2
    assert [row["failed"] for row in json.loads(path.read_text())["rows"]] == ["", "no memory", ""]


def test_what_the_device_has_checked_is_not_compared_again(benched, monkeypatch, tmp_path):
    path = tmp_path / "check.json"
    monkeypatch.setattr(cases, "compare", None)

    def checked(deviation, *, repeats_itself=True):
        row = {"op": "prefix_mean", "implementation": "xla", "case": "one"}
        row |= {"deviations": {"out": deviation}, "repeats_itself": repeats_itself}
        path.write_text(json.dumps({"conditions": timing.conditions(), "rows": [row]}))
        return benched(toy(), f"--checked={path}", speed=1e-9)

    code, out = checked([1e-7, 0.5])
    assert code == 0 and out.count("reached  speed") == 3
    code, out = checked([1.0, 2.0])
    assert code == 1 and out.count("RED, no speed: out 1.0e+00, 2.0 of its bound") == 3
    code, out = checked([1e-7, 0.5], repeats_itself=False)
    assert code == 1 and out.count("RED, no speed: a second run inf") == 3


@pytest.mark.parametrize("name", ["commit", "device"])
def test_a_check_of_another_commit_or_device_is_refused(name, benched, tmp_path, capsys):
    path = tmp_path / "check.json"
    conditions = timing.conditions()
    path.write_text(json.dumps({"conditions": conditions | {name: "other"}, "rows": []}))
    assert bench_kernels.main(["--device=cpu", f"--checked={path}"]) == 2
    error = capsys.readouterr().err
    assert f"is of {name} other, and this is {conditions[name]}; write it anew with" in error


def test_a_gradient_is_timed_with_the_outputs_it_belongs_to():
    suite = toy()
    arrays = suite.make(suite.cases[0], jax.random.key(0))
    run, arguments = baselines.gradient(stored, suite, suite.cases[0], arrays)
    assert sorted(run(*arguments)) == ["d_x", "out"]


def test_attention_as_wide_as_the_model_reads_arrays_that_are_there(monkeypatch):
    programs = []
    monkeypatch.setattr(timing, "program", lambda fn, given, **_: programs.append((fn, given)))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **options: q)
    suite = SUITES["prefix_mean"]
    benchmark = benchmarks.Benchmark(
        "prefix_mean", "wide", "forward", "cudnn_width_512", "xla", speed=1.0
    )
    case = cases.Case("wide", {"B": 2, "T": 3, "R": 4, "E": 256})
    arrays = suite.make(case, jax.random.key(0))
    list(benchmarks._pair("forward", benchmark, suite, case, arrays, 1))
    _, (run, (given,)) = programs
    # Channel by channel those of the values, twice.
    assert given["q"].shape == (2, 3, 8, 64)
    np.testing.assert_array_equal(given["q"].reshape(2, 3, 2, 256)[:, :, 1], arrays["value"])
    np.testing.assert_array_equal(given["k"], given["q"] + 1)
    # Nothing but the attention is timed.
    assert not jax.make_jaxpr(run)(given).eqns


def test_every_row_names_a_case_and_a_baseline():
    rows = [benchmark for device in ("cpu", "gpu") for benchmark in benchmarks.for_device(device)]
    assert len({benchmark.label for benchmark in rows}) == len(rows)
    for benchmark in rows:
        assert SUITES[benchmark.op].named(benchmark.case).name == benchmark.case
        assert (benchmark.baseline in baselines.BASELINES) != (
            benchmark.baseline in baselines.OUTSIDE
        )
        bars = (benchmark.speed, benchmark.time, benchmark.microseconds, benchmark.memory)
        assert any(bar is not None for bar in bars), benchmark.label


def test_a_slow_baseline_is_called_less_often_than_ours(monkeypatch):
    suite = toy()
    monkeypatch.setitem(SUITES, suite.op, suite)
    benchmark = benchmarks.Benchmark("prefix_mean", "one", "gradient", "xla", speed=1.0)
    arrays = suite.make(suite.cases[0], jax.random.key(0))
    ours, baseline = benchmarks._pair("gradient", benchmark, suite, suite.cases[0], arrays, 20)
    assert (ours.calls, baseline.calls) == (20, 5)
    assert len(baseline.run()) == 5
    # As few calls of ours do not make one program of the baseline's.
    compiled = []
    monkeypatch.setattr(timing, "program", lambda fn, given, **how: compiled.append(how))
    list(benchmarks._pair("gradient", benchmark, suite, suite.cases[0], arrays, 4))
    assert [how["together"] for how in compiled] == [True, False]


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (dispatch.UnavailableError("mosaic needs Hopper"), "missing"),
        (jax.errors.JaxRuntimeError("no such instruction\nmore"), "failed"),
    ],
)
def test_a_row_that_does_not_run_here_says_so(error, named, monkeypatch):
    def compare(*args, **_):
        raise error

    monkeypatch.setattr(benchmarks.cases, "compare", compare)
    benchmark = next(
        each for each in benchmarks.for_device("gpu") if each.implementation == "mosaic"
    )
    result = benchmarks.prepare(benchmark).result
    assert getattr(result, named) == str(error).partition("\n")[0]
    assert result.reached() == ({} if named == "missing" else {"runs": False})


def test_each_run_settles_before_it_is_timed(monkeypatch):
    clock, calls = [0.0], []

    def program(name, seconds):
        def run():
            calls.append(name)
            # The first run after another's is slower.
            clock[0] += seconds * (3.0 if calls[-2:-1] != [name] else 1.0)

        return run

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    runs = [program("short", 1.0), program("long", 10.0)]
    assert timing.in_turns(runs, 2) == [[3.0, 3.0], [30.0, 30.0]]
    calls.clear()
    assert timing.in_turns(runs, 2, settle=4.0) == [[1.0, 1.0], [10.0, 10.0]]
    # 3 s and 1 s settle the short one, 30 s the long one.
    assert calls == 3 * (3 * ["short"] + 2 * ["long"])


def test_the_ratio_is_taken_turn_by_turn():
    result = timing.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert (result.median, result.low, result.high) == (2.0, 1.0, 3.0)
