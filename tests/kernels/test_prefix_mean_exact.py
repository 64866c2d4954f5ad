"""`prefix_mean` where it could go wrong: long sequences, extreme decays and gates, empty pasts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels import prefix_mean
from iaj_kernels.prefix_mean.state import MASS_FLOOR, State
from iaj_kernels.rounding import error_bound
from tests import rounding
from tests.kernels import prefix_mean_oracle as oracle

IMPLEMENTATIONS = ("reference", "xla")


def _inputs(B, T, R, E, half_lives=(0.1, 10_000.0), scale=2.0, seed=0):
    """Gates from logits of `scale`, half-lives even in their logarithm; all float32."""
    keys = jax.random.split(jax.random.key(seed), 3)
    half_life_R = jnp.geomspace(*half_lives, R)
    return (
        jax.nn.softmax(scale * jax.random.normal(keys[0], (B, T, R))),
        jax.random.normal(keys[1], (B, T, E)),
        jnp.exp2(-1.0 / half_life_R),
        jax.nn.softmax(scale * jax.random.normal(keys[2], (B, T, R))),
    )


def _float64(arrays):
    return [np.asarray(array, np.float64) for array in arrays]


@functools.partial(jax.jit, static_argnames=("implementation",))
def _run(arrays, implementation):
    return prefix_mean(*arrays, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("implementation",))
def _gradients(arrays, cotangent, implementation):
    def run(*arrays):
        return prefix_mean(*arrays, implementation=implementation)

    return jax.vjp(run, *arrays)[1](cotangent)


def _filtered(arrays):
    """The filters' output, with the bounds of the recurrence."""
    wide = _float64(arrays)
    deviations = error_bound.DEVIATIONS * oracle.filtered_rounding(*wide)
    return rounding.Expected(oracle.filtered(*wide), deviations)


@pytest.mark.parametrize("half_lives", [(0.1, 10_000.0), (0.14, 200.0)], ids=str)
def test_the_rounding_of_the_filters_is_that_of_the_recurrence(half_lives):
    arrays = _inputs(2, 200, 3, 4, half_lives)
    run = functools.partial(prefix_mean, implementation="reference")
    values, bounds = rounding.expected(run, *arrays)
    filtered = _filtered(arrays)
    np.testing.assert_allclose(filtered.values, values, rtol=1e-10, atol=1e-14)
    # The analysis adds the least number of float32 to each error.
    np.testing.assert_allclose(filtered.bounds, bounds, rtol=1e-6)


def test_8192_steps_to_1e_minus_5():
    """The half-lives that the paper finds, 0.14 to 200."""
    arrays = _inputs(1, 8192, 8, 4, half_lives=(0.14, 200.0))
    wanted = _filtered(arrays)
    assert wanted.bounds.max() < 1e-5 * np.abs(wanted.values).max()
    for implementation in IMPLEMENTATIONS:
        rounding.assert_within(_run(arrays, implementation), wanted, implementation)


@pytest.mark.parametrize("r", [0, 4, 7])
def test_131072_steps_for_half_lives_of_a_tenth_to_ten_thousand(r):
    """Each prototype by itself, so that a long memory is not hidden behind a short one."""
    write, value, decay, _ = _inputs(1, 131_072, 8, 4)
    write = write[:, :, r, None]
    arrays = (write, value, decay[r, None], jnp.ones_like(write))
    wanted = _filtered(arrays)
    for implementation in IMPLEMENTATIONS:
        rounding.assert_within(_run(arrays, implementation), wanted, implementation)


def _quadratic(*arrays):
    """The output by the formula, of the logarithms of the gates."""
    return oracle.quadratic_of_logarithms(*arrays)["out"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_position_zero_reads_exactly_zero(implementation):
    assert not np.asarray(_run(_inputs(2, 40, 4, 3), implementation))[:, 0].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_output_depends_on_the_strict_past_alone(implementation):
    """By gradient: that of output i is zero for writes and values from i on, and not before."""
    write, value, decay, read = _inputs(1, 40, 4, 3, half_lives=(5.0, 50.0))

    @jax.jit
    def jacobians(write, value):
        def run(write, value):
            out = prefix_mean(write, value, decay, read, implementation=implementation)
            return out[0].sum(-1)

        return jax.jacrev(run, argnums=(0, 1))(write, value)

    future_TT = np.arange(40)[None] >= np.arange(40)[:, None]
    for jacobian in jacobians(write, value):
        moved_TT = np.abs(np.asarray(jacobian)[:, 0]).max(-1)
        assert not moved_TT[future_TT].any()
        # A lone first write is the mean for any size, so only values count at output 1.
        assert (moved_TT[2:] > 0).sum() == (~future_TT[2:]).sum()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_prototype_that_nothing_was_written_to_reads_zero(implementation):
    write, value, decay, read = _inputs(1, 40, 4, 3)
    write = write.at[:, :, 1].set(0.0).at[:, :25, 2].set(0.0)
    only = jnp.zeros_like(read)
    for r, silent in ((1, 40), (2, 26)):
        out = _run((write, value, decay, only.at[:, :, r].set(1.0)), implementation)
        assert not np.asarray(out)[:, :silent].any()
        assert np.asarray(out)[:, silent:].all()
    none = (jnp.zeros_like(write), value, decay, read)
    assert not np.asarray(_run(none, implementation)).any()
    for gradient in _gradients(none, jnp.ones_like(value), implementation):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_mass_below_the_floor_reads_zero(implementation):
    """One write, then silence, at a half-life of half a step: the mass is 4^-i after i steps."""
    T, value = 80, jnp.ones((1, 80, 2))
    write = jnp.zeros((1, T, 1)).at[0, 0, 0].set(1.0)
    decay, read = jnp.array([0.25]), jnp.ones((1, T, 1))
    out = np.asarray(_run((write, value, decay, read), implementation))[0, :, 0]
    last = int(np.log(MASS_FLOOR) / np.log(0.25))
    # Powers of 4 are exact, and one is divided by itself, maybe as a reciprocal and a product.
    np.testing.assert_allclose(out[1 : last + 1], 1.0, rtol=2 * 2**-24)
    assert not out[last + 1 :].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_finite_around_the_floor(implementation):
    """One-hot gates and half-lives of a tenth: masses of every size between 1 and nothing."""
    write, value, decay, read = _inputs(2, 90, 8, 16, half_lives=(0.1, 2.0))
    write = jax.nn.one_hot(write.argmax(-1), 8)
    cotangent = 10.0 * jax.random.normal(jax.random.key(1), value.shape)
    for gradient in _gradients((write, value, decay, read), cotangent, implementation):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gates_may_be_zero(implementation):
    """In the first steps, in a prototype throughout, everywhere."""
    write, value, decay, read = _inputs(1, 40, 4, 3)
    write = write.at[:, :20, 0].set(0.0).at[:, :, 1].set(0.0)
    cotangent = jax.random.normal(jax.random.key(1), value.shape)
    for gates in (write, jnp.zeros_like(write)):
        arrays = (jnp.log(gates), value, decay, read)
        run = functools.partial(_run, implementation=implementation)
        rounding.assert_within(run((gates, *arrays[1:])), rounding.expected(_quadratic, *arrays))
        wanted = rounding.expected(lambda *a: jax.vjp(_quadratic, *a)[1](cotangent), *arrays)
        d_gates, *others = _gradients((gates, *arrays[1:]), cotangent, implementation)
        rounding.assert_within((gates * d_gates, *others), wanted)


def test_bfloat16_keeps_float32_masses_and_states():
    """The rounding of the inputs is all there is: the state equals that of the rounded inputs."""
    arrays = _inputs(1, 2048, 8, 16, half_lives=(1.0, 10_000.0))
    low = [x.astype(jnp.bfloat16) if x.ndim == 3 else x for x in arrays]
    wide = [x.astype(jnp.float32) for x in low]

    @jax.jit
    def run(arrays):
        return prefix_mean(*arrays, return_state=True, implementation="xla")

    (low_out, low_state), (wide_out, wide_state) = run(low), run(wide)
    assert low_out.dtype == jnp.bfloat16 and low_state.total_BRE.dtype == jnp.float32
    np.testing.assert_array_equal(low_out, wide_out.astype(jnp.bfloat16))
    for a, b in zip(low_state, wide_state, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_state_alone_carries_a_gradient_to_every_input(implementation):
    """A cotangent for the returned state and none for the output, as a later device sends it."""
    arrays = _inputs(1, 21, 4, 3, half_lives=(1.0, 100.0))
    before = State(jnp.ones((1, 4, 3)), jnp.full((1, 4), 2.0))

    def gradients(implementation, *inputs):
        def state_after(arrays, before):
            return prefix_mean(
                *arrays, initial_state=before, return_state=True, implementation=implementation
            )[1]

        return jax.vjp(state_after, *inputs)[1](cotangent)

    cotangent = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.ndim), x.shape), before)
    d_arrays, d_before = jax.jit(gradients, static_argnums=0)(implementation, arrays, before)
    _, bounds = rounding.expected(functools.partial(gradients, "reference"), arrays, before)
    kept_R = np.asarray(arrays[2], np.float64) ** 21
    want = kept_R[None] * np.asarray(cotangent.mass_BR)
    rounding.assert_within(d_before.mass_BR, rounding.Expected(want, bounds[1].mass_BR))
    assert not np.asarray(d_arrays[3]).any()
    left_T = np.arange(21, 0, -1)
    kept_TR = np.asarray(arrays[2], np.float64)[None] ** left_T[:, None]
    want = kept_TR[None] * (
        np.einsum("BTE,BRE->BTR", *_float64((arrays[1], cotangent.total_BRE)))
        + np.asarray(cotangent.mass_BR)[:, None]
    )
    rounding.assert_within(d_arrays[0], rounding.Expected(want, bounds[0][0]))
