"""The Triton kernels in Triton's interpreter, against the reference in float64.

The interpreter runs a kernel program by program on numpy arrays, outputs filled with NaN at first:
what a kernel leaves out, or reads outside of its arrays, shows. It checks neither races nor what
the compiler makes of the kernel; `tools/compile_kernels.py` and a GPU do.
"""

import pytest

from kernels.core import cases, dispatch
from kernels.suites import SUITES


def small(op, dtype="float32", options=(), **sizes):
    text = "_".join(f"{letter.lower()}{size}" for letter, size in sizes.items())
    name = "_".join([text, dtype, *dict(options)])
    return pytest.param(
        SUITES[op], cases.Case(name, sizes, dtype, dict(options)), id=f"{op}-{name}"
    )


# Small, for a program of the interpreter takes milliseconds. Lengths and widths that fill no tile,
# some that fill them, and several programs along every axis of a grid.
CASES = (
    small("delta_rule", B=2, T=65, N=2, H=6, E=40, options={"initial_state": True}),
    small("delta_rule", B=1, T=32, N=1, H=64, E=32),
    small("delta_rule", B=1, T=2, N=2, H=96, E=17, options={"beta": 2.0}),
    small("delta_rule", B=1, T=65, N=1, H=16, E=24, options={"keys": "same", "beta": 2.0}),
    small("delta_rule", B=1, T=70, N=1, H=16, E=24, dtype="bfloat16"),
    small("selective_scan", B=2, T=35, I=40, J=5, options={"initial_state": True}),
    small("selective_scan", B=1, T=32, I=32, J=16, options={"decay": (1e-4, 50.0)}),
    small("selective_scan", B=1, T=2, I=3, J=32, options={"skip": False}),
    small("selective_scan", B=1, T=18, I=33, J=1, dtype="bfloat16"),
)


@pytest.mark.triton
@pytest.mark.parametrize(("suite", "case"), CASES)
def test_value_and_gradients_equal_the_reference(suite, case):
    with dispatch.on(dispatch.INTERPRETER):
        result = cases.compare(suite, case, "triton")
    print({d.name: round(d.share, 3) for d in result})
    assert all(each.ok for each in result), result
