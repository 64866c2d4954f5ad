"""Rates are operations over seconds, and shares are of a peak with its source."""

import types

import jax
import pytest

from lm_jax.train import throughput
from lm_jax.train.objective import LanguageModelling
from lm_jax.train.throughput import RATES, Peak, Throughput, format_rates, measured_peak, peak
from tests import tiny


def gpu(kind):
    return types.SimpleNamespace(device_kind=kind, platform="gpu")


@pytest.mark.parametrize(
    ("kind", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "float32", 494.7),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA A100-SXM4-80GB", "float32", 156.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA L40", "bfloat16", None),
    ],
)
def test_a_known_gpu_has_the_peak_of_its_data_sheet(kind, dtype, teraflops, monkeypatch):
    monkeypatch.setattr(throughput, "measured_peak", lambda dtype: 7e12)
    result = peak(dtype, (gpu(kind),) * 8)
    assert result.flops == pytest.approx(8e12 * (teraflops or 7.0))
    assert ("measured" in result.source) == (teraflops is None)


def test_exact_float32_is_measured_and_a_cpu_counts_once(monkeypatch):
    monkeypatch.setattr(throughput, "measured_peak", lambda dtype: 7e12)
    with jax.default_matmul_precision("highest"):
        assert peak("float32", (gpu("NVIDIA H100 80GB HBM3"),)).flops == 7e12
        assert peak("bfloat16", (gpu("NVIDIA H100 80GB HBM3"),)).flops == 989.4e12
    devices = tuple(jax.devices())
    assert len(devices) == 4 and peak("float32", devices).flops == 7e12


def test_the_measured_peak_is_that_of_the_fastest_product(monkeypatch):
    # Starts and ends of three products, of 4, 2 and 3 seconds.
    times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(times))
    measured_peak.cache_clear()
    assert measured_peak("float32", size=64, repeats=3) == 2 * 64**3 / 2.0
    # Once in a process: the clock has no more times.
    assert measured_peak("float32", size=64, repeats=3) == 2 * 64**3 / 2.0
    measured_peak.cache_clear()


def test_rates_are_of_all_steps_of_their_seconds():
    flops = {"square": 4e12, "triangle": 3e12}
    result = Throughput(flops, Peak(10e12, "made")).rates(tokens=600, seconds=2.0, steps=3)
    assert result == {
        "tokens_per_second": 300.0,
        "flops_per_second_square": 6e12,
        "peak_share_square": 0.6,
        "flops_per_second_triangle": 4.5e12,
        "peak_share_triangle": 0.45,
    }
    assert tuple(result) == RATES
    assert format_rates(result) == (
        "300 tokens/s, 6 TFLOP/s = 60.0% of peak (visible pairs alone: 4.5 TFLOP/s = 45.0% of peak)"
    )
    # No share above the whole is printed.
    busy = Throughput(flops, Peak(5e12, "made")).rates(tokens=600, seconds=2.0, steps=3)
    assert format_rates(busy) == (
        "300 tokens/s, 6 TFLOP/s (peak measured too low) "
        "(visible pairs alone: 4.5 TFLOP/s = 90.0% of peak)"
    )


def test_utilisation_of_a_step_of_known_time():
    """A decoder of 53,248 weights in products, 96 tokens in 1 s on a device of 100 MFLOP/s.

    Forward a token takes 2 x 53,248 and, per layer and key that it meets, 4 N H: all 16 keys of its
    row, or those up to itself, 8.5 on average. Forward and backward is three times that.
    """
    cfg = tiny.decoder(num_layers=4, num_heads=2, hidden_size=32, mlp_size=96, vocab_size=256)
    heads = 2 * 8
    weights = 4 * (4 * 32 * heads + 3 * 32 * 96) + 32 * 256
    objective = LanguageModelling(cfg)
    flops = {c: objective.flops(6, 17, c) for c in ("square", "triangle")}
    result = Throughput(flops, Peak(100e6, "made")).rates(tokens=96, seconds=1.0)
    assert weights == 53_248
    for convention, keys in (("square", 16), ("triangle", 8.5)):
        want = 96 * 3 * (2 * weights + 4 * 4 * keys * heads)
        assert result[f"peak_share_{convention}"] == pytest.approx(want / 100e6, rel=1e-12)
