"""MLPs replaced by a transcoder, against a run that is written out layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.model.edits import Replace
from lm_jax.model.sites import keep
from sparse_jax.transcoders import transcoder
from sparse_jax.transcoders.substitution import agreement, substitute
from sparse_jax.transcoders.transcoder import Transcoder
from tests.sparse_jax.circuits.small_models import circuit_model

B, T, F = 2, 6, 10
U = 2.0**-24


@pytest.fixture(scope="module")
def model():
    return circuit_model(bias=-0.5)


@pytest.fixture(scope="module")
def clt(model):
    drawn = transcoder.init(jax.random.key(3), model.cfg, features=F)
    params = dict(drawn.params) | {"decoder_bias": jnp.full((2, model.cfg.hidden_size), 0.1)}
    return Transcoder(params, drawn.cfg).folded(jnp.ones(2), jnp.full(2, 0.2))


def prompts(model):
    tokens_BT = np.random.default_rng(0).integers(0, model.cfg.vocab_size, (B, T)).astype(np.int32)
    valid_BT = np.ones((B, T), bool)
    valid_BT[1, 4:] = False
    replaced_BT = np.ones((B, T), bool)
    replaced_BT[:, 0] = False
    return tokens_BT, jnp.asarray(valid_BT), jnp.asarray(replaced_BT)


def test_each_layer_reads_what_the_replaced_layers_before_it_wrote(model, clt):
    tokens_BT, valid_BT, replaced_BT = prompts(model)
    record = {"mlp.in": keep, "mlp.out": keep}
    edits = substitute(clt, replaced_BT)
    output = model.forward(tokens_BT, valid_BT, edits=edits, record=record)
    # Written out: the first layer is replaced, then the run is repeated to read the second.
    mask = jnp.broadcast_to(replaced_BT[None, :, :, None], (2, B, T, 1))
    value_LBTD = jnp.zeros((2, B, T, model.cfg.hidden_size))
    for layer in range(2):
        upto = mask & (jnp.arange(2) < layer)[:, None, None, None]
        patched = {"mlp.out": Replace(value_LBTD, upto)}
        run = model.forward(tokens_BT, valid_BT, edits=patched, record=record)
        inputs_LXD = run.records["mlp.in"].reshape(2, B * T, -1)
        y_LXD = clt.decode(clt.encode(inputs_LXD))
        value_LBTD = value_LBTD.at[layer].set(y_LXD[layer].reshape(B, T, -1))
    last = model.forward(tokens_BT, valid_BT, edits={"mlp.out": Replace(value_LBTD, mask)})
    scale = np.abs(last.logits).max()
    # The same sums in another order, through two layers.
    np.testing.assert_allclose(output.logits, last.logits, atol=2**9 * U * scale)
    whole = model.forward(tokens_BT, valid_BT)
    assert np.abs(whole.logits - last.logits)[:, 1:].max() > 1e-2 * scale
    # The first token keeps its MLPs, and no later token reaches it.
    np.testing.assert_allclose(output.logits[:, 0], whole.logits[:, 0], atol=2**9 * U * scale)


def test_agreement_is_of_the_replaced_tokens_alone(model, clt):
    tokens_BT, valid_BT, replaced_BT = prompts(model)
    result = agreement(model, clt, tokens_BT, valid_BT, replaced_BT)
    wide = [
        np.asarray(model.forward(tokens_BT, valid_BT, edits=edits).logits, np.float64)
        for edits in ({}, substitute(clt, replaced_BT))
    ]
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in wide)
    divergence_BT = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    counted = np.asarray(valid_BT & replaced_BT)
    assert result.tokens == counted.sum() == 8
    np.testing.assert_allclose(result.divergence, divergence_BT[counted].sum(), rtol=1e-4)
    assert result.agreeing == (wide[0].argmax(-1) == wide[1].argmax(-1))[counted].sum()
    none = agreement(model, clt, tokens_BT, valid_BT, jnp.zeros((B, T), bool))
    assert none.tokens == 0 and none.divergence == 0
