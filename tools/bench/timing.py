"""Time and memory of compiled programs, as ratios measured in one run.

Contenders are run in turns, so that a load on the machine falls on all of them; the ratio of each
turn is kept and the median reported with its range. JAX returns before the device has finished, so
every run ends in `jax.block_until_ready`.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import inspect
import os
from pathlib import Path
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import jax

from lm_jax.errors import UserError
from lm_jax.train import profiling

Pass = Callable[[], Any]


def in_turns(
    runs: Sequence[Pass], repeats: int, pause: float = 0.0, settle: float = 0.0
) -> list[list[float]]:
    """Seconds of each run, made alternately, after one of each that is not counted.

    Args:
      pause: seconds of rest before each run, where the idle threads of one library would spin on
        the cores of another.
      settle: seconds that each has to itself, uncounted, before each run that counts. A program
        of a millisecond that follows one of fifty on one core is otherwise measured waking up the
        other cores.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    asked = profiling.requested()
    folder = asked.folder if asked and asked.folder else Path()
    with profiling.Tracer(folder, done=0, total=repeats) as tracer:
        for turn in range(repeats + 1):
            with tracer.step(turn):
                for run, kept in zip(runs, seconds, strict=True):
                    time.sleep(pause)
                    begun = time.perf_counter()
                    while time.perf_counter() - begun < settle:
                        run()
                    start = time.perf_counter()
                    run()
                    if turn:
                        kept.append(time.perf_counter() - start)
            tracer.after(turn)
    return seconds


PROFILE = argparse.ArgumentParser(add_help=False)
PROFILE.add_argument(
    "--profile", metavar="FIRST:LAST", help="turns to trace, into runs/<this tool>/profile"
)


def profiled(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """A benchmark's `main`, whose parser has `PROFILE` among its parents, with that flag's effect.

    Every comparison that is timed in turns is traced.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        given, _ = PROFILE.parse_known_args(argv)
        folder = Path("runs", Path(inspect.getfile(main)).stem)
        try:
            with profiling.request(profiling.parse(given.profile, folder)):
                return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code

    return run


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Of two series of seconds measured in turns: the median ratio and its range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """The ratio `over / under`, turn by turn."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def program(
    fn: Callable[..., Any], arguments: tuple[Any, ...], copies: int = 1
) -> tuple[Pass, int]:
    """A run of `fn(*arguments)` compiled, and the bytes of its temporaries.

    Args:
      copies: how often one run calls `fn`, within one program: on a GPU a kernel of microseconds
        is shorter than its dispatch from the host. Each copy has arguments of its own, so that
        nothing is computed once for all and the cache does not hold them between copies.
    """
    single = jax.jit(fn).lower(*arguments).compile()
    analysis = single.memory_analysis()
    if analysis is None:
        raise RuntimeError(f"{jax.default_backend()} tells nothing of a program's memory")
    memory = analysis.temp_size_in_bytes
    if copies == 1:
        return lambda: jax.block_until_ready(single(*arguments)), memory
    sets = [jax.tree.map(lambda x: x + 0, arguments) for _ in range(copies)]
    many = jax.jit(lambda sets: [fn(*each) for each in sets])
    return lambda: jax.block_until_ready(many(sets)), memory


def conditions(packages: Sequence[str]) -> dict[str, str]:
    """What the numbers hold for: versions, device, driver, load, date, commit."""
    results = {
        package: importlib.metadata.version(package)
        for package in packages
        if importlib.util.find_spec(package.replace("-", "_"))
    }
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git or "unknown",
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].platform,
        "runtime": str(jax.devices()[0].client.platform_version).splitlines()[0],
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
        **results,
    }
