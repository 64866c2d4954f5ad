"""The selective scan on a GPU: Triton kernels over chunks, with a backward pass of their own.

The mathematics is in `triton_kernels.py`. The forward pass keeps the state at the start of every
chunk and the sum of delta over it. Arithmetic and what it keeps are float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from iaj_kernels.core import dispatch, triton_calls
from iaj_kernels.selective_scan import reference, tile
from iaj_kernels.selective_scan import triton_kernels as tk
from iaj_kernels.selective_scan.config import Call, Config


def run(config: Config, call: Call) -> tuple[jax.Array, jax.Array]:
    """Computes what `reference.run` computes, and calls it for T = 1."""
    B, T, _ = call.u_BTI.shape
    if T == 1:
        return reference.run(config, call)
    # Rates by batch row, so that all arrays have rows, and in the layout of the kernels.
    A_BJI = jnp.broadcast_to(call.A_IJ.T[None], (B, *call.A_IJ.shape[::-1]))
    arrays = (call.u_BTI, call.delta_BTI, A_BJI, call.B_BTJ, call.C_BTJ)
    plan = (dispatch.target(), config.chunk)
    y_BTI, state_BJI = _scan(plan, *arrays, call.state_BIJ.swapaxes(1, 2))
    return y_BTI, state_BJI.swapaxes(1, 2)


def _run_forward(plan: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Output, last state, and what the backward pass reads."""
    u_BTI, delta_BTI, A_BJI, B_BTJ, C_BTJ, state_BJI = arrays
    launch, (B, T, I, J, Z, P, _) = _launcher(plan, *arrays)  # noqa: E741
    ends_BZJI, totals_BZI = launch(
        tk.end_kernel,
        (u_BTI, delta_BTI, A_BJI, B_BTJ),
        [(B, Z, J, I), (B, Z, I)],
        grid=(P, Z, B),
    )
    starts_BZJI, end_BJI = launch(
        tk.carry_kernel,
        (A_BJI, totals_BZI, ends_BZJI, state_BJI),
        [(B, Z, J, I), (B, J, I)],
        grid=(P, B),
        REVERSE=False,
    )
    (y_BTI,) = launch(
        tk.output_kernel,
        (u_BTI, delta_BTI, A_BJI, B_BTJ, C_BTJ, starts_BZJI),
        [(B, T, I)],
        grid=(P, Z, B),
    )
    return y_BTI, end_BJI, totals_BZI, starts_BZJI


def _run_backward(plan: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of the arguments of `_scan`, in float32."""
    u_BTI, delta_BTI, A_BJI, B_BTJ, C_BTJ, _, *others = arrays
    totals_BZI, starts_BZJI, dy_BTI, dend_BJI = others
    launch, (B, T, I, J, Z, P, G) = _launcher(plan, *arrays)  # noqa: E741
    (added_BZJI,) = launch(
        tk.adjoint_kernel,
        (delta_BTI, A_BJI, C_BTJ, dy_BTI),
        [(B, Z, J, I)],
        grid=(P, Z, B),
    )
    dends_BZJI, dstate_BJI = launch(
        tk.carry_kernel,
        (A_BJI, totals_BZI, added_BZJI, dend_BJI),
        [(B, Z, J, I), (B, J, I)],
        grid=(P, B),
        REVERSE=True,
    )
    _, du_BTI, ddelta_BTI, dA_BZJI, dB_BPTJ, dC_BPTJ = launch(
        tk.gradient_kernel,
        (u_BTI, delta_BTI, A_BJI, B_BTJ, C_BTJ, starts_BZJI, dy_BTI, dends_BZJI),
        [
            *((B, Z, G, J, I), (B, T, I), (B, T, I), (B, Z, J, I)),
            *((B, P, T, J), (B, P, T, J)),
        ],
        grid=(P, Z, B),
    )
    return du_BTI, ddelta_BTI, dA_BZJI.sum(1), dB_BPTJ.sum(1), dC_BPTJ.sum(1), dstate_BJI


def _launcher(plan: Any, *arrays: jax.Array) -> tuple[Any, tuple[int, ...]]:
    """The launcher of a call, and its sizes B T I J.

    With them the numbers of chunks Z, of programs over the channels P, and of groups of a chunk G.
    """
    target, chunk = plan
    (B, T, I), J = arrays[0].shape, arrays[3].shape[-1]  # noqa: E741
    tiles = tile.default_tiles({"T": T, "J": J}, arrays[0].dtype)
    channels, group = tiles["channels"], tiles["group"]
    G = -(-chunk // group)
    C = G * group
    Z, P = -(-T // C), -(-I // channels)
    launch = triton_calls.launcher(
        target,
        num_warps=1,
        T=T,
        I=I,
        J=J,
        C=C,
        Z=Z,
        BI=channels,
        BJ=1 << (J - 1).bit_length(),
        GROUP=group,
    )
    return launch, (B, T, I, J, Z, P, G)


# `y_BTI` and the state after the last step.
_scan = triton_calls.recurrence("selective_scan", _run_forward, _run_backward)
