"""Theorems 4.1, 4.2, 4.4, Corollary 4.3 and Remark 4.5 as properties of random rows."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import special

from polyattn_jax.recipes.diagnostic import Status, required_degree, row_stats
from polyattn_jax.recipes.row_maps import relu_over_length
from tests.polyattn_jax import envelopes

seeds = st.integers(0, 2**31)


def row(seed, keys=12):
    """A float64 row whose scale and offset vary over orders of magnitude."""
    rng = np.random.default_rng(seed)
    scale, offset = 10 ** rng.uniform(-2, 2), rng.normal()
    return scale * (rng.standard_normal(rng.integers(2, keys + 1)) + offset)


def monotone(seed):
    """A random nondecreasing step-and-slope function with g(0) = 0 and g(r) > 0 for r > 0."""
    rng = np.random.default_rng(seed)
    knots, jumps = rng.uniform(0, 5, 4), rng.exponential(1, 4) * rng.integers(0, 2, 4)
    slope, power = rng.uniform(0.01, 2), rng.uniform(0.2, 6)
    return lambda r: (
        slope * np.asarray(r) ** power
        + sum(jump * (np.asarray(r) > knot) for jump, knot in zip(jumps, knots, strict=True))
    )


@given(seed=seeds, shift=st.floats(-20, 20), beta=st.floats(-3, 3))
def test_exponentials_are_invariant_to_a_shift_of_the_row(seed, shift, beta):
    z = beta * np.random.default_rng(seed).normal(size=6)
    before, after = np.exp(z), np.exp(z + beta * shift)
    np.testing.assert_allclose(before / before.sum(), after / after.sum(), rtol=1e-12)


@pytest.mark.parametrize("beta", [0.1, 1.0, -2.0])
def test_no_shift_counterexample_for_exponentials(beta):
    assert envelopes.shift_counterexample(lambda z: 3 * np.exp(beta * z)) is None


@pytest.mark.parametrize(
    "phi",
    [
        special.expit,
        lambda z: np.maximum(z, 0) ** 2,
        lambda z: np.maximum(z + 1, 0) ** 16,
        lambda z: 1 + z**2,
        lambda z: np.exp(z) + 0.01,
    ],
    ids=["sigmoid", "relu^2", "relu^16", "polynomial", "exp plus a constant"],
)
def test_a_shift_counterexample_is_found_for_every_other_map(phi):
    witness = envelopes.shift_counterexample(phi)
    z = np.array(witness.scores)
    before, after = phi(z), phi(z + witness.shift)
    moved = abs(after[0] / after.sum() - before[0] / before.sum())
    np.testing.assert_allclose(moved, witness.change)
    assert moved > 1e-3


@given(seed=seeds, bias=st.floats(-2, 2))
def test_margin_bound_holds_for_random_monotone_maps(seed, bias):
    z, g = row(seed), monotone(seed)
    stats = row_stats(z, bias=bias, row_map=lambda z, b: g(np.maximum(z + b, 0)))
    if stats.status == Status.ACTIVE:
        r_star = z.max() + bias
        active = (np.delete(z, z.argmax()) + bias > 0).sum()
        bound = envelopes.margin_envelope(g, r_star, stats.margin, active)
        assert stats.target_mass[0] >= bound * (1 - 1e-12)


@given(seed=seeds, extra=st.floats(0, 3))
def test_a_margin_of_r_star_or_more_gives_all_the_mass(seed, extra):
    g, r_star = monotone(seed), 1.5
    z = np.array([r_star, -extra, -2 * extra])
    stats = row_stats(z, row_map=lambda z, b: g(np.maximum(z + b, 0)))
    assert stats.margin >= r_star and stats.target_mass[0] == 1 and stats.relative_margin >= 1
    assert envelopes.margin_envelope(g, r_star, stats.margin, stats.active) == 1


@given(seed=seeds, bias=st.floats(-2, 2))
def test_relative_margin_law_is_a_lower_bound_and_the_special_case_of_the_theorem(seed, bias):
    degrees = (1, 2, 4, 16)
    stats = row_stats(row(seed), bias=bias, degrees=degrees)
    if stats.status == Status.ACTIVE:
        powers = np.array(degrees)
        bound = envelopes.polynomial_envelope(stats.active, stats.relative_margin, powers)
        assert (stats.target_mass >= bound * (1 - 1e-9)).all()
        general = [
            envelopes.margin_envelope(lambda r, p=p: r**p, stats.r_star, stats.margin, stats.active)
            for p in degrees
        ]
        np.testing.assert_allclose(bound, general, rtol=1e-6)


def test_relative_margin_law_is_attained_when_all_distractors_tie():
    z = np.array([4.0, 3.0, 3.0, 3.0])
    stats = row_stats(z, degrees=(2, 8))
    bound = envelopes.polynomial_envelope(3, 0.25, np.array([2, 8]))
    np.testing.assert_allclose(stats.target_mass, bound, rtol=1e-14)


@given(seed=seeds, bias=st.floats(-2, 2))
def test_required_degree_is_sufficient(seed, bias):
    z = row(seed)
    first = row_stats(z, bias=bias)
    p_star = float(required_degree(first.active, first.relative_margin))
    if first.status == Status.ACTIVE and first.active > 0 and p_star < 500:
        degrees = (max(p_star, 1e-6), p_star + 1.0)
        stats = row_stats(z, bias=bias, degrees=degrees)
        assert (stats.s_p <= 1 + 1e-9).all()
        assert stats.target_mass.min() >= 0.5 - 1e-9


def test_required_degree_is_necessary_in_the_worst_case():
    z = np.array([4.0] + [3.0] * 7)
    stats = row_stats(z)
    p_star = float(required_degree(stats.active, stats.relative_margin))
    below, at, above = row_stats(z, degrees=(0.99 * p_star, p_star, 1.01 * p_star)).s_p
    assert below > 1 > above
    np.testing.assert_allclose(at, 1, rtol=1e-12)


@given(seed=seeds, p=st.integers(1, 9))
def test_monomials_dominate_nonnegative_polynomials_of_their_degree(seed, p):
    rng = np.random.default_rng(seed)
    coefficients = rng.exponential(1, p + 1) * np.append(rng.integers(0, 2, p), 1)
    r = rng.uniform(0, 3, 8)

    def mixture(z, b):
        return np.polynomial.polynomial.polyval(np.maximum(z + b, 0), coefficients)

    s_phi = row_stats(r, row_map=mixture).s_p[0]
    s_p = row_stats(r, degrees=(p,)).s_p[0]
    assert s_phi >= s_p * (1 - 1e-12)


@given(seed=seeds, p=st.sampled_from([2, 4, 8, 16]), off_argmax=st.booleans())
def test_aligned_binary_recall_has_the_right_sign_exactly_where_s_p_is_below_one(
    seed, p, off_argmax
):
    z = row(seed)
    target = int(z.argmin() if off_argmax else z.argmax())
    stats = row_stats(z, degrees=(p,), target=target, bias=1.0)
    if stats.status == Status.ACTIVE:
        r = np.maximum(z + 1.0, 0)
        weight = (r / r.max()) ** p
        value = np.where(np.arange(len(z)) == target, 1, -1)
        output = (weight * value).sum() / weight.sum()
        if abs(output) > 1e-9:
            assert (output > 0) == (stats.s_p[0] < 1)


def softmax(z, b):
    return special.softmax(z)


def sigmoid(z, b):
    # the share of the row, formed in the log domain because s(z + b) may underflow
    return special.softmax(special.log_expit(z + b))


@given(seed=seeds, bias=st.floats(-5, 5))
def test_softmax_and_sigmoid_envelopes_are_lower_bounds_of_the_measured_mass(seed, bias):
    z = row(seed) / 10
    active = len(z) - 1
    of_softmax, of_sigmoid = (row_stats(z, bias=bias, row_map=phi) for phi in (softmax, sigmoid))
    bound = envelopes.softmax_envelope(active, of_softmax.margin)
    assert of_softmax.target_mass[0] >= bound * (1 - 1e-12)
    bound = envelopes.sigmoid_envelope(active, z.max() + bias, of_sigmoid.margin)
    assert of_sigmoid.target_mass[0] >= bound * (1 - 1e-12)


def test_envelopes_are_attained_by_tied_distractors():
    z = np.array([1.0, 0.25, 0.25, 0.25])
    mass = row_stats(z, row_map=softmax).target_mass[0]
    np.testing.assert_allclose(envelopes.softmax_envelope(3, 0.75), mass, rtol=1e-14)
    mass = row_stats(z, bias=-2, row_map=sigmoid).target_mass[0]
    np.testing.assert_allclose(envelopes.sigmoid_envelope(3, -1.0, 0.75), mass, rtol=1e-14)


def test_un_normalised_weight_depends_on_the_length():
    for length in (16, 64):
        weight = relu_over_length(2, 0.5)(np.full(length, 3.0))[0]
        want = envelopes.over_length_weight(3.0, 2, float(length), 0.5)
        # A square, a quotient, and a power by logarithm and exponential to four units each.
        np.testing.assert_allclose(weight, want, rtol=24 * 2**-24)
