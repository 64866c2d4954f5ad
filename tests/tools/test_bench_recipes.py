"""The benchmark of recipes prints a ratio only where both libraries answer alike."""

import jax
import numpy as np
import pytest

import lm_jax
from polyattn_jax.recipes.row_maps import RECIPES
from polyattn_jax.suites import induction
from tools.bench import recipes as bench_recipes
from tools.bench.in_torch import llama as torch_llama
from tools.bench.in_torch import recipes as torch_recipes
from tools.bench.in_torch.recipes import RecipeModel

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model():
    cfg = lm_jax.DecoderConfig(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        hidden_size=16,
        mlp_size=16,
        vocab_size=40,
        max_length=64,
    )
    return lm_jax.Pretrained(cfg, lm_jax.init_params(jax.random.key(0), cfg), None, ())


@pytest.fixture(scope="module")
def suite():
    return induction(vocabulary=40, length=17, n=3)


def test_a_hooked_torch_model_gives_our_logits_under_every_recipe(model, suite):
    import torch

    tokens_BT = np.array([prompt.tokens for prompt in suite.prompts])
    theirs = RecipeModel(torch_llama.as_torch(model.cfg, model.params))
    for recipe in RECIPES.values():
        bias = 1.0 if recipe.bias == "auto" else recipe.bias
        attend = bench_recipes.measure.substitute([recipe.map], 0, bias, np.ones((2, 4), bool))
        ours = lm_jax.forward(model.params, tokens_BT, model.cfg, attend=attend).logits[:, -1]
        expected = theirs(torch.tensor(tokens_BT), recipe.map, bias).numpy()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5, err_msg=recipe.name)


def test_equal_answers_are_timed(model, suite, capsys):
    assert bench_recipes.against_hooks(model, suite, batch_size=2, bias=1.0, repeats=2)
    out = capsys.readouterr().out
    assert "14 recipes x 3 prompts of 17 tokens, 2 at a time, ours / transformers" in out
    assert "42 of 42 answers equal" in out and " ms (" in out


def test_other_answers_print_no_ratio(model, suite, capsys, monkeypatch):
    text = torch_recipes.RecipeModel.__call__
    monkeypatch.setattr(torch_recipes.RecipeModel, "__call__", lambda *args: -text(*args))
    assert not bench_recipes.against_hooks(model, suite, batch_size=2, bias=1.0, repeats=2)
    out = capsys.readouterr().out
    assert "not timed, as" in out and " ms (" not in out
