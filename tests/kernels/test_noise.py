"""Counter-based noise: pinned bits, the range and law of its uniforms, no trace of its counters.

Statistics are of one fixed sample each, so a test that passes always passes; the thresholds say how
unlikely a sample of ideal noise is to fail.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.core import noise


def _sample(seed=0, B=1, N=1, T=1, S=1, *, start=0):
    """Uniforms `[B, N, T, S]`."""
    batch, head, query, key = np.ogrid[:B, :N, :T, :S]
    stream = noise.stream(jnp.uint32(seed), batch, head)
    return np.asarray(noise.uniform(noise.bits(stream, query + start, key)))


def _mix(x):
    """lowbias32 on a python integer."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize(
    "counters",
    [(0, 0, 0, 0, 0), (1, 2, 3, 4, 5), (2**32 - 1, 999, 127, 131_071, 131_071), (0, 0, 0, -1, 7)],
)
def test_bits_are_those_of_the_written_definition(counters):
    seed, batch, head, query, key = counters
    word = _mix((_mix((seed + 0xC2B2AE35) % 2**32) + batch * 0x27D4EB2F) % 2**32)
    word = _mix(word ^ head * 0x165667B1 % 2**32)
    row = _mix((query * 0x9E3779B1 + word) % 2**32)
    got = noise.bits(noise.stream(jnp.uint32(seed), batch, head), jnp.int32(query), jnp.int32(key))
    assert got.dtype == jnp.uint32
    assert int(got) == _mix(row ^ key * 0x85EBCA6B % 2**32)


def test_noise_that_was_published_stays_the_same():
    # A run is repeated from its seed: these words may never change.
    got = noise.bits(noise.stream(jnp.uint32(7), 0, jnp.arange(2)[:, None]), 3, jnp.arange(3)[None])
    assert np.asarray(got).tolist() == [
        [3618765714, 2545540851, 779946900],
        [1495384944, 1080666459, 1201936605],
    ]


def test_uniforms_are_odd_multiples_of_a_power_of_two_and_never_0_or_1():
    words = jnp.asarray([0, 1 << 9, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], jnp.uint32)
    u = np.asarray(noise.uniform(words), np.float64)
    assert (u * 2**24).tolist() == [1, 3, 2**23 - 1, 2**23 + 1, 2**24 - 1]
    # 1 - u is exact too, so u and 1 - u are alike.
    assert ((1 - np.asarray(noise.uniform(words))) * 2**24).tolist() == (2**24 - u * 2**24).tolist()
    assert np.isfinite(noise.logistic(noise.uniform(words))).all()
    # A logarithm to four units in the last place, and a difference.
    lowest = np.log(2**-24) - np.log1p(-(2**-24))
    assert float(noise.logistic(jnp.float32(2**-24))) == pytest.approx(lowest, rel=6 * 2**-24)
    assert float(noise.logistic(jnp.float32(0.5))) == 0.0


def test_uniforms_have_the_uniform_law():
    u = _sample(3, T=1024, S=1024).astype(np.float64).ravel()
    sd = np.sqrt(1 / 12 / u.size)
    assert abs(u.mean() - 0.5) < 4 * sd
    assert abs(u.var() - 1 / 12) < 4 * np.sqrt(1 / 180 / u.size)
    # 1024 cells: chi square has mean 1023 and standard deviation 45.2; beyond 4.5 of them, 1e-5.
    counts = np.bincount((u * 1024).astype(int), minlength=1024)
    chi_square = ((counts - u.size / 1024) ** 2).sum() / (u.size / 1024)
    assert abs(chi_square - 1023) < 4.5 * np.sqrt(2 * 1023)
    # The tails decide sparse gates: 2^-12 of the draws, 256, each within 4.5 of its deviations.
    for tail in (u < 2**-12, u > 1 - 2**-12):
        assert abs(tail.sum() - 256) < 4.5 * np.sqrt(256)


@pytest.mark.parametrize("seed", range(4))
def test_the_first_pair_of_a_small_seed_is_as_any_other(seed):
    assert 0.01 < _sample(seed).item() < 0.99


@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["batch", "head", "query", "key"])
def test_neighbours_along_an_axis_are_uncorrelated(axis):
    # The axis and two others have 64 entries, 2^18 numbers.
    single = 3 if axis == 0 else axis - 1
    sizes = {letter: 1 if at == single else 64 for at, letter in enumerate("BNTS")}
    z = (_sample(11, **sizes).astype(np.float64) - 0.5) * np.sqrt(12)
    for lag in (1, 2, 16):
        left, right = np.take(z, range(64 - lag), axis), np.take(z, range(lag, 64), axis)
        # Of independent noise the mean product is normal with deviation 1 / sqrt(n): 4.5 is 7e-6.
        assert abs((left * right).mean()) * np.sqrt(left.size) < 4.5
        assert abs(((left**2 - 1) * (right**2 - 1)).mean()) / 0.8 * np.sqrt(left.size) < 4.5


def test_successive_seeds_are_uncorrelated():
    z = np.stack([_sample(seed, N=2, T=64, S=64).ravel() for seed in range(64)]) - 0.5
    correlations = np.corrcoef(z)[np.triu_indices(64, 1)] * np.sqrt(z.shape[1])
    # 2016 pairs: the largest of so many normal numbers is about 3.5, and beyond 5.2 once in 2,500.
    assert abs(correlations).max() < 5.2
    assert abs(correlations.mean()) < 4.5 / np.sqrt(correlations.size)


def test_rows_columns_and_diagonals_of_a_map_have_the_mean_of_noise():
    u = _sample(5, T=512, S=512)[0, 0].astype(np.float64) - 0.5
    diagonals = [np.diagonal(u, k) for k in range(-256, 257)]
    scores = [line.sum() / np.sqrt(line.size / 12) for line in (*u, *u.T, *diagonals)]
    # 1537 normal numbers: beyond 5.2 once in 3,000.
    assert np.abs(scores).max() < 5.2
    assert np.std(scores) == pytest.approx(1.0, abs=0.08)


def test_a_tile_holds_the_same_numbers_as_the_whole():
    whole = _sample(9, B=2, N=3, T=24, S=32)
    stream = noise.stream(jnp.uint32(9), 1, 2)
    query, key = jnp.arange(8, 24)[:, None], jnp.arange(16, 32)[None]
    tile = jax.jit(lambda *counters: noise.uniform(noise.bits(*counters)))(stream, query, key)
    np.testing.assert_array_equal(tile, whole[1, 2, 8:24, 16:32])
    np.testing.assert_array_equal(_sample(9, B=2, N=3, T=16, S=32, start=8), whole[:, :, 8:24])
