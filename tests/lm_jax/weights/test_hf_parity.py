"""Weights loaded from `transformers` models compute torch's logits, and are saved unchanged.

Ours and torch's are each compared with the model in float64, within the rounding errors of float32.
"""

import functools

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import lm_jax
from tests import rounding
from tools import make_goldens

CASES = sorted(make_goldens.CASES)


@functools.partial(jax.jit, static_argnums=0)
def run(cfg, params, tokens_BT=make_goldens.TOKENS_BT):
    """The residual stream after every layer, and logits."""
    tokens_BT = jax.numpy.asarray(tokens_BT)
    out = lm_jax.forward(params, tokens_BT, cfg, record={"resid_post": lm_jax.keep})
    return out.records["resid_post"], out.logits


@functools.cache
def wanted(case):
    """Both in float64, and how far float32 may be off."""
    model = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    return rounding.expected(functools.partial(run, model.cfg), model.params)


@pytest.mark.parametrize("case", CASES)
def test_golden_logits_and_every_layer(case):
    folder = make_goldens.GOLDEN / case
    model, golden = lm_jax.load_pretrained(folder), load_file(folder / "expected.safetensors")
    np.testing.assert_array_equal(golden["tokens"], make_goldens.TOKENS_BT)
    rounding.assert_within(run(model.cfg, model.params), wanted(case), "ours")
    rounding.assert_within((golden["hidden"], golden["logits"]), wanted(case), "torch's")


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
    from lm_jax.weights.compat import transformers

    model = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    lm_jax.save_pretrained(tmp_path / "out", model.cfg, model.params)
    loaded, report = transformers().AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    theirs = make_goldens.hidden_and_logits(loaded, make_goldens.TOKENS_BT)
    rounding.assert_within(theirs, wanted(case))


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_goldens_are_what_torch_computes_today(case):
    theirs = make_goldens.hidden_and_logits(make_goldens.reference(case), make_goldens.TOKENS_BT)
    rounding.assert_within(theirs, wanted(case))


@pytest.mark.torch
@pytest.mark.parametrize("case", ["phi3_longrope", "llama_dynamic"])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_rotations_by_length_near_the_first_context(case, beyond):
    model = lm_jax.load_pretrained(make_goldens.GOLDEN / case)
    tokens_BT = make_goldens.TOKENS_BT[:, : model.cfg.rope.scaling.original_length + beyond]
    ours = functools.partial(run, model.cfg, tokens_BT=tokens_BT)
    theirs = make_goldens.hidden_and_logits(make_goldens.reference(case), tokens_BT)
    rounding.assert_within(theirs, rounding.expected(ours, model.params))
