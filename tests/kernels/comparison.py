"""`cases.compare` with cached inputs and programs, most of the cost of a comparison.

Inputs and reference depend on the case alone, and cases that differ
in their numbers alone are one program. Kept until the tests of a file are through (`conftest.py`).
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.core import cases
from iaj_kernels.suites import SUITES
from tests import rounding

# What cancels in a case that an operation has: bounds are wider there than what they bound.
WIDE = {
    "delta_rule": {"d_beta", "d_k", "end"},
    "row_map_attention": {"d_bias"},
    "score_stats": {"relative_margin"},
}
# For programs that run once, where compiling is most of the cost: without XLA's emitters of
# fused loops, not cut up to be compiled in parallel, and not optimised.
COMPILED_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# From jax 0.11 on there is nothing but the emitters, and no option.
if jax.__version_info__ < (0, 11):
    COMPILED_QUICKLY["xla_cpu_use_fusion_emitters"] = False
_PROGRAMS: dict[Any, Callable] = {}


# Beside the cases that go through every line of an implementation and every pair of options that
# meet in it: sizes and options that other cases have in other company.
NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


# Of so many cases one runs before a commit, the others with the long tests.
_THINNED = 3


def thinned(parameters: list[Any]) -> list[Any]:
    """The same parameters of a test, of which a contributor waits for some before a commit."""
    quick, kept = 0, []
    for each in parameters:
        marks = tuple(each.marks)
        if not marks:
            marks = (pytest.mark.long,) if quick % _THINNED else ()
            quick += 1
        kept.append(pytest.param(*each.values, id=each.id, marks=marks))
    return kept


def parameter(case: cases.Case, *more: Any, nightly: bool) -> Any:
    """A case, and what else its test takes, as the parameters of a test that are named so."""
    name = "-".join([case.name, *map(str, more)])
    return pytest.param(case, *more, id=name, marks=NIGHTLY if nightly else ())


def crossed(suite: cases.Suite, **nightly: tuple[str, ...]) -> list[Any]:
    """Every test case with every implementation.

    Args:
      suite: the cases of an operation.
      nightly: names of the cases that run at night, by implementation.
    """
    for names in nightly.values():
        assert set(names) <= {case.name for case in suite.using("test")}, names
    return thinned(
        [
            parameter(case, implementation, nightly=case.name in names)
            for case in suite.using("test")
            for implementation, names in nightly.items()
        ]
    )


def forget() -> None:
    """Clears the caches."""
    _PROGRAMS.clear()
    expected.cache_clear()


def result(function: Callable, *arguments: Any) -> Any:
    """What `function` returns; in earnest under the mark `optimised`, and quickly elsewhere."""
    lowered = jax.jit(function).lower(*arguments)
    quick = COMPILED_QUICKLY if jax.config.read("jax_disable_most_optimizations") else None
    program = (lowered.in_tree, lowered.as_text(), quick is None)
    if program not in _PROGRAMS:
        _PROGRAMS[program] = lowered.compile(compiler_options=quick)
    return _PROGRAMS[program](*arguments)


@functools.cache
def expected(op: str, name: str) -> tuple[cases.Arrays, cases.Arrays, cases.Expected]:
    """The arrays of a case, its cotangents, and the result of `cases.expected`."""
    suite = SUITES[op]
    case = suite.named(name)
    key_inputs, key_cotangents = jax.random.split(jax.random.key(0))
    arrays = suite.make(case, key_inputs)
    cotangents = cases.cotangents(suite, case, arrays, key_cotangents)
    return arrays, cotangents, cases.expected(suite, case, arrays, cotangents)


def deviations(suite: cases.Suite, case: cases.Case, implementation: str) -> list[cases.Deviation]:
    """The deviations of `cases.compare`, from bounds that other arrays would not keep to."""
    arrays, cotangents, wanted = expected(suite.op, case.name)
    for name in wanted.values.keys() - WIDE.get(suite.op, ()):
        _assert_narrow(name, wanted.values[name], wanted.bounds[name])
    run = cases.outputs_and_gradients(suite, case, implementation)
    return cases.judged(result(run, arrays, cotangents), wanted)


def _assert_narrow(name: str, want: np.ndarray, bound: np.ndarray) -> None:
    """Zeros, or half as much again, would be out of the bounds of a floating array."""
    kept = np.isfinite(want)
    # Within NaN there is nothing but the value itself.
    bound = np.where(np.isnan(bound), 0.0, bound)
    if np.issubdtype(want.dtype, np.floating) and want[kept].any():
        size = np.sqrt(np.mean(want[kept] ** 2))
        assert np.median(bound[kept]) < size / 2, f"{name}: its bounds hold nothing"


def assert_slopes(
    suite: cases.Suite,
    case: cases.Case,
    arrays: cases.Arrays,
    oracle: Callable[..., dict[str, np.ndarray]],
) -> None:
    """The gradients of the reference, in float64, are the slopes of an oracle in numpy.

    Args:
      suite: of the operation.
      case: its options; the sizes are those of `arrays`.
      arrays: few, for every entry is moved.
      oracle: outputs by name from the arrays by name, in float64.
    """
    cts = cases.cotangents(suite, case, arrays, jax.random.key(1))
    run = cases.outputs_and_gradients(suite, case, "reference")
    wanted = rounding.expected(run, arrays, cts)
    rounding.assert_within(jax.jit(run)(arrays, cts), wanted)
    doubles = {name: np.asarray(x, np.float64) for name, x in arrays.items()}

    def loss(**changed: np.ndarray) -> float:
        out = oracle(**(doubles | changed))
        return sum((out[name] * np.asarray(ct, np.float64)).sum() for name, ct in cts.items())

    for name in arrays:
        slopes = np.zeros(doubles[name].shape)
        for at in np.ndindex(slopes.shape):
            step = np.zeros(slopes.shape)
            step[at] = 1e-5
            up, down = (loss(**{name: doubles[name] + sign * step}) for sign in (1, -1))
            slopes[at] = (up - down) / 2e-5
        # In float64 differences over h are good to h^2 and to 2^-53 / h: 1e-10 and 1e-11.
        np.testing.assert_allclose(wanted.values[f"d_{name}"], slopes, atol=1e-8, err_msg=name)


def of_bfloat16_weights(
    attend: Callable[[jax.Array], jax.Array], v: jax.Array, d_out: jax.Array
) -> rounding.Expected:
    """The output of attention and its gradient by the values, both stored in bfloat16.

    Sums are float32, and the weights, which are not negative, are rounded to bfloat16 before they
    are multiplied: out = sum_s w v may be off by 2^-8 sum_s w |v| + 2^-8 |out| beside what float32
    leaves, and d_v = sum_t w d_out by the same of |d_out|.

    Args:
      attend: the output of values in float32, by the reference.
      v: the values.
      d_out: the gradient by the output.
    """

    def both(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, pull = jax.vjp(attend, pair[0])
        return out, *pull(pair[1])

    signed = cases.widened((v, d_out))
    stacked = jax.tree.map(lambda x: jnp.stack([x, jnp.abs(x)]), signed)
    result = rounding.expected(lambda x: jax.lax.map(both, x), stacked)
    # A result is rounded as it is, not as it should be.
    unit = 2.0**-8 * (1 + 2.0**-7)
    bounds = jax.tree.map(lambda x, b: b[0] + unit * (x[1] + abs(x[0])), *result)
    return rounding.Expected(jax.tree.map(lambda x: x[0], result.values), bounds)
