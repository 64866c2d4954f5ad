"""Budgets of compiled kernels: the largest allowed value of each figure.

`budgets.json` of each operation holds, for every case with the use `budget`, the temporary memory
of the program of value and gradients, and the figures of each of its kernels (`machine_code`). They
are written from a measurement plus `SLACK`, and hold until they are written again, which shows in
review. A figure under half its budget fails as well, because the gain could be lost unnoticed.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import json
import math
from pathlib import Path
import tempfile
from typing import Any

import jax

import iaj_kernels
from iaj_kernels.core import cases
from iaj_kernels.suites import SUITES
from tools.gpu_code import machine_code, target, triton_code

KERNELS = Path(iaj_kernels.__file__).parent
# Relative margin of a budget over the measured figure; the other figures are exact.
SLACK = {"instructions_per_element": 0.05, "loop_instructions": 0.05, "temporary_bytes": 0.05}
# A GPU allocates registers to a warp in units of this many per thread.
_REGISTER_UNIT = 8

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One compiled case: temporary bytes of the program, and its kernels."""

    op: str
    case: str
    temporary_bytes: int
    kernels: tuple[machine_code.Kernel, ...]


def operations(*kernels: str) -> tuple[str, ...]:
    """The operations that have a GPU kernel, of these implementations or of all."""
    wanted = kernels or cases.GPU_KERNELS
    return tuple(op for op, suite in SUITES.items() if suite.kernel in wanted)


def workloads(*ops: str) -> list[tuple[cases.Suite, cases.Case]]:
    """The cases with a budget, of these operations or of all."""
    return [
        (suite, case)
        for suite in (SUITES[op] for op in ops or operations())
        for case in suite.using("budget")
    ]


def program(suite: cases.Suite, case: cases.Case) -> tuple[Any, Any, Any]:
    """A function that computes values and gradients with the kernel, and its arguments' shapes."""
    key = jax.random.key(0)
    arrays = jax.eval_shape(lambda key: suite.make(case, key), key)
    cotangents = jax.eval_shape(lambda a, key: cases.cotangents(suite, case, a, key), arrays, key)
    return cases.outputs_and_gradients(suite, case, suite.kernel), arrays, cotangents


def measure(suite: cases.Suite, case: cases.Case) -> Measured:
    """Compiles the value and the gradients of a case for the target.

    Raises:
      BadInputError: the compiler is not installed.
      target.NotCompiledError: naming the operation and the case.
    """
    by_triton = suite.kernel == "triton"
    if by_triton:
        triton_code.require()
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        listed = triton_code.compiled() if by_triton else contextlib.nullcontext([])
        try:
            with listed as kernels:
                compiled = target.compile_(*program(suite, case), dump=dump)
        except target.NotCompiledError as error:
            raise target.NotCompiledError(f"{suite.op} {case.name} {error}") from error
        memory = compiled.memory_analysis()
        if memory is None:
            raise RuntimeError(f"{suite.op} {case.name}: XLA reports no memory of the program")
        if not by_triton:
            kernels = machine_code.kernels(dump)
    return Measured(suite.op, case.name, memory.temp_size_in_bytes, tuple(kernels))


def figures(kernel: machine_code.Kernel) -> Figures:
    """Figures with a budget: instructions per element or, without a tile, per turn of the loop."""
    results: Figures = {
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "tensor_cores": kernel.tensor_cores,
    }
    if kernel.instructions_per_element is None:
        return results | {"loop_instructions": kernel.loop_instructions}
    return results | {"instructions_per_element": kernel.instructions_per_element}


def budget(measured: Measured) -> Figures:
    """The entry of a case in the file: measured figures plus slack."""
    return {
        "temporary_bytes": _ceiling("temporary_bytes", measured.temporary_bytes),
        "kernels": {
            kernel.name: {name: _ceiling(name, value) for name, value in figures(kernel).items()}
            for kernel in measured.kernels
        },
    }


def complaints(measured: Measured, allowed: Figures | None) -> list[str]:
    """A sentence for every figure that violates the budget; empty if there is none."""
    return list(_complaints(measured, allowed))


def _complaints(measured: Measured, allowed: Figures | None) -> Iterator[str]:
    where = f"{measured.op} {measured.case}"
    write = f"python -m tools.compile_kernels --op {measured.op} --case {measured.case} --write"
    if allowed is None:
        yield f"{where} has no budget; write it with: {write}"
        return
    whole = {"temporary_bytes": measured.temporary_bytes}
    yield from _compare(where, whole, allowed, write)
    results = {kernel.name: figures(kernel) for kernel in measured.kernels}
    for name in sorted(results.keys() | allowed["kernels"].keys()):
        if name not in allowed["kernels"]:
            yield f"{where}: kernel {name} has no budget; write it with: {write}"
        elif name not in results:
            yield f"{where}: kernel {name} has a budget and is gone; write again with: {write}"
        else:
            yield from _compare(
                f"{where}: kernel {name}", results[name], allowed["kernels"][name], write
            )


def _compare(where: str, result: Figures, allowed: Figures, write: str) -> Iterator[str]:
    for name, value in result.items():
        limit = allowed.get(name)
        text = f"{value:.1f}" if isinstance(value, float) else value
        if limit is None:
            yield f"{where} has no budget for {name}; write it with: {write}"
        elif isinstance(limit, str):
            if value != limit:
                yield f"{where}: {name} is {text}, its budget {limit}; if intended: {write}"
        elif value > limit:
            yield f"{where}: {name} is {text}, over its budget of {limit}; if intended: {write}"
        elif value < limit / 2:
            yield (
                f"{where}: {name} is {text}, under half its budget of {limit}, which is stale; "
                f"keep the gain with: {write}"
            )


def _ceiling(name: str, value: Any) -> Any:
    if name == "registers":
        return -(-value // _REGISTER_UNIT) * _REGISTER_UNIT
    if isinstance(value, float):
        return math.ceil(10 * value * (1 + SLACK[name])) / 10
    return math.ceil(value * (1 + SLACK[name])) if name in SLACK else value


def path(op: str) -> Path:
    """The budget file of an operation."""
    return KERNELS / op / "budgets.json"


def read(op: str) -> Mapping[str, Figures]:
    """Budgets by case; empty if none was written yet."""
    file = path(op)
    return json.loads(file.read_text("utf-8"))["cases"] if file.exists() else {}


def write(op: str, measured: list[Measured]) -> None:
    """Writes the cases' budgets to the file of `op`, without entries of removed cases."""
    known = {case.name for case in SUITES[op].using("budget")}
    new = {each.case: budget(each) for each in measured}
    kept = {name: entry for name, entry in {**read(op), **new}.items() if name in known}
    by_triton = SUITES[op].kernel == "triton"
    versions = triton_code.compilers() if by_triton else {}
    text = {
        "target": target.TARGET.device_kind,
        "compilers": target.compilers() | versions,
        "slack": SLACK,
        "cases": dict(sorted(kept.items())),
    }
    path(op).write_text(json.dumps(text, indent=2) + "\n", "utf-8")
