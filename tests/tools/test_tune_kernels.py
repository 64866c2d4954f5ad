"""Tuning keeps the fastest of the combinations that agree, and refuses a kernel that is wrong."""

import json

import jax
import jax.numpy as jnp
import pytest

from kernels import cases, dispatch, tuning
from tools import tune_kernels


def toy(wrong: int | None = None) -> cases.Suite:
    """An operation whose tile changes nothing, except that one tile gives another result."""

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
        bounds={"float32": (0.0, 0.0)},
        tiles=({"width": (2, 4)}, {"depth": (8,)}),
    )


@pytest.fixture
def tuned(monkeypatch):
    def tune(suite):
        monkeypatch.setattr(cases, "suite", lambda op: suite)
        return tune_kernels.tune(suite, suite.cases[0], dispatch.INTERPRETER, repeats=2)

    return tune


def test_groups_are_tuned_one_after_the_other_and_timings_kept(tuned):
    made = tuned(toy())
    first = {"heuristic", "width=2", "width=4"}
    assert first <= set(made["seconds"])
    later = set(made["seconds"]) - first
    assert len(later) == 1 and later.pop().endswith("depth=8")
    assert all(len(series) == 2 for series in made["seconds"].values())
    medians = {label: sorted(s)[0] / 2 + sorted(s)[1] / 2 for label, s in made["seconds"].items()}
    label = " ".join(f"{k}={v}" for k, v in made["tiles"].items()) or "heuristic"
    assert label in medians and made["refused"] == {}


def test_a_combination_that_disagrees_stops_the_tuning(tuned):
    with pytest.raises(ArithmeticError, match=r"toy one: with width=4 the gradient of x differs"):
        tuned(toy(wrong=4))


def test_the_table_is_merged_and_read_back(tmp_path, monkeypatch):
    path = tmp_path / "some_gpu.json"
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    tuning.table.cache_clear()
    for bucket, width in (("float32 B4", 2), ("float32 B8", 4)):
        found = {"toy": {bucket: {"tiles": {"width": width}, "seconds": {}, "refused": {}}}}
        tune_kernels.write(path, {"device": "Some GPU"}, found)
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


def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        tune_kernels.main([])
    assert "tuning needs an NVIDIA GPU and this is cpu" in capsys.readouterr().err
