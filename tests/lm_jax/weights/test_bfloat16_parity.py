"""Models in bfloat16 against torch's eager bfloat16, in which the papers read theirs.

Both round in other places, so neither is the other's oracle: each has its error, root mean square,
from the float64 value of the same bfloat16 weights.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from tests import rounding
from tests.lm_jax.weights.test_hf_parity import run
from tools import make_goldens

# What the error of as many roundings in other places may differ by; a softmax or a norm that is
# computed in bfloat16 doubles it.
AS_EXACT = 1.5


def errors_of(got, exact):
    return [
        np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - y)))
        for x, y in zip(got, exact.values, strict=True)
    ]


@pytest.mark.torch
@pytest.mark.parametrize("case", ["llama_gqa", "neox", "qwen3", "gemma2"])
def test_the_stream_and_the_logits_are_as_exact_as_torchs(case):
    import torch

    from lm_jax.weights.compat import transformers

    folder = make_goldens.GOLDEN / case
    model = lm_jax.load_pretrained(folder, dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    exact = rounding.expected(functools.partial(run, model.cfg), wide)
    theirs = transformers().AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.bfloat16
    )
    answer = make_goldens.hidden_and_logits(theirs.eval(), make_goldens.TOKENS_BT)
    ours = run(model.cfg, model.params)
    assert ours[0].dtype == jnp.bfloat16
    for own, other in zip(errors_of(ours, exact), errors_of(answer, exact), strict=True):
        assert 0.0 < own < AS_EXACT * other
