"""Every kernel compiles for an H200 and keeps its budget: `python -m tools.compile_kernels`.

The value and the gradients of a case are one program, compiled once.
"""

import pytest

from tools.gpu_code import budgets


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("suite", "case"),
    budgets.workloads(),
    ids=lambda each: getattr(each, "op", getattr(each, "name", "")),
)
def test_a_case_keeps_its_budget(suite, case):
    measured = budgets.measure(suite, case)
    result = budgets.complaints(measured, budgets.read(suite.op).get(case.name))
    assert not result, "\n".join(result)


@pytest.mark.parametrize("op", budgets.operations())
def test_the_budgets_are_those_of_the_cases(op):
    assert budgets.read(op).keys() == {case.name for _, case in budgets.workloads(op)}
