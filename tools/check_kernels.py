"""Compares every workload of every kernel with its reference on this device.

    python -m tools.check_kernels                       the kernel of each operation on a GPU
    python -m tools.check_kernels --interpret --op prefix_mean
    python -m tools.check_kernels --implementation xla

The cases are those of the tests; large ones are shortened so that the reference fits into memory.
Each runs twice, and the results must be equal bit for bit. The exit code is 1 if any case fails, or
if there is none that the implementation supports.
"""

import argparse
from collections.abc import Sequence
import contextlib
import json
import os
from pathlib import Path
import sys

import jax
import numpy as np

from iaj_kernels.core import cases, dispatch, triton_calls, tuning
from iaj_kernels.suites import SUITES
from tools.bench import benchmarks, timing

_ALL = timing.Shard()


def is_deterministic(suite: cases.Suite, case: cases.Case, implementation: str) -> bool:
    """Whether outputs and gradients of two runs are equal bit for bit."""
    arrays = suite.make(case, jax.random.key(0))
    cotangents = cases.cotangents(suite, case, arrays, jax.random.key(1))
    run = jax.jit(cases.outputs_and_gradients(suite, case, implementation))
    first, second = (jax.tree.map(np.asarray, run(arrays, cotangents)) for _ in range(2))
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


def parse_tiles(text: str) -> dict[str, int]:
    """Reads "chunk=32,num_warps=2".

    Raises:
      argparse.ArgumentTypeError: it is no such list.
    """
    try:
        pairs = (each.split("=") for each in text.split(","))
        return {name: int(number) for name, number in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=NUMBER,NAME=NUMBER; write chunk=32,num_warps=2"
        ) from None


def check(op: str, implementation: str, longest: int, shard: timing.Shard = _ALL) -> list[dict]:
    """One row per case: its deviations, whether it is deterministic, and whether it passes.

    A case that the implementation does not support has no row.
    """
    suite = SUITES[op]
    rows = []
    both = {c.name: c for use in ("test", "gpu") for c in suite.using(use)}
    for case in shard.share(both.values()):
        # Those of the tests are small as they are; long ones have parts of their own.
        shortened = case if "test" in case.uses else benchmarks.shorten(case, longest)
        try:
            deviations = cases.compare(suite, shortened, implementation)
        except dispatch.UnavailableError as error:
            print(f"      {error}: {case.name}", flush=True)
            continue
        same = is_deterministic(suite, shortened, implementation)
        rows.append(
            {
                "op": op,
                "implementation": implementation,
                "case": case.name,
                "sizes": dict(shortened.sizes),
                "deviations": {each.name: [each.error, each.share] for each in deviations},
                "repeats_itself": same,
                "green": same and all(each.ok for each in deviations),
            }
        )
        worst = max(deviations, key=lambda each: each.share)
        verdict = "green" if rows[-1]["green"] else "RED  "
        text = f"worst {worst.name} {worst.error:.1e}, {worst.share:.2f} of its bound"
        print(
            f"{verdict} {op} {case.name}: {text}{'' if same else ', not deterministic'}", flush=True
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--op", choices=SUITES, help="one operation")
    implementations = sorted({name for suite in SUITES.values() for name in suite.implementations})
    parser.add_argument(
        "--implementation",
        choices=implementations,
        help="this one of every operation (default: pallas, or triton where there is none)",
    )
    parser.add_argument("--interpret", action="store_true", help="kernels without a GPU")
    parser.add_argument(
        "--longest", type=int, default=512, help="length to which large cases are cut"
    )
    parser.add_argument(
        "--shard",
        type=timing.Shard.parse,
        default=_ALL,
        metavar="I/N",
        help="every N-th case of an operation, from the I-th on: the part of one of N processes",
    )
    parser.add_argument(
        "--tiles",
        type=parse_tiles,
        default={},
        metavar="NAME=NUMBER,...",
        help="tiles of the operation instead of its own; takes --op",
    )
    parser.add_argument("--json", type=Path, help="file for conditions and deviations")
    arguments = parser.parse_args(argv)
    kernel = arguments.implementation in (None, "mosaic", *cases.GPU_KERNELS)
    if (
        kernel
        and not arguments.interpret
        and (reason := dispatch.unsupported_reason(dispatch.target()))
    ):
        parser.error(f"{reason.partition(';')[0]}; pass --interpret to run them slowly here")
    if arguments.interpret:
        os.environ[triton_calls.INTERPRET] = "1"
    rows = []
    if arguments.tiles and not (arguments.op and SUITES[arguments.op].tiles):
        tiled = ", ".join(op for op, suite in SUITES.items() if suite.tiles)
        parser.error(f"--tiles are those of one operation; name it by --op, one of {tiled}")
    with contextlib.ExitStack() as stack:
        if arguments.interpret:
            stack.enter_context(dispatch.on(dispatch.INTERPRETER))
        if arguments.tiles:
            stack.enter_context(tuning.trying(arguments.op, arguments.tiles))
        for op in [arguments.op] if arguments.op else SUITES:
            implementation = arguments.implementation or SUITES[op].kernel
            if implementation not in SUITES[op].implementations:
                print(f"{op}: has no {implementation or 'GPU kernel'!r} implementation")
                continue
            rows += check(op, implementation, arguments.longest, arguments.shard)
    if arguments.json:
        results = {"conditions": timing.conditions(), "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    red = sum(not row["green"] for row in rows)
    print(f"\n{len(rows)} cases, {red} red")
    # Of a part of the cases all may be unsupported.
    return 1 if red or not (rows or arguments.shard.of > 1) else 0


if __name__ == "__main__":
    sys.exit(main())
