"""flash-linear-attention as a baseline of `prefix_mean`: chunked gated linear attention in Triton.

Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024):
S_t = diag(exp g_t) S_{t-1} + k_t v_t^T, o_t = q_t S_t. The prefix mean is that recurrence with one
head of R keys and E values:

1. It reads the strict past: step t takes the write and the value of step t - 1, the first none.
2. A write decays once before it is read: g = ln beta, k_t = beta w_{t-1}, so S_t = N_t.
3. The mass D is the same recurrence on the writes alone, one number per prototype. A value channel
   of ones would give only sum_r q_r D_r, so that D needs a second call, of the library's `hgrn`.
4. The query includes the division, q = read / D.

Forward and backward are in torch, captured as a CUDA graph, as ours are one compiled program. torch
and the library are only imported where they run; without them the benchmark is not run and says so.
"""

from collections.abc import Callable
import importlib.util
import types
from typing import Any

import jax
import numpy as np

from iaj_kernels.core import cases
from iaj_kernels.prefix_mean.state import MASS_FLOOR
from tools.bench import timing

INSTALL = "pip install torch flash-linear-attention"
# Runs before the capture: Triton compiles and chooses its tiles in the first.
_WARM_UP = 3
# Tolerance for rounding q = read / D to bfloat16 where masses are small.
_AGREEMENT = 5e-2


def missing() -> str:
    """What to install before this baseline can run, or ""."""
    absent = [name for name in ("torch", "fla") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed; {INSTALL}" if absent else ""


def gla_arguments(
    xp: Any,
    recurrence: Callable[[Any, Any], Any],
    write_BTR: Any,
    value_BTE: Any,
    decay_R: Any,
    read_BTR: Any,
) -> tuple[Any, Any, Any, Any]:
    """The arguments q, k, v and g, `[B, T, R]` or `[B, T, E]`, of gated linear attention.

    Args:
      xp: torch or numpy, whichever the arrays are of.
      recurrence: `(x_BTR, g_BTR) -> h_BTR` with h_t = exp(g_t) h_{t-1} + x_t.
    """
    k_BTR = decay_R * _shifted(xp, write_BTR)
    g_BTR = xp.broadcast_to(xp.log(decay_R), k_BTR.shape)
    mass_BTR = recurrence(k_BTR, g_BTR)
    written_BTR = mass_BTR > MASS_FLOOR
    one = xp.ones_like(mass_BTR)
    q_BTR = xp.where(written_BTR, read_BTR / xp.where(written_BTR, mass_BTR, one), 0 * one)
    return q_BTR, k_BTR, _shifted(xp, value_BTE), g_BTR


def _shifted(xp: Any, x_BTX: Any) -> Any:
    return xp.concatenate((xp.zeros_like(x_BTX[:, :1]), x_BTX[:, :-1]), 1)


def program(
    what: str, suite: cases.Suite, case: cases.Case, arrays: cases.Arrays, copies: int
) -> timing.Program:
    """Makes a `timing.Program`: one run is `copies` calls, each on arrays of its own.

    Args:
      what: "forward", or "gradient" for forward and backward.

    Raises:
      ArithmeticError: the output is not that of `prefix_mean`.
    """
    torch = importlib.import_module("torch")
    _check(torch, suite, case, arrays)
    work = [_call(torch, what, arrays) for _ in range(copies)]

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work[0]()
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() - before

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            work[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kept, because our program returns every result.
        outputs = [each() for each in work]

    def run() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return outputs

    return timing.Program(run, memory, copies)


def _call(torch: types.ModuleType, what: str, arrays: cases.Arrays) -> Callable[[], Any]:
    names = ("write", "value", "decay", "read")
    inputs = [_tensor(torch, arrays[name]) for name in names]
    if what == "forward":
        return lambda: _output(torch, *inputs)
    moving = [x.requires_grad_() for x in inputs]
    cotangent = torch.randn_like(inputs[1])
    return lambda: torch.autograd.grad(_output(torch, *moving), moving, cotangent)


def _output(torch: types.ModuleType, write_BTR, value_BTE, decay_R, read_BTR) -> Any:
    gla = importlib.import_module("fla.ops.gla")
    hgrn = importlib.import_module("fla.ops.hgrn")

    def recurrence(x_BTR, g_BTR):
        return hgrn.chunk_hgrn(x_BTR, g_BTR)[0]

    q, k, v, g = gla_arguments(torch, recurrence, write_BTR, value_BTE, decay_R, read_BTR)
    dtype = value_BTE.dtype
    q, k, v, g = (x[:, :, None] for x in (q.to(dtype), k.to(dtype), v, g))
    return gla.chunk_gla(q, k, v, g, scale=1.0)[0][:, :, 0]


def _tensor(torch: types.ModuleType, x: jax.Array) -> Any:
    # numpy has no bfloat16 of its own; float32 holds every one.
    tensor = torch.from_numpy(np.array(x.astype("float32"))).cuda()
    return tensor.to(getattr(torch, str(x.dtype)))


def _check(
    torch: types.ModuleType, suite: cases.Suite, case: cases.Case, arrays: cases.Arrays
) -> None:
    inputs = [_tensor(torch, arrays[name]) for name in ("write", "value", "decay", "read")]
    got = _output(torch, *inputs).float().cpu().numpy()
    want = np.asarray(suite.call(case, arrays, "xla")["out"].astype("float32"))
    error = cases.relative_error(got, want)
    if not error <= _AGREEMENT:
        raise ArithmeticError(
            f"flash-linear-attention {case.name}: its output differs from that of prefix_mean by "
            f"{error:.1e}; another version may define chunk_gla or chunk_hgrn otherwise"
        )
