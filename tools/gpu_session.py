"""Checks, tunes and benchmarks the kernels on a GPU, in one command and under ten minutes.

    python -m tools.gpu_session --out runs/gpu

1. check_kernels   every kernel against its reference on this device; if it fails, nothing is timed
2. tune_kernels    tile sizes, into kernels/tuned/<device>.json
3. bench_kernels   speed against the bars and baselines of docs/kernels.md

Each step is a separate process with its share of the time. Its log and its measurements are in the
folder, and the tables are copied to it. Commit the JSON files; they contain device, versions and
date.
"""

import argparse
from collections.abc import Sequence
import os
from pathlib import Path
import shutil
import subprocess
import sys
import time

from kernels.core import tuning

# Share of the time, and whether the session continues after the step has failed.
STEPS = (("check_kernels", 0.3, False), ("tune_kernels", 0.35, True), ("bench_kernels", 0.35, True))


def command(step: str, out: Path) -> list[str]:
    """The command line of a step."""
    line = [sys.executable, "-m", f"tools.{step}"]
    if step == "bench_kernels":
        line.append("--device=gpu")
    if step != "tune_kernels":
        line += ["--json", str(out / f"{step}.json")]
    return line


def run(step: str, out: Path, seconds: float) -> int:
    """Runs one step with its output in `out/<step>.log`; returns 124 if its time ran out."""
    log = out / f"{step}.log"
    with log.open("wb") as file:
        try:
            process = subprocess.run(
                command(step, out),
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                env={**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cuda,cpu")},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124
    return process.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=570.0, help="time for all steps")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for step, share, continues in STEPS:
        start = time.monotonic()
        code = run(step, arguments.out, share * arguments.seconds)
        verdict = {0: "done", 124: "ran out of time"}.get(code, f"exit {code}")
        print(f"{step}: {verdict} after {time.monotonic() - start:.0f} s", flush=True)
        tail = (arguments.out / f"{step}.log").read_text("utf-8", errors="replace").splitlines()
        print("\n".join(f"    {line}" for line in tail[-40:]), flush=True)
        if code:
            failed += 1
            if not continues:
                break
    for table in tuning.TABLES.glob("*.json"):
        shutil.copy(table, arguments.out / f"tuned_{table.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
