"""`prefix_mean`: every implementation against the recurrence, and that against float64."""

import pytest

from kernels import cases

SUITE = cases.suite("prefix_mean")


@pytest.mark.parametrize("case", SUITE.using("test"), ids=lambda case: case.name)
def test_value_and_gradients_equal_the_reference(case):
    found = cases.compare(SUITE, case, "reference")
    assert all(each.ok for each in found), found
