"""Every kernel compiles for an H200 and keeps its budget: `python -m tools.compile_kernels`.

The value and the gradients of a case are one program, compiled once.
"""

import os
from pathlib import Path
import subprocess
import sys

import pytest

from tools.gpu_code import budgets


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("suite", "case"),
    budgets.workloads(*budgets.operations("pallas")),
    ids=lambda each: getattr(each, "op", getattr(each, "name", "")),
)
def test_a_case_keeps_its_budget(suite, case):
    measured = budgets.measure(suite, case)
    result = budgets.complaints(measured, budgets.read(suite.op).get(case.name))
    assert not result, "\n".join(result)


@pytest.mark.compiled
@pytest.mark.triton
@pytest.mark.parametrize("op", budgets.operations("triton"))
def test_the_triton_kernels_of_an_operation_keep_their_budgets(op):
    """In a process of its own, for Triton either compiles or interprets."""
    unset = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "TRITON_INTERPRET")
    run = subprocess.run(
        [sys.executable, "-m", "tools.compile_kernels", "--op", op],
        env={name: value for name, value in os.environ.items() if name not in unset},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("op", budgets.operations())
def test_the_budgets_are_those_of_the_cases(op):
    assert budgets.read(op).keys() == {case.name for _, case in budgets.workloads(op)}
