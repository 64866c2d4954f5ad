"""The arithmetic of one chunk of `prefix_mean`, against sums over all pairs of steps in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.prefix_mean import tile
from iaj_kernels.prefix_mean.state import log_of_decay
from tests import rounding

C, R, E = 16, 5, 8
# No decay, a slow and a fast one, and two whose powers leave the range of float32 at once.
DECAY = np.array([1.0, 0.999, 0.5, 1e-3, 2.0**-80], np.float32)


def _log2_decay() -> jax.Array:
    return log_of_decay(jnp.asarray(DECAY))[None] / np.log(2.0)


@functools.cache
def _powers() -> tile.Decays:
    return tile.decays(C, _log2_decay())


def _inputs(length: int = C) -> dict[str, jax.Array]:
    """Arrays of one chunk and cotangents of its results; zeros from `length` on."""
    draw = np.random.default_rng(0)
    real = (np.arange(C) < length)[:, None]
    arrays = {
        "write": draw.uniform(0.05, 1.0, (C, R)) * real,
        "read": draw.uniform(0.05, 1.0, (C, R)) * real,
        "value": draw.normal(size=(C, E)) * real,
        "total": draw.normal(size=(R, E)),
        "mass": draw.uniform(0.5, 2.0, (1, R)),
        "d_out": draw.normal(size=(C, E)) * real,
        "d_total": draw.normal(size=(R, E)),
        "d_mass": draw.normal(size=(1, R)),
    }
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}


def _power(steps: np.ndarray, decay_R: jax.Array) -> jax.Array:
    """beta to the power of numbers of steps: `[..., R]`."""
    steps = np.float32(steps)[..., None]
    return jnp.exp(steps * jnp.log(decay_R).reshape((1,) * (steps.ndim - 1) + (-1,)))


def _pair_powers(decay_R: jax.Array) -> jax.Array:
    """beta^(i-j) for j < i, else 0: `[C, C, R]`."""
    apart = np.arange(C)[:, None] - np.arange(C)[None]
    return jnp.where(apart[..., None] > 0, _power(np.maximum(apart, 0), decay_R), 0.0)


def test_levels_cover_every_pair_once_with_factors_of_at_most_one():
    covered = np.zeros((C, C, R))
    for half, since_CR, until_CR in _powers().levels:
        for factor in (since_CR, until_CR):
            assert float(factor.min()) >= 0.0 and float(factor.max()) <= 1.0
        together = np.arange(C)[:, None] // (2 * half) == np.arange(C)[None] // (2 * half)
        pairs = np.float64(since_CR)[:, None] * np.float64(until_CR)[None]
        covered += together[..., None] * pairs
    rounding.assert_within(covered, rounding.expected(_pair_powers, DECAY))


def test_past_mass_is_the_discounted_sum_of_writes():
    x = _inputs()
    got = tile.past_mass(_powers(), x["write"], x["mass"])

    def formula(decay, write, mass):
        of_writes = jnp.einsum("ijr,jr->ir", _pair_powers(decay), write)
        return of_writes + _power(np.arange(C), decay) * mass

    rounding.assert_within(got, rounding.expected(formula, DECAY, x["write"], x["mass"]))


@pytest.mark.parametrize("mass", [0.0, 1e-38, 1e-37])
def test_a_past_without_mass_reads_zero(mass):
    assert float(tile.per_mass(jnp.full((1, 1), mass))[0, 0]) == 0.0


def test_mixing_is_strictly_causal_and_exact():
    x = _inputs()
    got = tile.mixing(_powers(), x["read"], x["write"], jnp.float32)

    def formula(decay, read, write):
        return jnp.einsum("ir,ijr,jr->ij", read, _pair_powers(decay), write)

    rounding.assert_within(got, rounding.expected(formula, DECAY, x["read"], x["write"]))
    assert not np.asarray(got)[np.triu_indices(C)].any()


def _formula(write, value, decay, read, total, mass, length: int, normalise: bool):
    """The results of a chunk, from the powers of every pair of steps."""
    pair, start = _pair_powers(decay), _power(np.arange(C), decay)
    past_total = jnp.einsum("ijr,jr,je->ire", pair, write, value) + start[..., None] * total[None]
    past_mass = jnp.einsum("ijr,jr->ir", pair, write) + start * mass
    memory = past_total / past_mass[..., None] if normalise else past_total
    end = _power(np.maximum(length - np.arange(C), 0), decay)
    kept = _power(np.array([length]), decay)
    return {
        "out": jnp.einsum("ir,ire->ie", read, memory),
        "total": kept.T * total + jnp.einsum("jr,je->re", write * end, value),
        "mass": kept * mass + (write * end).sum(0, keepdims=True),
    }


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("length", [C, 11])
def test_outputs_and_gradients_equal_the_pairwise_formula(length, normalise):
    x = _inputs(length)

    def formula(x, decay):
        names = ("write", "value", "read", "total", "mass")
        results, pull = jax.vjp(
            lambda decay, x: _formula(**x, decay=decay, length=length, normalise=normalise),
            decay,
            {name: x[name] for name in names},
        )
        d_decay, d_x = pull({name: x[f"d_{name}"] for name in results})
        start = (d_x["total"] * x["total"]).sum(1) + d_x["mass"][0] * x["mass"][0]
        d_x = {name: d if name in ("total", "mass") else d[:length] for name, d in d_x.items()}
        return results, d_x | {"log_decay": (decay * d_decay)[None], "flux": start[None]}

    wanted, d_wanted = (
        rounding.Expected(*each) for each in zip(*rounding.expected(formula, x, DECAY), strict=True)
    )
    until_end = tile.until_end(C, _log2_decay(), length)
    kept = jnp.exp2(length * _log2_decay())
    per_mass = jnp.ones((C, R))
    if normalise:
        per_mass = tile.per_mass(tile.past_mass(_powers(), x["write"], x["mass"]))
    scaled = x["read"] * per_mass
    total, mass = tile.advance(until_end, x["write"], x["value"])
    results = {
        "out": tile.output(_powers(), scaled, x["write"], x["value"], x["total"]),
        "total": kept.T * x["total"] + total,
        "mass": kept * x["mass"] + mass,
    }
    rounding.assert_within(results, wanted)

    d_read = tile.read_gradient(_powers(), x["write"], x["value"], x["d_out"], x["total"], per_mass)
    pull = scaled * d_read if normalise else None
    ends = x["d_total"], x["d_mass"]
    d_write = tile.write_gradient(_powers(), until_end, scaled, pull, x["value"], x["d_out"], *ends)
    d_value = tile.value_gradient(
        _powers(), until_end, scaled, x["write"], x["d_out"], x["d_total"]
    )
    d_total, d_mass = tile.retreat(_powers(), scaled, pull, x["d_out"])
    flux = jnp.sum(x["d_total"] * results["total"], axis=1)[None] + x["d_mass"] * results["mass"]
    lost = x["write"] * d_write - (0.0 if normalise else x["read"] * d_read)
    d_log_decay, flux_at_start = tile.flux_gradient(flux, lost, length)
    d_results = {
        "read": d_read[:length],
        "write": d_write[:length],
        "value": d_value[:length],
        "total": kept.T * x["d_total"] + d_total,
        "mass": kept * x["d_mass"] + d_mass,
        "log_decay": d_log_decay,
        "flux": flux_at_start,
    }
    rounding.assert_within(d_results, d_wanted)


def test_wide_products_of_bfloat16_keep_sixteen_bits():
    draw = np.random.default_rng(1)
    a, b = (jnp.asarray(draw.normal(size=(64, 64)), jnp.float32) for _ in range(2))
    want = np.float64(a) @ np.float64(b)
    scale = np.abs(np.float64(a)) @ np.abs(np.float64(b))
    rounded, wide = (
        np.abs(np.float64(dot(a, b, jnp.bfloat16)) - want).max() / scale.max()
        for dot in (tile._dot, tile._wide_dot)
    )
    assert wide < 2.0**-16 < 2.0**-12 < rounded
