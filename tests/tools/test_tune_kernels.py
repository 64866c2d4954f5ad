"""Tuning selects the fastest combination, and stops at a kernel that is wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from iaj_kernels.core import cases, dispatch, tuning
from iaj_kernels.suites import SUITES
from tools import tune_kernels

H200 = dispatch.Target("gpu", "NVIDIA H200")
TUNED = tuple(op for op, suite in SUITES.items() if suite.tiles)


def toy(wrong: int | None = None) -> cases.Suite:
    """An operation whose result does not depend on its tile, except for one wrong tile."""

    def call(case, arrays, implementation):
        del implementation
        heuristic = {"width": 1, "depth": 1}
        tiles = tuning.tiles("toy", "toy", case.sizes, case.dtype, heuristic)
        return {"out": arrays["x"] * (2.0 if tiles["width"] == wrong else 1.0)}

    return cases.Suite(
        op="toy",
        cases=(cases.Case("one", {"B": 3}),),
        make=lambda case, key: {"x": jax.random.normal(key, (case.sizes["B"],))},
        call=call,
        differentiable=("x",),
        implementations=("pallas", "reference"),
        tiles=({"width": (2, 4)}, {"depth": (8,)}),
    )


@pytest.fixture
def tuned(monkeypatch):
    def tune(suite):
        monkeypatch.setitem(SUITES, suite.op, suite)
        results = tune_kernels.tune(suite, suite.cases[0], dispatch.INTERPRETER, repeats=2, jobs=2)
        return list(results)[-1]

    return tune


def test_groups_are_tuned_one_after_the_other_and_timings_kept(tuned):
    result = tuned(toy())
    first = {"heuristic", "width=2", "width=4"}
    assert first <= set(result["seconds"])
    later = set(result["seconds"]) - first
    assert len(later) == 1 and later.pop().endswith("depth=8")
    assert all(len(series) == 2 for series in result["seconds"].values())
    medians = {label: sorted(s)[0] / 2 + sorted(s)[1] / 2 for label, s in result["seconds"].items()}
    label = " ".join(f"{k}={v}" for k, v in result["tiles"].items()) or "heuristic"
    assert label in medians and result["refused"] == {}


def twice(name):
    """The error of a combination that is as wrong in a second run."""
    return rf"toy one: with width=4, {name} differs by (\S+) from .*, and run again by \1;"


def test_a_combination_that_disagrees_stops_the_tuning(tuned):
    with pytest.raises(ArithmeticError, match=twice("d_x")):
        tuned(toy(wrong=4))


def test_the_table_is_merged_and_read_back(tmp_path, monkeypatch):
    path = tmp_path / "some_gpu.json"
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    tuning.table.cache_clear()
    for bucket, width in (("float32 B4", 2), ("float32 B8", 4)):
        results = {"toy": {bucket: {"tiles": {"width": width}, "seconds": {}, "refused": {}}}}
        tune_kernels.write(path, {"device": "Some GPU"}, results)
    heuristic = {"width": 1, "depth": 3}
    for size, width in ((3, 2), (4, 2), (5, 4), (9, 1)):
        tiles = tuning.tiles("toy", "Some GPU", {"B": size}, jnp.dtype("float32"), heuristic)
        assert tiles == {"width": width, "depth": 3}
    assert json.loads(path.read_text())["timings"]["toy"]["float32 B8"]["conditions"] == {
        "device": "Some GPU"
    }
    with pytest.raises(ValueError, match="toy has no tile width, only height"):
        tuning.tiles("toy", "Some GPU", {"B": 4}, jnp.dtype("float32"), {"height": 1})
    tuning.table.cache_clear()


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(
    ("suite", "case"),
    [(suite, case) for suite in map(SUITES.get, TUNED) for case in suite.using("gpu")],
    ids=lambda each: getattr(each, "op", getattr(each, "name", "")),
)
def test_an_operation_looks_up_what_tuning_writes(suite, case, last, monkeypatch):
    """It uses the bucket of its case only, and all candidates are tiles of the operation."""
    asked = set()
    tiles = tuning.tiles

    def spy(op, device_kind, sizes, dtype, heuristic):
        asked.add((op, device_kind, tuning.bucket(sizes, dtype)))
        return tiles(op, device_kind, sizes, dtype, heuristic)

    monkeypatch.setattr(tuning, "tiles", spy)
    tried = {name: each[-last] for group in suite.tiles for name, each in group.items()}
    arrays = jax.eval_shape(lambda key: suite.make(case, key), jax.random.key(0))
    run = cases.outputs_and_gradients(suite, case, "pallas")
    with dispatch.on(H200), tuning.trying(suite.op, tried):
        cotangents = jax.eval_shape(
            lambda arrays, key: cases.cotangents(suite, case, arrays, key),
            arrays,
            jax.random.key(0),
        )
        jax.eval_shape(run, arrays, cotangents)
    assert asked == {(suite.op, H200.device_kind, tuning.bucket(case.sizes, case.dtype))}


def test_every_operation_with_a_kernel_is_tuned_in_few_compilations():
    with_kernels = {op for op, suite in SUITES.items() if "pallas" in suite.implementations}
    assert set(TUNED) == with_kernels
    for op in TUNED:
        groups = SUITES[op].tiles
        tried = 1 + sum(len(list(tune_kernels.combinations(group))) for group in groups)
        assert tried <= 25, op


def test_a_bucket_is_tuned_once_by_its_first_workload():
    one, two, three = (
        cases.Case(str(size), {"B": size}, uses=frozenset({"gpu"})) for size in (3, 4, 5)
    )
    suite = dataclasses.replace(toy(), cases=(one, two, three))
    assert tune_kernels.workloads(suite) == {"float32 B4": one, "float32 B8": three}
    assert tune_kernels.workloads(dataclasses.replace(suite, tiles=())) == {}
