"""Every Pallas kernel lowers for an H200 at the sizes of its budgets, with jaxlib alone."""

import pytest

from tools.gpu_code import budgets, target


@pytest.mark.parametrize(
    ("suite", "case"),
    budgets.workloads(*budgets.operations("pallas")),
    ids=lambda each: getattr(each, "op", getattr(each, "name", "")),
)
def test_value_and_gradients_lower_to_triton(suite, case):
    lowered = target.lower(*budgets.program(suite, case))
    assert "__gpu$xla.gpu.triton" in lowered.as_text()


@pytest.mark.parametrize("op", budgets.operations())
def test_every_operation_with_a_kernel_has_cases_with_a_budget_each_of_its_own_name(op):
    names = [case.name for _, case in budgets.workloads(op)]
    assert names and len(set(names)) == len(names)
