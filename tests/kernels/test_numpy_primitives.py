"""JAX's primitives in NumPy, against JAX in float64."""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.rounding import numpy_primitives


def numbers(*shape, low=-2.0, high=2.0):
    return np.random.default_rng(0).uniform(low, high, shape)


def integers(*shape, high=5):
    return np.random.default_rng(1).integers(-high, high, shape, np.int32)


X, Y, Z = numbers(3, 4), numbers(4, 3).T, numbers(3, 4, low=0.1)
EXTREMES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-300, 1e300, -1.0])
WHICH, OTHER = X > 0, Y > 0
COUNTS = integers(3, 4)
SHIFTED = lax.GatherScatterMode.FILL_OR_DROP

# Each function binds the primitive that it is named after, and maybe others.
CASES = {
    **{
        name: (getattr(lax, name), (X,))
        for name in (
            *("abs", "ceil", "cos", "erf", "erfc", "exp", "exp2", "expm1", "floor"),
            *("logistic", "neg", "sign", "sin", "square", "stop_gradient", "tanh"),
        )
    },
    **{name: (getattr(lax, name), (Z,)) for name in ("log", "log1p", "rsqrt", "sqrt")},
    **{
        name: (getattr(lax, name), (X, Y))
        for name in ("add", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "sub")
    },
    "log2": (jnp.log2, (Z,)),
    "and": (lax.bitwise_and, (WHICH, OTHER)),
    "or": (lax.bitwise_or, (COUNTS, COUNTS.T.reshape(3, 4))),
    "not": (lax.bitwise_not, (WHICH,)),
    "is_finite": (lax.is_finite, (EXTREMES,)),
    "one_minus_square": (jax.grad(jnp.tanh), (np.float64(0.3),)),
    "clamp": (lambda x: lax.clamp(-0.5, x, 1.0), (X,)),
    "copy": (lambda x: jnp.array(x, copy=True), (X,)),
    "name": (lambda x: checkpoint_name(x, "here"), (X,)),
    "add_any": (jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)), (X,)),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), (X,)),
    "argmin": (lambda x: lax.argmin(x, 0, np.int32), (np.round(X),)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 3, 5, 4), (1, 3)), (X,)),
    "concatenate": (lambda x, y: lax.concatenate([x, y, x], 1), (X, Y)),
    "convert_element_type": (lambda x: lax.convert_element_type(x, np.int32), (X,)),
    "convert_to_bool": (lambda x: lax.convert_element_type(x, np.bool_), (COUNTS,)),
    "bitcast_convert_type": (
        lambda x: lax.bitcast_convert_type(x, np.float32),
        (np.float32(X).view(np.int32),),
    ),
    **{
        f"{name}{'_reversed' * reverse}": (
            lambda x, name=name, reverse=reverse: getattr(lax, name)(x, 1, reverse=reverse),
            (X,),
        )
        for name in ("cummax", "cummin", "cumsum")
        for reverse in (False, True)
    },
    "dot_general": (
        lambda x, y: lax.dot_general(x, y, (((1, 4), (3, 0)), ((3,), (1,)))),
        (numbers(2, 3, 4, 5, 6), numbers(6, 5, 7, 3)),
    ),
    "dot_general_of_vectors": (lax.dot, (X[0], Y[0])),
    "dot_general_of_integers": (lax.dot, (COUNTS, COUNTS.T)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3)), (X, np.int32(2))),
    "dynamic_update_slice": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, -i)),
        (X, Y[:2, :3], np.int32(2)),
    ),
    "expand_dims": (lambda x: lax.expand_dims(x, (0, 2)), (X,)),
    "integer_pow": (lambda x: lax.integer_pow(x, -3), (Z,)),
    "iota": (lambda x: x + lax.broadcasted_iota(np.float64, (3, 4), 1), (X,)),
    "pad": (lambda x: lax.pad(x, 7.0, ((1, 2, 3), (0, 4, 0))), (X,)),
    "pad_negative": (lambda x: lax.pad(x, 7.0, ((-1, 2, 1), (0, -1, 0))), (X,)),
    "reduce_and": (lambda x: lax.reduce_and(x, (0,)), (X > -1,)),
    "reduce_or": (lambda x: lax.reduce_or(x, (0,)), (X > 1,)),
    "reduce_or_of_integers": (lambda x: lax.reduce_or(x, (0,)), (COUNTS,)),
    "reduce_max": (lambda x: lax.reduce_max(x, (0, 1)), (X,)),
    "reduce_max_of_none": (lambda x: lax.reduce_max(x, (0,)), (X[:0],)),
    "reduce_min": (lambda x: lax.reduce_min(x, (1,)), (COUNTS,)),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (1,)), (COUNTS,)),
    "reshape": (lambda x: lax.reshape(x, (2, 6)), (Y,)),
    "rev": (lambda x: lax.rev(x, (0,)), (X,)),
    "scatter": (
        lambda x, i, y: x.at[i].set(y, mode=SHIFTED),
        (X, np.int32([2, 9]), Y[:2]),
    ),
    "scatter-add": (
        lambda x, i, y: x.at[i].add(y, mode=SHIFTED),
        (X, np.int32([2, 9, 2]), Y),
    ),
    "select_n": (lax.select, (WHICH, X, Y)),
    "select_of_three": (lax.select_n, (np.abs(COUNTS) % 3, X, Y, Z)),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 4), (1, 3)), (X,)),
    "squeeze": (lambda x: lax.squeeze(x, (0, 2)), (X[None, :, None],)),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), (numbers(2, 3, 4),)),
    "gather": (lambda x, i: x[i], (X, np.int32([2, -1]))),
    "sort": (lambda x: lax.sort(x, dimension=0), (X,)),
}


@pytest.mark.parametrize("name", CASES)
def test_numpy_gives_what_jax_does_in_float64(name):
    function, arguments = CASES[name]
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(function)(*arguments)
        want = np.asarray(jax.jit(function)(*arguments))
    known = dict(zip(closed.jaxpr.invars, map(numpy_primitives.wide, arguments), strict=True))
    known |= zip(closed.jaxpr.constvars, map(numpy_primitives.wide, closed.consts), strict=True)
    got = evaluated(closed.jaxpr, known)
    assert got.dtype == (np.float64 if want.dtype == np.float32 else want.dtype)
    # Elementary functions of NumPy and XLA are within a few units of the result.
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-15)


def evaluated(jaxpr, known):
    def read(atom):
        literal = isinstance(atom, core.Literal)
        return numpy_primitives.wide(atom.val, atom.aval.dtype) if literal else known[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        (variable,) = eqn.outvars
        if "jaxpr" in eqn.params:
            inner = eqn.params["jaxpr"].jaxpr
            known[variable] = evaluated(inner, dict(zip(inner.invars, operands, strict=True)))
        else:
            result = numpy_primitives.evaluate(eqn, operands)
            known[variable] = result[0] if eqn.primitive.multiple_results else result
    return read(jaxpr.outvars[0])


def test_every_primitive_has_a_case():
    with jax.enable_x64(True):
        closed = [jax.make_jaxpr(function)(*arguments) for function, arguments in CASES.values()]
    missing = numpy_primitives.RULES.keys() - set.union(*(names(each.jaxpr) for each in closed))
    # Not every version of jax has them.
    assert missing <= {"copy", "copy_p", "expand_dims", "log2", "one_minus_square"}


def names(jaxpr):
    inner = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*map(names, inner))


@pytest.mark.parametrize(
    "name", ["exp", "log", "log1p", "sqrt", "rsqrt", "sign", "tanh", "logistic", "erf", "expm1"]
)
def test_extremes_are_what_they_are_in_jax(name):
    with jax.enable_x64(True):
        (eqn,) = jax.make_jaxpr(getattr(lax, name))(EXTREMES).jaxpr.eqns
        want = getattr(lax, name)(EXTREMES)
    with np.errstate(all="ignore"):
        got = numpy_primitives.evaluate(eqn, [EXTREMES])
    np.testing.assert_allclose(got, want, rtol=1e-14)


def test_random_keys_stay_keys():
    key = jax.random.key(3)
    closed = jax.make_jaxpr(lambda key: jax.random.bits(jax.random.fold_in(key, 1), (4,)))(key)
    known = {closed.jaxpr.invars[0]: numpy_primitives.wide(key)}
    want = jax.random.bits(jax.random.fold_in(key, 1), (4,))
    np.testing.assert_array_equal(evaluated(closed.jaxpr, known), want)
