"""Measures the tile sizes of the Pallas kernels on this GPU and writes the best to its table.

    python -m tools.tune_kernels                     every operation with tiles to choose
    python -m tools.tune_kernels --op gated_attention --repeats 10

For the first workload marked `gpu` of each bucket, the tile sizes of one kernel after another are
compiled, compared with the heuristic's result, and timed, forward and backward together if there is
a backward. Combinations that do not fit the device are in the table with the compiler's error. The
table `kernels/iaj_kernels/tuned/<device>.json` has the fastest tiles with all raw timings, device,
versions and date, and is written after each group of combinations.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import itertools
import json
import os
from pathlib import Path
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.core import cases, dispatch, tuning
from iaj_kernels.suites import SUITES
from tools.bench import baselines, timing

# Two tile sizes round differently; a larger difference is an error in one of them.
AGREEMENT = {"float32": 1e-5, "bfloat16": 2e-2}


def workloads(suite: cases.Suite) -> dict[str, cases.Case]:
    """The workloads to tune, by bucket; none if the operation has no tiles to choose."""
    results: dict[str, cases.Case] = {}
    for case in suite.using("gpu") if suite.tiles else ():
        results.setdefault(tuning.bucket(case.sizes, case.dtype), case)
    return results


def combinations(tiles: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Every combination of tile sizes."""
    for values in itertools.product(*tiles.values()):
        yield dict(zip(tiles, values, strict=True))


def tune(
    suite: cases.Suite,
    case: cases.Case,
    target: dispatch.Target,
    repeats: int,
    *,
    copies: int = 1,
    jobs: int = 1,
    lock: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """The fastest tiles of one workload, with the seconds of every combination.

    Yields after each group of combinations, so that a session that runs out of time keeps what it
    has measured: `tiles` (empty if the heuristic is fastest), `seconds` by combination, and
    `refused`, the first line of the compiler's error by combination.

    Args:
      jobs: threads that compile the combinations of a group.
      lock: the file that is locked while the device is timed.

    Raises:
      ArithmeticError: two combinations disagree by more than rounding.
    """
    arrays = suite.make(case, jax.random.key(0))
    ours = baselines.ours(suite.op, "pallas")

    def compiled(tiles: Mapping[str, int]) -> timing.Pass | str:
        # A function of its own each time: what jax.jit has traced keeps its tiles.
        fn, arguments = baselines.gradient(ours, suite, case, arrays)
        with dispatch.on(target), tuning.trying(suite.op, tiles):
            try:
                return timing.program(fn, arguments, copies, memory=False).run
            except jax.errors.JaxRuntimeError as error:
                if not tiles:
                    raise
                return timing.first_line(error)

    seconds: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    expected: Any = None
    best: dict[str, int] = {}
    for group in [{}, *suite.tiles]:
        tried = {_label(each): each for each in ({**best, **c} for c in combinations(group))}
        new = [label for label in tried if label not in seconds]
        with ThreadPoolExecutor(jobs) as threads:
            programs = list(threads.map(compiled, (tried[label] for label in new)))
        with timing.alone(lock):
            for label, run in zip(new, programs, strict=True):
                if isinstance(run, str):
                    refused[label] = run
                    continue
                try:
                    outputs = run()
                except jax.errors.JaxRuntimeError as error:
                    if not tried[label]:
                        raise
                    refused[label] = timing.first_line(error)
                    continue
                first = _first(outputs, copies)
                expected = first if expected is None else expected
                if name := _differing(case, first, expected):
                    errors = [
                        _error(each, expected, name) for each in (first, _first(run(), copies))
                    ]
                    raise ArithmeticError(
                        f"{suite.op} {case.name}: with {label}, {name} differs by {errors[0]:.1e} "
                        f"from the heuristic's tiles, and run again by {errors[1]:.1e}; a kernel "
                        "is wrong, so do not tune it"
                    )
                (series,) = timing.in_turns([run], repeats)
                seconds[label] = [each / copies for each in series]
        measured = [label for label in tried if label in seconds] + [_label(best)]
        fastest = min(measured, key=lambda label: statistics.median(seconds[label]))
        best = tried.get(fastest, best)
        yield {"tiles": best, "seconds": seconds, "refused": refused}


def _label(tiles: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in tiles.items()) or "heuristic"


def _first(outputs: Any, copies: int) -> Any:
    """What the first of several calls in one program returned."""
    return outputs if copies == 1 else outputs[0]


def _differing(case: cases.Case, outputs: Any, expected: Any) -> str:
    """The first output that differs by more than rounding; empty if none does."""
    for name, want in expected.items():
        # An argmax moves by whole keys where two scores round to one.
        if not jnp.issubdtype(want.dtype, jnp.floating):
            continue
        if not _error(outputs, expected, name) <= AGREEMENT[case.dtype]:
            return name
    return ""


def _error(outputs: Any, expected: Any, name: str) -> float:
    return cases.relative_error(np.asarray(outputs[name]), np.asarray(expected[name]))


def write(path: Path, conditions: Mapping[str, str], result: Mapping[str, Any]) -> None:
    """Merges the tiles into the device's table, which other processes may be writing too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with timing.alone(path.with_suffix(".lock")):
        _merge(path, conditions, result)


def _merge(path: Path, conditions: Mapping[str, str], result: Mapping[str, Any]) -> None:
    old = json.loads(path.read_text("utf-8")) if path.exists() else {"tiles": {}, "timings": {}}
    for op, by_bucket in result.items():
        tiles = {bucket: each["tiles"] for bucket, each in by_bucket.items() if each["tiles"]}
        old["tiles"][op] = old["tiles"].get(op, {}) | tiles
        old["timings"][op] = old["timings"].get(op, {}) | {
            bucket: {**each, "conditions": dict(conditions)} for bucket, each in by_bucket.items()
        }
    path.write_text(json.dumps(old, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--op", choices=SUITES, help="one operation")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each combination")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="threads that compile")
    parser.add_argument(
        "--shard",
        type=timing.Shard.parse,
        default=timing.Shard(),
        metavar="I/N",
        help="every N-th workload, from the I-th on: the part of one of N processes",
    )
    parser.add_argument("--lock", type=Path, help="file that such processes lock to time alone")
    parser.add_argument("--tables", type=Path, default=tuning.TABLES, help="where the table is")
    arguments = parser.parse_args(argv)
    target = dispatch.target()
    if reason := dispatch.unsupported_reason(target):
        parser.error(f"tuning {reason.partition(';')[0]}")
    path = arguments.tables / f"{tuning.device_key(target.device_kind)}.json"
    conditions = timing.conditions()
    suites = [SUITES[arguments.op]] if arguments.op else SUITES.values()
    for suite, bucket, case in arguments.shard.share(
        (each, *workload) for each in suites for workload in workloads(each).items()
    ):
        for result in tune(
            suite,
            case,
            target,
            arguments.repeats,
            copies=5,
            jobs=arguments.jobs,
            lock=arguments.lock,
        ):
            write(path, conditions, {suite.op: {bucket: result}})
        best = min(statistics.median(each) for each in result["seconds"].values())
        text = result["tiles"] or "the heuristic"
        print(f"{suite.op} {case.name}: {text}, {1e6 * best:,.0f} us", flush=True)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
