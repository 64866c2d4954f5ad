"""Ablated values are the means they are named for, and circuits keep what they are to keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from sparse_jax.circuits import ablation, patching
from sparse_jax.circuits.patching import Activations
from tests import rounding
from tests.sparse_jax.circuits import oracle

L, B, T, N, K, H = 2, 3, 5, 4, 2, 3
LENGTHS = np.array([5, 3, 4])
VALID = np.arange(T) < LENGTHS[:, None]
DISTANCE = np.arange(T)[:, None] - np.arange(T)
# Token edges, the first layer with a window of two keys.
VISIBLE = np.stack([(DISTANCE >= 0) & (window > DISTANCE) for window in (2, T)])[:, None, None]
VISIBLE = np.broadcast_to(VISIBLE & VALID[:, None, :, None], (L, B, N, T, T))


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


def exact_values(name, clean):
    def run(clean):
        return ablation.head_values(name, clean, drawn(1), jnp.asarray(VALID))

    return rounding.expected(run, clean)


def test_means_leave_padding_out():
    z = np.asarray(drawn(0).z_LBTNH, np.float64)
    by_hand = {"mean": np.empty((L, 1, 1, N, H)), "aligned_mean": np.empty((L, 1, T, N, H))}
    for layer, head in np.ndindex(L, N):
        rows = [z[layer, b, t, head] for b, t in np.argwhere(VALID)]
        by_hand["mean"][layer, 0, 0, head] = np.mean(rows, 0)
        for t in range(T):
            rows = [z[layer, b, t, head] for b in range(B) if VALID[b, t]]
            by_hand["aligned_mean"][layer, 0, t, head] = np.mean(rows, 0)
    for name, want in by_hand.items():
        exact = exact_values(name, drawn(0))
        oracle.assert_equal(want, exact, name)
        rounding.assert_within(values(name), exact, name)


@pytest.mark.parametrize("name", ["mean", "aligned_mean"])
def test_the_mean_of_constant_outputs_is_that_constant_for_every_head(name):
    constant_LNH = np.random.default_rng(3).normal(size=(L, 1, 1, N, H)).astype(np.float32)
    z = np.where(VALID[None, :, :, None, None], constant_LNH, 1e6)
    clean = drawn(0).replace(z_LBTNH=jnp.asarray(z, jnp.float32))
    exact = exact_values(name, clean)
    want = np.broadcast_to(constant_LNH.astype(np.float64), exact.values.shape)
    oracle.assert_equal(want, exact)
    rounding.assert_within(values(name, clean), exact)
    assert (exact.bounds < 1e-5).all()


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
    with pytest.raises(UsageError, match="'resample' is not defined for token edges; choose zero"):
        ablation.edge_values("resample", drawn(0), drawn(1), jnp.asarray(VISIBLE))


@pytest.mark.parametrize("name", ablation.EDGE_ABLATIONS)
def test_ablated_edges_contribute_what_they_are_named_for(name):
    """Kept edges are the run's own; the sum over the others at each query, edge by edge."""
    keep = np.random.default_rng(7).uniform(size=VISIBLE.shape) < 0.4
    sides = [jax.tree.map(lambda x: np.asarray(x, np.float64), drawn(seed)) for seed in (0, 1)]
    group = np.arange(N) // (N // K)
    # Of every edge, `[L, B, N, T, S, H]`.
    clean, corrupt = (
        side.pattern_LBNTS[..., None]
        * np.moveaxis(side.v_LBSKH[..., group, :], 3, 2)[:, :, :, None]
        for side in sides
    )
    shared = np.zeros_like(clean)
    for layer, head in np.ndindex(L, N):
        own, seen = clean[layer, :, head], VISIBLE[layer, :, head]
        if name == "mean":
            shared[layer, :, head] = own[seen].mean(0)
        if name == "aligned_mean":
            for q, k in np.argwhere(seen.any(0)):
                shared[layer, :, head, q, k] = own[seen[:, q, k], q, k].mean(0)
    ablated = corrupt if name == "counterfactual" else shared
    outside = (VISIBLE & ~keep)[..., None]
    wanted = np.moveaxis((ablated * outside).sum(4), 2, 3)

    def run(clean, corrupt):
        values = ablation.edge_values(name, clean, corrupt, jnp.asarray(VISIBLE))
        return ablation.keep_edges(jnp.asarray(keep), values, jnp.asarray(VISIBLE))["attn.z"].value

    exact = rounding.expected(run, drawn(0), drawn(1))
    oracle.assert_equal(wanted, exact)
    rounding.assert_within(jax.jit(run)(drawn(0), drawn(1)), exact)
    assert (np.abs(wanted).max() > 0.1) == (name != "zero")


def test_contributions_are_weighted_values_of_the_group():
    own = drawn(4)
    mask = np.random.default_rng(5).uniform(size=(L, B, N, T, T)) < 0.5
    pattern, v = np.asarray(own.pattern_LBNTS, np.float64), np.asarray(own.v_LBSKH, np.float64)
    g = np.random.default_rng(6).normal(size=(L, B, T, N, H)).astype(np.float32)

    def run(own, g):
        return own.contributions_LBTNH(jnp.asarray(mask)), own.products_LBNTS(g)

    exact = rounding.expected(run, own, jnp.asarray(g))
    sums, products = np.empty((L, B, T, N, H)), np.empty((L, B, N, T, T))
    for head in range(N):
        edges = pattern[:, :, head, :, :, None] * v[:, :, None, :, head // (N // K)]
        sums[:, :, :, head] = (edges * mask[:, :, head, :, :, None]).sum(3)
        products[:, :, head] = (edges * g[:, :, :, None, head]).sum(-1)
    oracle.assert_equal((sums, products), exact)
    rounding.assert_within(jax.jit(run)(own, jnp.asarray(g)), exact)
    assert isinstance(own, patching.Activations)


def test_a_pair_is_not_resampled_from_another_pair_of_its_own_prompt():
    """Each takes the first pair of another prompt, and all pairs of a prompt the same."""
    prompt_B, z = np.array([0, 1, 0]), np.asarray(drawn(0).z_LBTNH)
    for seed in range(5):
        found = values("resample", key=jax.random.key(seed), prompt_B=prompt_B)
        for b, first in enumerate([1, 0, 1]):
            place_T = np.minimum(np.arange(T), LENGTHS[first] - 1)
            np.testing.assert_array_equal(found[:, b], z[:, first, place_T])
    with pytest.raises(UsageError, match="two prompts or more"):
        values("resample", key=jax.random.key(0), prompt_B=np.zeros(3, int))


def test_prompts_that_nothing_shares_are_resampled_as_without_their_numbers():
    key = jax.random.key(3)
    numbered = values("resample", key=key, prompt_B=np.arange(B))
    assert numbered.tobytes() == values("resample", key=key).tobytes()
