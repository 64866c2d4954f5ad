"""Caches written within the arrays of all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model import caches
from tests import tiny

L, B, K, S, H = 8, 2, 2, 512, 8
CFG = lm_jax.DecoderConfig(
    vocab_size=32,
    hidden_size=K * H,
    num_layers=L,
    num_heads=K,
    num_kv_heads=K,
    head_dim=H,
    mlp_size=32,
    max_length=S,
)


def stacked(seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (L, B, K, S, H))


@pytest.mark.parametrize("layer", [0, 3, L - 1])
def test_a_layer_writes_its_own_part_and_nothing_else(layer):
    before = {"k": stacked(0), "v": stacked(1)}
    new = jax.random.normal(jax.random.key(2), (B, K, H))
    slices = caches.of_layer(before, jnp.int32(layer))
    rows, positions = jnp.arange(B), jnp.array([5, S])  # The second row is full.
    slices["k"] = slices["k"].write_at((rows, slice(None), positions), new)
    after = caches.of_all_layers(caches.of_layer(before, jnp.int32(layer)), slices)

    expected = np.array(before["k"])
    expected[layer, 0, :, 5] = new[0]
    np.testing.assert_array_equal(after["k"], expected)
    np.testing.assert_array_equal(after["v"], before["v"])


def test_arrays_made_anew_take_the_place_of_the_layers_part():
    before = [stacked(0), stacked(1)]
    slices = caches.of_layer(before, 2)
    parts = caches.arrays(slices)
    np.testing.assert_array_equal(parts[1], before[1][2])
    after = caches.of_all_layers(slices, [2 * parts[0], slices[1]])
    np.testing.assert_array_equal(after[0], before[0].at[2].multiply(2.0))
    np.testing.assert_array_equal(after[1], before[1])


def test_a_decoded_token_copies_the_keys_and_values_of_no_more_than_two_layers():
    cache = lm_jax.init_cache(CFG, B, S)
    params = tiny.params(CFG)

    def step(params, cache, tokens_B1):
        out = lm_jax.forward(params, tokens_B1, CFG, cache=cache)
        return out.logits, out.cache

    compiled = jax.jit(step, donate_argnums=1).lower(params, cache, jnp.ones((B, 1), jnp.int32))
    temporary = compiled.compile().memory_analysis().temp_size_in_bytes
    of_all_layers = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    assert temporary < 2 * of_all_layers / L
