"""Checks, tunes and benchmarks the kernels on a GPU, in one command and under ten minutes.

    python -m tools.gpu_session --out runs/gpu
    python -m tools.gpu_session --out runs/gpu --only check_kernels

1. check_kernels   every kernel against its reference on this device; if it fails, nothing is timed
2. bench_kernels   speed against the bars and baselines of docs/kernels/gpu.md
3. bench_train     training steps, forward passes and decoding of the Prototype Transformer
4. tune_kernels    tile sizes, into kernels/iaj_kernels/tuned/<device>.json

Every step keeps what it has measured when its time is over. On 16 cores and an H200 the first took
90 seconds. The last, whose time goes into compiling, did not finish a workload in 80; it may go on
in another session (`--only tune_kernels`). Both share out their cases among processes; when tuning,
one of them times at once. Logs, measurements and a copy of the tables are in the folder. Commit the
JSON files; they contain device, versions and date.
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import time

from iaj_kernels.core import tuning
from iaj_kernels.suites import SUITES


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the session.

    Attributes:
      share: share of the session's time.
      continues: whether the session continues after it has failed.
    """

    name: str
    share: float
    continues: bool = True


STEPS = (
    Step("check_kernels", 0.2, continues=False),
    Step("bench_kernels", 0.3),
    Step("bench_train", 0.2),
    Step("tune_kernels", 0.3),
)
# In the folder of the results.
CHECKED = "check_kernels.json"
# The largest number of cases of one process.
_CASES, _WORKLOADS = 6, 3


def commands(step: str, out: Path) -> Iterator[tuple[str, list[str]]]:
    """The arguments of each process of a step, by the name of its log."""
    match step:
        case "check_kernels":
            for op, suite in SUITES.items():
                cases = len({each.name for use in ("test", "gpu") for each in suite.using(use)})
                for implementation in (suite.kernel, "mosaic"):
                    if implementation not in suite.implementations:
                        continue
                    of = -(-cases // _CASES)
                    for i in range(of):
                        name = f"{step}_{op}_{implementation}_{i}"
                        yield (
                            name,
                            [
                                f"--op={op}",
                                f"--implementation={implementation}",
                                f"--shard={i}/{of}",
                                # The bounds of longer attention take tens of gigabytes each.
                                "--longest=256",
                                f"--json={out / name}.json",
                            ],
                        )
        case "tune_kernels":
            lock = f"--lock={out / 'timing.lock'}"
            for op, suite in SUITES.items():
                of = -(-len(suite.using("gpu")) // _WORKLOADS) if suite.tiles else 0
                for i in range(of):
                    yield f"{step}_{op}_{i}", [f"--op={op}", f"--shard={i}/{of}", "--jobs=4", lock]
        case "bench_kernels":
            # Without it the benchmark compares by itself.
            checked = [f"--checked={out / CHECKED}"] if (out / CHECKED).exists() else []
            jobs = f"--jobs={os.cpu_count()}"
            yield (
                step,
                ["--device=gpu", f"--json={out / step}.json", *checked, jobs, "--settle=0.005"],
            )
        case "bench_train":
            models = ("protot", "llama", "mamba", "deltanet")
            # The sizes and batches of Table 13.
            paper = ["--shapes=protot/throughput", "--batch", "32", "128"]
            chosen = ["--models", *models, "--decoders", *models]
            yield step, [*paper, *chosen, f"--json={out / step}.json"]


def run(step: str, out: Path, seconds: float) -> dict[str, int]:
    """Runs the processes of a step, each with its output in `out/<name>.log`.

    Returns:
      The exit codes by name; 124 where the time ran out.
    """
    everyone = list(commands(step, out))
    environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cuda,cpu")}
    # Several processes, or torch beside JAX, share the device's memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    processes = {}
    for name, arguments in everyone:
        with (out / f"{name}.log").open("wb") as file:
            processes[name] = subprocess.Popen(
                [sys.executable, "-m", f"tools.{step}", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )
    end = time.monotonic() + seconds
    codes = {}
    for name, process in processes.items():
        try:
            codes[name] = process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes[name] = 124
    return codes


def clear(out: Path) -> None:
    """Removes what an earlier session checked, which may be of another commit or device."""
    for path in (*out.glob("check_kernels_*.json"), out / CHECKED):
        path.unlink(missing_ok=True)


def gather(out: Path) -> list[str]:
    """Joins the rows of the checking processes in `out/check_kernels.json`.

    Returns:
      The operations of whose kernel no case was compared.
    """
    parts = [
        json.loads(path.read_text("utf-8")) for path in sorted(out.glob("check_kernels_*.json"))
    ]
    rows = [row for part in parts for row in part["rows"]]
    if parts:
        whole = {"conditions": parts[0]["conditions"], "rows": rows}
        text = json.dumps(whole, indent=1) + "\n"
        (out / CHECKED).write_text(text, encoding="utf-8")
    compared = {(row["op"], row["implementation"]) for row in rows}
    kernels = {(op, suite.kernel) for op, suite in SUITES.items() if suite.kernel}
    return sorted(op for op, _ in kernels - compared)


def tail(out: Path, name: str, lines: int) -> str:
    """The last lines of a log, indented."""
    text = (out / f"{name}.log").read_text("utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in text[-lines:])


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=570.0, help="time for all steps")
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these steps")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if step.name in arguments.only]
    whole, failed = sum(step.share for step in steps), 0
    for step in steps:
        start = time.monotonic()
        if step.name == "check_kernels":
            clear(arguments.out)
        codes = run(step.name, arguments.out, step.share / whole * arguments.seconds)
        took = time.monotonic() - start
        unchecked = gather(arguments.out) if step.name == "check_kernels" else []
        print(
            f"{step.name}: {sum(not code for code in codes.values())} of {len(codes)} processes "
            f"done after {took:.0f} s",
            flush=True,
        )
        for name, code in codes.items():
            if code:
                verdict = "ran out of time" if code == 124 else f"exit {code}"
                print(f"  {name}: {verdict}", flush=True)
            print(
                tail(arguments.out, name, 40 if len(codes) == 1 else 12 if code else 2), flush=True
            )
        if unchecked:
            print(f"  no case of {', '.join(unchecked)} was compared", flush=True)
        if any(codes.values()) or unchecked:
            failed += 1
            if not step.continues:
                break
    for table in tuning.TABLES.glob("*.json"):
        shutil.copy(table, arguments.out / f"tuned_{table.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
