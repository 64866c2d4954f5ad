"""Biases that open gates at the start: the share that was asked for, and the loss of the model.

The models have scores that spread over several units, as those of pretrained models do: with
initial weights scores are near 0, and any bias opens all gates or none.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import lm_jax
from lm_jax.console.config_files import load_config
from lm_jax.errors import BadInputError, UsageError
from lm_jax.parallel import sharding
from lm_jax.run.config import from_plain
from lm_jax.train.objective import ignore_index_batch, nll
from sparse_jax.gates.attend import by_kernels, gated
from sparse_jax.gates.model import Gates, SparseModel
from sparse_jax.gates.opening import open_biases
from sparse_jax.studies.posttrain.settings import OPEN_GATES, PosttrainConfig
from tests.sparse_jax.families import FAMILIES, scored, smollm2_batches, spread_model

# Of every recipe.
SHARE = OPEN_GATES["open_at_start"]
# Of 24 halvings of the interval.
PRECISION = 2.0**13 / 2.0**24


def one_device():
    return sharding.make_mesh(devices=jax.devices()[:1])


@functools.cache
def text():
    """Rows, of which one ends in padding early."""
    tokens_BS = np.random.default_rng(1).integers(0, 40, (16, 25))
    tokens_BS[0, 9:] = -1
    return ignore_index_batch(jnp.asarray(tokens_BS, jnp.int32))


def shares(cfg, params, bias_LN, raw_gate):
    """Open edges and, at the worst position, open weight of each head, `[L, N]`, in float64."""
    batch = text()
    output = scored(params, batch.input_BT, cfg, batch.input_mask_BT)
    scores_LBNTS = np.asarray(output.records["attn.scores"], np.float64)
    valid_BT = np.asarray(batch.input_mask_BT)
    pattern_LBNTS = special.softmax(scores_LBNTS, axis=-1) * valid_BT[:, None, :, None]
    visible_LBNTS = np.isfinite(scores_LBNTS) & valid_BT[:, None, :, None]
    own_LBNTS = np.where(visible_LBNTS, scores_LBNTS, 0.0) / (cfg.scale if raw_gate else 1.0)
    gate_LBNTS = special.expit(own_LBNTS + np.float64(bias_LN)[:, None, :, None, None])
    edges_LN = (visible_LBNTS * gate_LBNTS).sum((1, 3, 4)) / visible_LBNTS.sum((1, 3, 4))
    passed_LNT = (pattern_LBNTS * gate_LBNTS).sum((1, 4)) / valid_BT.sum(0)
    return edges_LN, passed_LNT.min(-1)


@pytest.mark.parametrize("raw_gate", [False, True])
@pytest.mark.parametrize("share", [0.9, 0.99])
def test_the_least_bias_opens_the_share_of_the_edges_and_of_the_weight(share, raw_gate):
    cfg, params = spread_model("llama")
    bias_LN = open_biases(cfg, params, text(), share, one_device(), raw_gate=raw_gate)
    # Scores are sums of few products in float32, below 2^10 without their scale; and a mean of
    # sigmoids changes by at most a quarter of a change of the bias.
    slack = 2.0**-12
    enough_LN = np.minimum(*shares(cfg, params, bias_LN, raw_gate))
    assert np.all(enough_LN >= share - slack)
    less_LN = np.minimum(*shares(cfg, params, bias_LN - PRECISION, raw_gate))
    assert np.all(less_LN < share + slack)


@pytest.mark.parametrize("raw_gate", [False, True])
def test_the_least_bias_that_passes_the_weight_may_close_edges(raw_gate):
    cfg, params = spread_model("llama")
    options = {"raw_gate": raw_gate, "opened": "weight"}
    bias_LN = open_biases(cfg, params, text(), 0.9, one_device(), **options)
    edges_LN, weight_LN = shares(cfg, params, bias_LN, raw_gate)
    assert np.all(weight_LN >= 0.9 - 2.0**-12) and np.any(edges_LN < 0.8)
    _, less_LN = shares(cfg, params, bias_LN - PRECISION, raw_gate)
    assert np.all(less_LN < 0.9 + 2.0**-12)


def test_both_shares_bind_somewhere():
    """A share of edges alone leaves the first token of a row out: it sees one edge, itself."""
    found = []
    for family in FAMILIES:
        cfg, params = spread_model(family)
        bias_LN = open_biases(cfg, params, text(), 0.9, one_device())
        edges_LN, weight_LN = shares(cfg, params, bias_LN, raw_gate=False)
        found += list((edges_LN < weight_LN).ravel())
    assert 0 < sum(found) < len(found)


def test_four_devices_find_the_biases_of_one():
    cfg, params = spread_model("llama")
    bias_LN = open_biases(cfg, params, text(), 0.99, one_device())
    assert bias_LN.shape == (cfg.num_layers, cfg.num_heads) and np.ptp(bias_LN) > 1
    mesh = sharding.make_mesh(data=2, fsdp=2)
    batch = jax.device_put(text(), sharding.batch_sharding(mesh))
    four_LN = open_biases(cfg, params, batch, 0.99, mesh)
    np.testing.assert_allclose(four_LN, bias_LN, rtol=0, atol=2 * PRECISION)


def test_what_cannot_be_opened_is_refused():
    cfg, params = spread_model("llama")
    for share in (0.0, 1.0):
        with pytest.raises(UsageError, match=r"share = \d\.0 must be above 0 and below 1"):
            open_biases(cfg, params, text(), share, one_device())
    empty = ignore_index_batch(jnp.full((4, 9), -1, jnp.int32))
    with pytest.raises(BadInputError, match="has no token; give longer documents"):
        open_biases(cfg, params, empty, 0.99, one_device())
    capped = dataclasses.replace(cfg, score_softcap=20.0)
    with pytest.raises(UsageError, match=r"needs q\.k, and this model's scores are capped"):
        open_biases(capped, params, text(), 0.99, one_device(), raw_gate=True)


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

    return float(mean(text()))


@pytest.mark.parametrize("family", FAMILIES)
def test_open_gates_keep_the_loss_that_bias_0_loses(family):
    """Of every family that a recipe is for: within 0.01 nats in each mode of the gates."""
    cfg, params = spread_model(family)
    bias_LN = open_biases(cfg, params, text(), SHARE, one_device())
    for mode in ("sample", "expected", "threshold"):
        assert divergences(cfg, params, bias_LN, mode) < 0.01, mode
    raw_LN = open_biases(cfg, params, text(), SHARE, one_device(), raw_gate=True)
    assert divergences(cfg, params, raw_LN, "sample", raw_gate=True) < 0.01
    # The same model with the gates of the paper, of which half are closed.
    assert divergences(cfg, params, 0.0, "sample", raw_gate=True) > 0.1


@pytest.mark.real("smollm2", "wiki")
@pytest.mark.slow
def test_smollm2_starts_within_a_hundredth_of_a_nat(tmp_path):
    """As its recipes start, in all modes; the gates of the paper lose a quarter of a nat."""
    base, calibration, held_out = smollm2_batches(tmp_path)
    bias_LN = open_biases(base.cfg, base.params, calibration, SHARE, one_device())
    dense = _mean_loss(base, None, held_out, "open")
    for mode in ("sample", "expected", "threshold"):
        assert abs(_mean_loss(base, Gates(bias_LN), held_out, mode) - dense) < 0.01, mode
    paper = Gates(np.zeros_like(bias_LN), raw_gate=True)
    assert _mean_loss(base, paper, held_out, "sample") - dense > 0.1


@pytest.mark.long
@pytest.mark.real("stories15m")
def test_stories15m_starts_within_a_hundredth_of_a_nat_with_many_edges_closed():
    """As its recipe starts, on text that it samples."""
    base = lm_jax.load_pretrained("stories15m")
    settings = from_plain(load_config("sparse/stories15m"), PosttrainConfig)
    ids = lm_jax.generate(
        base.params,
        [[1]] * 24,
        base.cfg,
        max_new_tokens=127,
        sampling=lm_jax.Sampling(temperature=1.0),
        key=jax.random.key(0),
    )
    tokens_BS = jnp.asarray([[1, *row] for row in ids], jnp.int32)
    calibration, held_out = ignore_index_batch(tokens_BS[:16]), ignore_index_batch(tokens_BS[16:])
    bias_LN = open_biases(
        base.cfg,
        base.params,
        calibration,
        settings.open_at_start,
        one_device(),
        raw_gate=settings.raw_gate,
        opened=settings.opened,
    )
    gates = Gates(bias_LN, raw_gate=settings.raw_gate)
    dense = _mean_loss(base, None, held_out, "open")
    for mode in ("sample", "threshold"):
        assert abs(_mean_loss(base, gates, held_out, mode) - dense) < 0.01, mode
    output = SparseModel(base, gates, {}).forward(held_out.input_BT, mode="threshold")
    pairs = output.aux["pairs_B"].sum() * base.cfg.num_heads
    assert output.aux["open_edges_BN"].sum() < 0.6 * pairs


def _mean_loss(base, gates, batch, mode):
    gates = gates or Gates(np.zeros((base.cfg.num_layers, base.cfg.num_heads), np.float32))
    key = jax.random.key(0) if mode == "sample" else None

    @jax.jit
    def mean(params):
        model = SparseModel(base, gates, {}).with_params(params)
        output = model.forward(batch.input_BT, mode=mode, key=key, valid_BT=batch.input_mask_BT)
        return nll(output, params, base.cfg, batch).sum() / batch.loss_mask_BT.sum()

    return float(mean(base.params))
