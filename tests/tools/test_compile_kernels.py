"""The command that compiles kernels: selection, output, budgets and exit codes.

The compiler itself is `tests/tools/test_gpu_code.py`; here its figures are made up.
"""

import json
import types

import pytest

from iaj_kernels.core import cases
from tools import compile_kernels
from tools.gpu_code import budgets, machine_code, target

SUITES = {
    op: cases.Suite(
        op=op,
        cases=tuple(
            cases.Case(name, {}, uses=frozenset({use}))
            for name, use in (("small", "test"), ("large", "budget"), ("larger", "budget"))
        ),
        make=lambda case, key: {},
        call=lambda case, arrays, implementation: {},
        differentiable=(),
        implementations=("pallas", "reference"),
    )
    for op in ("mean", "scan")
}


@pytest.fixture
def house(monkeypatch, tmp_path):
    """Two operations of two cases, whose kernel has `spill_bytes`; `broken` does not compile."""
    state = types.SimpleNamespace(spill_bytes=0, broken=None, folder=tmp_path)

    def measure(suite, case):
        if case.name == state.broken:
            raise target.NotCompiledError(f"{suite.op} {case.name} does not compile")
        kernel = machine_code.Kernel(
            "forward", (64, 64), 4, 100, state.spill_bytes, 1024, "HGMMA", 1600
        )
        return budgets.Measured(suite.op, case.name, 3 * 2**20, (kernel,))

    for op in SUITES:
        (tmp_path / op).mkdir()
    monkeypatch.setattr(budgets, "SUITES", SUITES)
    monkeypatch.setattr(budgets, "KERNELS", tmp_path)
    monkeypatch.setattr(budgets, "measure", measure)
    monkeypatch.setattr(target, "unsupported_reason", lambda: "")
    return state


def test_written_budgets_hold_until_a_figure_passes_one(house, capsys):
    assert compile_kernels.main([]) == 10
    assert "mean large has no budget; write it with: python -m" in capsys.readouterr().out

    assert compile_kernels.main(["--write"]) == 0
    out = capsys.readouterr().out
    assert "mean large: 3.0 MiB temporary\n" in out
    assert "forward  64x64      4        100          0      1024         HGMMA" in out
    assert compile_kernels.main([]) == 0
    assert compile_kernels.main(["--op", "scan", "--case", "larger"]) == 0

    house.spill_bytes = 8
    capsys.readouterr()
    assert compile_kernels.main(["--op", "scan", "--case", "larger"]) == 10
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("scan larger: kernel forward: spill_bytes is 8, over its budget of 0")


def test_writing_one_case_keeps_the_others_and_drops_removed_ones(house):
    assert compile_kernels.main(["--op", "mean", "--write"]) == 0
    path = budgets.path("mean")
    text = json.loads(path.read_text("utf-8"))
    text["cases"]["gone"] = text["cases"]["large"]
    path.write_text(json.dumps(text), "utf-8")

    house.spill_bytes = 8
    assert compile_kernels.main(["--op", "mean", "--case", "large", "--write"]) == 0
    entries = budgets.read("mean")
    spills = {case: entry["kernels"]["forward"]["spill_bytes"] for case, entry in entries.items()}
    assert spills == {"large": 8, "larger": 0}
    assert not budgets.path("scan").exists()


def test_a_case_that_does_not_compile_is_reported_and_the_others_are_compared(house, capsys):
    assert compile_kernels.main(["--write"]) == 0
    house.broken = "large"
    assert compile_kernels.main(["--op", "mean"]) == 10
    assert capsys.readouterr().out.splitlines()[-1] == "mean large does not compile"
