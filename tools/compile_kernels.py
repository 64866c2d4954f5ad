"""Compiles the GPU kernels for an H200 on a machine without a GPU, and holds them to budgets.

    python -m tools.compile_kernels                          every operation and case
    python -m tools.compile_kernels --op gated_attention --case CASE
    python -m tools.compile_kernels --op gated_attention --write    new budgets from these figures

For the value and the gradients of each case with the use `budget`: registers and spilled bytes of a
thread, shared memory of a block, tensor-core instructions, instructions of a thread for one element
of the main loop's tile, and the temporary memory of the whole program. All are exact, so a change
of a kernel shows here before it is timed; what they cannot show is time, and results.

Exit codes: 0 within the budgets, 2 usage, 3 the compiler is not installed, 10 over a budget, or a
case that does not compile.
"""

import argparse
from collections.abc import Sequence
import sys

import jax

from iaj.parser import Parser, run_parsed
from iaj_kernels.core import cases
from lm_jax.console.terminal import format_table
from lm_jax.errors import EXIT_FINISHED, EXIT_NO_GO, UsageError, nearest
from tools.gpu_code import budgets, target

_COLUMNS = (
    "kernel",
    "tile",
    "warps",
    "registers",
    "spilled B",
    "shared B",
    "tensor cores",
    "loop instructions",
    "of an element",
)


def selected(op: str | None, case: str | None) -> list[tuple[cases.Suite, cases.Case]]:
    """The cases to compile.

    Raises:
      UsageError: an unknown operation or case.
    """
    known = budgets.operations()
    if op is not None and op not in known:
        raise UsageError(f"--op {op} is no operation with a kernel{nearest(op, known)}")
    every = budgets.workloads(*([op] if op else []))
    chosen = [pair for pair in every if case in (None, pair[1].name)]
    if case is not None and not chosen:
        names = {each.name for _, each in every}
        raise UsageError(f"--case {case} is no case with a budget{nearest(case, names)}")
    return chosen


def table(measured: budgets.Measured) -> str:
    """The case with its temporary memory, and a line for each kernel."""
    rows = [_COLUMNS]
    for kernel in measured.kernels:
        per_element = kernel.instructions_per_element
        rows.append(
            (
                kernel.name,
                "x".join(map(str, kernel.tile)) if kernel.tile else "-",
                str(kernel.warps),
                str(kernel.registers),
                str(kernel.spill_bytes),
                str(kernel.shared_bytes),
                kernel.tensor_cores,
                str(kernel.loop_instructions),
                "-" if per_element is None else f"{per_element:.1f}",
            )
        )
    heads, *cells = rows
    temporary = f"{measured.temporary_bytes / 2**20:.1f} MiB temporary"
    return "\n".join(
        [f"{measured.op} {measured.case}: {temporary}", format_table(heads, cells), ""]
    )


def run(arguments: argparse.Namespace) -> int:
    """Compiles, prints, compares or writes; returns the exit code."""
    target.require()
    wrong: list[str] = []
    measured: dict[str, list[budgets.Measured]] = {}
    for suite, case in selected(arguments.op, arguments.case):
        try:
            result = budgets.measure(suite, case)
        except target.NotCompiledError as error:
            wrong.append(str(error))
            continue
        print(table(result), flush=True)
        measured.setdefault(suite.op, []).append(result)
    for op, own in measured.items():
        if arguments.write:
            budgets.write(op, own)
            print(f"wrote {budgets.path(op)}")
        else:
            allowed = budgets.read(op)
            wrong += [s for each in own for s in budgets.complaints(each, allowed.get(each.case))]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return EXIT_NO_GO if wrong else EXIT_FINISHED


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; a refusal is one line on standard error."""
    parser = Parser("python -m tools.compile_kernels", __doc__)
    parser.add_argument("--op", metavar="OP", help="this operation alone")
    parser.add_argument("--case", metavar="CASE", help="this case alone")
    parser.add_argument("--write", action="store_true", help="write the budgets from these figures")
    # The compiler wants no device, and its plugin would look for one.
    jax.config.update("jax_platforms", "cpu")
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
