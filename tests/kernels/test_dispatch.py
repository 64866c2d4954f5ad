"""The choice of an implementation, and what is said of a slower one."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from iaj_kernels.core import dispatch
from iaj_kernels.delta_rule.api import delta_rule
from iaj_kernels.gated_attention.api import gated_attention
from iaj_kernels.prefix_mean.api import prefix_mean
from iaj_kernels.row_map_attention.api import row_map_attention
from iaj_kernels.row_map_attention.maps import SOFTMAX
from iaj_kernels.score_stats.api import score_stats
from iaj_kernels.selective_scan.api import selective_scan

GPU = dispatch.Target("gpu", "NVIDIA H200")


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(dispatch, "_FALLBACKS", [])


def trace(function, *shapes):
    """Traces the function of float32 arrays, which chooses its implementation, and runs nothing."""
    jax.eval_shape(function, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def means(R=16, E=16, **options):
    def run(write_BTR, value_BTE, decay_R, read_BTR):
        return prefix_mean(write_BTR, value_BTE, decay_R, read_BTR, **options)

    trace(run, (1, 4, R), (1, 4, E), (R,), (1, 4, R))


def attend(H):
    trace(
        lambda q, k, v: row_map_attention(q, k, v, row_map=SOFTMAX),
        *[(1, 4, 1, H)] * 3,
    )


CASES = {
    "prefix_mean: pallas needs R a power of two from 16 to 64, and R = 128": lambda: means(R=128),
    "prefix_mean: pallas needs E a power of two from 16 to 256, and E = 512": lambda: means(E=512),
    "prefix_mean: pallas has no resets": lambda: means(resets_BT=jnp.zeros((1, 4), bool)),
    "row_map_attention: pallas needs H to be one of 16, 32, 64, 128, 256, and H = 8": lambda: (
        attend(8)
    ),
    "gated_attention: pallas does not support renormalise=True": lambda: trace(
        lambda q, k, v: gated_attention(q, k, v, mode="expected", renormalise=True),
        *[(1, 4, 1, 16)] * 3,
    ),
    "score_stats: pallas needs a head width of 16, 32, 64, 128 or 256, and H = 24": lambda: trace(
        lambda q, k: score_stats(q, k, degrees=(1.0,)),
        *[(1, 4, 1, 24)] * 2,
    ),
    "delta_rule: triton takes keys of at most": lambda: trace(
        lambda q, k, v, beta: delta_rule(q, k, v, beta),
        *[(1, 4, 1, 257)] * 2,
        (1, 4, 1, 16),
        (1, 4, 1),
    ),
    "selective_scan: triton takes states of at most": lambda: trace(
        lambda *arrays: selective_scan(*arrays),
        (1, 4, 2),
        (1, 4, 2),
        (2, 999),
        (1, 4, 999),
        (1, 4, 999),
    ),
}


@pytest.mark.parametrize("reason", CASES)
def test_a_fallback_on_a_gpu_is_said_once(reason):
    run = CASES[reason]
    with dispatch.on(GPU), pytest.warns(dispatch.FallbackWarning) as said:
        run()
    assert [str(each.message).startswith(reason) for each in said] == [True]
    assert str(said[0].message).endswith("; xla runs instead, which can be many times slower")
    with dispatch.on(GPU), warnings.catch_warnings(action="error"):
        run()
    assert dispatch.fallbacks() == (str(said[0].message),)


def test_a_cpu_and_a_kernel_that_runs_are_silent():
    for run in CASES.values():
        run()
    with dispatch.on(GPU):
        means()
        assert dispatch.choose("op", "xla", {"pallas": "is out", "xla": ""}) == "xla"
    assert dispatch.fallbacks() == ()


def test_another_accelerator_says_what_it_lacks():
    tpu = dispatch.Target("tpu", "TPU v5")
    with dispatch.on(tpu), pytest.warns(dispatch.FallbackWarning, match="needs an NVIDIA GPU"):
        means()
