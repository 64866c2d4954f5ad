"""A run of a sparse model is one with its gates, in logits, sites and shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.weights.load import Pretrained
from sparse_jax.gates.model import Gates, SparseModel
from tests import tiny

CFG = tiny.decoder(vocab_size=32, max_length=24, num_heads=4, num_kv_heads=2)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model():
    params = jax.tree.map(lambda x: 3.0 * x, tiny.params(CFG))
    bias_LN = np.linspace(-0.6, 0.2, 8, dtype=np.float32).reshape(2, 4)
    return SparseModel(Pretrained(CFG, params, None, ()), Gates(bias_LN), {})


def test_a_run_has_the_logits_of_the_forward_pass_and_the_patterns_of_the_open_edges(model):
    run, tokens_BT = model.run(IDS), jnp.array([IDS])
    np.testing.assert_allclose(run.logits, model.forward(tokens_BT).logits, rtol=1e-5, atol=1e-5)
    edges = model.open_edges(tokens_BT)
    shown = np.zeros(run.cache["attn.pattern"].shape, bool)
    shown[edges["layer"], 0, edges["head"], edges["query"], edges["key"]] = True
    np.testing.assert_array_equal(np.asarray(run.cache["attn.pattern"]) != 0, shown)
    assert 0 < shown.sum() < 4 * 2 * len(IDS) * (len(IDS) + 1) / 2


def test_shares_of_components_add_up_to_the_difference_under_gates(model):
    run = model.run(IDS)
    shares = run.attribution(7, 9)
    assert shares.total_B[0] == pytest.approx(run.logit_diff(7, 9), rel=1e-4)
    assert abs(shares.rest_B[0]) < 1e-4 * float(np.abs(shares.mixer_LBN).max())


def test_an_edit_of_a_run_keeps_the_gates(model):
    without = model.run(IDS, edits=lm_jax.ablate("L0H1"))
    zero_LBTNH = jnp.zeros((2, 1, len(IDS), 4, CFG.head_dim))
    mask = jnp.zeros((2, 1, 1, 4, 1), bool).at[0, :, :, 1].set(True)
    edits = {"attn.z": lm_jax.Replace(zero_LBTNH, mask)}
    want = model.forward(jnp.array([IDS]), edits=edits).logits
    np.testing.assert_allclose(without.logits, want, rtol=1e-5, atol=1e-5)
