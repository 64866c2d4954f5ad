"""Value of a function in float64, and a bound on its rounding error in float32.

    traced   = the function as a list of primitives (`jax.make_jaxpr`)
    (x, 0)   for every argument, taken as exact
    (y, e)   for every result, one primitive after another (`error_rules.py`), all in float64

`y` is the oracle, and e bounds |fl(y) - y| for any order of summation on any processor; with
statistical arithmetic it is its standard deviation. Nothing is measured, and nothing is run in
float32. The result belongs to the formula that was traced. Another way to compute the same value
rounds in other places, about as often.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from kernels.rounding import error_choices, error_rules
from kernels.rounding.error_model import Arithmetic, Pair, error_of, exact

# How many standard deviations an entry may be off. Independent errors never reach that; the room is
# for errors that repeat, as that of the same exponential in every step of a recurrence, and so add
# up over the steps that the recurrence remembers rather than over their root.
DEVIATIONS = 10.0

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

FLOAT32 = Arithmetic()
_RULES = error_rules.RULES | error_choices.RULES


def value_and_error(
    function: Callable[..., Any], *arguments: Any, arithmetic: Arithmetic = FLOAT32
) -> tuple[Any, Any]:
    """The value of `function(*arguments)` in exact arithmetic, and a bound on its rounding errors.

    Args:
      function: of arrays; traced in the dtypes of `arguments`, not run.
      *arguments: trees of arrays, taken as exact.
      arithmetic: the rounding of every operation.

    Returns:
      The result with float64 in place of floating arrays, and a tree of the same structure with the
      bounds, float64; for integers and booleans too a bound on the difference, 0 where exact.

    Raises:
      NotImplementedError: a primitive without a rule has operands with errors.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves = jax.tree.leaves(arguments)
    # On a CPU whatever is the default: a GPU compiles for its own, and is not to be its own oracle.
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        run = functools.partial(_run, closed.jaxpr, arithmetic)
        run = jax.jit(run, compiler_options=COMPILED_QUICKLY)
        consts, leaves = jax.device_get((closed.consts, leaves))
        values, errors = run([_wide(x) for x in consts], [_wide(x) for x in leaves])
        values, errors = jax.device_get((values, errors))
    tree = jax.tree.structure(shapes)
    return tree.unflatten(values), tree.unflatten(errors)


def _wide(x: Any) -> Any:
    x = jnp.asarray(x)
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _run(jaxpr: Any, arithmetic: Arithmetic, consts: list[Any], leaves: list[Any]) -> Any:
    results = _interpret(jaxpr, arithmetic, [*map(Pair, consts)], [*map(Pair, leaves)])
    return [x.value for x in results], [error_of(x).astype(jnp.float64) for x in results]


def _interpret(
    jaxpr: Any, arithmetic: Arithmetic, consts: Sequence[Pair], arguments: Sequence[Pair]
) -> list[Pair]:
    known: dict[Any, Pair] = {}

    def read(atom: Any) -> Pair:
        if isinstance(atom, core.Literal):
            return Pair(_wide(jnp.asarray(atom.val, getattr(atom.aval, "dtype", None))))
        return known[atom]

    known.update(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        results = _apply(eqn, arithmetic, operands)
        known.update(
            zip(eqn.outvars, results if isinstance(results, list) else [results], strict=True)
        )
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: Any, arithmetic: Arithmetic, operands: list[Pair]) -> Any:
    name = eqn.primitive.name
    if name in _RULES:
        return _RULES[name](arithmetic, eqn, operands)
    if name == "scan":
        return _scan(eqn, arithmetic, operands)
    if name == "cond" and operands[0].error is None:
        return _branch(eqn, arithmetic, operands)
    inner = next((eqn.params[k] for k in _CALLED if k in eqn.params), None)
    if inner is not None:
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
        return _interpret(jaxpr, arithmetic, [Pair(_wide(c)) for c in consts], operands)
    if any(x.error is not None for x in operands) or _makes_floats(eqn, operands):
        raise NotImplementedError(f"the rounding of {name!r} has no rule in error_rules.py")
    return exact(arithmetic, eqn, operands)


# Parameters that hold the function of a call (jit, custom derivatives, checkpoint).
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _makes_floats(eqn: Any, operands: list[Pair]) -> bool:
    """Whether floats are computed from floats; those of `iota` and random bits are exact."""
    return any(jnp.issubdtype(x.value.dtype, jnp.floating) for x in operands)


def _branch(eqn: Any, arithmetic: Arithmetic, operands: list[Pair]) -> list[Pair]:
    def run(branch: Any, operands: list[Pair]) -> list[Pair]:
        consts = [Pair(_wide(c)) for c in branch.consts]
        results = _interpret(branch.jaxpr, arithmetic, consts, operands)
        return [Pair(x.value, error_of(x)) for x in results]

    branches = [functools.partial(run, branch) for branch in eqn.params["branches"]]
    return lax.switch(operands[0].value, branches, operands[1:])


def _carried(eqn: Any) -> slice:
    """Which operands of a scan are carried; constants come before them, and what it scans after.

    The names of the parameters that say so are not the same in jax 0.10 and 0.11. What is scanned,
    or stacked, has an axis more outside of the body.
    """
    body = eqn.params["jaxpr"]
    scanned, stacked = (
        sum(outer.aval.ndim > inner.ndim for outer, inner in zip(outers, inners, strict=True))
        for outers, inners in ((eqn.invars, body.in_avals), (eqn.outvars, body.out_avals))
    )
    last = len(eqn.invars) - scanned
    return slice(last - (len(eqn.outvars) - stacked), last)


def _scan(eqn: Any, arithmetic: Arithmetic, operands: list[Pair]) -> list[Pair]:
    params = eqn.params
    jaxpr = params["jaxpr"]
    carried = _carried(eqn)
    consts, carry, xs = operands[: carried.start], operands[carried], operands[carried.stop :]
    inner = [Pair(_wide(c)) for c in jaxpr.consts]
    # What is carried is taken as inexact, unless it is an integer (a counter).
    carry = [
        Pair(x.value, None if jnp.issubdtype(x.value.dtype, jnp.integer) else error_of(x))
        for x in carry
    ]

    def body(carry: list[Pair], xs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
        results = _interpret(jaxpr.jaxpr, arithmetic, inner, [*consts, *carry, *xs])
        after = [
            Pair(x.value, None if before.error is None else error_of(x))
            for x, before in zip(results[: len(carry)], carry, strict=True)
        ]
        return after, results[len(carry) :]

    carry, ys = lax.scan(body, carry, xs, length=params["length"], reverse=params["reverse"])
    return [*carry, *ys]
