"""Choice of an operation's implementation, and the call of a Pallas kernel.

The `api` of an operation holds one table, `IMPLEMENTATIONS`, of functions `run(config, call)` by
name. A named one runs or raises; None takes the first that runs on the target, so a GPU falls back
to XLA where no kernel supports the shape. That is never silent: a `FallbackWarning` gives each
reason once, and `fallbacks` has all of them. On a CPU XLA is the usual choice.

The choice is made when the operation is traced, for the `Target` of that moment: the default
backend, or the one named by `on`. A function that `jax.jit` has already traced keeps its choice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import difflib
import functools
import importlib
import logging
import types
from typing import Any
import warnings

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class UnavailableError(NotImplementedError):
    """The named implementation does not run on this target or for these arguments."""


class FallbackWarning(UserWarning):
    """A slower implementation runs in place of the kernel of this device; the message says why."""


_log = logging.getLogger(__name__)
_FALLBACKS: list[str] = []


def fallbacks() -> tuple[str, ...]:
    """A sentence for every fallback of this process so far, each once, in order."""
    return tuple(_FALLBACKS)


@dataclasses.dataclass(frozen=True)
class Target:
    """Platform and device that an operation is traced for; `device_kind` is JAX's device name.

    With `interpret`, JAX's interpreter runs the Pallas kernels, on any platform.
    """

    platform: str
    device_kind: str
    interpret: bool = False


INTERPRETER = Target("cpu", "interpreter", interpret=True)

_TARGET: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


def target() -> Target:
    """The target named by `on`, else the first device of the default backend."""
    named = _TARGET.get()
    if named is not None:
        return named
    device = jax.devices()[0]
    return Target(device.platform, device.device_kind)


@contextlib.contextmanager
def on(target: Target) -> Iterator[None]:
    """Traces the operations in its `with` block for `target`.

    `on(INTERPRETER)` tests kernels without a GPU; a GPU target compiles for a GPU that need not be
    present.
    """
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


def unsupported_reason(target: Target) -> str:
    """Why the Pallas kernels of this package cannot run on `target`; empty if they can."""
    if target.interpret or target.platform in ("gpu", "cuda"):
        return ""
    return (
        f"needs an NVIDIA GPU and this is {target.platform}; "
        "trace it under iaj_kernels.core.dispatch.on(INTERPRETER) to run it slowly here"
    )


def choose(op: str, wanted: str | None, reasons: Mapping[str, str]) -> str:
    """The implementation of `op` to run.

    Args:
      wanted: a name of `IMPLEMENTATIONS`, or None for the first that runs.
      reasons: the reason why each implementation cannot run, in order of preference; empty if it
        can.

    Raises:
      ValueError: `wanted` is no implementation of `op`.
      UnavailableError: the named one cannot run, or none can; the message gives every reason.
    """
    if wanted is None:
        for name, reason in reasons.items():
            if not reason:
                _tell_fallback(op, name, reasons)
                return name
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnavailableError(f"{op}: no implementation runs here: {text}")
    if wanted not in reasons:
        close = difflib.get_close_matches(str(wanted), reasons, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{op}: implementation={wanted!r} is none of {', '.join(reasons)}{hint}")
    if reasons[wanted]:
        raise UnavailableError(f"{op}: implementation={wanted!r} {reasons[wanted]}")
    return wanted


def _tell_fallback(op: str, chosen: str, reasons: Mapping[str, str]) -> None:
    """Says once why no faster implementation than the `chosen` one runs, unless on a CPU."""
    if target().platform == "cpu":
        return
    slower_than = list(reasons)[: list(reasons).index(chosen)]
    # What a call that names an implementation could do instead is no help here.
    why = [f"{name} {reasons[name].partition('; ')[0]}" for name in slower_than]
    if not why:
        return
    text = f"{op}: {', '.join(why)}; {chosen} runs instead, which can be many times slower"
    if text not in _FALLBACKS:
        _FALLBACKS.append(text)
        _log.info("%s", text)
        warnings.warn(text, FallbackWarning, stacklevel=4)


def lazy_module(name: str) -> Callable[[], types.ModuleType]:
    """Returns a function that imports a module when called, for a lowering that few calls need."""
    return functools.partial(importlib.import_module, name)


def first_order(op: str, tree: Any) -> Any:
    """Returns `tree` unchanged; differentiating it raises. For hand-written backward passes.

    Raises:
      NotImplementedError: when a second derivative is taken, with the remedy.
    """

    @jax.custom_jvp
    def same(leaf: jax.Array) -> jax.Array:
        return leaf

    @same.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            f"{op}: its fast implementations have first derivatives in reverse mode alone; "
            "pass implementation='reference' for second derivatives"
        )

    return jax.tree.map(same, tree)


def exact_dot(dtype: Any) -> jax.lax.Precision | None:
    """The precision of a product of `dtype` operands: float32 is never rounded to TF32 or bf16."""
    return jax.lax.Precision.HIGHEST if dtype == jax.numpy.float32 else None


def triton_call(
    kernel: Any,
    *,
    target: Target,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    input_output_aliases: Mapping[int, int] | None = None,
    tile: tuple[int, int] | None = None,
) -> Any:
    """`pl.pallas_call` through Pallas' Triton lowering.

    The compiler parameters decide the lowering, and what their absence means changed between jax
    0.10 and 0.11, so they are always passed.

    Args:
      name: `<op>_<pass>`, as a profile shows it.
      in_specs: a `pl.BlockSpec` for each argument, or a tree of them of the argument's structure.
      tile: rows and columns of the tile of one iteration of the main loop. Appended to the name,
        `_m64_n64`, from which `tools/compile_kernels.py` computes instructions per element.
    """
    if tile is not None:
        name = f"{name}_m{tile[0]}_n{tile[1]}"
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=target.interpret,
        name=name,
        input_output_aliases=dict(input_output_aliases or {}),
    )
