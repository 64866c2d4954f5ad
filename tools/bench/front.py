"""The front of the benchmarks: flags, comparison before timing, turns, table, file of raw figures.

A benchmark declares its flags and what it measures, and says whether everything agreed:

    def measure(arguments: argparse.Namespace, record: front.Record) -> bool:
        if not front.agrees("270 heads", off, TOLERANCE, "effects differ by"):
            return False
        runs = {"one run per head": loop, "all at once": sweep}
        return record.keep("seconds", front.timed("270 heads", runs, arguments.repeats))

    def main(argv: Sequence[str] | None = None) -> int:
        parser = front.parser("bench.patching", __doc__, repeats=3)
        parser.add_argument("--layers", type=int, default=6)
        return front.run(measure, parser, argv)

Exit codes: 0, 1 where something did not agree, and those of a `UserError`.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
import statistics
from typing import Any

from iaj.parser import Parser, run_parsed
from lm_jax.errors import UsageError
from lm_jax.run.files import write_json
from lm_jax.train import profiling
from tools.bench.timing import Pass, conditions, in_turns, ratio


class Record:
    """What a benchmark has measured, with the conditions of the measurement.

    Attributes:
      results: the conditions and the parts that were kept, by name.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.results: dict[str, Any] = {"conditions": conditions()}

    def keep(self, name: str, part: Any) -> bool:
        """Keeps a part and writes the file, for a session whose time may run out.

        Returns:
          Whether there was anything to keep: what did not agree is not timed.
        """
        if not part:
            return False
        self.results[name] = part
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._file, self.results)
        return True


Measure = Callable[[argparse.Namespace, Record], bool]


def parser(tool: str, doc: str | None, *, repeats: int, kept: bool = True) -> Parser:
    """The flags that every benchmark has, for those of its own to be added.

    Args:
      tool: name of the module below `tools`.
      doc: docstring of the module, whose examples open the help.
      repeats: the usual number of turns.
      kept: whether raw figures can be kept in a file.
    """
    result = Parser(f"python -m tools.{tool}", doc)
    result.add_argument("--repeats", type=int, default=repeats, help="turns that are timed")
    result.set_defaults(json=None)
    if kept:
        result.add_argument("--json", type=Path, help="file for conditions and raw figures")
    result.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="turns to trace, into runs/<this tool>/profile, or beside the file of --json",
    )
    return result


def run(measure: Measure, parser: Parser, argv: Sequence[str] | None) -> int:
    """Runs a benchmark on a command line, with the conditions printed first.

    Every comparison that is timed in turns is traced where `--profile` asks for it.
    """

    def measured(arguments: argparse.Namespace) -> int:
        if arguments.repeats < 1:
            raise UsageError(f"--repeats={arguments.repeats} must be at least 1")
        folder = Path("runs", parser.prog.removeprefix("python -m tools.").replace(".", "_"))
        if arguments.json:
            folder = arguments.json.with_suffix("")
        with profiling.request(profiling.parse(arguments.profile, folder)):
            record = Record(arguments.json)
            found = record.results["conditions"].items()
            print(", ".join(f"{name} {value}" for name, value in found) + "\n", flush=True)
            return 0 if measure(arguments, record) else 1

    return run_parsed(measured, parser, argv)


def agrees(label: str, off: float, tolerance: float, what: str) -> bool:
    """Whether a difference is within its tolerance; if not, or if it is NaN, says so in a line.

    Args:
      label: what is timed only where results agree.
      off: difference of the results.
      tolerance: largest difference of results that agree.
      what: words before the difference, such as "logits differ by".
    """
    if off <= tolerance:
        return True
    print(f"{label}: not timed, as {what} {off:.1e}, more than {tolerance:.0e}", flush=True)
    return False


def timed(
    label: str,
    runs: Mapping[str, Pass],
    repeats: int,
    *,
    over: str | None = None,
    pause: float = 0.0,
    settle: float = 0.0,
    calls: int = 1,
    rows: int = 0,
    memory: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Times runs in turns, and prints medians, ranges and ratios.

    Args:
      label: heading of the table.
      runs: what is timed, by name.
      repeats: number of turns.
      over: name of the run to which ratios are; None for the first.
      pause: seconds of rest before each run (`timing.in_turns`).
      settle: untimed seconds before each run (`timing.in_turns`).
      calls: number of calls in each run, among which its time is divided.
      rows: number of samples that a run reads, for its rate; 0 for no rate.
      memory: temporary bytes of runs, by name.

    Returns:
      Seconds of every turn, by name.
    """
    series = in_turns(list(runs.values()), repeats, pause, settle)
    seconds = {name: [each / calls for each in own] for name, own in zip(runs, series, strict=True)}
    over, memory = over or next(iter(seconds)), memory or {}
    print(f"{label}; ratios are over {over}")
    for name, own in seconds.items():
        median, low, high = (1e3 * f(own) for f in (statistics.median, min, max))
        line = f"  {name:22} {median:8.1f} ms ({low:.1f} to {high:.1f})"
        if rows:
            line += f"  {1e3 * rows / median:7.1f} samples/s"
        fastest = min(own) / min(seconds[over])
        line += f"  time ratio {ratio(own, seconds[over])}, {fastest:.2f} of the fastest"
        if name in memory:
            share = memory[name] / memory[over]
            line += f"  {memory[name] / 2**20:6.0f} MiB  memory ratio {share:.2f}"
        print(line, flush=True)
    return seconds
