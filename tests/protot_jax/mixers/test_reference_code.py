"""The released arithmetic in JAX equals its oracle, and differs from ours where expected."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels import prefix_mean
import lm_jax
from lm_jax.console.config_files import load_config
from lm_jax.errors import UsageError
from lm_jax.model.mixers import Layer
from lm_jax.model.sites import Scope
from lm_jax.run.config import from_plain
from protot_jax.mixers.reference_code import released_prefix_mean
from protot_jax.training import study_config
from protot_jax.training.config import PretrainConfig
from protot_jax.training.saved_run import model
from tests import rounding
from tests.kernels.released_prefix_mean import released
from tests.protot_jax.small_runs import settings

by_definition = functools.partial(prefix_mean, implementation="reference")


def _inputs(decays, T=160, B=2, E=3):
    rng = np.random.default_rng(0)
    R = len(decays)
    write, read = (rng.dirichlet(np.ones(R), (B, T)).astype(np.float32) for _ in range(2))
    value = rng.normal(size=(B, T, E)).astype(np.float32)
    return write, value, np.asarray(decays, np.float32), read


# Half-lives 0.3, 1, 6.6, 50: discount lost at once, mass lost within the sequence, neither.
@pytest.mark.parametrize("decay", [0.1, 0.5, 0.9, 0.986])
def test_it_is_the_oracle_in_one_product(decay):
    write, value, decay_R, read = _inputs([decay, decay])
    want = released(write, value, decay_R, read)
    inputs = tuple(map(jnp.asarray, (write, value, decay_R, read)))
    exact = rounding.expected(released_prefix_mean, *inputs)
    rounding.assert_within(released_prefix_mean(*inputs), exact)
    rounding.assert_within(want, exact)


def test_it_is_the_exact_mean_while_powers_are_above_its_epsilon():
    inputs = tuple(map(jnp.asarray, _inputs([0.9, 0.95], T=100)))
    exact, its = (rounding.expected(f, *inputs) for f in (by_definition, released_prefix_mean))
    rounding.assert_within(released_prefix_mean(*inputs), its)
    # At step 100 and decay 0.9 the epsilon is 4e-8 of the power, and so of a weight in the mean.
    largest = np.abs(inputs[1]).max()
    np.testing.assert_allclose(its.values, exact.values, rtol=0, atol=2 * 4e-8 * largest)


def test_without_the_mass_it_sums_as_the_exact_one():
    inputs = tuple(map(jnp.asarray, _inputs([0.9, 0.95], T=100)))
    unnormalised = functools.partial(released_prefix_mean, mass_normalisation=False)
    exact = rounding.expected(functools.partial(by_definition, mass_normalisation=False), *inputs)
    its = rounding.expected(unnormalised, *inputs)
    rounding.assert_within(unnormalised(*inputs), its)
    # At step 100 and decay 0.9 the epsilon is 4e-8 of the power, and so of a term; their weights
    # add up to at most 1 / (1 - 0.95).
    room = 4e-8 / 0.05 * np.abs(inputs[1]).max()
    np.testing.assert_allclose(its.values, exact.values, rtol=0, atol=room)


def test_the_no_mass_row_of_table_18_reads_the_released_moving_average():
    """Weights (1 - beta) beta^(i-1-j): of values of 1 and even gates nearly 1 after long."""
    table = from_plain(load_config("configs/protot/mass_and_rank.py"), study_config.StudyConfig)
    (variant,) = (v for v in table.variants if v.name == "no_mass_normalisation")
    own = study_config.changed(table.base, variant)
    cfg, mixer = model(dataclasses.replace(own, hidden_size=16, num_layers=3), 20)
    p = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)["blocks"]["mixer"]
    p = jax.tree.map(lambda x: x[2], p)
    E, R = p["out"].shape[0], mixer.num_prototypes
    T = 200
    # Every token writes 1 / R to every prototype a value of ones, and reads all alike.
    p |= {"prototypes": jnp.zeros_like(p["prototypes"]), "out": jnp.eye(E, 16)}
    p |= {"value": jnp.ones_like(p["value"]) / 16}
    text = Layer(
        positions_BT=jnp.zeros((1, T), jnp.int32),
        scope=Scope({}, {}),
        attend=lm_jax.softmax,
        index=2,
    )

    def apply(p):
        return mixer.apply(p, jnp.ones((1, T, 16)), cfg, text, None)[0][0, :, 0]

    exact = rounding.expected(apply, p)
    rounding.assert_within(apply(p), exact)
    # The logit of 0.9 is rounded: a unit of it moves 1 - 0.9 by as much of itself.
    want_T = (1 - 0.9 ** np.arange(T)) / R
    np.testing.assert_allclose(exact.values, want_T, rtol=8 * 2.0**-24)


def test_beyond_forty_half_lives_it_forgets_the_discount_and_then_everything():
    write, value, decay_R, read = map(jnp.asarray, _inputs([0.5, 0.5], T=160))
    ones = jnp.ones_like(value)
    inputs = write, ones, decay_R, read
    exact = rounding.expected(released_prefix_mean, *inputs)
    rounding.assert_within(released_prefix_mean(*inputs), exact)
    read_out = exact.values[0, :, 0]
    # The two shares of a read add up to 1 but for their rounding.
    np.testing.assert_allclose(read_out[1:40], 1.0, rtol=2.0**-23)
    # Mass 0.5 * 2^-i * sum 1e12 passes under 1e-6 near step 60.
    assert np.all(read_out[80:] < 0.05)
    ours = rounding.expected(by_definition, *inputs)
    np.testing.assert_allclose(ours.values[0, 1:, 0], 1.0, rtol=2.0**-23)
    rounding.assert_within(prefix_mean(*inputs), ours)


def test_its_gradients_are_finite_where_everything_is_forgotten():
    inputs = tuple(map(jnp.asarray, _inputs([0.1, 0.9])))
    grads = jax.grad(lambda *x: released_prefix_mean(*x).sum(), argnums=(0, 1, 2, 3))(*inputs)
    assert all(np.isfinite(np.asarray(grad)).all() for grad in grads)


def test_it_decodes_nothing(text):
    config = from_plain(settings(text, arithmetic="released"), PretrainConfig)
    _, mixer = model(config, 100)
    assert mixer.prefix is released_prefix_mean
    with pytest.raises(UsageError, match="exact prefix mean"):
        mixer.prefix(*map(jnp.asarray, _inputs([0.9])), initial_state=object())
