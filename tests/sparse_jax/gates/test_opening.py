"""Biases that open gates at the start: the share that was asked for, and the loss of the model.

The models have scores that spread over several units, as those of pretrained models do: with
initial weights scores are near 0, and any bias opens all gates or none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.parallel import sharding
from lm_jax.train.objective import ignore_index_batch, nll
from sparse_jax.gates.attend import by_kernels, gated
from sparse_jax.gates.model import Gates, SparseModel
from sparse_jax.gates.opening import open_biases
from tests.sparse_jax.families import FAMILIES, scored, smollm2_batches, spread_model

# Of 24 halvings of the interval.
PRECISION = 2.0**13 / 2.0**24


def one_device():
    return sharding.make_mesh(devices=jax.devices()[:1])


@functools.cache
def batches():
    """Two batches of rows, of which some end in padding."""
    rng = np.random.default_rng(1)
    tokens_KBS = rng.integers(0, 40, (2, 8, 25))
    tokens_KBS[:, 0, 9:] = -1
    return [ignore_index_batch(jnp.asarray(each, jnp.int32)) for each in tokens_KBS]


def logits(cfg, params, raw_gate):
    """The scores of visible pairs that gates read, of both batches, by layer and head."""
    found = [[[] for _ in range(cfg.num_heads)] for _ in range(cfg.num_layers)]
    for batch in batches():
        output = scored(params, batch.input_BT, cfg, batch.input_mask_BT)
        scores_LBNTS = np.asarray(output.records["attn.scores"], np.float64)
        if raw_gate:
            scores_LBNTS = scores_LBNTS / cfg.scale
        visible_BTS = (
            np.isfinite(scores_LBNTS[0, :, 0]) & np.asarray(batch.input_mask_BT)[..., None]
        )
        for layer, scores_BNTS in enumerate(scores_LBNTS):
            for head in range(cfg.num_heads):
                found[layer][head].append(scores_BNTS[:, head][visible_BTS])
    return [[np.concatenate(each) for each in row] for row in found]


@pytest.mark.parametrize("raw_gate", [False, True])
@pytest.mark.parametrize("share", [0.9, 0.99])
def test_the_mean_of_the_gates_is_the_share_that_was_asked_for(share, raw_gate):
    cfg, params = spread_model("llama")
    bias_LN = open_biases(cfg, params, batches(), share, one_device(), raw_gate=raw_gate)
    for layer, row in enumerate(logits(cfg, params, raw_gate)):
        for head, score in enumerate(row):
            bias = float(bias_LN[layer, head])
            # Scores are sums of few products in float32, below 2^10 without their scale; and the
            # mean of sigmoids changes by at most a quarter of a change of the bias.
            slack = 2.0**-12
            assert special.expit(score + bias).mean() >= share - slack
            assert special.expit(score + bias - PRECISION).mean() < share + slack
            # A rule, e > 0, opens more of them: the share of a quantile is another bias.
            assert np.mean(score + bias > 0) > share
            assert bias > -np.quantile(score, 1 - share)


def test_heads_differ_in_their_biases():
    cfg, params = spread_model("llama")
    bias_LN = open_biases(cfg, params, batches(), 0.99, one_device())
    assert bias_LN.shape == (cfg.num_layers, cfg.num_heads) and np.ptp(bias_LN) > 1
    four = open_biases(cfg, params, batches(), 0.99, sharding.make_mesh(data=2, fsdp=2))
    np.testing.assert_allclose(four, bias_LN, rtol=0, atol=2 * PRECISION)


def test_a_share_that_no_bias_gives_and_text_without_tokens_are_refused():
    cfg, params = spread_model("llama")
    for share in (0.0, 1.0):
        with pytest.raises(UsageError, match=r"share = \d\.0 must be above 0 and below 1"):
            open_biases(cfg, params, batches(), share, one_device())
    empty = ignore_index_batch(jnp.full((4, 9), -1, jnp.int32))
    with pytest.raises(BadInputError, match="has no token; give longer documents"):
        open_biases(cfg, params, [empty], 0.99, one_device())


def divergences(cfg, params, bias, mode, *, raw_gate=False):
    """KL(dense || gated) in nats per token, the expected loss on text of the dense model."""

    @jax.jit
    def mean(batch):
        attend = gated(
            cfg,
            mode=mode,
            key=jax.random.key(0) if mode == "sample" else None,
            bias=bias,
            valid_BT=batch.input_mask_BT,
            raw_gate=raw_gate,
        )
        log_p, log_q = (
            jax.nn.log_softmax(
                lm_jax.forward(
                    params, batch.input_BT, cfg, attend=each, valid_BT=batch.input_mask_BT
                ).logits
            )
            for each in (lm_jax.softmax, by_kernels(attend))
        )
        kl_BT = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        return jnp.where(batch.loss_mask_BT, kl_BT, 0.0).sum() / batch.loss_mask_BT.sum()

    return np.mean([float(mean(batch)) for batch in batches()])


@pytest.mark.parametrize("family", FAMILIES)
def test_open_gates_keep_the_loss_that_bias_0_loses(family):
    """Of every family that a recipe is for: within 0.01 nats in each mode of the gates."""
    cfg, params = spread_model(family)
    bias_LN = open_biases(cfg, params, batches(), 0.99, one_device())
    for mode in ("sample", "expected", "threshold"):
        assert divergences(cfg, params, bias_LN, mode) < 0.01, mode
    raw_LN = open_biases(cfg, params, batches(), 0.99, one_device(), raw_gate=True)
    assert divergences(cfg, params, raw_LN, "sample", raw_gate=True) < 0.01
    # The same model with the gates of the paper, of which half are closed.
    assert divergences(cfg, params, 0.0, "sample", raw_gate=True) > 0.1


@pytest.mark.real("smollm2", "wiki")
@pytest.mark.slow
def test_smollm2_starts_within_a_hundredth_of_a_nat(tmp_path):
    """As its recipes start, in all modes; the gates of the paper lose a quarter of a nat."""
    base, calibration, held_out = smollm2_batches(tmp_path)
    bias_LN = open_biases(base.cfg, base.params, calibration, 0.99, one_device())
    dense = _mean_loss(base, None, held_out, "open")
    for mode in ("sample", "expected", "threshold"):
        assert abs(_mean_loss(base, Gates(bias_LN), held_out, mode) - dense) < 0.01, mode
    paper = Gates(np.zeros_like(bias_LN), raw_gate=True)
    assert _mean_loss(base, paper, held_out, "sample") - dense > 0.1


def _mean_loss(base, gates, batch, mode):
    gates = gates or Gates(np.zeros((base.cfg.num_layers, base.cfg.num_heads), np.float32))
    key = jax.random.key(0) if mode == "sample" else None

    @jax.jit
    def mean(params):
        model = SparseModel(base, gates, {}).with_params(params)
        output = model.forward(batch.input_BT, mode=mode, key=key, valid_BT=batch.input_mask_BT)
        return nll(output, params, base.cfg, batch).sum() / batch.loss_mask_BT.sum()

    return float(mean(base.params))
