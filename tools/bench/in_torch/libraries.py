"""Kernels of other libraries as baselines: flash-linear-attention, and Mamba's own scan.

`prefix_mean` is chunked gated linear attention in Triton (`fla`). Yang et al., "Gated Linear
Attention Transformers with Hardware-Efficient Training" (2024):
S_t = diag(exp g_t) S_{t-1} + k_t v_t^T, o_t = q_t S_t. The prefix mean is that recurrence with one
head of R keys and E values:

1. It reads the strict past: step t takes the write and the value of step t - 1, the first none.
2. A write decays once before it is read: g = ln beta, k_t = beta w_{t-1}, so S_t = N_t.
3. The mass D is the same recurrence on the writes alone, one number per prototype. A value channel
   of ones would give only sum_r q_r D_r, so that D needs a second call, of the library's `hgrn`.
4. The query includes the division, q = read / D.

`delta_rule` is `chunk_delta_rule` of fla, with a decay `chunk_gated_delta_rule`; `selective_scan`
is `selective_scan_fn` of `mamba_ssm`, whose last axis are steps.

Forward and backward are in torch, captured as a CUDA graph, as ours are one compiled program. torch
and the library are only imported where they run; without them the benchmark is not run and says so.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import importlib.util
import types
from typing import Any

import jax
import numpy as np

from iaj_kernels.core import cases
from iaj_kernels.prefix_mean.state import MASS_FLOOR
from tools.bench import timing

# Runs before the capture: Triton compiles and chooses its tiles in the first.
_WARM_UP = 3
# Of outputs: rounding q = read / D to bfloat16 where masses are small, and products of bfloat16.
_AGREEMENT = 5e-2

Tensors = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One of our operations by a library.

    Attributes:
      arrays: names of the arrays that it reads, of those that a case has; all have gradients.
      result: name of the output that it gives.
      output: function of torch and the arrays by name.
    """

    arrays: Sequence[str]
    result: str
    output: Callable[[types.ModuleType, Tensors], Any]


@dataclasses.dataclass(frozen=True)
class Library:
    """A library of kernels in torch.

    Attributes:
      module: module that is looked for, besides torch.
      install: command that installs it.
      operations: operations that it has, by our names.
    """

    module: str
    install: str
    operations: Mapping[str, Operation]

    def missing(self) -> str:
        """What to install before this baseline can run, or ""."""
        wanted = ("torch", self.module)
        absent = [name for name in wanted if importlib.util.find_spec(name) is None]
        return f"{' and '.join(absent)} not installed; {self.install}" if absent else ""

    def program(
        self, what: str, suite: cases.Suite, case: cases.Case, arrays: cases.Arrays, copies: int
    ) -> timing.Program:
        """Makes a `timing.Program`: one run is `copies` calls, each on arrays of its own.

        Args:
          what: "forward", or "gradient" for forward and backward.

        Raises:
          ArithmeticError: the output is not that of the operation.
        """
        torch = importlib.import_module("torch")
        operation = self.operations[suite.op]
        self._check(torch, operation, suite, case, arrays)
        return _program(torch, operation, what, arrays, copies)

    def _check(
        self,
        torch: types.ModuleType,
        operation: Operation,
        suite: cases.Suite,
        case: cases.Case,
        arrays: cases.Arrays,
    ) -> None:
        got = operation.output(torch, _tensors(torch, operation, arrays)).float().cpu().numpy()
        want = np.asarray(suite.call(case, arrays, "xla")[operation.result].astype("float32"))
        error = cases.relative_error(got, want)
        if not error <= _AGREEMENT:
            raise ArithmeticError(
                f"{self.module} {case.name}: its output differs from that of {suite.op} by "
                f"{error:.1e}; another version may define its functions otherwise"
            )


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


def _program(
    torch: types.ModuleType, operation: Operation, what: str, arrays: cases.Arrays, copies: int
) -> timing.Program:
    work = [_call(torch, operation, what, arrays) for _ in range(copies)]

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


def _call(
    torch: types.ModuleType, operation: Operation, what: str, arrays: cases.Arrays
) -> Callable[[], Any]:
    given = _tensors(torch, operation, arrays)
    if what == "forward":
        return lambda: operation.output(torch, given)
    moving = {name: x.requires_grad_() for name, x in given.items()}
    cotangent = torch.randn_like(operation.output(torch, moving))
    return lambda: torch.autograd.grad(
        operation.output(torch, moving), list(moving.values()), cotangent
    )


def _tensors(torch: types.ModuleType, operation: Operation, arrays: cases.Arrays) -> dict[str, Any]:
    names = [name for name in operation.arrays if name in arrays]
    return {name: _tensor(torch, arrays[name]) for name in names}


def _tensor(torch: types.ModuleType, x: jax.Array) -> Any:
    # numpy has no bfloat16 of its own; float32 holds every one.
    tensor = torch.from_numpy(np.array(x.astype("float32"))).cuda()
    return tensor.to(getattr(torch, str(x.dtype)))


def _prefix_mean(torch: types.ModuleType, given: Tensors) -> Any:
    gla = importlib.import_module("fla.ops.gla")
    hgrn = importlib.import_module("fla.ops.hgrn")

    def recurrence(x_BTR, g_BTR):
        return hgrn.chunk_hgrn(x_BTR, g_BTR)[0]

    arguments = (given[name] for name in ("write", "value", "decay", "read"))
    q, k, v, g = gla_arguments(torch, recurrence, *arguments)
    dtype = given["value"].dtype
    q, k, v, g = (x[:, :, None] for x in (q.to(dtype), k.to(dtype), v, g))
    return gla.chunk_gla(q, k, v, g, scale=1.0)[0][:, :, 0]


def _delta_rule(_torch: types.ModuleType, given: Tensors) -> Any:
    q, k, v, beta = (given[name] for name in ("q", "k", "v", "beta"))
    if "log_decay" not in given:
        return importlib.import_module("fla.ops.delta_rule").chunk_delta_rule(q, k, v, beta)[0]
    gated = importlib.import_module("fla.ops.gated_delta_rule")
    return gated.chunk_gated_delta_rule(q, k, v, given["log_decay"], beta)[0]


def _selective_scan(_torch: types.ModuleType, given: Tensors) -> Any:
    module = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    # Its kernel has the steps last.
    u, delta, B, C = (given[name].swapaxes(1, 2) for name in ("u", "delta", "B", "C"))
    return module.selective_scan_fn(u, delta, given["A"], B, C, given.get("D")).swapaxes(1, 2)


FLA = Library(
    "fla",
    "pip install torch flash-linear-attention",
    types.MappingProxyType(
        {
            "prefix_mean": Operation(("write", "value", "decay", "read"), "out", _prefix_mean),
            "delta_rule": Operation(("q", "k", "v", "beta", "log_decay"), "out", _delta_rule),
        }
    ),
)
MAMBA = Library(
    "mamba_ssm",
    "pip install torch mamba-ssm causal-conv1d",
    types.MappingProxyType(
        {"selective_scan": Operation(("u", "delta", "A", "B", "C", "D"), "y", _selective_scan)}
    ),
)
