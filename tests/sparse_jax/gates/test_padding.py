"""Rotations by length (LongRoPE) leave the padding of a batch out of every measurement."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm_jax
from lm_jax.train.objective import IGNORE_INDEX, ignore_index_batch, nll
from lm_jax.weights.load import Pretrained
from sparse_jax.gates.model import Gates, SparseModel
from sparse_jax.studies.multiple_choice import run as multiple_choice
from sparse_jax.studies.posttrain import evaluation
from tests import rounding
from tests.lm_jax.model.test_rotation_lengths import FIRST, config, model, text

CFG = config("longrope")
# A text of the first context, padded to the length of one that is longer.
T = FIRST + 3
SHORT, LONG = (text(length, CFG) for length in (FIRST, T))
TOKENS_BT = jnp.array([[*SHORT, *[0] * (T - FIRST)], LONG])
VALID_BT = jnp.arange(T)[None] < jnp.array([[FIRST], [T]])
DENSE = Pretrained(CFG, model(CFG), None, ())
SPARSE = SparseModel(DENSE, Gates(np.full((CFG.num_layers, CFG.num_heads), 0.1, np.float32)), {})


def run_alone(params, tokens_BT, which):
    """A forward pass without padding; the definition of gates, which forms the scores."""
    if which == "dense":
        return lm_jax.forward(params, tokens_BT, CFG)
    return SPARSE.with_params(params).forward(tokens_BT, record={"attn.pattern": lm_jax.keep})


def test_open_edges_of_a_short_text_are_those_of_it_alone():
    table = SPARSE.open_edges(TOKENS_BT, valid_BT=VALID_BT).to_pandas().query("batch == 0")

    def alone(params):
        return run_alone(params, TOKENS_BT[:1, :FIRST], "sparse").records["attn.pattern"][:, 0]

    wanted = rounding.expected(alone, DENSE.params)
    at = np.nonzero(wanted.values)
    for name, places in zip(("layer", "head", "query", "key"), at, strict=True):
        np.testing.assert_array_equal(table[name], places)
    rounding.assert_within(
        table["weight"].to_numpy(), rounding.Expected(*(np.asarray(x)[at] for x in wanted))
    )


@pytest.mark.parametrize("which", ["dense", "sparse"])
def test_losses_of_a_short_text_are_those_of_it_alone(which):
    tokens_BS = np.full((2, T + 1), IGNORE_INDEX)
    tokens_BS[0, :FIRST], tokens_BS[1] = SHORT, [*LONG, 1]
    run = jax.jit(functools.partial(evaluation._evaluate, DENSE, SPARSE, ignore_index_batch))
    result = run(DENSE.params, DENSE.params, jnp.asarray(tokens_BS), None)[f"{which}_nll"]
    # Of a text that ends, the last token is read too, and predicts nothing.
    batch = ignore_index_batch(jnp.asarray(tokens_BS[:1, : FIRST + 1]))

    def alone(params):
        return nll(run_alone(params, batch.input_BT, which), params, CFG, batch)[0]

    rounding.assert_within(result[0], rounding.expected(alone, DENSE.params))


@pytest.mark.parametrize("which", ["dense", "sparse"])
def test_a_question_is_scored_by_the_logits_of_it_alone(which):
    logits = jax.jit(
        functools.partial(multiple_choice._logits, DENSE if which == "dense" else SPARSE)
    )
    result = logits(DENSE.params, TOKENS_BT, VALID_BT)[0, :FIRST]
    wanted = rounding.expected(
        lambda params: run_alone(params, TOKENS_BT[:1, :FIRST], which).logits[0], DENSE.params
    )
    rounding.assert_within(result, wanted)
