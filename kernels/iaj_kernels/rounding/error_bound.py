"""Value of a function in float64, and a bound on its rounding error in float32.

    traced   = the function as a list of primitives (`jax.make_jaxpr`)
    (x, 0)   for every argument, taken as exact
    (y, e)   for every result, one primitive after another (`error_rules.py`), all in float64
             and by NumPy (`numpy_primitives.py`)

`y` is the oracle, and e bounds |fl(y) - y| for any order of summation on any processor; with
statistical arithmetic it is its standard deviation. Nothing is measured, and nothing is run in
float32. The result belongs to the formula that was traced. Another way to compute the same value
rounds in other places, about as often.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from iaj_kernels.rounding import error_choices, error_rules
from iaj_kernels.rounding.error_model import Arithmetic, Pair, error_of, exact
from iaj_kernels.rounding.numpy_primitives import wide

# How many standard deviations an entry may be off. Independent errors never reach that; the room is
# for errors that repeat, as that of the same exponential in every step of a recurrence, and so add
# up over the steps that the recurrence remembers rather than over their root.
DEVIATIONS = 10.0

FLOAT32 = Arithmetic()
_RULES = error_rules.RULES | error_choices.RULES


def value_and_error(
    function: Callable[..., Any], *arguments: Any, arithmetic: Arithmetic = FLOAT32
) -> tuple[Any, Any]:
    """The value of `function(*arguments)` in exact arithmetic, and a bound on its rounding errors.

    Args:
      function: a function of arrays; traced in the dtypes of `arguments`, not run.
      *arguments: trees of arrays, taken as exact.
      arithmetic: the rounding of every operation.

    Returns:
      The result with float64 in place of floating arrays, and a tree of the same structure with the
      bounds, float64; for integers and booleans too a bound on the difference, 0 where exact.

    Raises:
      NotImplementedError: a primitive without a rule has operands with errors.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    consts, leaves = jax.device_get((closed.consts, jax.tree.leaves(arguments)))
    # What overflows or is not a number comes out as such.
    with np.errstate(all="ignore"):
        results = _interpret(closed.jaxpr, arithmetic, _exact(consts), _exact(leaves))
    tree = jax.tree.structure(shapes)
    values = tree.unflatten([x.value for x in results])
    return values, tree.unflatten([error_of(x).astype(np.float64) for x in results])


def _exact(arrays: Iterable[Any]) -> list[Pair]:
    return [Pair(wide(x)) for x in arrays]


def _interpret(
    jaxpr: Any, arithmetic: Arithmetic, consts: Sequence[Pair], arguments: Sequence[Pair]
) -> list[Pair]:
    known: dict[Any, Pair] = {}

    def read(atom: Any) -> Pair:
        if isinstance(atom, core.Literal):
            return Pair(wide(atom.val, getattr(atom.aval, "dtype", None)))
        return known[atom]

    known.update(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn, finished in zip(jaxpr.eqns, _finished(jaxpr), strict=True):
        operands = [read(atom) for atom in eqn.invars]
        results = _apply(eqn, arithmetic, operands)
        known.update(
            zip(eqn.outvars, results if isinstance(results, list) else [results], strict=True)
        )
        for variable in finished:
            del known[variable]
    return [read(atom) for atom in jaxpr.outvars]


@functools.lru_cache(maxsize=512)
def _finished(jaxpr: Any) -> list[list[Any]]:
    """The variables, for each equation, that no later one reads."""
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    finished = []
    for eqn in reversed(jaxpr.eqns):
        variables = {*eqn.outvars, *(x for x in eqn.invars if not isinstance(x, core.Literal))}
        finished.append([*(variables - read)])
        read |= variables
    return finished[::-1]


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
        return _interpret(jaxpr, arithmetic, _exact(consts), operands)
    if any(x.error is not None for x in operands) or _makes_floats(eqn, operands):
        raise NotImplementedError(f"the rounding of {name!r} has no rule in error_rules.py")
    return exact(arithmetic, eqn, operands)


# Parameters that hold the function of a call (jit, custom derivatives, checkpoint).
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _makes_floats(eqn: Any, operands: list[Pair]) -> bool:
    """Whether floats are computed from floats; those of `iota` and random bits are exact."""
    return any(jnp.issubdtype(x.value.dtype, jnp.floating) for x in operands)


def _branch(eqn: Any, arithmetic: Arithmetic, operands: list[Pair]) -> list[Pair]:
    which, *operands = operands
    branches = eqn.params["branches"]
    branch = branches[min(max(int(which.value), 0), len(branches) - 1)]
    return _interpret(branch.jaxpr, arithmetic, _exact(branch.consts), operands)


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
    inner = _exact(jaxpr.consts)
    steps = range(params["length"])
    stacked: list[list[Pair]] = [[] for _ in jaxpr.out_avals[len(carry) :]]
    for step in reversed(steps) if params["reverse"] else steps:
        at = [Pair(*(None if part is None else part[step] for part in x)) for x in xs]
        # What is carried is taken as inexact, unless it is an integer (a counter).
        carry = [x if _counts(x) else Pair(x.value, error_of(x)) for x in carry]
        results = _interpret(jaxpr.jaxpr, arithmetic, inner, [*consts, *carry, *at])
        carry = results[: len(carry)]
        for rows, row in zip(stacked, results[len(carry) :], strict=True):
            rows.append(row)
    order = -1 if params["reverse"] else 1
    avals = jaxpr.out_avals[len(carry) :]
    ys = [_stacked(rows[::order], aval) for rows, aval in zip(stacked, avals, strict=True)]
    return [*carry, *ys]


def _counts(pair: Pair) -> bool:
    return bool(jnp.issubdtype(pair.value.dtype, jnp.integer))


def _stacked(rows: list[Pair], aval: Any) -> Pair:
    """The results of a scan's steps, along an axis before their own."""
    if not rows:
        return Pair(wide(np.zeros((0, *aval.shape), aval.dtype)))
    errors = None
    if any(row.error is not None for row in rows):
        errors = np.stack([error_of(row) for row in rows])
    return Pair(np.stack([row.value for row in rows]), errors)
