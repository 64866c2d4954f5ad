"""The softmax of training: cuDNN's attention or the kernel of this project, never whole scores."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.attention.rows import softmax
from iaj_kernels.attention.visibility import Visibility
from iaj_kernels.core import dispatch
from iaj_kernels.row_map_attention.maps import SOFTMAX
from lm_jax.model.attention import Fused, by_row_map, fused, register_fused
from lm_jax.parallel.kernels import shard_kernel

# Names of fused kernels (`lm_jax.model.attention`).
SHARDED, CUDNN = "sharded", "cudnn"


def _by_device(kernel, q_BTNH, k_BSKH, v_BSKH, visibility: Visibility, scale, cap):
    """A kernel of softmax, on a mesh on each device's rows and heads."""

    def part(first, q_BTNH, k_BSKH, v_BSKH, start_B, window, query_segments_BT, key_segments_BS):
        del first
        own = dataclasses.replace(
            visibility,
            start_B=start_B,
            window=window,
            query_segments_BT=query_segments_BT,
            key_segments_BS=key_segments_BS,
        )
        return kernel(q_BTNH, k_BSKH, v_BSKH, visibility=own, scale=scale, cap=cap)

    segments = visibility.query_segments_BT, visibility.key_segments_BS
    arrays = q_BTNH, k_BSKH, v_BSKH, visibility.start_B, visibility.window, *segments
    of_segments = ("", "") if segments[0] is None else ("BT", "BS")
    axes = ("BTNH", "BSKH", "BSKH", "B", "", *of_segments)
    return shard_kernel(part, arrays, axes, "BTNH", "BNK")


def _own(q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    return by_row_map(
        SOFTMAX, q_BTNH, k_BSKH, v_BSKH, visibility=visibility, scale=scale, cap=cap
    ).out_BTNH


def _cudnn(q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    del visibility, cap
    return jax.nn.dot_product_attention(
        # Rotations and norms of queries and keys may be float32; it takes one dtype.
        q_BTNH.astype(v_BSKH.dtype),
        k_BSKH.astype(v_BSKH.dtype),
        v_BSKH,
        is_causal=True,
        scale=scale,
        implementation="cudnn",
    )


def _sharded_softmax(attend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    del attend
    return _by_device(_own, q_BTNH, k_BSKH, v_BSKH, visibility, scale, cap)


def _cudnn_softmax(attend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    """Attention of cuDNN where it is causal alone, in rows of even length; else our own kernel.

    Given documents or windows it reads a bias for every pair of positions, and a gradient of that;
    our kernel has neither, and leaves out what no query sees.
    """
    del attend
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    parts = visibility.window, visibility.query_segments_BT, cap
    is_plain = visibility.causal and visibility.first == 0 and all(x is None for x in parts)
    kernel = _cudnn if is_plain and T == S and T % 2 == 0 else _own
    return _by_device(kernel, q_BTNH, k_BSKH, v_BSKH, visibility, scale, cap)


register_fused(softmax, SHARDED, _sharded_softmax)
register_fused(softmax, CUDNN, _cudnn_softmax)

# Widths of heads that cuDNN's attention takes on every GPU that has it.
_CUDNN_WIDEST, _CUDNN_STEP = 128, 8


def fastest_softmax(dtype: Any, widths: Sequence[int], cap: float | None) -> Fused:
    """The softmax of training on this device, none of which forms whole scores.

    That is cuDNN's on an NVIDIA GPU from Ampere on, in half precision, without a soft cap, for
    heads of a multiple of 8 and at most 128 numbers; of rows that are not causal alone, as packed
    documents, and on other GPUs, it is the kernel of this project, on a mesh on each device's rows
    and heads; on a CPU that is XLA's, which the compiler splits.

    Args:
      dtype: dtype of queries, keys and values.
      widths: widths of the heads, of all layers.
      cap: soft cap of the scores.
    """
    if dispatch.target().platform == "cpu":
        return fused(softmax, "kernels")
    fits = all(H % _CUDNN_STEP == 0 and H <= _CUDNN_WIDEST for H in widths)
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    takes = fits and half and cap is None and _has_cudnn()
    return fused(softmax, CUDNN if takes else SHARDED)


def _has_cudnn() -> bool:
    """Whether programs are for the GPU of this process, an NVIDIA one from Ampere on."""
    target, device = dispatch.target(), jax.devices()[0]
    if device.device_kind != target.device_kind or "NVIDIA" not in device.device_kind:
        return False
    return tuple(map(int, device.compute_capability.split("."))) >= (8, 0)
