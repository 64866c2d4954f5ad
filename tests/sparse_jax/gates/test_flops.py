"""Operations of a post-training step equal those of the same computation with dense attention."""

import jax
import jax.numpy as jnp
import pytest

import lm_jax
from lm_jax.model import params as params_lib
from lm_jax.model.flops import forward_flops
from lm_jax.model.lora import LoraConfig
from lm_jax.model.mixers import ATTENTION
from sparse_jax.gates.geco import GecoConfig
from sparse_jax.gates.objective import Sparsifying
from tests import tiny
from tests.traced import used_products
from tools.bench import posttrain as bench_posttrain

CFG = tiny.decoder(vocab_size=32, max_length=16)
LORA = LoraConfig(rank=2, alpha=4.0, targets=("q", "k", "v", "o"))
FIXED = GecoConfig.fixed(1.0)
ROWS, T = 3, 12


@pytest.mark.parametrize("loss_share", [1.0, 0.25])
def test_an_update_of_adapters_counts_every_product_of_loss_and_gradient(monkeypatch, loss_share):
    # The kernel's backward pass forms products again, which are not counted.
    monkeypatch.setattr(bench_posttrain, "training_softmax", lambda *given: lm_jax.softmax)
    objective = bench_posttrain.Dense(CFG, FIXED, adapters=LORA, distill=0.0, loss_share=loss_share)
    tokens_BS = jnp.ones((ROWS, T + 1), jnp.int32)
    normalizers = objective.normalizers(tokens_BS)

    def loss(params, frozen):
        dual, rng = objective.init_state(), jax.random.key(0)
        return objective.loss_terms(params, frozen, dual, tokens_BS, normalizers, rng)[0]

    frozen = params_lib.abstract(lm_jax.param_spec(CFG))
    traced = jax.make_jaxpr(jax.value_and_grad(loss))(params_lib.abstract(objective.spec), frozen)
    assert used_products(traced.jaxpr) == objective.flops(ROWS, T + 1, "square")


@pytest.mark.parametrize("causal", ["square", "triangle"])
def test_a_teacher_and_the_training_of_all_weights_cost_more(causal):
    forward = ROWS * forward_flops(CFG, ATTENTION, T, causal=causal).total

    def flops(**options):
        return Sparsifying(CFG, FIXED, **options).flops(ROWS, T + 1, causal)

    assert flops(distill=0.0) == 3 * forward and flops(distill=0.5) == 4 * forward
    adapted = flops(adapters=LORA, distill=0.0)
    assert flops(adapters=LORA, distill=1.0) == adapted + forward
    assert 2 * forward < adapted < 3 * forward
