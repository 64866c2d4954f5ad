"""Speed and memory of the kernels against their rivals, as ratios measured in one run.

    python -m tools.bench_kernels --device=cpu                  the rows for a CPU
    python -m tools.bench_kernels --device=gpu --json FILE      those for an NVIDIA GPU
    python -m tools.bench_kernels --device=cpu --op prefix_mean --repeats 20

Every row compares our implementation with the reference first, values and gradients; where that is
red no speed is printed. A row whose rival is not installed says what to install, and is not run.
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

from kernels.core.cases import OPS
from tools.bench import races, timing

PACKAGES = ("jax", "jaxlib", "numpy", "jax-triton", "torch", "triton", "fla")


def line(result: races.Result) -> str:
    """One row of the table, or the deviations of a red comparison."""
    race = result.race
    if result.missing:
        return f"{race.label}\n    not run: {result.missing}"
    if not result.green:
        red = [each for each in result.deviations if not each.ok]
        told = ", ".join(f"{d.name} {d.error:.1e}, {d.share:.1f} of its bound" for d in red)
        return f"{race.label}\n    RED, no speed: {told}"
    ours = 1e6 * statistics.median(result.ours_seconds)
    rival = 1e6 * statistics.median(result.rival_seconds)
    told = f"{race.label}\n    {ours:,.0f} us against {rival:,.0f} us, {result.speed} times as fast"
    told += f"; {result.ours_bytes / 2**20:,.1f} MiB against {result.rival_bytes / 2**20:,.1f} MiB"
    for name, reached in result.reached().items():
        bar = getattr(race, name)
        sign = ">=" if name == "speed" else "<="
        told += f"\n    {'reached' if reached else 'MISSED '}  {name} {sign} {bar}"
    return told


def record(result: races.Result) -> dict[str, Any]:
    """A result as JSON holds it: raw seconds, bytes, deviations, bars."""
    return {
        **dataclasses.asdict(result.race),
        "missing": result.missing,
        "deviations": {each.name: [each.error, each.share] for each in result.deviations},
        "ours_seconds": result.ours_seconds,
        "rival_seconds": result.rival_seconds,
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
    parser.add_argument("--op", choices=OPS, help="the rows of one operation")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each pair")
    parser.add_argument(
        "--settle",
        type=float,
        default=0.02,
        help="seconds that each of a pair runs uncounted before each run that counts; "
        "0 times it straight after its rival (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="writes conditions and raw timings there")
    given = parser.parse_args(argv)
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    if not 0.0 <= given.settle <= 60.0:
        parser.error("--settle must be between 0 and 60 seconds")
    found = jax.devices()[0].platform
    if found != given.device:
        parser.error(f"--device={given.device}, but jax runs on {found}; set JAX_PLATFORMS")
    table = [race for race in races.of(given.device) if given.op is None or race.op == given.op]
    if not table:
        parser.error(f"no row for --op={given.op} on --device={given.device}")

    conditions = timing.conditions(PACKAGES) | {"settle": f"{given.settle} s"}
    print(", ".join(f"{key} {value}" for key, value in conditions.items()) + "\n")
    results = []
    for race in table:
        copies = 1 if given.device == "cpu" else 20
        results.append(races.run(race, given.repeats, copies, given.settle))
        print(line(results[-1]), flush=True)
    if given.json:
        rows = {"conditions": conditions, "rows": [record(each) for each in results]}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    missed = sum(not all(each.reached().values()) for each in results)
    left_out = sum(bool(each.missing) for each in results)
    told = f", {left_out} not run for lack of a rival" if left_out else ""
    print(f"\n{len(results)} rows, {missed} with a missed bar or a red comparison{told}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
