"""Counted operations are those of the traced programs, in either convention of causal attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.model.flops import forward_flops
from lm_jax.model.mixers import ATTENTION, AttentionMixer
from lm_jax.train.objective import LanguageModelling
from tests import tiny
from tests.lm_jax.train import tiny_training
from tests.traced import products, used_products

T = 12
CFG = tiny.decoder(vocab_size=32, max_length=16)


# Layers of two shapes, the last of which reads the keys of the first, with inputs of their own.
UNLIKE = {
    "num_layers": 3,
    "layers": (
        lm_jax.LayerShape(),
        lm_jax.LayerShape(head_dim=2, kv="tied"),
        lm_jax.LayerShape(mlp_size=10, kv=0),
    ),
    "block_end": lm_jax.BlockEnd(5),
}


@pytest.mark.parametrize("changed", [{}, {"num_kv_heads": 1, "gated_mlp": False}, UNLIKE])
def test_the_square_holds_every_product_of_the_forward_pass(changed):
    cfg = dataclasses.replace(CFG, **changed)
    params = lm_jax.params.abstract(lm_jax.param_spec(cfg))
    tokens_BT = jax.ShapeDtypeStruct((1, T), jnp.int32)
    traced = jax.make_jaxpr(lambda p, t: lm_jax.forward(p, t, cfg).logits)(params, tokens_BT)
    assert products(traced.jaxpr) == forward_flops(cfg, ATTENTION, T).total


def test_an_update_holds_every_product_of_loss_and_gradient():
    # With dropout of the pattern: attention in spans leaves out a part of the square.
    mixer = AttentionMixer(pattern_dropout=True)
    objective = LanguageModelling(tiny_training.CFG, mixer, dropout=0.1)
    params = lm_jax.params.abstract(objective.spec)
    tokens_BS = jnp.asarray(tiny_training.BATCHES.at(0)["tokens"])

    def loss(params):
        normalizers = objective.normalizers(tokens_BS)
        return objective.loss_terms(params, (), None, tokens_BS, normalizers, jax.random.key(0))[0]

    traced = jax.make_jaxpr(jax.value_and_grad(loss))(params)
    assert used_products(traced.jaxpr) == objective.flops(*tokens_BS.shape, "square")


@pytest.mark.parametrize("window", [None, 1, 5, T, 40])
def test_the_triangle_counts_the_pairs_that_a_mask_shows(window):
    cfg = dataclasses.replace(CFG, windows=(window,) * CFG.num_layers)
    distance = np.arange(T)[:, None] - np.arange(T)
    visible = (distance >= 0) & (distance < (window or T))
    square = forward_flops(cfg, ATTENTION, T)
    triangle = forward_flops(cfg, ATTENTION, T, causal="triangle")
    assert triangle.mixing * T * T == square.mixing * visible.sum()
    assert dataclasses.replace(triangle, mixing=square.mixing) == square
