"""The selective scan on a GPU: Triton kernels over chunks, with a backward pass of their own.

The mathematics is in `triton_kernels.py`. The forward pass keeps the state at the start of every
chunk and the sum of delta over it. Arithmetic and what it keeps are float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels.core import dispatch, triton_calls
from kernels.selective_scan import reference
from kernels.selective_scan import triton_kernels as tk
from kernels.selective_scan.config import Call, Config

# Channels of a program, one a thread.
CHANNELS = 32
# Numbers of the states of a group of steps that a thread holds in registers.
_HELD = 64


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(plan: Any, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`y_BTI` and the state after the last step."""
    return _forward(plan, *arrays)[0]


def _forward(plan: Any, *arrays: jax.Array) -> tuple[Any, Any]:
    arrays = dispatch.first_order("selective_scan", arrays)
    y_BTI, end_BJI, *kept = triton_calls.over_rows(_run_forward, plan)(*arrays)
    return (y_BTI, end_BJI), (arrays, kept)


def _backward(plan: Any, residuals: Any, cotangents: Any) -> tuple[jax.Array, ...]:
    residuals, cotangents = dispatch.first_order("selective_scan", (residuals, cotangents))
    arrays, kept = residuals
    gradients = triton_calls.over_rows(_run_backward, plan)(*arrays[:5], *kept, *cotangents)
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, arrays, strict=True))


_scan.defvjp(_forward, _backward)


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
    u_BTI, delta_BTI, A_BJI, B_BTJ, C_BTJ, totals_BZI, starts_BZJI, dy_BTI, dend_BJI = arrays
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
    """`triton_calls.launch` for a call, and its sizes B T I J.

    With them the numbers of chunks Z, of programs over the channels P, and of groups of a chunk G.
    """
    target, chunk = plan
    (B, T, I), J = arrays[0].shape, arrays[3].shape[-1]  # noqa: E741
    BJ = 1 << (J - 1).bit_length()
    group = _HELD // max(BJ, 16)
    G = -(-chunk // group)
    C = G * group
    Z, P = -(-T // C), -(-I // CHANNELS)
    fixed = {"T": T, "I": I, "J": J, "C": C, "Z": Z, "BI": CHANNELS, "BJ": BJ, "GROUP": group}

    def launch(
        kernel: Any, arrays: Any, shapes: Any, grid: tuple[int, ...], **constants: Any
    ) -> Any:
        return triton_calls.launch(
            kernel,
            arrays,
            tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
            target=target,
            grid=grid,
            num_warps=1,
            constants=fixed | constants,
        )

    return launch, (B, T, I, J, Z, P, G)
