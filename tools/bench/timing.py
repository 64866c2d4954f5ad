"""Time and memory ratios of compiled programs, measured in one run.

Programs run in turns, so that load on the machine affects all of them; the median of the turns'
ratios is reported with its range. JAX returns before the device has finished, so that every run
ends in `jax.block_until_ready`.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import os
from pathlib import Path
import platform
import re
import statistics
import subprocess
import time
from typing import Any, NamedTuple, TypeVar

from filelock import FileLock
import jax

from lm_jax.train import profiling

# Distributions whose versions are conditions of a measurement, lower case with hyphens.
PACKAGES = (
    *("jax", "jaxlib", "numpy", "jax-triton"),
    *("torch", "transformers", "triton", "fla-core"),
)
Pass = Callable[[], Any]
Item = TypeVar("Item")


def first_line(error: Exception) -> str:
    """What a compiler or a runtime refuses, without its trace."""
    return str(error).partition("\n")[0]


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Holds `lock` within it, so that one process at a time measures on the device."""
    if lock is None:
        yield
        return
    with FileLock(lock):
        yield


class Shard(NamedTuple):
    """One of `of` processes that share out the cases of a tool; each has every `of`-th."""

    index: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Reads "I/N", with I from 0 on.

        Raises:
          argparse.ArgumentTypeError: no such pair.
        """
        index, _, of = text.partition("/")
        if not (index.isdecimal() and of.isdecimal() and int(index) < int(of)):
            raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N - 1")
        return cls(int(index), int(of))

    def share(self, items: Iterable[Item]) -> list[Item]:
        """This process's part of `items`."""
        return list(items)[self.index :: self.of]


def in_turns(
    runs: Sequence[Pass], repeats: int, pause: float = 0.0, settle: float = 0.0
) -> list[list[float]]:
    """Seconds of each run, in alternation, after one untimed run of each.

    Args:
      pause: seconds of rest before each run, for libraries whose idle threads spin on the cores.
      settle: untimed seconds of the same program before each timed run. Otherwise the time of a
        program of a millisecond that follows one of fifty on one core includes waking up the other
        cores.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    request = profiling.requested()
    folder = request.folder if request and request.folder else Path()
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


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median ratio of two series of seconds measured in turns, and its range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """The ratio `over / under`, turn by turn."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


class Program(NamedTuple):
    """A compiled program to time: `run` does `calls` calls of it.

    Attributes:
      bytes: bytes of its temporaries.
    """

    run: Pass
    bytes: int
    calls: int = 1


def program(
    fn: Callable[..., Any],
    arguments: tuple[Any, ...],
    copies: int = 1,
    *,
    memory: bool = True,
    together: bool = True,
) -> Program:
    """The compiled `fn(*arguments)` as a program to time.

    Everything is compiled on return, so that several threads may each prepare one.

    Args:
      copies: calls of `fn` in one run, within one program: on a GPU a kernel of microseconds is
        shorter than its dispatch from the host. Each copy has its own arguments, so that no result
        is shared and the cache does not keep them between copies. They are made by the first run.
      memory: false gives 0 bytes, and with several copies saves compiling one alone.
      together: false dispatches the copies one after another and waits for the last alone, for a
        `fn` of many kernels: it takes longer than its dispatch, and long to compile.
    """
    traced = jax.jit(fn)
    used = 0
    if memory or copies == 1 or not together:
        single = traced.lower(*arguments).compile()
        analysis = single.memory_analysis()
        if analysis is None:
            raise RuntimeError(f"{jax.default_backend()} does not report a program's memory")
        used = analysis.temp_size_in_bytes
    if copies == 1:
        return Program(lambda: jax.block_until_ready(single(*arguments)), used)

    @functools.cache
    def sets() -> list[Any]:
        return [jax.tree.map(lambda x: x + 0, arguments) for _ in range(copies)]

    if not together:
        return Program(
            lambda: jax.block_until_ready([single(*each) for each in sets()]), used, copies
        )
    # A call of a jitted function, which is traced once for all copies.
    repeated = jax.jit(lambda sets: [traced(*each) for each in sets])
    many = repeated.lower([arguments] * copies).compile()
    return Program(lambda: jax.block_until_ready(many(sets())), used, copies)


def conditions() -> dict[str, str]:
    """Conditions of a measurement: versions of what is installed, device, driver, load, commit."""
    installed = {
        re.sub(r"[-_.]+", "-", each.name).lower() for each in importlib.metadata.distributions()
    }
    results = {
        package: importlib.metadata.version(package) for package in PACKAGES if package in installed
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
