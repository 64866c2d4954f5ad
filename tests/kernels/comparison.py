"""`cases.compare` with nothing drawn or compiled twice, which is most of what a comparison costs.

Inputs and the reference are those of the case, whatever is compared with it, and cases that differ
in their numbers alone are one program. Kept until the tests of a file are through (`conftest.py`).
"""

from collections.abc import Callable
import functools
from typing import Any

import jax

from kernels import cases
from kernels.error_bound import COMPILED_QUICKLY

_PROGRAMS: dict[Any, Callable] = {}


def forget() -> None:
    """Drops what is kept."""
    _PROGRAMS.clear()
    expected.cache_clear()


def result(function: Callable, *arguments: Any) -> Any:
    """What `function` returns; in earnest under the mark `optimised`, and quickly elsewhere."""
    lowered = jax.jit(function).lower(*arguments)
    program = (lowered.in_tree, lowered.as_text())
    if program not in _PROGRAMS:
        quick = COMPILED_QUICKLY if jax.config.read("jax_disable_most_optimizations") else None
        _PROGRAMS[program] = lowered.compile(compiler_options=quick)
    return _PROGRAMS[program](*arguments)


@functools.cache
def expected(op: str, name: str) -> tuple[cases.Arrays, cases.Arrays, cases.Expected]:
    """The arrays of a case, its cotangents, and what `cases.expected` gives of them."""
    suite = cases.suite(op)
    case = suite.named(name)
    key_inputs, key_cotangents = jax.random.split(jax.random.key(0))
    arrays = suite.make(case, key_inputs)
    cotangents = cases.cotangents(suite, case, arrays, key_cotangents)
    return arrays, cotangents, cases.expected(suite, case, arrays, cotangents)


def deviations(suite: cases.Suite, case: cases.Case, implementation: str) -> list[cases.Deviation]:
    """What `cases.compare` finds."""
    arrays, cotangents, wanted = expected(suite.op, case.name)
    run = cases.outputs_and_gradients(suite, case, implementation)
    return cases.judged(result(run, arrays, cotangents), wanted)
