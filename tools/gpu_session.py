"""All that is to be done where a GPU is at hand, in one command and under ten minutes.

    python -m tools.gpu_session --out runs/gpu

1. check_kernels   every kernel against its reference on this device; if red, nothing is timed
2. tune_kernels    tile sizes, into kernels/tuned/<device>.json
3. bench_kernels   speed against the bars and baselines of docs/kernels.md

Each step is a process of its own with its share of the time; what it printed and measured is left
in the folder, and the tables are copied there too. Commit the JSON files with the device, versions
and date that they hold.
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

# Share of the budget, and whether the session goes on after the step has failed.
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
    """Runs one step, its output into `out/<step>.log`; 124 if its time ran out."""
    log = out / f"{step}.log"
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                command(step, out),
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                env={**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cuda,cpu")},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124
    return done.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=570.0, help="time for all steps")
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for step, share, goes_on in STEPS:
        start = time.monotonic()
        code = run(step, given.out, share * given.seconds)
        verdict = {0: "done", 124: "ran out of time"}.get(code, f"exit {code}")
        print(f"{step}: {verdict} after {time.monotonic() - start:.0f} s", flush=True)
        tail = (given.out / f"{step}.log").read_text("utf-8", errors="replace").splitlines()
        print("\n".join(f"    {line}" for line in tail[-40:]), flush=True)
        if code:
            failed += 1
            if not goes_on:
                break
    for table in tuning.TABLES.glob("*.json"):
        shutil.copy(table, given.out / f"tuned_{table.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
