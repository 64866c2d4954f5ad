"""What a function computes, read from its trace."""

import math

from jax.extend import core
from jax.interpreters import partial_eval


def products(jaxpr):
    """FLOPs of the matrix products of a traced function, those in loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, made = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(made) * math.prod(left[i] for i in contracted)
        runs = equation.params.get("length", 1)
        inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
        total += runs * sum(products(each) for each in inner if hasattr(each, "eqns"))
    return total


def used_products(jaxpr):
    """`products` without those that no output depends on."""
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return products(used)


def largest(jaxpr):
    """The size of the largest array that a jaxpr, or one within it, computes."""
    result = max((out.aval.size for eqn in jaxpr.eqns for out in eqn.outvars), default=0)
    within = (sub for eqn in jaxpr.eqns for sub in core.jaxprs_in_params(eqn.params))
    return max([result, *map(largest, within)])
