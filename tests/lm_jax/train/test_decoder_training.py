"""Training features of the decoder: dropout, rematerialisation, blocks without an MLP."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.layers import Dropout
from lm_jax.model.mixers import AttentionMixer
from lm_jax.model.params import by_layer
from lm_jax.parallel import sharding
from tests import rounding, tiny

CFG = tiny.decoder(vocab_size=30, max_length=32)
TOKENS_BT = np.arange(24).reshape(2, 12) % 30
U = 2.0**-24


@pytest.fixture(scope="module")
def params():
    return tiny.params(CFG)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_zeroes_its_share_and_keeps_the_mean(rate):
    x = jnp.full((400, 500), 3.0)
    dropped = np.asarray(Dropout(rate, jax.random.key(0))(x, "a"))
    share = (dropped == 0).mean()
    assert abs(share - rate) < 5 * np.sqrt(rate * (1 - rate) / x.size)
    # A rate, its complement, and a product or quotient.
    np.testing.assert_allclose(dropped[dropped != 0], 3.0 / (1 - rate), rtol=5 * U)
    other = np.asarray(Dropout(rate, jax.random.key(0))(x, "b"))
    both = ((dropped == 0) & (other == 0)).mean()
    assert abs(both - rate**2) < 0.01


def mask(shape, key, name="a", rate=0.1):
    """1 where an entry is kept."""
    return np.asarray(Dropout(rate, key)(jnp.ones(shape), name)) > 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_what_is_dropped_has_the_law_of_independent_draws(rate):
    """Of 2^18 entries: the share, in all and along each axis, and that of neighbours."""
    kept = mask((16, 64, 4, 64), jax.random.key(5), rate=rate)
    dropped = 1.0 - kept
    deviation = np.sqrt(rate * (1 - rate))
    # Normal scores: beyond 4.5 once in 150,000, and of 148 lines beyond 5.2 once in 30,000.
    assert abs(dropped.mean() - rate) * np.sqrt(dropped.size) / deviation < 4.5
    for axis in range(4):
        lines = np.moveaxis(dropped, axis, 0).reshape(dropped.shape[axis], -1)
        scores = (lines.mean(1) - rate) * np.sqrt(lines.shape[1]) / deviation
        assert np.abs(scores).max() < 5.2
        centred = (lines - rate) / deviation
        for lag in (1, 2, 3):
            together = centred[lag:] * centred[:-lag]
            assert abs(together.mean()) * np.sqrt(together.size) < 4.5


def test_layers_names_and_steps_drop_independently():
    """48 masks of 2^14 entries: as many correlations as pairs, each of mean 0."""
    keys = [
        layer_key
        for step in range(4)
        for layer_key in jax.random.split(jax.random.fold_in(jax.random.key(1), step), 4)
    ]
    masks = [mask((4, 64, 64), key, name).ravel() for key in keys for name in ("a", "b", "c")]
    correlations = np.corrcoef(masks)[np.triu_indices(len(masks), 1)] * np.sqrt(masks[0].size)
    # The largest of 1,128 normal numbers: beyond 5.2 once in 4,400.
    assert np.abs(correlations).max() < 5.2
    assert abs(correlations.mean()) < 4.5 / np.sqrt(correlations.size)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 2, 2), (2, 1, 2)])
def test_every_mesh_drops_the_same_entries(sizes):
    mesh = sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True)))
    split = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor"))
    drop = Dropout(0.3, jax.random.key(7))
    run = jax.jit(lambda x: drop(x, "mlp.post"), in_shardings=split, out_shardings=split)
    result = run(jnp.ones((4, 5, 6)))
    np.testing.assert_array_equal(result, drop(jnp.ones((4, 5, 6)), "mlp.post"))
    assert "all-gather" not in run.lower(jnp.ones((4, 5, 6))).compile().as_text()


def test_dropout_that_was_published_stays_the_same():
    # A run is repeated from its seed: these entries may never change.
    kept = mask((2, 3, 12), jax.random.key(7), "embed", 0.5)
    assert ["".join(map(str, row)) for row in kept.astype(int).reshape(6, 12)] == [
        "001101010101",
        "010100011101",
        "111001001001",
        "001101111011",
        "101101110011",
        "110101011000",
    ]


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
    kept, dropped = run(AttentionMixer(), key), run(AttentionMixer(pattern_dropout=True), key)
    assert np.abs(kept - dropped).max() > 1e-4
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


DEEP = dataclasses.replace(CFG, num_layers=8)


@jax.grad
def slopes(params, remat=False, unroll=False):
    return lm_jax.forward(params, TOKENS_BT, DEEP, remat=remat, unroll=unroll).logits.std()


@pytest.fixture(scope="module")
def deep():
    """Parameters of eight layers, and the gradient that is to be found."""
    params = tiny.params(DEEP)
    return params, rounding.expected(slopes, params)


@pytest.mark.parametrize("unroll", [False, True])
def test_rematerialisation_changes_the_memory_alone(deep, unroll):
    params, wanted = deep
    built = [
        jax.jit(slopes, static_argnums=(1, 2)).lower(params, remat, unroll).compile()
        for remat in (False, True)
    ]
    for each in built:
        rounding.assert_within(each(params), wanted)
    if not unroll:
        kept, made_anew = (each.memory_analysis().temp_size_in_bytes for each in built)
        assert made_anew < 0.7 * kept


def test_blocks_without_an_mlp_are_the_mixer_and_its_residual():
    cfg = dataclasses.replace(CFG, mlp_size=0)
    params = tiny.params(cfg)
    assert set(params["blocks"]) == {"ln1", "mixer"}
    record = dict.fromkeys(("resid_pre", "attn.out", "resid_post"), lm_jax.keep)
    out = lm_jax.forward(params, TOKENS_BT, cfg, record=record).records
    before, written, after = (np.float64(out[name]) for name in record)
    # One sum, rounded.
    np.testing.assert_array_less(np.abs(before + written - after), 2 * U * np.abs(after))
    with pytest.raises(UsageError, match=r"has no site 'mlp\.out'"):
        lm_jax.forward(params, TOKENS_BT, cfg, record={"mlp.out": lm_jax.keep})


def test_constants_that_differ_by_layer():
    stacked = by_layer((3.0, 1.0, 1.5), (2,), "R").stacked(3)
    values = stacked.init(jax.random.key(0), stacked.shape, jnp.float32)
    np.testing.assert_array_equal(values, [[3, 3], [1, 1], [1.5, 1.5]])
    with pytest.raises(ValueError, match="2 values for 3 layers"):
        by_layer((3.0, 1.0), (), "").stacked(3)
