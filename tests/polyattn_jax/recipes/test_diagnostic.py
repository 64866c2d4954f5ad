"""S_p against exact rational arithmetic, the row types, and the criterion's decisions."""

from fractions import Fraction
import math

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from lm_jax.errors import UsageError
from polyattn_jax.recipes import diagnostic, row_maps
from polyattn_jax.recipes.diagnostic import Safety, Status, row_stats
from tests import rounding


def exact_s_p(z, b, p, *, target=None, cap=math.inf):
    """S_p of one float row without any rounding (integer p), or None where the row is dead."""
    z = [Fraction(float(x)) for x in z if x != -math.inf]
    r = [max(x + Fraction(float(b)), Fraction(0)) for x in z]
    r = r if cap == math.inf else [min(x, Fraction(cap)) for x in r]
    at = max(range(len(z)), key=z.__getitem__) if target is None else target
    if r[at] == 0:
        return None
    return sum((x / r[at]) ** p for j, x in enumerate(r) if j != at)


def rng_row(seed, n, scale, dtype=np.float32):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(dtype)


def _between(degree, keys):
    """Two sums of powers of the same scores, each within its proved bound."""
    return 2 * diagnostic.relative_error_bound(degree, keys)


def assert_close(got, want, rtol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), got, want)


ADVERSARIAL = {
    "ties": np.float32([3, 3, 3, 1, 0.5]),
    "one active key": np.float32([2, -1, -5, -0.25]),
    "one key": np.float32([0.7]),
    "near the threshold": np.float32([1e-6, 9.9e-7, -1e-7, 0.0]),
    "huge": np.float32([3e30, 2.9e30, 1e29, -3e30]),
    "tiny": np.float32([3e-30, 2.9e-30, 1e-31, -3e-30]),
    "huge and tiny": np.float32([1e30, 1e-30, 0.0, 5e29]),
    "long and flat": (1 + rng_row(0, 4096, 1e-3)).astype(np.float32),
    "long and spread": rng_row(1, 4096, 5.0),
}


@pytest.mark.parametrize("bias", [0.0, 0.3, -0.1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adversarial_rows_stay_inside_the_proved_bound(bias, dtype):
    bias = dtype(bias)
    padded = np.full((len(ADVERSARIAL), 4096), -np.inf, dtype)
    for row, z in zip(padded, ADVERSARIAL.values(), strict=True):
        row[: len(z)] = z
    # float32 runs in JAX, float64 in numpy without enable_x64.
    stats = row_stats(jnp.asarray(padded) if dtype is np.float32 else padded, bias=bias)
    assert stats.s_p.dtype == dtype
    for i, (name, z) in enumerate(ADVERSARIAL.items()):
        for column, p in enumerate((2, 4, 8, 16)):
            got, mass = float(stats.s_p[i, column]), float(stats.target_mass[i, column])
            want = exact_s_p(z, bias, p)
            if want is None:
                assert stats.status[i] == Status.DEAD and got == np.inf
                continue
            bound = diagnostic.relative_error_bound(p, len(z), dtype)
            # The bound excludes underflow: terms below the smallest normal number may vanish.
            assert abs(Fraction(got) - want) <= Fraction(bound) * want + Fraction(1e-37), (name, p)
            assert abs(Fraction(mass) * (1 + want) - 1) <= bound + 4 * np.finfo(dtype).eps


@given(
    row=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=24),
    bias=st.floats(-100, 100, width=32),
    p=st.integers(1, 20),
)
def test_any_row_stays_inside_the_proved_bound_and_is_never_misjudged(row, bias, p):
    z = np.float32(row)
    stats = row_stats(z, bias=np.float32(bias), degrees=(p,))
    want = exact_s_p(z, bias, p)
    if want is None or float(stats.r_star) < 1e-15:
        return
    bound = diagnostic.relative_error_bound(p, len(z))
    got = float(stats.s_p[0])
    assert abs(Fraction(got) - want) <= Fraction(bound) * want + Fraction(1e-15)
    safety = diagnostic.classify(stats.s_p, bound=bound)[0]
    assert safety != Safety.SAFE or want < 1
    assert safety != Safety.UNSAFE or want >= 1
    assert safety != Safety.UNDECIDED or abs(want - 1) <= 3 * bound


def test_the_bound_is_small_enough_to_decide_and_grows_with_row_and_degree():
    bound = diagnostic.relative_error_bound
    assert bound(2, 1024) < 7e-5 and bound(16, 4096) < 3e-4 and bound(16, 4096, np.float64) < 1e-12
    assert bound(2, 64) < bound(4, 64) < bound(4, 128)
    assert bound(2, 64, jnp.bfloat16) == bound(2, 64, np.float32)


@pytest.mark.parametrize("p", [0.5, 1.5, 2.7])
def test_real_degrees_stay_inside_the_proved_bound(p):
    z = rng_row(3, 300, 2.0)
    r = np.maximum(z.astype(np.longdouble), 0)
    want = ((r / r.max()) ** np.longdouble(p)).sum() - 1
    got = float(row_stats(jnp.asarray(z), degrees=(p,)).s_p[0])
    assert abs(got / want - 1) <= diagnostic.relative_error_bound(p, len(z))


def test_fields_of_a_row_worked_by_hand():
    stats = row_stats(np.array([1.0, 4.0, -3.0, 3.0]), bias=1.0, degrees=(1, 2))
    np.testing.assert_allclose(stats.s_p, [2 / 5 + 4 / 5, 4 / 25 + 16 / 25])
    np.testing.assert_allclose(stats.target_mass, [5 / 11, 5 / 9])
    assert (stats.margin, stats.relative_margin, stats.active) == (1.0, 0.2, 2)
    assert (stats.argmax, stats.status, stats.r_star) == (1, Status.ACTIVE, 5.0)


def test_row_types():
    inf, nan = np.inf, np.nan
    scores = np.array(
        [
            [1.0, 0.5, -2.0],
            [-1.0, -0.5, -2.0],
            [0.0, 0.0, 0.0],
            [9.0, 0.5, -2.0],
            [5.0, 0.5, -2.0],
            [1.0, nan, -2.0],
            [1.0, inf, -2.0],
            [-inf, -inf, -inf],
            [-inf, 3.0, -inf],
        ],
        np.float32,
    )
    want = ["ACTIVE", "DEAD", "DEAD", "SATURATED", "SATURATED"]
    want += ["INVALID", "INVALID", "EMPTY", "ACTIVE"]
    for array in (scores, jnp.asarray(scores)):
        stats = row_stats(array, cap=5.0)
        assert [Status(int(s)).name for s in stats.status] == want
        assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(stats))
        idle = ~np.isin(stats.status, (Status.ACTIVE, Status.SATURATED))
        assert np.isinf(stats.s_p[idle]).all() and not np.any(stats.target_mass[idle])
        assert not np.any(stats.active[idle]) and not np.any(stats.relative_margin[idle])
        np.testing.assert_array_equal(stats.argmax[-4:], [-1, -1, -1, 1])
        np.testing.assert_array_equal(stats.s_p[-1], 0.0)


def test_saturated_rows_use_the_clipped_score():
    stats = row_stats(np.array([9.0, 2.0]), cap=4.0, degrees=(2,))
    assert stats.s_p[0] == 0.25 and stats.r_star == 4.0
    assert stats.relative_margin == 7 / 9


@given(seed=st.integers(0, 2**31), bias=st.floats(-3, 3), target=st.integers(0, 11))
def test_answer_key_target_matches_the_oracle(seed, bias, target):
    z = rng_row(seed, 12, 2.0, np.float64)
    stats = row_stats(z, bias=bias, degrees=(2, 16), target=target)
    for column, p in enumerate((2, 16)):
        want = exact_s_p(z, bias, p, target=target)
        if want is None:
            assert stats.status == Status.DEAD
        else:
            np.testing.assert_allclose(stats.s_p[column], float(want), rtol=1e-12)
    assert stats.margin == z[target] - np.delete(z, target).max()
    assert stats.argmax == z.argmax()


def test_answer_key_far_below_the_argmax_overflows_to_inf_and_never_to_nan():
    scores = jnp.float32([[1e30, 1e-30, -1.0], [1e4, 1.0, 2.0]])
    stats = row_stats(scores, target=jnp.array([1, 1]))
    assert np.isinf(stats.s_p[0]).all() and np.isinf(stats.s_p[1, 3])
    np.testing.assert_array_equal(stats.status, Status.ACTIVE)
    np.testing.assert_array_equal(stats.target_mass[0], 0)


def test_a_target_outside_the_row_is_invalid_and_a_masked_one_dead():
    scores = np.float32([[1, 2, -np.inf]] * 4)
    stats = row_stats(scores, target=np.array([-1, 3, 2, 0]))
    want = [Status.INVALID, Status.INVALID, Status.DEAD, Status.ACTIVE]
    np.testing.assert_array_equal(stats.status, want)


@pytest.mark.parametrize("row_map", [None, row_maps.sigmoid])
def test_masked_keys_change_nothing(row_map):
    z = rng_row(5, 3 * 10, 3.0).reshape(3, 10)
    kept = np.array([0, 2, 3, 7, 9])
    mask = np.isin(np.arange(10), kept)
    want = row_stats(jnp.asarray(z[:, kept]), row_map=row_map, bias=0.2)
    poisoned = np.where(mask, z, np.float32(np.nan))
    for scores, given_mask in ((np.where(mask, z, -np.inf), None), (poisoned, jnp.asarray(mask))):
        got = row_stats(jnp.asarray(scores), mask=given_mask, row_map=row_map, bias=0.2)
        np.testing.assert_array_equal(kept[want.argmax], got.argmax)
        assert_close(got._replace(argmax=want.argmax), want, rtol=_between(16, 10))


def test_jit_vmap_scan_and_traced_bias_agree_with_numpy():
    z = rng_row(6, 2 * 3 * 4 * 7, 2.0).reshape(2, 3, 4, 7)
    bias = np.float32([0.0, 0.5, -0.5]).reshape(3, 1, 1)
    want = row_stats(z, bias=bias)
    reduced = jax.jit(lambda x, b: row_stats(x, bias=b))
    by_scan = jax.lax.scan(lambda c, x: (c, row_stats(x, bias=bias)), None, jnp.asarray(z))[1]
    mapped = jax.vmap(lambda x, b: row_stats(x, bias=b), in_axes=(1, 0), out_axes=1)
    for got in (reduced(z, bias), by_scan, mapped(jnp.asarray(z), jnp.asarray(bias[:, 0, 0]))):
        assert_close(got, want, rtol=_between(16, 7))
    reduced(z, 2 * bias)
    assert reduced._cache_size() == 1


def test_no_intermediate_is_larger_than_the_scores():
    scores = jnp.zeros((5, 64))
    jaxpr = jax.make_jaxpr(lambda x: row_stats(x, degrees=(1, 2, 3, 4, 5, 6, 7, 8)))(scores)
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    assert max(sizes) == scores.size


@given(
    row=st.lists(st.floats(-1e8, 1e8, width=32), min_size=2, max_size=10),
    bias=st.floats(-1e8, 1e8, width=32),
)
def test_relative_margin_reaches_one_exactly_where_no_distractor_is_active(row, bias):
    stats = row_stats(np.float32(row), bias=np.float32(bias))
    if stats.status == Status.ACTIVE:
        assert (stats.relative_margin < 1) == (stats.active > 0)
        assert stats.relative_margin >= 0


def test_relative_margin_below_one_survives_rounding():
    # (z_* - z_j) and u_* round to the same float32 although the distractor is active.
    stats = row_stats(jnp.float32([1e8, 1e-3]))
    assert stats.active == 1 and stats.relative_margin < 1


@pytest.mark.parametrize("bias", [0.0, 2.5, -40.0, -1e4])
def test_s_sigma_matches_a_float64_oracle(bias):
    z = rng_row(7, 200, 4.0)
    stats = row_stats(jnp.asarray(z), row_map=row_maps.sigmoid, bias=bias)
    logs = special.log_expit(z.astype(np.float64) + bias)
    want = np.exp(np.delete(logs - logs.max(), z.argmax())).sum()
    # The shift rounds the scores: at b = -1e4 to steps of 2^-10.
    wanted = rounding.expected(lambda z: row_stats(z, row_map=row_maps.sigmoid, bias=bias).s_p, z)
    rounding.assert_within(stats.s_p, wanted._replace(values=np.array([want])))
    assert stats.active == 199 and stats.status == Status.ACTIVE


def test_s_phi_of_the_power_map_is_s_p():
    z = jnp.asarray(rng_row(8, 50, 2.0))
    want = row_stats(z, bias=0.5, degrees=(4,))
    got = row_stats(z, bias=0.5, row_map=row_maps.relu_power(4))
    np.testing.assert_allclose(got.s_p, want.s_p, rtol=_between(4, 50))
    assert (got.active, got.status) == (want.active, want.status)


@pytest.mark.parametrize("keys", [2, 5, 300, 4096])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 8.0])
def test_s_of_softmax_stays_inside_its_proved_bound(keys, scale):
    z = rng_row(9, 64 * keys, scale).reshape(64, keys)
    # As many rows near the boundary: rivals shifted until they weigh as much as the target.
    rivals = special.logsumexp(np.sort(z.astype(np.float64))[:, :-1], axis=-1)
    near = np.sort(z)
    near[:, -1] = rivals
    z = np.concatenate([z, near])
    got = np.asarray(row_stats(jnp.asarray(z), row_map=row_maps.softmax).s_p[:, 0], np.float64)
    exact = z.astype(np.float64)
    top = exact.max(-1, keepdims=True)
    order = np.sort(exact - top)[:, :-1]
    want = np.exp(order).sum(-1)
    bound = diagnostic.softmax_error_bound(keys)
    read = want >= 0.5
    assert read.sum() >= 64 and bound < 3e-4
    assert (np.abs(got[read] / want[read] - 1) <= bound).all()
    safety = diagnostic.classify(np.float32(got), bound=bound)
    assert not np.any((safety == Safety.SAFE) & (want >= 1))
    assert not np.any((safety == Safety.UNSAFE) & (want < 1))


def test_ties_are_a_type_of_their_own_and_the_tolerance_makes_them_safe():
    stats = row_stats(np.float32([[2, 2, -1], [2, 1.9, -1], [2, 2, 2]]), degrees=(2,))
    s_2 = stats.s_p[:, 0]
    want = [Safety.TIE, Safety.SAFE, Safety.UNSAFE]
    np.testing.assert_array_equal(diagnostic.classify(s_2), want)
    tolerant = diagnostic.classify(s_2, epsilon=1e-6)
    np.testing.assert_array_equal(tolerant, [Safety.SAFE, Safety.SAFE, Safety.UNSAFE])


def test_rows_within_the_bound_are_undecided():
    s_p = jnp.float32([0.9, 0.9995, 1.0, 1.0005, 1.1, np.inf])
    got = diagnostic.classify(s_p, bound=1e-3)
    want = ["SAFE", "UNDECIDED", "TIE", "UNDECIDED", "UNSAFE", "UNSAFE"]
    assert [Safety(int(s)).name for s in got] == want


def test_required_degree_corner_cases_and_closed_form():
    active = np.array([0, 0, 1, 1, 5, 5, 8, 3])
    rho = np.array([0.2, np.inf, 0.0, 0.3, 0.0, -0.1, 0.5, 0.999])
    want = [0, 0, 0, 0, np.inf, np.inf, 3.0, math.log(3) / math.log(1000)]
    np.testing.assert_allclose(diagnostic.required_degree(active, rho), want, rtol=1e-12)
    assert diagnostic.required_degree(1, -0.1) == np.inf
    clipped = diagnostic.required_degree(active, rho, clip=0.99)
    np.testing.assert_allclose(clipped[-1], math.log(3) / math.log(100))
    np.testing.assert_allclose(clipped[:-1], want[:-1])
    wanted = rounding.expected(diagnostic.required_degree, active, jnp.float32(rho))
    rounding.assert_within(jax.jit(diagnostic.required_degree)(active, jnp.float32(rho)), wanted)
    # 0.999 is the only one that float32 moves by much: 1 - rho by half a unit of 1.
    np.testing.assert_allclose(wanted.values, want, rtol=2**-25 / 0.001)


def test_approximate_degree_is_conservative_and_meets_the_exact_one_at_small_margins():
    rho = np.geomspace(1e-6, 0.99, 50)
    exact = diagnostic.required_degree(100, rho)
    approximate = diagnostic.approximate_required_degree(100, rho)
    assert (approximate >= exact).all()
    np.testing.assert_allclose(approximate[0], exact[0], rtol=1e-6)


@pytest.mark.parametrize("degrees", [(), (0,), (2, -1), (math.nan,), (math.inf,)])
def test_impossible_degrees_are_refused(degrees):
    with pytest.raises(UsageError, match="degrees"):
        row_stats(np.ones(3), degrees=degrees)


@pytest.mark.parametrize("shape", [(), (2, 0)])
def test_scores_without_keys_are_refused(shape):
    with pytest.raises(UsageError, match="last axis must be keys"):
        row_stats(np.ones(shape))


@pytest.mark.parametrize("jitted", [False, True])
def test_an_exact_tie_has_s_p_one_whatever_its_value(jitted):
    # XLA may turn the quotient into a product with the reciprocal, which misses 1 for many values.
    values = np.arange(1, 200, dtype=np.float32)
    scores = jnp.stack([jnp.asarray(values), jnp.asarray(values), jnp.full(199, -500.0)], -1)
    run = jax.jit(row_stats) if jitted else row_stats
    stats = run(scores, bias=7.0)
    np.testing.assert_array_equal(stats.s_p, np.ones((199, 4)))
    np.testing.assert_array_equal(diagnostic.classify(np.asarray(stats.s_p)), int(Safety.TIE))
