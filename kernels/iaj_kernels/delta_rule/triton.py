"""The delta rule on a GPU: Triton kernels over chunks, with a backward pass of their own.

The mathematics is in `triton_forward.py` and `triton_backward.py`. The forward pass keeps, in
float32, the memory at the start of every chunk, the changes that its steps make, and the inverse
that gives them: H E / C + E + C numbers for a step of a head, and never a memory of every step.

Products of float32 inputs are those of float32. For bfloat16 inputs tensor cores multiply float32
in three parts (3xTF32, to about 2^-21).
"""

from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.core import dispatch, triton_calls
from iaj_kernels.delta_rule import reference, tile
from iaj_kernels.delta_rule import triton_backward as backward
from iaj_kernels.delta_rule import triton_forward as forward
from iaj_kernels.delta_rule.config import Call, Config


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """Computes what `reference.run` computes, for calls without a decay, and calls it for T = 1."""
    if call.q_BTNH.shape[1] == 1:
        return reference.run(config, call)
    *arrays, _ = call
    return _scan(dispatch.target(), *arrays)


def _run_forward(target: dispatch.Target, *call: jax.Array) -> tuple[jax.Array, ...]:
    """Output, last memory, and what the backward pass reads."""
    q_BTNH, k_BTNH, v_BTNE, beta_BTN, state_BNHE = call
    launch, columns, (B, T, N, H, E, C, Z) = _launcher(target, *call)
    (inverse_BNZCC,) = launch(
        forward.inverse_kernel, (k_BTNH, beta_BTN), [(B, N, Z, C, C)], grid=(B * N, Z)
    )
    starts_BNZHE, changes_BTNE, end_BNHE = launch(
        forward.memory_kernel,
        (k_BTNH, v_BTNE, beta_BTN, inverse_BNZCC, state_BNHE),
        [(B, N, Z, H, E), (B, T, N, E), (B, N, H, E)],
        grid=(B * N, -(-E // columns)),
    )
    (out_BTNE,) = launch(
        forward.output_kernel,
        (q_BTNH, k_BTNH, starts_BNZHE, changes_BTNE),
        [(B, T, N, E)],
        grid=(B * N, -(-E // columns), Z),
    )
    return out_BTNE, end_BNHE, inverse_BNZCC, starts_BNZHE, changes_BTNE


def _run_backward(target: dispatch.Target, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of a call in its order, in float32."""
    q_BTNH, k_BTNH, v_BTNE, beta_BTN, _, *others = arrays
    inverse_BNZCC, starts_BNZHE, changes_BTNE, dout_BTNE, dend_BNHE = others
    launch, columns, (B, T, N, H, E, C, Z) = _launcher(target, *arrays[:5])
    dends_BNZHE, g_BTNE, dstate_BNHE = launch(
        backward.memory_gradient_kernel,
        (q_BTNH, k_BTNH, beta_BTN, inverse_BNZCC, dout_BTNE, dend_BNHE),
        [(B, N, Z, H, E), (B, T, N, E), (B, N, H, E)],
        grid=(B * N, -(-E // columns)),
    )
    dweight_BNZCC, dsystem_BNZCC, dv_BTNE, dbeta_BTN = launch(
        backward.weight_gradient_kernel,
        (k_BTNH, v_BTNE, beta_BTN, starts_BNZHE, changes_BTNE, dout_BTNE, g_BTNE),
        [(B, N, Z, C, C), (B, N, Z, C, C), (B, T, N, E), (B, T, N)],
        grid=(B * N, Z),
    )
    dq_BTNH, dk_BTNH = launch(
        backward.key_gradient_kernel,
        (
            *(q_BTNH, k_BTNH, starts_BNZHE, changes_BTNE, dout_BTNE, dends_BNZHE),
            *(dweight_BNZCC, dsystem_BNZCC, dv_BTNE),
        ),
        [(B, T, N, H), (B, T, N, H)],
        grid=(B * N, Z, -(-H // columns)),
    )
    return dq_BTNH, dk_BTNH, dv_BTNE, dbeta_BTN, dstate_BNHE


def _launcher(target: dispatch.Target, *call: jax.Array) -> tuple[Any, int, tuple[int, ...]]:
    """The launcher of a call, the columns of a program, and the sizes B T N H E C Z."""
    B, T, N, H = call[0].shape
    E = call[2].shape[-1]
    wide = all(x.dtype == jnp.float32 for x in call)
    tiles = tile.default_tiles({"H": H}, jnp.float32 if wide else jnp.bfloat16)
    C, columns = tiles["chunk"], tiles["columns"]
    launch = triton_calls.launcher(
        target,
        num_warps=4,
        T=T,
        N=N,
        H=H,
        E=E,
        C=C,
        LEVELS=C.bit_length() - 1,
        BH=max(tile.SMALLEST, 1 << (H - 1).bit_length()),
        BE=columns,
        PRECISION="ieee" if wide else "tf32x3",
    )
    return launch, columns, (B, T, N, H, E, C, -(-T // C))


# `out_BTNE` before its scale, and the memory after the last step.
_scan = triton_calls.recurrence("delta_rule", _run_forward, _run_backward)
