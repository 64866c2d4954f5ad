"""Named workloads of an operation, and the comparison of its implementations on them.

Each operation has one table, `SUITE` in its `cases.py`, and tests, benchmarks, tuning and the
ahead-of-time compilation all read it. `compare` is the one judge: value and every gradient of an
implementation against the reference, on the same inputs and a random cotangent for every output.
"""

from collections.abc import Callable, Mapping
import dataclasses
import difflib
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

OPS = (
    "prefix_mean",
    "gated_attention",
    "row_map_attention",
    "score_stats",
    "selective_scan",
    "delta_rule",
)

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: sizes by letter, dtype, static options of the operation, what it is used for.

    `uses` holds some of: `test` (small; every implementation against the reference), `cpu` (timed
    on a CPU), `gpu` (timed on a GPU and tuned), `budget` (compiled ahead of time for a GPU).
    """

    name: str
    sizes: Mapping[str, int]
    dtype: str = "float32"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    uses: frozenset[str] = frozenset({"test"})


@dataclasses.dataclass(frozen=True)
class Suite:
    """The workloads of one operation and how to run them.

    Attributes:
      make: `(case, key) -> arrays` by argument name.
      call: `(case, arrays, implementation) -> outputs`, a dict of arrays by output name.
      differentiable: the arguments whose gradients are compared.
      bounds: dtype -> (bound of values, bound of gradients), each an error divided by the largest
        magnitude of the compared array in the reference.
      own_bounds: argument or output -> dtype -> bound, where one needs another than `bounds`.
      exact: outputs that must be equal.
      implementations: those that the operation offers.
      tiles: the choices that tuning tries, by name of the tile, in groups: all combinations within
        a group, one group after the other.
    """

    op: str
    cases: tuple[Case, ...]
    make: Callable[[Case, jax.Array], Arrays]
    call: Callable[[Case, Arrays, str | None], dict[str, jax.Array]]
    differentiable: tuple[str, ...]
    bounds: Mapping[str, tuple[float, float]]
    own_bounds: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    implementations: tuple[str, ...] = ("pallas", "xla", "reference")
    tiles: tuple[Mapping[str, tuple[int, ...]], ...] = ()

    def named(self, name: str) -> Case:
        """The case of that name.

        Raises:
          KeyError: with the nearest name that there is.
        """
        names = {case.name: case for case in self.cases}
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            raise KeyError(f"{self.op} has no case {name!r}; the nearest is {close[0]!r}")
        return names[name]

    def using(self, use: str) -> tuple[Case, ...]:
        """The cases with that use."""
        return tuple(case for case in self.cases if use in case.uses)


def suite(op: str) -> Suite:
    """The table of `op`, from `kernels/<op>/cases.py`."""
    return importlib.import_module(f"kernels.{op}.cases").SUITE


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far one array is from the reference: the largest error over the largest magnitude."""

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """False for a NaN as well."""
        return self.error <= self.bound


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


def compare(suite: Suite, case: Case, implementation: str | None, seed: int = 0) -> list[Deviation]:
    """Values and gradients of one implementation against the float32 reference.

    NaN in the compared arrays makes an infinite error.
    """
    key_inputs, key_cotangents = jax.random.split(jax.random.key(seed))
    arrays = suite.make(case, key_inputs)
    cts = cotangents(suite, case, arrays, key_cotangents)
    expected = jax.jit(outputs_and_gradients(suite, case, "reference"))(
        widened(arrays), widened(cts)
    )
    got = jax.jit(outputs_and_gradients(suite, case, implementation))(arrays, cts)
    return judged(suite, case, got, expected)


def judged(suite: Suite, case: Case, got: Arrays, expected: Arrays) -> list[Deviation]:
    """The deviation of every array that is expected, beside its bound in the dtype of the case."""
    value_bound, gradient_bound = suite.bounds[case.dtype]
    found = []
    for name, want in expected.items():
        default = gradient_bound if name.startswith("d_") else value_bound
        bound = suite.own_bounds.get(name, {}).get(case.dtype, default)
        bound = 0.0 if name in suite.exact else bound
        found.append(Deviation(name, relative_error(got[name], want), bound))
    return found


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
