"""Ablated values are the means they are named for, and circuits keep what they are to keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.circuits import ablation, patching
from sparse_jax.circuits.patching import Activations

L, B, T, N, K, H = 2, 3, 5, 4, 2, 3
LENGTHS = np.array([5, 3, 4])
VALID = np.arange(T) < LENGTHS[:, None]


def drawn(seed):
    rng = np.random.default_rng(seed)
    return Activations(
        jnp.asarray(rng.normal(size=(L, B, T, N, H)), jnp.float32),
        jnp.asarray(rng.uniform(size=(L, B, N, T, T)), jnp.float32),
        jnp.asarray(rng.normal(size=(L, B, T, K, H)), jnp.float32),
    )


def values(name, clean=None, **options):
    return np.asarray(
        ablation.head_values(name, clean or drawn(0), drawn(1), jnp.asarray(VALID), **options)
    )


def test_means_leave_padding_out():
    z = np.asarray(drawn(0).z_LBTNH, np.float64)
    for layer, head in np.ndindex(L, N):
        rows = [z[layer, b, t, head] for b, t in np.argwhere(VALID)]
        np.testing.assert_allclose(values("mean")[layer, 0, 0, head], np.mean(rows, 0), atol=1e-6)
        for t in range(T):
            rows = [z[layer, b, t, head] for b in range(B) if VALID[b, t]]
            np.testing.assert_allclose(
                values("aligned_mean")[layer, 0, t, head], np.mean(rows, 0), atol=1e-6
            )


@pytest.mark.parametrize("name", ["mean", "aligned_mean"])
def test_the_mean_of_constant_outputs_is_that_constant_for_every_head(name):
    constant_LNH = np.random.default_rng(3).normal(size=(L, 1, 1, N, H)).astype(np.float32)
    z = np.where(VALID[None, :, :, None, None], constant_LNH, 1e6)
    clean = drawn(0).replace(z_LBTNH=jnp.asarray(z, jnp.float32))
    result = np.broadcast_to(values(name, clean), (L, B, T, N, H))
    np.testing.assert_allclose(result[:, VALID], z[:, VALID], rtol=1e-6)


def test_the_other_values():
    assert (values("zero") == 0).all()
    np.testing.assert_array_equal(values("counterfactual"), drawn(1).z_LBTNH)
    orders = set()
    # Where the other prompt is shorter, its last token and not its padding.
    last_B = np.asarray(VALID).sum(1) - 1
    assert len(set(last_B)) > 1
    place_BT = np.minimum(np.arange(T), last_B[:, None])
    for seed in range(20):
        result = values("resample", key=jax.random.key(seed))
        clean = np.asarray(drawn(0).z_LBTNH)
        order = tuple(
            next(j for j in range(B) if (result[:, b] == clean[:, j, place_BT[j]]).all())
            for b in range(B)
        )
        assert sorted(order) == list(range(B)) and all(b != j for b, j in enumerate(order))
        orders.add(order)
    assert len(orders) == 2


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"no ablation 'means'.*'mean'"):
        values("means")
    with pytest.raises(UsageError, match="needs a random key and two prompts"):
        values("resample")
    with pytest.raises(UsageError, match="'mean' is not defined for token edges; choose zero or"):
        ablation.keep_edges(jnp.ones((L, B, N, T, T), bool), "mean", drawn(1))


def test_contributions_are_weighted_values_of_the_group():
    own = drawn(4)
    mask = np.random.default_rng(5).uniform(size=(L, B, N, T, T)) < 0.5
    pattern, v = np.asarray(own.pattern_LBNTS, np.float64), np.asarray(own.v_LBSKH, np.float64)
    result = np.asarray(own.contributions_LBTNH(jnp.asarray(mask)))
    g = np.random.default_rng(6).normal(size=(L, B, T, N, H))
    products = np.asarray(own.products_LBNTS(jnp.asarray(g, jnp.float32)))
    for head in range(N):
        edges = pattern[:, :, head, :, :, None] * v[:, :, None, :, head // (N // K)]
        wanted = (edges * mask[:, :, head, :, :, None]).sum(3)
        np.testing.assert_allclose(result[:, :, :, head], wanted, atol=1e-5)
        inner = (edges * g[:, :, :, None, head]).sum(-1)
        np.testing.assert_allclose(products[:, :, head], inner, atol=1e-5)
    assert isinstance(own, patching.Activations)
