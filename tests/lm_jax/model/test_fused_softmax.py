"""Softmax by the kernel is the attention of the definition, and needs less memory."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.attention.visibility import visibility
import lm_jax
from lm_jax.model import sites
from lm_jax.model.attention import attention
from lm_jax.model.mixers import ATTENTION, AttentionMixer
from lm_jax.train import objective
from tests import rounding, tiny

SCALE = 0.3


def draw(B, T, S, N, K, H=8, seed=0):
    """Queries, keys, values and a cotangent; scores of standard deviation 2.5 or so."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    return tuple(1.7 * jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))


def attended(q, k, v, attend, *, cap=None, segment_ids=None, **visible):
    keys_visible = visibility(
        "attention", *q.shape[:2], k.shape[1], segment_ids=segment_ids, **visible
    )
    scope = sites.Scope({}, {})
    return attention(q, k, v, keys_visible, attend=attend, scale=SCALE, cap=cap, scope=scope)


def value_and_gradients(arrays, attend, **visible):
    *qkv, cotangent = arrays
    out, back = jax.vjp(lambda *qkv: attended(*qkv, attend, **visible), *qkv)
    return out, back(cotangent)


PAST = {"causal": True, "window": None, "start": 0}
# B, T, S, N, K, and the visibility.
CASES = {
    "square": ((2, 16, 16, 2, 2), PAST),
    "uneven": ((1, 13, 13, 1, 1), PAST),
    "shorter_than_the_spans": ((1, 3, 3, 1, 1), PAST),
    "grouped": ((1, 10, 10, 6, 2), PAST),
    "window": ((1, 12, 12, 2, 1), PAST | {"window": 4}),
    "after_a_cache": ((2, 6, 12, 2, 2), PAST | {"start": 4}),
    "all_keys": ((1, 6, 9, 1, 1), PAST | {"causal": False}),
    "several_blocks": ((1, 80, 80, 2, 1), PAST),
    "soft_cap": ((1, 12, 12, 2, 1), PAST | {"cap": 2.0}),
    "segments": ((1, 8, 8, 2, 1), PAST | {"segment_ids": np.array([[0, 0, 0, 1, 1, 1, -1, -1]])}),
}


def assert_is_softmax_of_whole_scores(name, implementation):
    """Values and gradients of a case."""
    sizes, visible = CASES[name]
    arrays = draw(*sizes)
    wanted = rounding.expected(
        lambda *arrays: value_and_gradients(arrays, lm_jax.softmax, **visible), *arrays
    )
    fused = lm_jax.fused(lm_jax.softmax, implementation)
    got = jax.jit(lambda *arrays: value_and_gradients(arrays, fused, **visible))(*arrays)
    rounding.assert_within(got, wanted, name)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_whole_scores(name):
    assert_is_softmax_of_whole_scores(name, "kernels")


def test_a_start_that_is_data_reads_the_same_keys():
    arrays = draw(2, 4, 9, 2, 1)
    fused = lm_jax.fused(lm_jax.softmax, "kernels")
    starts = jnp.array([5, 2], jnp.int32)

    def of(attend):
        return lambda *arrays: value_and_gradients(arrays, attend, **PAST | {"start": starts})

    wanted = rounding.expected(of(lm_jax.softmax), *arrays)
    rounding.assert_within(jax.jit(of(fused))(*arrays), wanted)


def test_a_row_that_sees_nothing_is_zero():
    q, k, v, cotangent = draw(1, 4, 4, 1, 1)
    fused = lm_jax.fused(lm_jax.softmax, "kernels")
    visible = PAST | {"start": -2}
    out, gradients = value_and_gradients((q, k, v, cotangent), fused, **visible)
    np.testing.assert_array_equal(out[:, :2], 0)
    np.testing.assert_array_equal(gradients[0][:, :2], 0)
    assert all(np.isfinite(x).all() for x in gradients)


def shapes_of(rate, mixer=ATTENTION, cfg=None):
    """The shapes in the program of a loss and its gradient, 2 rows of 80 tokens."""
    cfg = cfg or tiny.DECODER
    params = lm_jax.params.abstract(lm_jax.param_spec(cfg, mixer))
    tokens_BS = jnp.ones((2, 81), jnp.int32)

    def loss(params):
        key = jax.random.key(0) if rate else None
        return objective.token_loss(params, tokens_BS, cfg, mixer, dropout=rate, rng=key)[0]

    program = str(jax.make_jaxpr(jax.grad(loss))(params))
    return {tuple(map(int, s.split(","))) for s in re.findall(r"\[([\d,]+)\]", program)}


def has_whole_scores(shapes):
    return any(len(shape) > 2 and shape[-2:] == (80, 80) for shape in shapes)


def test_training_forms_whole_scores_only_to_drop_from_them():
    assert not has_whole_scores(shapes_of(0.0))
    assert not has_whole_scores(shapes_of(0.1))
    dropping = AttentionMixer(pattern_dropout=True)
    assert not has_whole_scores(shapes_of(0.0, dropping))
    assert has_whole_scores(shapes_of(0.1, dropping))
    capped = dataclasses.replace(tiny.DECODER, score_softcap=20.0)
    assert not has_whole_scores(shapes_of(0.0, cfg=capped))


def test_a_gradient_over_long_rows_needs_little_memory():
    arrays = draw(1, 1_024, 1_024, 4, 4)

    def needed(attend):
        run = jax.jit(lambda *arrays: value_and_gradients(arrays, attend, **PAST))
        return run.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    ours = needed(lm_jax.fused(lm_jax.softmax, "kernels"))
    assert ours < 0.8 * needed(lm_jax.softmax)
