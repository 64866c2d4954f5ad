"""Named workloads of an operation, and the comparison of its implementations on them.

Each operation has one table, `SUITE` in its `cases.py`, and tests, benchmarks, tuning and the
ahead-of-time compilation all read it; `iaj_kernels.suites` holds them by name. `compare` checks the
value and every gradient of an implementation against the reference in float64, on the same inputs
and a random cotangent for every output. The bound on the error of each entry is derived from the
rounding of every operation (`error_bound.py`).
"""

from collections.abc import Callable, Mapping
import dataclasses
import difflib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.rounding import error_bound
from iaj_kernels.rounding.error_model import Arithmetic

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: sizes by letter, dtype, static options of the operation, and its uses.

    `uses` holds some of: `test` (small; every implementation against the reference), `cpu` (timed
    on a CPU), `gpu` (timed on a GPU and tuned), `budget` (compiled ahead of time for a GPU),
    `resets` (small; with resets, which no GPU kernel has).

    `repeats`: numbers that are added up are nearly equal, so that their errors are too and add up
    in full; bounds are those of the worst case then, not of independent errors.
    """

    name: str
    sizes: Mapping[str, int]
    dtype: str = "float32"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    uses: frozenset[str] = frozenset({"test"})
    repeats: bool = False


# The implementations that are GPU kernels with gradients of their own.
GPU_KERNELS = ("pallas", "triton")


@dataclasses.dataclass(frozen=True)
class Suite:
    """The workloads of one operation and how to run them.

    Attributes:
      make: `(case, key) -> arrays` by argument name.
      call: `(case, arrays, implementation) -> outputs`, a dict of arrays by output name.
      differentiable: the arguments whose gradients are compared.
      implementations: the names of the operation's table `IMPLEMENTATIONS`.
      tiles: the choices that tuning tries, by name of the tile, in groups: all combinations within
        a group, one group after the other.
    """

    op: str
    cases: tuple[Case, ...]
    make: Callable[[Case, jax.Array], Arrays]
    call: Callable[[Case, Arrays, str | None], dict[str, jax.Array]]
    differentiable: tuple[str, ...]
    implementations: tuple[str, ...]
    tiles: tuple[Mapping[str, tuple[int, ...]], ...] = ()

    @property
    def kernel(self) -> str | None:
        """The implementation that is a GPU kernel; None if there is none."""
        return next((name for name in GPU_KERNELS if name in self.implementations), None)

    def named(self, name: str) -> Case:
        """The case with this name.

        Raises:
          KeyError: no case has it; the message gives the nearest name.
        """
        names = {case.name: case for case in self.cases}
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            raise KeyError(f"{self.op} has no case {name!r}; the nearest is {close[0]!r}")
        return names[name]

    def using(self, use: str) -> tuple[Case, ...]:
        """The cases with this use."""
        return tuple(case for case in self.cases if use in case.uses)


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far one array is from the reference in float64.

    Attributes:
      name: name of the output, or `d_` and the argument of the gradient.
      error: the largest error of an entry over the largest magnitude of the array.
      share: the largest error of an entry over the bound of that entry; infinite for NaN, and for
        an error where the bound is 0.
    """

    name: str
    error: float
    share: float

    @property
    def ok(self) -> bool:
        """Whether every entry is within its bound."""
        return self.share <= 1.0


@dataclasses.dataclass(frozen=True)
class Expected:
    """Reference values of one case in float64, by array name, and the bounds on their errors."""

    values: Mapping[str, np.ndarray]
    bounds: Mapping[str, np.ndarray]


def outputs_and_gradients(
    suite: Suite, case: Case, implementation: str | None
) -> Callable[[Arrays, dict[str, jax.Array]], dict[str, jax.Array]]:
    """A function of (arrays, cotangents) that returns every output, and `d_<argument>` for each."""

    def run(arrays: Arrays, cotangents: dict[str, jax.Array]) -> dict[str, jax.Array]:
        fixed = {k: v for k, v in arrays.items() if k not in suite.differentiable}
        moving = {k: v for k, v in arrays.items() if k in suite.differentiable}
        outputs, pull = jax.vjp(lambda m: suite.call(case, {**fixed, **m}, implementation), moving)
        (gradients,) = pull(
            {
                name: cotangents[name].astype(out.dtype)
                if jnp.issubdtype(out.dtype, jnp.floating)
                else np.zeros(out.shape, jax.dtypes.float0)
                for name, out in outputs.items()
            }
        )
        return {**outputs, **{f"d_{name}": grad for name, grad in gradients.items()}}

    return run


def resets(B: int, T: int) -> jax.Array:
    """Resets `[B, T]`: one in each fifth of the steps, and one more; at other steps in each row."""
    step_1T, row_B1 = np.arange(T)[None], np.arange(B)[:, None]
    return jnp.asarray(
        ((step_1T + 2 * row_B1) % max(T // 5, 1) == 3) | (step_1T == T // 2 + row_B1)
    )


def cotangents(suite: Suite, case: Case, arrays: Arrays, key: jax.Array) -> Arrays:
    """A random cotangent, of the output's dtype, for every floating output of the case."""
    shapes = jax.eval_shape(lambda a: suite.call(case, a, "reference"), arrays)
    return {
        name: jax.random.normal(jax.random.fold_in(key, i), out.shape).astype(out.dtype)
        for i, (name, out) in enumerate(sorted(shapes.items()))
        if jnp.issubdtype(out.dtype, jnp.floating)
    }


def widened(tree: Any) -> Any:
    """Low-precision arrays as float32: the reference is computed from the same numbers."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def expected(suite: Suite, case: Case, arrays: Arrays, cotangents: Arrays) -> Expected:
    """Values and gradients of the reference in float64, and bounds on the rounding errors.

    Inputs of a low precision are widened to float32 exactly; their products round the operands to
    the low precision.
    """
    inputs = widened((arrays, cotangents))
    arithmetic = Arithmetic(operand_unit=_unit(case.dtype), statistical=not case.repeats)
    run = outputs_and_gradients(suite, case, "reference")
    values, errors = error_bound.value_and_error(run, *inputs, arithmetic=arithmetic)
    deviations = error_bound.DEVIATIONS if arithmetic.statistical else 1.0
    return Expected(values, {name: deviations * e for name, e in errors.items()})


def _unit(dtype: Any) -> float:
    """The unit roundoff of a dtype below float32, and 0 for float32."""
    digits = jnp.finfo(dtype).nmant
    return 2.0 ** -(digits + 1) if digits < 23 else 0.0


def compare(suite: Suite, case: Case, implementation: str | None, seed: int = 0) -> list[Deviation]:
    """Values and gradients of one implementation against those of `expected`."""
    key_inputs, key_cotangents = jax.random.split(jax.random.key(seed))
    arrays = suite.make(case, key_inputs)
    cts = cotangents(suite, case, arrays, key_cotangents)
    got = jax.jit(outputs_and_gradients(suite, case, implementation))(arrays, cts)
    return judged(got, expected(suite, case, arrays, cts))


def judged(got: Arrays, expected: Expected) -> list[Deviation]:
    """The deviation of every expected array; a result of a low precision is rounded to it once."""
    results = []
    for name, want in expected.values.items():
        bound = expected.bounds[name]
        if jnp.issubdtype(got[name].dtype, jnp.floating):
            stored = np.where(np.isfinite(want), np.abs(want), 0.0)
            bound = bound + _unit(got[name].dtype) * stored
        results.append(deviation(name, got[name], want, bound))
    return results


def deviation(name: str, got: Any, want: Any, bound: Any) -> Deviation:
    """The deviation of one array from `want`, whose entries may be off by `bound`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = relative_error(got, want)
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want))
        share = np.where(off == 0, 0.0, off / bound)
    worst = float(share.max(initial=0.0))
    return Deviation(name, error, float("inf") if np.isnan(worst) else worst)


def relative_error(got: Any, want: Any) -> float:
    """The largest |got - want| over the largest |want|; over 1 where `want` is all zeros."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"compared shapes {got.shape} and {want.shape}")
    same = got == want
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - want))
    top = np.abs(want[np.isfinite(want)]).max(initial=0.0)
    worst = error.max(initial=0.0)
    return float("inf") if np.isnan(worst) else float(worst / (top or 1.0))
