"""What the decoder does for training alone: dropout, rematerialisation, blocks without an MLP."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.layers import Dropout
from lm_jax.mixers import AttentionMixer
from lm_jax.params import by_layer
from tests import tiny

CFG = tiny.decoder(vocab_size=30, max_length=32)
TOKENS_BT = np.arange(24).reshape(2, 12) % 30


@pytest.fixture(scope="module")
def params():
    return lm_jax.init_params(jax.random.key(0), CFG)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_zeroes_its_share_and_keeps_the_mean(rate):
    x = jnp.full((400, 500), 3.0)
    dropped = np.asarray(Dropout(rate, jax.random.key(0))(x, "a"))
    share = (dropped == 0).mean()
    assert abs(share - rate) < 5 * np.sqrt(rate * (1 - rate) / x.size)
    np.testing.assert_allclose(dropped[dropped != 0], 3.0 / (1 - rate), rtol=1e-6)
    other = np.asarray(Dropout(rate, jax.random.key(0))(x, "b"))
    both = ((dropped == 0) & (other == 0)).mean()
    assert abs(both - rate**2) < 0.01


def test_every_place_of_the_paper_is_dropped_from(params):
    """Embedding, each addition to the residual stream, the hidden units of the MLP."""
    names = ("embed", "attn.out", "mlp.post", "mlp.out")
    record = dict.fromkeys(names, lm_jax.keep)

    def zeros(rate):
        out = lm_jax.forward(
            params, TOKENS_BT, CFG, record=record, dropout=rate, rng=jax.random.key(3)
        )
        return {name: float((np.asarray(out.records[name]) == 0).mean()) for name in names}

    assert set(zeros(0.0).values()) == {0.0}
    for name, share in zeros(0.25).items():
        assert 0.15 < share < 0.35, name


def test_dropout_needs_a_key(params):
    with pytest.raises(UsageError, match=r"dropout = 0\.1 needs a random key"):
        lm_jax.forward(params, TOKENS_BT, CFG, dropout=0.1)


def test_the_pattern_is_dropped_from_where_the_mixer_asks(params):
    def run(mixer, rng):
        out = lm_jax.forward(params, TOKENS_BT, CFG, mixer=mixer, rng=rng, dropout=0.2)
        return out.logits

    key = jax.random.key(1)
    plain, dropped = run(AttentionMixer(), key), run(AttentionMixer(pattern_dropout=True), key)
    assert np.abs(plain - dropped).max() > 1e-4
    with pytest.raises(UsageError, match="forms no pattern to drop from"):
        lm_jax.forward(
            params,
            TOKENS_BT,
            CFG,
            mixer=AttentionMixer(pattern_dropout=True),
            attend=lm_jax.fused(lm_jax.softmax, "xla"),
            rng=key,
            dropout=0.2,
        )


@pytest.mark.parametrize("unroll", [False, True])
def test_rematerialisation_changes_the_memory_alone(params, unroll):
    cfg = dataclasses.replace(CFG, num_layers=8)
    params = lm_jax.init_params(jax.random.key(0), cfg)

    def loss(params, remat):
        return lm_jax.forward(params, TOKENS_BT, cfg, remat=remat, unroll=unroll).logits.std()

    built = [
        jax.jit(jax.grad(loss), static_argnums=1).lower(params, remat).compile()
        for remat in (False, True)
    ]
    plain, again = (each(params) for each in built)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(a).max())
    if not unroll:
        kept, made_anew = (each.memory_analysis().temp_size_in_bytes for each in built)
        assert made_anew < 0.7 * kept


def test_blocks_without_an_mlp_are_the_mixer_and_its_residual():
    cfg = dataclasses.replace(CFG, mlp_size=0)
    params = lm_jax.init_params(jax.random.key(0), cfg)
    assert set(params["blocks"]) == {"ln1", "mixer"}
    record = dict.fromkeys(("resid_pre", "attn.out", "resid_post"), lm_jax.keep)
    out = lm_jax.forward(params, TOKENS_BT, cfg, record=record).records
    np.testing.assert_allclose(out["resid_pre"] + out["attn.out"], out["resid_post"], atol=1e-6)
    with pytest.raises(UsageError, match=r"has no site 'mlp\.out'"):
        lm_jax.forward(params, TOKENS_BT, cfg, record={"mlp.out": lm_jax.keep})


def test_constants_that_differ_by_layer():
    stacked = by_layer((3.0, 1.0, 1.5), (2,), "R").stacked(3)
    values = stacked.init(jax.random.key(0), stacked.shape, jnp.float32)
    np.testing.assert_array_equal(values, [[3, 3], [1, 1], [1.5, 1.5]])
    with pytest.raises(ValueError, match="2 values for 3 layers"):
        by_layer((3.0, 1.0), (), "").stacked(3)
