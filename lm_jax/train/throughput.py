"""Training throughput: tokens/s, model FLOP/s, and their share of the devices' peak.

Model FLOPs are those that the mathematics of an update needs, forward and backward, with two
operations to a multiply-add; a forward pass that is recomputed to save memory does not count. All
positions of a batch count, padding too, because they are computed. For causal attention both
conventions are reported (`lm_jax.model.flops`): the full square, and the triangle of visible pairs.

The peak of a known GPU is that of its data sheet for dense products, in float32 with TF32, which is
what JAX multiplies float32 in by default there. Of any other device it is measured: the rate of the
best of several products of square matrices in the dtype of the run, once in a process.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.model.flops import CONVENTIONS, Causal

# Dense TFLOP/s of bfloat16 with float32 accumulation, and of TF32. NVIDIA's data sheets of each;
# where they print rates "with sparsity" these are half of those. The first matching name counts.
_TERAFLOPS: tuple[tuple[str, float, float], ...] = (
    ("H200 NVL", 835.5, 417.5),
    ("H200", 989.4, 494.7),
    ("H100 PCIe", 756.0, 378.0),
    ("H100 NVL", 835.5, 417.5),
    ("H100", 989.4, 494.7),
    ("A100", 312.0, 156.0),
    ("L40S", 362.0, 183.0),
    ("L4", 121.0, 60.0),
    ("A10", 125.0, 62.5),
)
_DEFAULT_PRECISIONS = (None, "default", "fastest", "tensorfloat32")


@dataclasses.dataclass(frozen=True)
class Peak:
    """FLOP/s of all devices of a run together, and where the number comes from."""

    flops: float
    source: str


def peak(dtype: str, devices: tuple[jax.Device, ...]) -> Peak | None:
    """The peak of the devices for products in `dtype`, "float32" or "bfloat16".

    None for several processes on CPUs, which may share their cores.
    """
    kind = devices[0].device_kind
    config: Any = jax.config
    precise = config.jax_default_matmul_precision not in _DEFAULT_PRECISIONS
    if devices[0].platform == "gpu" and not (dtype == "float32" and precise):
        known = data_sheet(kind, dtype)
        if known:
            return Peak(known.flops * len(devices), known.source)
    if devices[0].platform != "cpu":
        return Peak(measured_peak(dtype) * len(devices), f"{kind} {dtype} product, measured")
    if jax.process_count() > 1:
        return None
    # The devices of a CPU share its cores, and one product uses all.
    return Peak(measured_peak(dtype), f"CPU {dtype} product, measured")


def data_sheet(kind: str, dtype: str) -> Peak | None:
    """The peak of one GPU by the data sheet of its kind; None for a kind that is not known."""
    # "L40" is no "L4".
    words = kind.replace("-", " ").split()
    for name, bfloat16, tf32 in _TERAFLOPS:
        if all(word in words for word in name.split()):
            low = dtype == "bfloat16"
            precision = "bfloat16" if low else "TF32"
            return Peak(1e12 * (bfloat16 if low else tf32), f"{name} {precision}, data sheet")
    return None


@functools.cache
def measured_peak(dtype: str, size: int | None = None, repeats: int = 8) -> float:
    """FLOP/s of the fastest of `repeats` products of square matrices on one device.

    Args:
      dtype: dtype of the matrices.
      size: width of the matrices; None is 1,024 on a CPU and 8,192 elsewhere.
      repeats: products, after one that compiles.
    """
    device = jax.local_devices()[0]
    size = size or (1_024 if device.platform == "cpu" else 8_192)
    x = jax.device_put(jnp.full((size, size), 1.0 / size, dtype), device)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(x, x))
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Converts seconds into rates: tokens/s and model FLOP/s.

    Attributes:
      flops: model FLOPs of one update, by convention.
      peak: peak of all devices, or None if it is unknown.
    """

    flops: Mapping[Causal, float]
    peak: Peak | None

    def rates(self, tokens: float, seconds: float, steps: int = 1) -> dict[str, float]:
        """The columns `RATES` of `steps` updates that took `seconds` and predicted `tokens`."""
        per_second = 1.0 / seconds if seconds > 0 else math.nan
        results = {"tokens_per_second": tokens * per_second}
        for convention in CONVENTIONS:
            flops = steps * self.flops[convention] * per_second
            results[f"flops_per_second_{convention}"] = flops
            results[f"peak_share_{convention}"] = flops / self.peak.flops if self.peak else math.nan
        return results


RATES = tuple(Throughput(dict.fromkeys(CONVENTIONS, 0.0), None).rates(0.0, 1.0))


def format_rates(rates: Mapping[str, Any]) -> str:
    """The rates for a terminal, in about 80 columns; both conventions where they differ."""
    square, triangle = (
        _share(rates[f"flops_per_second_{c}"], rates[f"peak_share_{c}"]) for c in CONVENTIONS
    )
    text = square if square == triangle else f"{square} (visible pairs alone: {triangle})"
    return f"{rates['tokens_per_second']:,.0f} tokens/s, {text}"


def _share(flops: float, share: float) -> str:
    if math.isnan(share):
        of_peak = ""
    elif share > 1:  # other processes ran while it was measured
        of_peak = " (peak measured too low)"
    else:
        of_peak = f" = {share:.1%} of peak"
    return f"{format_flops(flops)}/s{of_peak}"


def format_flops(flops: float) -> str:
    """A number of operations with its prefix, as `1.23 TFLOP`."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= size:
            return f"{flops / size:.3g} {prefix}FLOP"
    return f"{flops:.3g} FLOP"
