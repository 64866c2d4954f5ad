"""Powers for softmax in a bfloat16 model, against torch's eager bfloat16, as the paper ran it.

Maps are of float32 scores here. The other side maps scores of bfloat16 (`torch_recipes`), so that a
rounding of a score is p times as large in its weight.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import lm_jax
import polyattn_jax
from polyattn_jax.recipes.row_maps import parse_recipe
from tests import rounding
from tests.lm_jax.weights.test_bfloat16_parity import AS_EXACT, errors_of
from tools import make_goldens


def last(cfg, params, *, attend):
    tokens_BT = jnp.asarray(make_goldens.TOKENS_BT)
    return (lm_jax.forward(params, tokens_BT, cfg, attend=attend).logits[:, -1],)


@pytest.mark.torch
@pytest.mark.parametrize("recipe", ["softmax", "relu:p=2,b=0", "relu:p=4,b=0", "relu:p=16,b=0"])
def test_answers_are_as_exact_as_torchs(recipe):
    import torch

    from lm_jax.weights.compat import transformers
    from tools.bench.in_torch.recipes import RecipeModel

    folder = make_goldens.GOLDEN / "llama_gqa"
    model = lm_jax.load_pretrained(folder, dtype=jnp.bfloat16)
    run = functools.partial(last, model.cfg, attend=polyattn_jax.recipe(recipe))
    exact = rounding.expected(run, jax.tree.map(lambda x: x.astype(jnp.float32), model.params))
    theirs = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = torch.tensor(make_goldens.TOKENS_BT)
    answer = RecipeModel(theirs)(tokens, parse_recipe(recipe).map, 0.0).float().numpy()
    (own,), (other,) = errors_of(run(model.params), exact), errors_of((answer,), exact)
    assert 0.0 < own < AS_EXACT * other
