"""Attention without a causal mask sees the whole row, except padding; causal attention does not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.attention import fused, softmax
from lm_jax.model.flops import forward_flops
from lm_jax.model.mixers import ATTENTION, BidirectionalAttention
from tests import rounding, tiny

BOTH_WAYS = BidirectionalAttention()
T = 7
CFG = tiny.decoder(num_heads=4, num_kv_heads=2, vocab_size=24, max_length=T)
TOKENS = np.random.default_rng(1).integers(0, CFG.vocab_size, (2, T), dtype=np.int32)
ATTENDS = {"unfused": softmax, "fused": fused(softmax, "kernels")}


@functools.cache
def params():
    # Arrays also where a program that is traced asks for them first.
    with jax.ensure_compile_time_eval():
        return jax.tree.map(lambda a: 6 * a, tiny.params(CFG))


def logits(tokens_BT, mixer, attend=softmax, valid_BT=None, added=None, each=None):
    edits = {} if added is None else {"embed": lm_jax.Add(added)}
    return lm_jax.forward(
        params() if each is None else each,
        tokens_BT,
        CFG,
        mixer=mixer,
        attend=attend,
        valid_BT=valid_BT,
        edits=edits,
    ).logits


@pytest.mark.parametrize("attend", ATTENDS)
@pytest.mark.parametrize("mixer", [ATTENTION, BOTH_WAYS], ids=["causal", "bidirectional"])
def test_which_positions_a_position_depends_on(mixer, attend):
    """The gradient of every position's logits by every position's embedding."""

    @jax.jit
    def squared(weights_BTV):
        def total(added):
            return (logits(TOKENS, mixer, ATTENDS[attend], added=added) * weights_BTV).sum()

        return (jax.grad(total)(jnp.zeros((*TOKENS.shape, CFG.hidden_size))) ** 2).sum(-1)

    weights = jax.random.normal(jax.random.key(2), (*TOKENS.shape, CFG.vocab_size))
    for query in range(T):
        only = weights * (jnp.arange(T) == query)[None, :, None]
        depends_BS = np.asarray(squared(only)) > 0
        seen_S = np.arange(T) <= query if mixer.causal else np.ones(T, bool)
        np.testing.assert_array_equal(depends_BS, np.broadcast_to(seen_S, depends_BS.shape))


@pytest.mark.parametrize("attend", ATTENDS)
def test_padding_is_not_seen(attend):
    """Logits of a padded row are those of the row alone, whatever the padding holds."""
    short = T - 2
    valid_BT = jnp.broadcast_to(jnp.arange(T) < short, TOKENS.shape)
    wanted = rounding.expected(
        lambda each: logits(TOKENS[:, :short], BOTH_WAYS, each=each), params()
    )
    run = jax.jit(lambda tokens: logits(tokens, BOTH_WAYS, ATTENDS[attend], valid_BT))
    for padding in (0, 5):
        padded = jnp.where(valid_BT, TOKENS, padding)
        rounding.assert_within(run(padded)[:, :short], wanted)
    unmasked = jax.jit(lambda tokens: logits(tokens, BOTH_WAYS))(TOKENS)
    assert np.abs(unmasked[:, :short] - wanted.values).max() > 0.1


def test_all_pairs_count_in_either_convention():
    square = forward_flops(CFG, BOTH_WAYS, T)
    assert forward_flops(CFG, BOTH_WAYS, T, causal="triangle") == square
    assert square == forward_flops(CFG, ATTENTION, T)


def test_a_cache_and_a_window_are_refused():
    cache = lm_jax.init_cache(CFG, 2, T)
    with pytest.raises(UsageError, match="cannot decode with a cache; pass whole rows"):
        lm_jax.forward(params(), TOKENS, CFG, mixer=BOTH_WAYS, cache=cache)
    windowed = tiny.decoder(windows=(3, None), num_layers=2)
    each = tiny.params(windowed)
    with pytest.raises(UsageError, match="no sliding window; leave out config"):
        lm_jax.forward(each, TOKENS[:, :5] % 8, windowed, mixer=BOTH_WAYS)
