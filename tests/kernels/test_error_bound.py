"""The error analysis: closed forms, that rounding stays within it, and that a fault does not."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

from iaj_kernels.core import cases
from iaj_kernels.rounding import error_bound
from iaj_kernels.rounding.error_model import Arithmetic
from tests import rounding

U = 2.0**-24
WORST = Arithmetic()
RANDOM = Arithmetic(statistical=True)


def of(function, *arguments, arithmetic=WORST):
    return error_bound.value_and_error(function, *arguments, arithmetic=arithmetic)


def test_a_sum_is_off_by_units_of_its_sizes():
    x = jnp.array([1.0, -2.0, 4.0, -8.0])
    value, error = of(jnp.sum, x)
    assert value == -5.0 and value.dtype == np.float64
    assert error == 4 * U * 15.0


def test_rows_that_are_added_up_are_off_by_units_of_their_sizes():
    table, ids = jnp.zeros((3, 2)), jnp.array([2, 0, 2])
    terms = jnp.array([[1.0, -2.0], [3.0, 5.0], [4.0, -8.0]])
    _, pull = jax.vjp(lambda table: table[ids], table)
    value, (error,) = of(lambda x: pull(x), terms)
    np.testing.assert_array_equal(value[0], [[3, 5], [0, 0], [5, -10]])
    # The initial entry counts as a term, zero here.
    np.testing.assert_array_equal(error / U, [[2 * 3, 2 * 5], [0, 0], [3 * 5, 3 * 10]])


def test_a_product_passes_on_what_its_factors_have():
    x, y = jnp.float32(3.0), jnp.float32(5.0)
    for product in (lambda x, y: (x + y) * y, lambda x, y: y * (x + y)):
        _, error = of(product, x, y)
        assert error == pytest.approx(8 * U * 5 + U * 40, rel=1e-12)


def test_the_derivative_of_tanh_is_off_where_its_square_cancels():
    """jax 0.10 writes it as 1 - y^2, jax 0.11 as a primitive of its own."""
    x = jnp.float32(3.0)
    value, error = of(jax.grad(jnp.tanh), x)
    assert value == pytest.approx(np.cosh(3.0) ** -2, rel=1e-12)
    # tanh, 0.995, is off by 8 units, and its square by twice that, against a value of 0.01.
    assert 15 * U < error < 40 * U


def test_a_matrix_product_is_bounded_entry_by_entry():
    x, y = (jax.random.normal(jax.random.key(i), (7, 7)) for i in range(2))
    _, error = of(jnp.matmul, x, y)
    want = 7 * U * np.abs(np.float64(x)) @ np.abs(np.float64(y))
    np.testing.assert_allclose(error, want, rtol=1e-12)
    _, low = of(lambda x, y: (3.0 * x) @ y, x, y, arithmetic=Arithmetic(operand_unit=2.0**-8))
    assert np.all(low > 1e3 * error)


def test_exact_operands_are_not_rounded_again():
    # Inputs in bfloat16 are in bfloat16.
    x = jnp.ones((3, 3))
    full, low = (of(jnp.matmul, x, x, arithmetic=Arithmetic(operand_unit=u)) for u in (0, 1.0))
    np.testing.assert_array_equal(full[1], low[1])


def test_a_choice_in_doubt_counts_both_ways():
    # (1e8 + 1) - 1e8 is 0 or 8 in float32, by the order.
    def function(x):
        return jnp.where(jnp.sum(x) > 0.5, 10.0, -10.0), jnp.sum(x) > 0.5

    (value, above), (error, doubt) = of(function, jnp.array([1e8, 1.0, -1e8]))
    assert (value, above) == (10.0, True)
    assert (error, doubt) == (20.0, 1.0)
    (_, _), (error, doubt) = of(function, jnp.array([1.0, 1.0, -1.0]))
    assert (error, doubt) == (0.0, 0.0)


def test_ties_leave_the_largest_in_doubt():
    x = jnp.array([1.0, 2.0, 2.0])
    assert of(jnp.argmax, x)[1] == 0.0
    # The rounded number may have been another.
    assert of(lambda x: jnp.argmax(x * 0.1), x)[1] == np.inf
    assert of(lambda x: jnp.argmax(x * 0.1), x.at[2].set(1.9))[1] == 0.0


def test_places_of_the_largest_are_in_doubt_where_neighbours_may_change():
    x = jnp.array([4.0, 1.0, 3.0, 3.0, 2.0])

    def top(x):
        return jax.lax.top_k(x, 3)

    (values, places), (errors, doubts) = of(top, x)
    assert (values.tolist(), places.tolist()) == ([4.0, 3.0, 3.0], [0, 2, 3])
    assert errors.tolist() == doubts.tolist() == [0.0, 0.0, 0.0]
    (_, _), (errors, doubts) = of(lambda x: top(x * 0.1), x)
    assert doubts.tolist() == [0.0, np.inf, np.inf] and (errors > 0).all()
    # Third and fourth are near, the first two apart.
    (_, _), (_, doubts) = of(lambda x: top(x * 0.1), jnp.array([4.0, 3.0, 2.0, 2.0]))
    assert doubts.tolist() == [0.0, 0.0, np.inf]


def test_a_recurrence_forgets_its_errors_as_it_forgets_its_values():
    def run(x):
        return jax.lax.scan(lambda m, x: (0.5 * m + x, None), 0.0, x)[0]

    for length in (10, 1000):
        value, error = of(run, jnp.ones(length))
        assert value == pytest.approx(2.0, rel=1e-2)
        # Each step adds u |m / 2| + u |m|, and halves the error so far.
        assert error == pytest.approx(2 * U * (1 + 2), rel=1e-2)


def test_the_tail_of_erfc_is_off_by_what_its_exponent_is():
    x = jnp.linspace(-4.0, 9.0, 300)
    rounding.assert_within(jax.jit(lax.erfc)(x), rounding.expected(lax.erfc, x))


@pytest.mark.parametrize(
    "options", [{"lower": True}, {"trans": 1}, {"unit_diagonal": True}], ids=str
)
def test_rounding_of_a_triangular_solution_stays_within(options):
    key_a, key_b = jax.random.split(jax.random.key(0))
    a = jnp.eye(20)[None] + 0.3 * jax.random.normal(key_a, (3, 20, 20))
    b = jax.random.normal(key_b, (3, 20, 4))

    def function(a, b):
        # Neither is exact.
        return jax.scipy.linalg.solve_triangular(a * 1.1, b * 0.9, **options)

    exact = rounding.expected(function, a, b)
    wide_a, wide_b = np.float64(a) * np.float32(1.1), np.float64(b) * np.float32(0.9)
    for i in range(3):
        want = linalg.solve_triangular(wide_a[i], wide_b[i], **options)
        np.testing.assert_allclose(exact.values[i], want, rtol=1e-9, atol=1e-12)
    got = jax.jit(function)(a, b)
    rounding.assert_within(got, exact)
    off = error_bound.DEVIATIONS * (np.float64(got) - exact.values) / exact.bounds
    assert 0.05 < np.sqrt(np.mean(off**2)) < 1.0


def test_what_is_written_into_an_array_brings_its_error():
    def function(x, at):
        return (3.0 * x).at[at].set(x[at] * 0.1 + 1.0)

    _, error = of(function, jnp.array([1.0, 2.0, 4.0]), jnp.array([1]))
    np.testing.assert_allclose(error / U, [3.0, 0.2 + 1.2, 12.0], rtol=1e-6)


def test_a_primitive_without_a_rule_is_refused():
    with pytest.raises(NotImplementedError, match="cbrt"):
        of(jnp.cbrt, jnp.ones(3))


def attention(q, k, v):
    scores = jnp.einsum("BTH,BSH->BTS", q, k, precision="highest") / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    return jnp.einsum("BTS,BSH->BTH", jax.nn.softmax(scores), v, precision="highest")


def swapped(q, k, v):
    """The same, its sums the other way round and its softmax by another formula."""
    scores = jnp.einsum("BTH,BSH->BTS", q[..., ::-1], k[..., ::-1], precision="highest")
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    weight = jnp.exp2(scores * (q.shape[-1] ** -0.5 / np.log(2)))
    out = jnp.einsum("BTS,BSH->BTH", weight[..., ::-1], v[:, ::-1], precision="highest")
    return out / weight.sum(-1, keepdims=True)


def gradients(function, weight):
    return jax.jit(jax.grad(lambda *a: (weight * function(*a)).sum(), argnums=(0, 1, 2)))


@pytest.mark.parametrize("size", [0.3, 3.0])
def test_rounding_stays_within_and_near_its_standard_deviation(size):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weight = (jax.random.normal(key, (3, 50, 16)) for key in keys)
    arguments = (size * q, k, v)
    wanted = rounding.expected(gradients(attention, weight), *arguments)
    for function in (attention, swapped):
        got = gradients(function, weight)(*arguments)
        rounding.assert_within(got, wanted)
        for name, g, value, bound in zip("qkv", got, *wanted, strict=True):
            sigma = np.asarray(bound) / error_bound.DEVIATIONS
            off = (np.asarray(g, np.float64) - value)[sigma > 0] / sigma[sigma > 0]
            # Too large a bound would hide faults: it has the size of rounding errors.
            assert 0.05 < np.sqrt(np.mean(off**2)) < 1.0, name


def test_a_fault_of_a_hundred_thousandth_is_found():
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weight = (jax.random.normal(key, (3, 50, 16)) for key in keys)
    wanted = rounding.expected(gradients(attention, weight), q, k, v)

    def faulty(q, k, v):
        return attention(q * (1 + 1e-5), k, v)

    with pytest.raises(AssertionError):
        rounding.assert_within(gradients(faulty, weight)(q, k, v), wanted)


def test_the_worst_case_is_above_what_is_likely():
    q, k, v = (jax.random.normal(jax.random.key(i), (3, 50, 16)) for i in range(3))
    (value, worst), (same, likely) = (of(attention, q, k, v, arithmetic=a) for a in (WORST, RANDOM))
    np.testing.assert_array_equal(value, same)
    assert np.all(worst >= likely)


def test_a_nan_and_another_shape_are_no_agreement():
    result = cases.deviation("x", np.array([np.nan, 1.0]), np.ones(2), np.ones(2))
    assert result.share == np.inf and not result.ok
    with pytest.raises(ValueError, match="shapes"):
        cases.deviation("x", np.ones(3), np.ones(2), np.ones(2))


def test_a_masked_entry_whose_mask_is_in_doubt_may_be_the_largest():
    def function(x):
        # (1e8 + 1) - 1e8 is 0 or 8 in float32, by the order.
        masked = jnp.where(jnp.array([True, True, jnp.sum(x) > 2.0]), x, -jnp.inf)
        return jnp.max(masked), jnp.argmax(masked), jax.lax.top_k(masked, 1)[1]

    (largest, place, top), errors = of(function, jnp.array([1e8, 1.0, -1e8]))
    assert (largest, place, top.tolist()) == (1e8, 0, [0])
    assert [float(np.max(e)) for e in errors] == [np.inf] * 3
    _, errors = of(function, jnp.array([2.0, 1.0, 4.0]))
    assert [float(np.max(e)) for e in errors] == [0.0] * 3
