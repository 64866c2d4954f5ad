"""The variance that a transcoder leaves out says whether it is of a model, and read rightly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import UsageError
from lm_jax.model.sites import keep
from sparse_jax.graphs.neurons import Neurons
from sparse_jax.transcoders import fit
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig
from tests.sparse_jax.circuits.small_models import circuit_model

ROWS, TOKENS = 13, 20


@pytest.fixture(scope="module")
def model():
    """A model whose MLPs are ReLU of a projection, so that a transcoder can equal them."""
    dense = circuit_model("gpt2", num_layers=2, scale=6.0)
    return dataclasses.replace(dense, cfg=dataclasses.replace(dense.cfg, activation="relu"))


@pytest.fixture(scope="module")
def own(model):
    """The MLPs themselves as a transcoder."""
    neurons = Neurons.of(model).params
    down_LFD = neurons["down"]
    L, F, D = down_LFD.shape
    params = {
        "encoder": jnp.swapaxes(neurons["up"], 1, 2),
        "encoder_bias": neurons["up_bias"],
        "decoder": {f"to_{layer}": down_LFD[layer][None] for layer in range(L)},
        "decoder_bias": neurons["down_bias"],
    }
    return Transcoder(params, TranscoderConfig(L, D, F, kind="relu", window=1))


def text(model):
    tokens_BT = np.random.default_rng(0).integers(0, model.cfg.vocab_size, (ROWS, TOKENS))
    valid_BT = np.ones((ROWS, TOKENS), bool)
    valid_BT[0, 7:] = False
    return tokens_BT.astype(np.int32), valid_BT


def test_a_transcoder_that_is_the_mlps_leaves_nothing_out(model, own):
    left_L = fit.unexplained(model, own, *text(model))
    assert left_L.shape == (2,) and left_L.max() < 1e-9 and not fit.is_wrong(left_L)


def test_it_is_the_share_of_the_variance_by_definition(model, own):
    half = dataclasses.replace(
        own,
        params=dict(own.params) | {"encoder_bias": own.params["encoder_bias"] + 0.3},
        skip_start=2,
    )
    tokens_BT, valid_BT = text(model)
    record = dict.fromkeys(("mlp.in", "mlp.out"), keep)
    records = model.forward(jnp.asarray(tokens_BT), jnp.asarray(valid_BT), record=record).records
    x, y = (np.asarray(records[name], np.float64) for name in ("mlp.in", "mlp.out"))
    counted = valid_BT & (np.arange(TOKENS) >= 2)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), half.params)
    wanted = []
    for layer in range(2):
        z = np.maximum(x[layer] @ p["encoder"][layer].T + p["encoder_bias"][layer], 0.0)
        left = y[layer] - z @ p["decoder"][f"to_{layer}"][0] - p["decoder_bias"][layer]
        whole = y[layer][counted] - y[layer][counted].mean(0)
        wanted.append((left[counted] ** 2).sum() / (whole**2).sum())
    np.testing.assert_allclose(fit.unexplained(model, half, tokens_BT, valid_BT), wanted, rtol=1e-4)


def test_active_features_are_counted_at_first_tokens_and_after_them(model, own):
    tokens_BT, valid_BT = text(model)
    records = model.forward(
        jnp.asarray(tokens_BT), jnp.asarray(valid_BT), record={"mlp.in": keep}
    ).records
    x_LBTD = np.asarray(records["mlp.in"], np.float64)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), own.params)
    pre = np.einsum("LBTD,LFD->LBTF", x_LBTD, p["encoder"]) + p["encoder_bias"][:, None, None]
    number_LBT = (pre > 0).sum(-1)
    after = [n[:, 1:][valid_BT[:, 1:]].mean() for n in number_LBT]
    first = [n[:, 0].mean() for n in number_LBT]
    found = fit.measured(model, own, tokens_BT, valid_BT)
    np.testing.assert_allclose(found[1:], [after, first])


def test_a_wrong_reading_is_seen_and_the_right_one_is_among_those_that_are_offered(model, own):
    """Of a file that names the residual stream for what was read after the norm."""
    misread = dataclasses.replace(own, hooks=("hook_resid_mid", "hook_mlp_out"))
    tokens = text(model)
    assert fit.is_wrong(fit.unexplained(model, misread, *tokens))
    offered = {
        name: fit.unexplained(model, other.for_model(model.params, model.cfg), *tokens).max()
        for name, other in fit.mistakes(misread, model)
    }
    assert offered["feature_input_hook: mlp.hook_in"] < 1e-9
    assert set(offered) == {
        "feature_input_hook: mlp.hook_in",
        "feature_input_hook: ln2.hook_normalized",
        "b_dec subtracted from the input",
    }


def test_a_bias_that_should_have_been_subtracted_is_among_them(model, own):
    shift_LF = jnp.einsum("LFD,LD->LF", own.params["encoder"], own.params["decoder_bias"])
    params = dict(own.params) | {"encoder_bias": own.params["encoder_bias"] + shift_LF}
    other = dict(fit.mistakes(dataclasses.replace(own, params=params), model))
    left_L = fit.unexplained(model, other["b_dec subtracted from the input"], *text(model))
    assert left_L.max() < 1e-9


def test_few_tokens_are_no_answer_and_what_is_no_number_is_wrong(model, own):
    tokens_BT, valid_BT = text(model)
    with pytest.raises(UsageError, match=r"text: 38 tokens are too few .* give 200 or more"):
        fit.unexplained(model, own, tokens_BT[1:3], valid_BT[1:3])
    assert fit.is_wrong(np.array([np.nan, np.nan])) and not fit.is_wrong(np.array([0.1, np.nan]))
