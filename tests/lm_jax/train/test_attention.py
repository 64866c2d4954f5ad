"""The softmax of training is that of whole scores, by whichever kernel; on a mesh by device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iaj_kernels.core import dispatch
import lm_jax
from lm_jax.parallel import sharding
from lm_jax.parallel.kernels import under_mesh
from lm_jax.train import attention as training_attention
from lm_jax.train.attention import fastest_softmax
from tests.lm_jax.model.test_fused_softmax import (
    CASES,
    PAST,
    SCALE,
    assert_is_softmax_of_whole_scores,
    attended,
    draw,
)

CAUSAL_ALONE = ("square", "grouped", "several_blocks")


@pytest.fixture
def as_cudnn(monkeypatch):
    """XLA computes what cuDNN is asked for; the dtypes of its arrays are kept."""
    real, asked = jax.nn.dot_product_attention, []

    def attend(*arrays, implementation, **options):
        assert implementation == "cudnn" and options == {"is_causal": True, "scale": SCALE}
        asked.append({x.dtype.name for x in arrays})
        return real(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    return asked


@pytest.mark.parametrize("name", CASES)
def test_cudnn_is_asked_for_what_is_causal_alone(name, as_cudnn):
    """Rows of odd length it does not take, and with a mask it reads a bias for every pair."""
    assert_is_softmax_of_whole_scores(name, "cudnn")
    assert bool(as_cudnn) == (name in CAUSAL_ALONE)


def test_cudnn_is_given_one_dtype(as_cudnn):
    """Queries and keys that are rotated in float32 have that of the values."""
    q, k, v, _ = draw(1, 8, 8, 2, 1)
    out = attended(q, k, v.astype(jnp.bfloat16), lm_jax.fused(lm_jax.softmax, "cudnn"), **PAST)
    assert as_cudnn == [{"bfloat16"}] and out.dtype == jnp.bfloat16


H200 = dispatch.Target("gpu", "NVIDIA H200")


@pytest.mark.parametrize(
    ("has", "dtype", "widths", "cap", "chosen"),
    [
        (True, "bfloat16", [64], None, "cudnn"),
        (True, "float16", [128, 64], None, "cudnn"),
        (True, "float32", [64], None, "sharded"),
        (True, "bfloat16", [256], None, "sharded"),
        (True, "bfloat16", [64, 256], None, "sharded"),
        (True, "bfloat16", [20], None, "sharded"),
        (True, "bfloat16", [64], 50.0, "sharded"),
        (False, "bfloat16", [64], None, "sharded"),
    ],
)
def test_training_takes_cudnn_where_it_fits(has, dtype, widths, cap, chosen, monkeypatch):
    assert fastest_softmax(dtype, widths, cap).implementation == "kernels"
    monkeypatch.setattr(training_attention, "_has_cudnn", lambda: has)
    with dispatch.on(H200):
        assert fastest_softmax(dtype, widths, cap).implementation == chosen


def test_a_gpu_that_is_not_here_has_no_cudnn():
    assert not training_attention._has_cudnn()
    with dispatch.on(H200):
        assert not training_attention._has_cudnn()


@pytest.mark.parametrize("implementation", ["sharded", "cudnn"])
def test_on_a_mesh_each_device_attends_in_its_rows_and_heads(implementation, as_cudnn):
    """Without that the compiler gathers every argument of a kernel on every device."""
    mesh = sharding.make_mesh(2, 1, 2, devices=jax.devices()[:4])
    *qkv, _ = draw(4, 8, 8, 4, 2)
    fused = lm_jax.fused(lm_jax.softmax, implementation)
    run = under_mesh(lambda *qkv: attended(*qkv, fused, **PAST), mesh)
    assert "shard_map" in str(jax.make_jaxpr(run)(*qkv))
    run = jax.jit(run, in_shardings=sharding.replicated(mesh))
    np.testing.assert_allclose(
        run(*qkv), attended(*qkv, lm_jax.softmax, **PAST), rtol=1e-5, atol=1e-5
    )
