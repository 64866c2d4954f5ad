"""Weights loaded from `transformers` models give what torch computes, and go back unchanged."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import lm_jax
from tools import make_goldens

CASES = sorted(make_goldens.CASES)


def run(model, tokens_BT):
    out = lm_jax.forward(
        model.params, jnp.asarray(tokens_BT), model.cfg, record={"resid_post": lm_jax.keep}
    )
    return np.asarray(out.records["resid_post"]), np.asarray(out.logits)


@pytest.mark.parametrize("case", CASES)
def test_golden_logits_and_every_layer(case):
    folder = make_goldens.GOLDEN / case
    expected = load_file(folder / "expected.safetensors")
    hidden, logits = run(lm_jax.load_pretrained(folder), expected["tokens"])
    np.testing.assert_allclose(hidden, expected["hidden"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_again_is_bitwise_equal(case, tmp_path):
    model = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params)
    again = lm_jax.load_pretrained(tmp_path / "out")
    assert again.cfg == model.cfg
    for path, leaf in lm_jax.params.by_path(model.params).items():
        np.testing.assert_array_equal(lm_jax.params.by_path(again.params)[path], leaf, err_msg=path)


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_we_save(case, tmp_path):
    from lm_jax.hf.compat import transformers

    model = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params)
    loaded, report = transformers().AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    tokens_BT = make_goldens.TOKENS_BT
    hidden, logits = make_goldens.hidden_and_logits(loaded, tokens_BT)
    ours_hidden, ours_logits = run(model, tokens_BT)
    np.testing.assert_allclose(ours_hidden, hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours_logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_goldens_are_what_torch_computes_today(case):
    expected = load_file(make_goldens.GOLDEN / case / "expected.safetensors")
    hidden, logits = make_goldens.hidden_and_logits(
        make_goldens.reference(case), make_goldens.TOKENS_BT
    )
    np.testing.assert_allclose(hidden, expected["hidden"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=1e-5)
