"""The Triton kernels in Triton's interpreter, against the reference in float64.

The interpreter runs a kernel program by program on numpy arrays, outputs filled with NaN at first:
what a kernel leaves out, or reads outside of its arrays, shows. It checks neither races nor what
the compiler makes of the kernel; `tools/compile_kernels.py` and a GPU do.
"""

import jax
import numpy as np
import pytest

from kernels.core import cases, dispatch
from kernels.suites import SUITES
from tests.kernels import comparison

# Small: a program of the interpreter takes milliseconds. Lengths and widths that fill no tile, one
# that fills them, several programs along every axis of a grid.
CASES = [
    ("delta_rule", {"B": 2, "T": 65, "N": 2, "H": 6, "E": 40}, "float32", {"initial_state": True}),
    ("delta_rule", {"B": 1, "T": 32, "N": 1, "H": 64, "E": 32}, "float32", {}),
    ("delta_rule", {"B": 1, "T": 2, "N": 2, "H": 96, "E": 17}, "float32", {"beta": 2.0}),
    ("delta_rule", {"B": 1, "T": 70, "N": 1, "H": 16, "E": 24}, "bfloat16", {}),
    ("delta_rule", {"B": 1, "T": 65, "N": 1, "H": 16, "E": 24}, "float32", {"keys": "same", "beta": 2.0}),
]


def named(op, sizes, dtype, options):
    text = [f"{letter.lower()}{size}" for letter, size in sizes.items()]
    return SUITES[op], cases.Case("_".join([*text, dtype, *options]), sizes, dtype, options)


@pytest.mark.triton
@pytest.mark.parametrize(("suite", "case"), [named(*each) for each in CASES], ids=lambda x: x.name if isinstance(x, cases.Case) else x.op)
def test_value_and_gradients_equal_the_reference(suite, case):
    with dispatch.on(dispatch.INTERPRETER):
        result = cases.compare(suite, case, "triton")
    print({d.name: round(d.share,3) for d in result})
    assert all(each.ok for each in result), result
