"""`gated_attention`: the fast implementations against the reference on every case of the table."""

import contextlib

import pytest

from iaj_kernels.core import cases, dispatch
from iaj_kernels.gated_attention.cases import SUITE
from tests.kernels import comparison

# The widest heads are in the next case.
WIDE = ("b1_t17_s17_n2_k1_h128_float32",)


@pytest.mark.parametrize(
    ("case", "implementation"), comparison.crossed(SUITE, xla=WIDE, pallas=WIDE)
)
def test_value_and_gradients_equal_the_reference(case, implementation):
    interpreted = implementation == "pallas"
    with dispatch.on(dispatch.INTERPRETER) if interpreted else contextlib.nullcontext():
        result = comparison.deviations(SUITE, case, implementation)
    assert all(each.ok for each in result), result


@pytest.mark.parametrize("mode", ["sample", "expected"])
def test_renormalised_value_and_gradients_equal_the_reference(mode):
    options = {"mode": mode, "renormalise": True, "segments": True}
    case = cases.Case(
        "renormalise", {"B": 2, "T": 70, "S": 70, "N": 4, "K": 2, "H": 16}, "float32", options
    )
    result = cases.compare(SUITE, case, "xla")
    assert all(each.ok for each in result), result
