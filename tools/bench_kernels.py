"""Speed and memory of the kernels against their baselines, as ratios measured in one run.

    python -m tools.bench_kernels --device=cpu                  the rows for a CPU
    python -m tools.bench_kernels --device=gpu --json FILE      those for an NVIDIA GPU
    python -m tools.bench_kernels --device=cpu --op prefix_mean --repeats 20

Every row compares our implementation with the reference first, values and gradients; where that is
red no speed is printed. A row whose baseline is not installed says what to install, and is not run.
The exit code is 1 if a comparison was red or a bar was missed.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
import statistics
import sys
from typing import Any

import jax

from kernels.suites import SUITES
from tools.bench import benchmarks, timing

PACKAGES = ("jax", "jaxlib", "numpy", "jax-triton", "torch", "triton", "fla")


def line(result: benchmarks.Result) -> str:
    """One row of the table, or the deviations of a red comparison."""
    benchmark = result.benchmark
    if result.missing:
        return f"{benchmark.label}\n    not run: {result.missing}"
    if not result.green:
        red = [each for each in result.deviations if not each.ok]
        text = ", ".join(f"{d.name} {d.error:.1e}, {d.share:.1f} of its bound" for d in red)
        return f"{benchmark.label}\n    RED, no speed: {text}"
    ours = 1e6 * statistics.median(result.ours_seconds)
    baseline = 1e6 * statistics.median(result.baseline_seconds)
    text = (
        f"{benchmark.label}\n    {ours:,.0f} us against {baseline:,.0f} us, "
        f"{result.speed} times as fast"
    )
    text += f"; {result.ours_bytes / 2**20:,.1f} MiB against {result.rival_bytes / 2**20:,.1f} MiB"
    for name, reached in result.reached().items():
        bar = getattr(benchmark, name)
        sign = ">=" if name == "speed" else "<="
        text += f"\n    {'reached' if reached else 'MISSED '}  {name} {sign} {bar}"
    return text


def record(result: benchmarks.Result) -> dict[str, Any]:
    """A result as JSON holds it: raw seconds, bytes, deviations, bars."""
    return {
        **dataclasses.asdict(result.benchmark),
        "missing": result.missing,
        "deviations": {each.name: [each.error, each.share] for each in result.deviations},
        "ours_seconds": result.ours_seconds,
        "baseline_seconds": result.baseline_seconds,
        "ours_bytes": result.ours_bytes,
        "rival_bytes": result.rival_bytes,
        "reached": result.reached(),
    }


@timing.profiled
def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], parents=[timing.PROFILE]
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--op", choices=SUITES, help="the rows of one operation")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each pair")
    parser.add_argument(
        "--settle",
        type=float,
        default=0.02,
        help="seconds that each of a pair runs uncounted before each run that counts; "
        "0 times it straight after its baseline (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="writes conditions and raw timings there")
    given = parser.parse_args(argv)
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    if not 0.0 <= given.settle <= 60.0:
        parser.error("--settle must be between 0 and 60 seconds")
    result = jax.devices()[0].platform
    if result != given.device:
        parser.error(f"--device={given.device}, but jax runs on {result}; set JAX_PLATFORMS")
    table = [
        benchmark
        for benchmark in benchmarks.for_device(given.device)
        if given.op is None or benchmark.op == given.op
    ]
    if not table:
        parser.error(f"no row for --op={given.op} on --device={given.device}")

    conditions = timing.conditions(PACKAGES) | {"settle": f"{given.settle} s"}
    print(", ".join(f"{key} {value}" for key, value in conditions.items()) + "\n")
    results = []
    for benchmark in table:
        copies = 1 if given.device == "cpu" else 20
        results.append(benchmarks.run(benchmark, given.repeats, copies, given.settle))
        print(line(results[-1]), flush=True)
    if given.json:
        rows = {"conditions": conditions, "rows": [record(each) for each in results]}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    missed = sum(not all(each.reached().values()) for each in results)
    left_out = sum(bool(each.missing) for each in results)
    text = f", {left_out} not run for lack of a baseline" if left_out else ""
    print(f"\n{len(results)} rows, {missed} with a missed bar or a red comparison{text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
