"""Checks, measures and tunes on a GPU, in one command of at most 25 minutes, in order of worth.

    python -m tools.gpu_session --out runs/gpu
    python -m tools.gpu_session --out runs/gpu --only check_kernels race_check

1. check_kernels   every kernel against its reference on this device; if it fails, nothing is timed
2. race_check      the prefix mean with the tiles that once were wrong, alone and under
                   compute-sanitizer, where that is installed
3. train_step      training steps of 12 million and of a billion parameters, with a trace, with and
                   without kernels of custom calls in command buffers
4. attention       gated attention, Triton and Mosaic, against cuDNN
5. bench_kernels   speed against the bars and baselines of docs/kernels/gpu.md
6. bench_train     training steps, forward passes and decoding of the models of Table 13
7. audit           SmolLM2 at 4,096 tokens: rows, needles and every recipe
8. circuits        circuits of SmolLM2, 100 prompts
9. graph           neurons of 6,000 tokens in SmolLM2's shape
10. posttrain      SmolLM2 post-trained as `sparse/posttrain` says, resumed by the next session
11. pretrain       the Prototype Transformer at full size, resumed by the next session
12. tune_kernels   tile sizes, into kernels/iaj_kernels/tuned/<device>.json

A step begins if half of its time, or of the session's, is left. Steps of which every process ended
without an error are noted in `session.json` of the folder with the commit, and left out the next
time on that commit, so that `--seconds=570`, given again, goes on with the others; `--only` names
steps to do in any case. What runs out of time gets SIGTERM, so that training saves its state.
On 16 cores and an H200 the first took 90 seconds; the others were not run in this form. Kernels
share out their cases among processes; when tuning, one of them times at once. SmolLM2 and texts are
read from the cache (`iaj fetch smollm2 wiki`). Logs, measurements and a copy of the tables are in
the folder. Commit the JSON files; they contain device, versions and date.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from iaj_kernels.core import tuning
from iaj_kernels.suites import SUITES
from lm_jax.run.files import read_json, write_json
from tools.bench.timing import conditions


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the session.

    Attributes:
      seconds: time that it may take.
      continues: whether the session continues after it has failed.
    """

    name: str
    seconds: float
    continues: bool = True


STEPS = (
    Step("check_kernels", 150, continues=False),
    Step("race_check", 60),
    Step("train_step", 180),
    Step("attention", 90),
    Step("bench_kernels", 210),
    Step("bench_train", 150),
    Step("audit", 180),
    Step("circuits", 60),
    Step("graph", 60),
    Step("posttrain", 120),
    Step("pretrain", 120),
    Step("tune_kernels", 120),
)
# All of it, in seconds.
WHOLE = sum(step.seconds for step in STEPS)
# In the folder of the results.
CHECKED, SESSION = "check_kernels.json", "session.json"
# Exit code of what ran out of time, and seconds that it then has to save its state.
LATE, _GRACE = 124, 15.0
# The largest number of cases of one process.
_CASES, _WORKLOADS = 6, 3
# Tiles of the prefix mean whose output was wrong once (docs/kernels/gpu.md).
_RACING = "chunk=32,num_warps=2"
# Under which XLA may replay kernels of custom calls, Triton's, without launching them one by one.
_BUFFERED = (
    "--xla_gpu_enable_command_buffer=+CUSTOM_CALL "
    # Without it traced turns have no command buffers.
    "--xla_enable_command_buffers_during_profiling=true"
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A process of a step.

    Attributes:
      name: name of its log.
      module: module that it runs.
      arguments: arguments of that.
      under: program that runs the interpreter, with its arguments.
      flags: flags of XLA.
    """

    name: str
    module: str
    arguments: Sequence[str]
    under: Sequence[str] = ()
    flags: str = ""

    @property
    def line(self) -> list[str]:
        """The words of the process."""
        return [*self.under, sys.executable, "-m", self.module, *self.arguments]


def commands(step: str, out: Path) -> Iterator[Launch]:
    """The processes of a step."""
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
                        yield Launch(
                            name,
                            "tools.check_kernels",
                            [
                                f"--op={op}",
                                f"--implementation={implementation}",
                                f"--shard={i}/{of}",
                                # The bounds of longer attention take tens of gigabytes each.
                                "--longest=256",
                                f"--json={out / name}.json",
                            ],
                        )
        case "race_check":
            given = ["--op=prefix_mean", f"--tiles={_RACING}"]
            file = f"--json={out / step}.json"
            yield Launch(step, "tools.check_kernels", [*given, "--longest=2048", file])
            if sanitizer := shutil.which("compute-sanitizer"):
                under = (sanitizer, "--tool", "racecheck", "--error-exitcode", "1")
                name = f"{step}_sanitizer"
                yield Launch(name, "tools.check_kernels", [*given, "--longest=128"], under)
        case "train_step":
            for shapes, batch in (("throughput", "128"), ("throughput:billion", "8")):
                for flags in ("", _BUFFERED):
                    name = f"{step}_{shapes.replace(':', '_')}{'_buffered' * bool(flags)}"
                    models = ("protot", "llama")
                    chosen = [f"--shapes=protot/{shapes}", "--batch", batch, "--models", *models]
                    # Nothing but training steps.
                    alone = ["--lengths", "--prompts", "--dtype=bfloat16", "--repeats=5"]
                    kept = ["--profile=2:3", f"--json={out / name}.json"]
                    arguments = [*chosen, *alone, *kept]
                    yield Launch(name, "tools.bench.train", arguments, flags=flags)
        case "attention" | "bench_kernels":
            # Without it the benchmark compares by itself.
            checked = [f"--checked={out / CHECKED}"] if (out / CHECKED).exists() else []
            given = ["--device=gpu", "--settle=0.005", f"--jobs={os.cpu_count()}", *checked]
            for op in SUITES:
                if (op == "gated_attention") == (step == "attention"):
                    name = f"{step}_{op}"
                    own = [f"--op={op}", f"--json={out / name}.json"]
                    yield Launch(name, "tools.bench.kernels", [*own, *given])
        case "tune_kernels":
            lock = f"--lock={out / 'timing.lock'}"
            for op, suite in SUITES.items():
                of = -(-len(suite.using("gpu")) // _WORKLOADS) if suite.tiles else 0
                for i in range(of):
                    given = [f"--op={op}", f"--shard={i}/{of}", "--jobs=4", lock]
                    yield Launch(f"{step}_{op}_{i}", "tools.tune_kernels", given)
        case "bench_train":
            models = ("protot", "llama", "mamba", "deltanet", "gated_deltanet")
            # The sizes and batches of Table 13.
            paper = ["--shapes=protot/throughput", "--batch", "32", "128"]
            chosen = ["--models", *models, "--decoders", *models]
            arguments = [*paper, *chosen, f"--json={out / step}.json"]
            yield Launch(step, "tools.bench.train", arguments)
        case "graph":
            arguments = ["--neurons", "--length=6000", "--max_features=1024"]
            yield Launch(step, "tools.bench.graphs", [*arguments, f"--json={out / step}.json"])
        case _:
            yield Launch(step, "iaj", [*_STUDIES[step], f"--workdir={out / step}"])


# Steps that are commands of the package.
_STUDIES: Mapping[str, Sequence[str]] = {
    "audit": (
        *("polyattn", "audit", "--config=polyattn/smollm2", "--config.niah_lengths=(4096,)"),
        *("--config.niah_n=200", "--config.batch_size=4", "--config.context=4096"),
    ),
    "circuits": ("sparse", "circuits", "--dense=smollm2", "--task=ioi", "--config.count=100"),
    "posttrain": ("sparse", "posttrain", "--config=sparse/posttrain"),
    "pretrain": ("protot", "pretrain", "--config=protot/large_scale"),
}


def run(step: str, out: Path, seconds: float) -> dict[str, int]:
    """Runs the processes of a step, each with its output in `out/<name>.log`.

    Returns:
      The exit codes by name; `LATE` where the time ran out.
    """
    end = time.monotonic() + seconds
    codes, running = {}, {}
    for launch in commands(step, out):
        if step in _TIMED:
            # What is timed has the device alone.
            running = {launch.name: _start(launch, out)}
            codes |= _ended(running, end)
        else:
            running[launch.name] = _start(launch, out)
    return codes | ({} if step in _TIMED else _ended(running, end))


# Steps whose processes run one after the other.
_TIMED = frozenset({"train_step", "attention", "bench_kernels"})


def _start(launch: Launch, out: Path) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cuda,cpu")}
    # Several processes, or torch beside JAX, share the device's memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if launch.flags:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {launch.flags}".strip()
    with (out / f"{launch.name}.log").open("wb") as file:
        return subprocess.Popen(
            launch.line,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            # With its children a group of its own, which is ended as one.
            start_new_session=True,
        )


def _ended(processes: Mapping[str, subprocess.Popen], end: float) -> dict[str, int]:
    """The exit codes of processes, which are ended at a time of the monotonic clock."""
    codes = {}
    for name, process in processes.items():
        try:
            codes[name] = process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            _end(process)
            codes[name] = LATE
    return codes


def _end(process: subprocess.Popen) -> None:
    """Asks a process and its children to save and end, and ends them after a while."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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


def read_session(out: Path, commit: str) -> dict[str, dict]:
    """What was done in the folder on this commit: exit codes and seconds of each step."""
    found = read_json(out / SESSION) if (out / SESSION).exists() else {}
    return found["steps"] if found.get("commit") == commit else {}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=WHOLE, help="time for all steps")
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, help="these steps, done or not")
    arguments = parser.parse_args(argv)
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    commit = conditions()["commit"]
    done = read_session(out, commit)
    left = [step for step in STEPS if step.name in (arguments.only or names)]
    if not arguments.only:
        left = [step for step in left if not _is_done(done.get(step.name, {}))]
    end, failed = time.monotonic() + arguments.seconds, 0
    while left:
        step, remaining = left[0], end - time.monotonic()
        if remaining < step.seconds / 2 and remaining < arguments.seconds / 2:
            break
        del left[0]
        start = time.monotonic()
        if step.name == "check_kernels":
            clear(out)
        codes = run(step.name, out, min(step.seconds, remaining))
        took = time.monotonic() - start
        unchecked = gather(out) if step.name == "check_kernels" else []
        done[step.name] = {"codes": codes, "unchecked": unchecked, "seconds": round(took, 1)}
        write_json(out / SESSION, {"commit": commit, "steps": done})
        _print(step.name, out, codes, took, unchecked)
        if any(codes.values()) or unchecked:
            failed += 1
            if not step.continues:
                return 1
    if left:
        text = ", ".join(step.name for step in left)
        print(f"left: {text}; the same command goes on with them", flush=True)
    for table in tuning.TABLES.glob("*.json"):
        shutil.copy(table, out / f"tuned_{table.name}")
    return 1 if failed else 0


def _is_done(step: Mapping[str, Any]) -> bool:
    """Whether every process of a step ended without an error and in time, and left nothing out."""
    return bool(step) and not any(step["codes"].values()) and not step["unchecked"]


def _print(
    step: str, out: Path, codes: Mapping[str, int], took: float, unchecked: Sequence[str]
) -> None:
    """What became of a step, and the ends of its logs."""
    print(
        f"{step}: {sum(not code for code in codes.values())} of {len(codes)} processes done after "
        f"{took:.0f} s",
        flush=True,
    )
    for name, code in codes.items():
        if code:
            verdict = "ran out of time" if code == LATE else f"exit {code}"
            print(f"  {name}: {verdict}", flush=True)
        print(tail(out, name, 40 if len(codes) == 1 else 12 if code else 2), flush=True)
    if unchecked:
        print(f"  no case of {', '.join(unchecked)} was compared", flush=True)


if __name__ == "__main__":
    sys.exit(main())
