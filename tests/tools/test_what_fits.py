"""The memory of jobs: bytes counted by hand, and which device holds them."""

import pytest

import lm_jax
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.decoder import param_spec
from tools import what_fits

CONTEXT = 32
# Positions, targets, keys, step counters and learning statistics.
SMALL = 1_024


@pytest.fixture(scope="module")
def cfg():
    return lm_jax.DecoderConfig(
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        hidden_size=64,
        mlp_size=128,
        vocab_size=512,
        max_length=64,
    )


@pytest.fixture(scope="module")
def needs(cfg):
    return {job: compiled(cfg, CONTEXT) for job, compiled in what_fits.JOBS.items()}


def test_arguments_are_the_weights_and_the_state_of_what_is_trained(cfg, needs):
    weights = params_lib.count(param_spec(cfg))
    adapters = params_lib.count(lora.adapter_spec(param_spec(cfg), lora.LoraConfig()))
    by_hand = {
        # bfloat16 weights.
        "forward pass": 2 * weights,
        "audit": 2 * weights,
        # Adapters and their two moments in float32 beside them.
        "post-training, adapters": 2 * weights + 12 * adapters,
        "pretraining, all weights": 12 * weights,
        # Encoders, decoders, their biases and thresholds in float32.
        "attribution graph": 2 * weights
        + 4 * cfg.num_layers * (what_fits.FEATURES * (2 * cfg.hidden_size + 2) + cfg.hidden_size),
    }
    assert set(by_hand) == set(needs)
    for job, expected in by_hand.items():
        assert 0 <= needs[job].arguments - expected < SMALL, job


def test_a_longer_row_takes_more(cfg, needs):
    longer = what_fits.forward(cfg, 2 * CONTEXT)
    assert longer.temporary > needs["forward pass"].temporary
    assert longer.arguments - needs["forward pass"].arguments == 4 * CONTEXT


def test_a_graph_of_6000_tokens_of_gemma_2_2b_fits_into_60_gb():
    """Its attention patterns alone would be 30 GB, and what its features write 748 GB."""
    gemma = lm_jax.DecoderConfig(
        family="gemma2",
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        hidden_size=2_304,
        mlp_size=9_216,
        vocab_size=256_000,
        max_length=8_192,
        norm_offset=1.0,
        norm_placement="both",
        activation="gelu_tanh",
        rope=lm_jax.Rope(theta=10_000.0),
        windows=(4_096, None) * 13,
        attention_scale=256**-0.5,
        score_softcap=50.0,
        logit_softcap=30.0,
        embed_scale=48.0,
        tie_embeddings=True,
    )
    assert what_fits.graph(gemma, 6_000).total < 60e9


@pytest.mark.parametrize(
    ("total", "device"),
    [
        (24e9, "a 24 GB card"),
        (24e9 + 1, "an A100 40 GB"),
        (80e9, "an H100 80 GB"),
        (141e9 + 1, "more than one"),
    ],
)
def test_the_smallest_device_that_holds_it(total, device):
    assert what_fits.Need(int(total) - 1_000, 1_000).device == device
