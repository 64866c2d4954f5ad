"""Rows longer than the context of pretraining: recurrent mixers read them, attention does not."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model import params as params_lib
from lm_jax.text.tokenizer_training import train_tokenizer
from protot_jax.mixers.models import build_model
from protot_jax.studies.glue import finetune
from protot_jax.studies.glue.encoding import encode_task
from protot_jax.studies.glue.objective import HEAD
from protot_jax.studies.glue.readers import Split, TaskData
from protot_jax.studies.glue.settings import GlueConfig
from protot_jax.studies.glue.tasks import OFFICIAL
from protot_jax.training.config import PretrainConfig
from protot_jax.training.saved_run import TrainedModel

CONTEXT = 16
LONG, SHORT = " ".join("abcdef"[i % 6] for i in range(600)), "b a d"
CONFIG = GlueConfig(tasks=("films",))
SST2 = OFFICIAL["sst2"]
# A model of each family.
RECURRENT = ["protot", "mamba", "deltanet", "raven"]


@pytest.fixture(scope="module", params=["llama", *RECURRENT])
def base(request):
    """A model that was not trained, with a token for every letter."""
    tokenizer = train_tokenizer(["a b c d e f"] * 3, vocab_size=60)
    cfg, mixer = build_model(
        request.param,
        hidden_size=16,
        num_layers=2,
        vocab_size=tokenizer.vocab_size,
        context=CONTEXT,
        tie_embeddings=True,
    )
    config = PretrainConfig(model=request.param)
    params = lm_jax.init_params(jax.random.key(0), cfg, mixer=mixer)
    return TrainedModel(cfg, mixer, params, tokenizer, config, 1, 7, "ab" * 32)


def encoded(base, texts, **changes):
    split = Split([(text,) for text in texts], np.arange(len(texts)) % 2.0)
    length, pads = finetune.row_length(dataclasses.replace(CONFIG, **changes), base)
    data = TaskData(split, split, {"dev": split}, {}, "", True)
    return encode_task(data, SST2, base.tokenizer, length=length, pads=pads).train


def predictions(base, rows_NS):
    objective = finetune.objective_of(CONFIG, base, SST2)
    head = params_lib.init(jax.random.key(1), {HEAD: objective.head_spec})
    head[HEAD]["w"] *= 20.0
    return np.asarray(jax.jit(objective.predict)({"model": base.params, **head}, rows_NS))


def test_a_long_text_has_the_length_of_the_paper_unless_attention_has_a_context(base, caplog):
    train = encoded(base, [LONG, SHORT])
    attention = not base.mixer.recurrent
    assert attention == (base.config.model == "llama")
    assert train.rows_NS.shape == (2, (CONTEXT if attention else 512) + 1)
    assert train.truncated == 1
    # The released pooling, which reads padding, pads short texts to the same length.
    alone = encoded(base, [SHORT], pooling="released").rows_NS
    assert alone.shape[1] == train.rows_NS.shape[1]
    with caplog.at_level(logging.WARNING):
        finetune.warn_of_context(CONFIG, base, "own")
    warning = "own: rows have at most 16 ids, the context of its attention"
    assert (warning in caplog.text) == attention
    # A shorter length than the context is what it is, without a warning.
    caplog.clear()
    less = dataclasses.replace(CONFIG, max_length=9)
    finetune.warn_of_context(less, base, "own")
    assert finetune.row_length(less, base)[0] == 9 and not caplog.text


def test_a_short_text_has_the_same_outputs_beside_a_long_one(base):
    """The pooling leaves padding out, and no state reads it, so that its amount is no matter."""
    alone, beside = (
        encoded(base, texts, max_length=2 * CONTEXT).rows_NS for texts in ([SHORT], [LONG, SHORT])
    )
    assert alone.shape[1] < beside.shape[1]
    wanted, (_, short) = (predictions(base, rows) for rows in (alone, beside))
    # Sums over five positions and 16 channels in another order: some 100 roundings of numbers
    # below 10.
    np.testing.assert_allclose(short, wanted[0], rtol=0, atol=1e-4)


def test_the_context_of_pretraining_is_nothing_to_a_forward_pass(base):
    """Every model computes the same at all positions of a row if its context is called longer.

    So what limits attention is what it was trained on, the angles of its positions.
    """
    tokens = jnp.asarray(encoded(base, [LONG], max_length=CONTEXT).rows_NS[:, :-1])
    tokens = jnp.tile(tokens, (1, 4))
    longer = dataclasses.replace(base.cfg, max_length=4 * CONTEXT)
    hidden = [
        lm_jax.forward(base.params, tokens, cfg, mixer=base.mixer).hidden
        for cfg in (base.cfg, longer)
    ]
    np.testing.assert_array_equal(*hidden)
    assert np.isfinite(hidden[0]).all()


@pytest.mark.parametrize("base", RECURRENT, indirect=True)
def test_a_recurrent_mixer_has_no_position(base):
    """A row reads what follows its padding on the left as if it began there."""
    text = encoded(base, [SHORT]).rows_NS[:, :-1]
    moved = np.pad(text, ((0, 0), (3 * CONTEXT, 0)))
    hidden, late = (
        lm_jax.forward(
            base.params, jnp.asarray(ids), base.cfg, mixer=base.mixer, valid_BT=jnp.asarray(ids > 0)
        ).hidden
        for ids in (text, moved)
    )
    # Means of products in another order: some 100 roundings of numbers below 10.
    np.testing.assert_allclose(late[:, 3 * CONTEXT :], hidden, rtol=0, atol=1e-4)
