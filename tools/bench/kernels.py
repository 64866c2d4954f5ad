"""Speed and memory of the kernels relative to their baselines, measured in one run.

    python -m tools.bench.kernels --device=cpu                  the rows for a CPU
    python -m tools.bench.kernels --device=gpu --json FILE      those for an NVIDIA GPU
    python -m tools.bench.kernels --device=cpu --op prefix_mean --repeats 20
    python -m tools.bench.kernels --device=gpu --op prefix_mean --baseline fla

Every row first compares values and gradients of our implementation with the reference, and prints
no speed if they disagree. A row whose baseline is not installed is not run, and says what to
install. The exit code is 1 if a comparison failed or a bar was missed.
"""

import argparse
import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
import statistics
import sys
from typing import Any

import jax

from iaj_kernels.core import cases
from iaj_kernels.suites import SUITES
from lm_jax.errors import UsageError
from tools.bench import baselines, benchmarks, front


def line(result: benchmarks.Result) -> str:
    """One row of the table, or the deviations of a red comparison."""
    benchmark = result.benchmark
    if result.missing:
        return f"{benchmark.label}\n    not run: {result.missing}"
    if not result.green:
        red = [each for each in result.deviations if not each.ok]
        text = ", ".join(f"{d.name} {d.error:.1e}, {d.share:.1f} of its bound" for d in red)
        return f"{benchmark.label}\n    RED, no speed: {text}"
    if result.failed:
        return f"{benchmark.label}\n    FAILED: {result.failed}"
    ours = 1e6 * statistics.median(result.ours_seconds)
    baseline = 1e6 * statistics.median(result.baseline_seconds)
    text = (
        f"{benchmark.label}\n    {ours:,.0f} us against {baseline:,.0f} us, "
        f"{result.speed} times as fast"
    )
    text += (
        f"; {result.ours_bytes / 2**20:,.1f} MiB against {result.baseline_bytes / 2**20:,.1f} MiB"
    )
    for name, reached in result.reached().items():
        bar = getattr(benchmark, name)
        sign = ">=" if name == "speed" else "<="
        text += f"\n    {'reached' if reached else 'MISSED '}  {name} {sign} {bar}"
    return text


def record(result: benchmarks.Result) -> dict[str, Any]:
    """A result as JSON data: raw seconds, bytes, deviations, bars."""
    return {
        **dataclasses.asdict(result.benchmark),
        "missing": result.missing,
        "failed": result.failed,
        "deviations": {each.name: [each.error, each.share] for each in result.deviations},
        "ours_seconds": result.ours_seconds,
        "baseline_seconds": result.baseline_seconds,
        "ours_bytes": result.ours_bytes,
        "baseline_bytes": result.baseline_bytes,
        "reached": result.reached(),
    }


def measured(
    table: Sequence[benchmarks.Benchmark],
    prepare: Callable[[benchmarks.Benchmark], benchmarks.Prepared],
    *,
    jobs: int,
    repeats: int,
    settle: float,
) -> Iterator[benchmarks.Result]:
    """The results of the rows of one operation, one after another.

    Nothing else may run while one is timed, so that all are compiled before. What is no JAX program
    captures a graph, which no other thread may disturb.
    """
    with ThreadPoolExecutor(jobs) as threads:
        inside = [each for each in table if each.baseline not in baselines.OUTSIDE]
        done = dict(zip(inside, threads.map(prepare, inside), strict=True))
    prepared = collections.deque(done.get(each) or prepare(each) for each in table)
    done.clear()
    while prepared:
        # What it holds on the device goes with it.
        yield prepared.popleft().measured(repeats, settle)


def read_checked(path: Path, conditions: Mapping[str, str]) -> benchmarks.Checked:
    """The comparisons in a file of `tools.check_kernels --json`, on this device at this commit.

    A case of which two runs differ has a deviation of its own.

    Raises:
      UsageError: there is no such file, or it is of another commit or device.
    """
    remedy = f"write it anew with python -m tools.check_kernels --json={path}, or leave it out"
    try:
        file = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--checked={path} cannot be read ({error}); {remedy}") from error
    for name in ("commit", "device"):
        if (checked := file["conditions"].get(name)) != conditions[name]:
            raise UsageError(
                f"--checked={path} is of {name} {checked}, and this is {conditions[name]}; {remedy}"
            )
    deviations = {}
    for row in file["rows"]:
        each = [cases.Deviation(name, *of_array) for name, of_array in row["deviations"].items()]
        if not row["repeats_itself"]:
            each.append(cases.Deviation("a second run", math.inf, math.inf))
        deviations[row["op"], row["implementation"], row["case"]] = each
    return deviations


def rows(device: str, op: str | None, baseline: str | None) -> list[benchmarks.Benchmark]:
    """The chosen rows of a device.

    Raises:
      UsageError: there is none, or this is another device.
    """
    platform = jax.devices()[0].platform
    if platform != device:
        raise UsageError(f"--device={device}, but jax runs on {platform}; set JAX_PLATFORMS")
    table = [
        row
        for row in benchmarks.for_device(device)
        if op in (None, row.op) and baseline in (None, row.baseline)
    ]
    if not table:
        chosen = {"op": op, "baseline": baseline}
        flags = " ".join(f"--{name}={value}" for name, value in chosen.items() if value)
        raise UsageError(f"no row for {flags} on --device={device}")
    # Last: its library tries its own tiles for minutes.
    return sorted(table, key=lambda each: each.baseline in baselines.OUTSIDE)


def run(arguments: argparse.Namespace, kept: front.Record) -> bool:
    """Measures the chosen rows; false where a comparison failed or a bar was missed."""
    if not 0.0 <= arguments.settle <= 60.0:
        raise UsageError(f"--settle={arguments.settle} must be between 0 and 60 seconds")
    table = rows(arguments.device, arguments.op, arguments.baseline)
    conditions = kept.results["conditions"]
    conditions["settle"] = f"{arguments.settle} s"
    results = []
    prepare = functools.partial(
        benchmarks.prepare,
        copies=1 if arguments.device == "cpu" else 20,
        checked=read_checked(arguments.checked, conditions) if arguments.checked else None,
    )
    for _, group in itertools.groupby(table, lambda each: each.op):
        for result in measured(
            list(group),
            prepare,
            jobs=arguments.jobs,
            repeats=arguments.repeats,
            settle=arguments.settle,
        ):
            results.append(result)
            print(line(result), flush=True)
            kept.keep("rows", [record(each) for each in results])
    missed = sum(not all(each.reached().values()) for each in results)
    not_run = sum(bool(each.missing) for each in results)
    text = f", {not_run} not run without their baseline" if not_run else ""
    print(f"\n{len(results)} rows, {missed} with a missed bar or a red comparison{text}")
    return not missed


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = front.parser("bench.kernels", __doc__, repeats=15)
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--op", choices=SUITES, help="the rows of one operation")
    parser.add_argument(
        "--baseline",
        choices=[*baselines.BASELINES, *baselines.OUTSIDE],
        help="the rows with one baseline",
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=0.02,
        help="untimed seconds of each program before each of its timed runs; 0 times it directly "
        "after its baseline (default: %(default)s)",
    )
    parser.add_argument(
        "--checked",
        type=Path,
        help="file of tools.check_kernels --json, of this device and commit; not compared again",
    )
    parser.add_argument("--jobs", type=int, default=1, help="threads that compile")
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
