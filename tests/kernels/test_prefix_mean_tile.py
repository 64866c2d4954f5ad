"""The arithmetic of one chunk of `prefix_mean`, against sums over all pairs of steps in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.prefix_mean import tile
from kernels.prefix_mean.state import log_of_decay

C, R, E = 16, 5, 8
# No decay at all, a slow and a fast one, and two whose powers leave the range of float32 at once.
DECAY = np.array([1.0, 0.999, 0.5, 1e-3, 2.0**-80], np.float32)
LOG2_DECAY = log_of_decay(jnp.asarray(DECAY))[None] / np.log(2.0)
POWERS = tile.decays(C, LOG2_DECAY)


def _inputs(length: int = C) -> dict[str, np.ndarray]:
    """Float64 arrays of one chunk and cotangents of what it yields; zeros from `length` on."""
    draw = np.random.default_rng(0)
    real = (np.arange(C) < length)[:, None]
    return {
        "write": draw.uniform(0.05, 1.0, (C, R)) * real,
        "read": draw.uniform(0.05, 1.0, (C, R)) * real,
        "value": draw.normal(size=(C, E)) * real,
        "total": draw.normal(size=(R, E)),
        "mass": draw.uniform(0.5, 2.0, (1, R)),
        "d_out": draw.normal(size=(C, E)) * real,
        "d_total": draw.normal(size=(R, E)),
        "d_mass": draw.normal(size=(1, R)),
    }


def _single(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}


def _pair_powers() -> np.ndarray:
    """beta^(i-j) for j < i, else 0: `[C, C, R]`."""
    apart = np.arange(C)[:, None] - np.arange(C)[None]
    return np.where(apart[..., None] > 0, np.float64(DECAY) ** np.maximum(apart, 0)[..., None], 0.0)


def _close(got, want, bound: float = 2e-6) -> None:
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error <= bound * np.abs(want).max(), error


def test_levels_cover_every_pair_once_with_factors_of_at_most_one():
    covered = np.zeros((C, C, R))
    for half, since_CR, until_CR in POWERS.levels:
        for factor in (since_CR, until_CR):
            assert float(factor.min()) >= 0.0 and float(factor.max()) <= 1.0
        together = np.arange(C)[:, None] // (2 * half) == np.arange(C)[None] // (2 * half)
        pairs = np.float64(since_CR)[:, None] * np.float64(until_CR)[None]
        covered += together[..., None] * pairs
    # An exponent near -100, rounded to 24 bits, gives the power to 6e-6.
    np.testing.assert_allclose(covered, _pair_powers(), rtol=1e-5, atol=1e-37)


def test_past_mass_is_the_discounted_sum_of_writes():
    arrays = _inputs()
    got = tile.past_mass(POWERS, *(_single(arrays)[name] for name in ("write", "mass")))
    start = np.float64(DECAY) ** np.arange(C)[:, None] * arrays["mass"]
    want = np.einsum("ijr,jr->ir", _pair_powers(), arrays["write"]) + start
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("mass", [0.0, 1e-38, 1e-37])
def test_a_past_without_mass_reads_zero(mass):
    assert float(tile.per_mass(jnp.full((1, 1), mass))[0, 0]) == 0.0


def test_mixing_is_strictly_causal_and_exact():
    arrays = _inputs()
    got = tile.mixing(POWERS, *(_single(arrays)[name] for name in ("read", "write")), jnp.float32)
    _close(got, np.einsum("ir,ijr,jr->ij", arrays["read"], _pair_powers(), arrays["write"]))
    assert not np.asarray(got)[np.triu_indices(C)].any()


def _plain(write, value, log_decay, read, total, mass, length: int, normalise: bool):
    """What a chunk yields, from the powers of every pair of steps."""
    step = jnp.arange(C)
    apart = jnp.maximum(step[:, None] - step[None], 0)[..., None]
    earlier = (step[:, None] > step[None])[..., None]
    pair = jnp.where(earlier, jnp.exp(apart * log_decay[None]), 0.0)
    start = jnp.exp(step[:, None] * log_decay)
    past_total = jnp.einsum("ijr,jr,je->ire", pair, write, value) + start[..., None] * total[None]
    past_mass = jnp.einsum("ijr,jr->ir", pair, write) + start * mass
    memory = past_total / past_mass[..., None] if normalise else past_total
    end = jnp.exp(jnp.maximum(length - step[:, None], 0) * log_decay)
    kept = jnp.exp(length * log_decay)
    return (
        jnp.einsum("ir,ire->ie", read, memory),
        kept.T * total + jnp.einsum("jr,je->re", write * end, value),
        kept * mass + (write * end).sum(0, keepdims=True),
    )


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("length", [C, 11])
def test_outputs_and_gradients_equal_the_plain_form(length, normalise):
    arrays = _inputs(length)
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(array) for name, array in arrays.items()}
        names = ("write", "value", "log_decay", "read", "total", "mass")
        exact["log_decay"] = jnp.log(jnp.asarray(DECAY, jnp.float64))[None]
        want, pull = jax.vjp(
            lambda *a: _plain(*a, length, normalise), *(exact[name] for name in names)
        )
        cotangents = pull(tuple(exact[name] for name in ("d_out", "d_total", "d_mass")))
        d_want = dict(zip(names, cotangents, strict=True))
        want = [np.asarray(each) for each in want]
        d_want = {name: np.asarray(each) for name, each in d_want.items()}

    x = _single(arrays)
    until_end = tile.until_end(C, LOG2_DECAY, length)
    kept = jnp.exp2(length * LOG2_DECAY)
    per_mass = jnp.ones((C, R))
    if normalise:
        per_mass = tile.per_mass(tile.past_mass(POWERS, x["write"], x["mass"]))
    scaled = x["read"] * per_mass
    total, mass = tile.advance(until_end, x["write"], x["value"])
    _close(tile.output(POWERS, scaled, x["write"], x["value"], x["total"]), want[0])
    _close(kept.T * x["total"] + total, want[1])
    _close(kept * x["mass"] + mass, want[2])

    d_read = tile.read_gradient(POWERS, x["write"], x["value"], x["d_out"], x["total"], per_mass)
    _close(d_read, d_want["read"])
    pull = scaled * d_read if normalise else None
    ends = x["d_total"], x["d_mass"]
    d_write = tile.write_gradient(POWERS, until_end, scaled, pull, x["value"], x["d_out"], *ends)
    _close(d_write[:length], d_want["write"][:length])
    d_value = tile.value_gradient(POWERS, until_end, scaled, x["write"], x["d_out"], x["d_total"])
    _close(d_value[:length], d_want["value"][:length])
    d_total, d_mass = tile.retreat(POWERS, scaled, pull, x["d_out"])
    _close(kept.T * x["d_total"] + d_total, d_want["total"])
    _close(kept * x["d_mass"] + d_mass, d_want["mass"])

    flux = jnp.sum(x["d_total"] * want[1], axis=1)[None] + x["d_mass"] * want[2]
    lost = x["write"] * d_write - (0.0 if normalise else x["read"] * d_read)
    d_log_decay, flux_at_start = tile.flux_gradient(jnp.asarray(flux, jnp.float32), lost, length)
    _close(d_log_decay, d_want["log_decay"], 2e-5)
    exact_start = (d_want["total"] * arrays["total"]).sum(1) + d_want["mass"] * arrays["mass"]
    _close(flux_at_start, exact_start, 2e-5)


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
