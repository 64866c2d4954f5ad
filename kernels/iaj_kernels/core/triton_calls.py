"""The call of a Triton kernel from JAX: by jax-triton on a GPU, by Triton's interpreter elsewhere.

This is the one module that knows jax-triton, which is imported where a kernel is lowered for a GPU.
A kernel (`@triton.jit`) takes pointers to its inputs, pointers to its outputs, then constants
(`tl.constexpr`). Arrays are contiguous, so strides follow from the constants.

Neither package differentiates or batches a kernel: `recurrence` gives the kernels of an operation
a `custom_vjp`, and `over_rows` batches a function of arrays whose first axes are independent rows.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import importlib.util
import inspect
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.core import dispatch

INTERPRET = "TRITON_INTERPRET"


# Of a target that need not be present; of another the device is asked.
_CAPABILITIES = {"NVIDIA H200": 90}


def unsupported_reason(target: dispatch.Target) -> str:
    """Why a Triton kernel cannot run on `target`; empty if it can."""
    if reason := dispatch.unsupported_reason(target):
        return reason
    interpreting = os.environ.get(INTERPRET) == "1"
    if target.interpret and not interpreting:
        return f"needs {INTERPRET}=1 in the environment before Triton is imported"
    if interpreting and not target.interpret:
        return f"needs Triton's compiler: unset {INTERPRET}"
    if target.interpret:
        return "" if _installed("triton") else "needs Triton: pip install triton"
    if not (_installed("triton") and _installed("jax_triton")):
        return "needs jax-triton: pip install 'interpretable-attention-jax[cuda13]' (or [cuda12])"
    return ""


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def launch(
    kernel: Any,
    arrays: Sequence[jax.Array],
    outputs: Any,
    *,
    target: dispatch.Target,
    grid: tuple[int, ...],
    num_warps: int,
    constants: Mapping[str, Any],
    num_stages: int = 1,
) -> Any:
    """Runs `kernel` over `grid`.

    Args:
      kernel: a `@triton.jit` function of the arrays, the outputs and the constants, in that order.
      outputs: a tuple of `jax.ShapeDtypeStruct`. The kernel writes every element.
      constants: values of its `tl.constexpr` arguments by name; it takes those that it names.

    Returns:
      A tuple of arrays like `outputs`.
    """
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    if target.interpret:

        def interpret(*inputs: Any) -> tuple[np.ndarray, ...]:
            return _interpreted(kernel, inputs, outputs, grid, constants)

        return jax.pure_callback(interpret, outputs, *arrays)
    import jax_triton

    # jax-triton 0.4 renames the argument.
    new = "out_type" in inspect.signature(jax_triton.triton_call).parameters
    return tuple(
        jax_triton.triton_call(
            *arrays,
            kernel=kernel,
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=_CAPABILITIES.get(target.device_kind),
            **{"out_type" if new else "out_shape": outputs},
            **constants,
        )
    )


def launcher(target: dispatch.Target, num_warps: int, **fixed: Any) -> Callable[..., Any]:
    """`launch` for the kernels of one call, all of whose outputs are float32.

    Args:
      target: the target.
      num_warps: warps of a program.
      **fixed: constants of all kernels.

    Returns:
      a function of a kernel, its arrays, the shapes of its outputs, its grid and further constants.
    """

    def run(
        kernel: Any,
        arrays: Sequence[jax.Array],
        shapes: Sequence[tuple[int, ...]],
        grid: tuple[int, ...],
        **constants: Any,
    ) -> Any:
        return launch(
            kernel,
            arrays,
            tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
            target=target,
            grid=grid,
            num_warps=num_warps,
            constants=fixed | constants,
        )

    return run


def recurrence(
    op: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """A differentiable function `(plan, *arrays) -> (out, end)` of kernels over rows.

    Args:
      op: name of the operation.
      forward: `(plan, *arrays) -> (out, end, *kept)`.
      backward: `(plan, *arrays, *kept, d_out, d_end)` -> a gradient in float32 for each array.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(plan: Any, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return run_forward(plan, *arrays)[0]

    def run_forward(plan: Any, *arrays: jax.Array) -> tuple[Any, Any]:
        arrays = dispatch.first_order(op, arrays)
        out, end, *kept = over_rows(forward, plan)(*arrays)
        return (out, end), (arrays, kept)

    def run_backward(plan: Any, residuals: Any, cotangents: Any) -> tuple[jax.Array, ...]:
        (arrays, kept), cotangents = dispatch.first_order(op, (residuals, cotangents))
        gradients = over_rows(backward, plan)(*arrays, *kept, *cotangents)
        return tuple(d.astype(x.dtype) for d, x in zip(gradients, arrays, strict=True))

    run.defvjp(run_forward, run_backward)
    return run


def _interpreted(
    kernel: Any,
    inputs: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
) -> tuple[np.ndarray, ...]:
    """Runs a kernel in Triton's interpreter on the memory of numpy arrays.

    Outputs start as NaN, so that an element which the kernel leaves out is seen.
    """
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    types = {"float32": tl.float32, "bfloat16": tl.bfloat16}

    def pointer(array: np.ndarray) -> Any:
        kind = tl.pointer_type(types[array.dtype.name])
        return tl.tensor(TensorHandle(np.array([array.ctypes.data], np.uint64), kind), kind)

    read = [np.ascontiguousarray(x) for x in inputs]
    written = [np.full(x.shape, np.nan, x.dtype) for x in outputs]
    with np.errstate(all="ignore"):
        kernel[grid](*map(pointer, (*read, *written)), **constants)
    return tuple(written)


def over_rows(run: Callable[..., Any], plan: Any) -> Callable[..., Any]:
    """`run(plan, *arrays)` as a function of the arrays, with a rule for `vmap`.

    The first axis of every array counts independent rows. A mapped axis becomes part of it, so that
    a mapped kernel is one launch.
    """
    batched = jax.custom_batching.custom_vmap(functools.partial(run, plan))

    @batched.def_vmap
    def rule(size: int, mapped: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        whole = [
            x if own else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, own in zip(arrays, mapped, strict=True)
        ]
        folded = batched(*(x.reshape(size * x.shape[1], *x.shape[2:]) for x in whole))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), folded)
        return results, jax.tree.map(lambda _: True, results)

    return batched
