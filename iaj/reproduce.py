"""Measures a stored result again, and prints the stored and the new numbers side by side.

    iaj reproduce --list                               every result, its command and what it costs
    iaj reproduce pair/pair_192                        run its command, then compare
    iaj reproduce bench_kernels/h200 --compare=FOLDER  compare a run that is in FOLDER already

The results are in `results/` of a checkout (`--results` names another folder). A number agrees if
it differs by no more than the tolerance of the result, which `result.toml` states with its reason.
Texts and truth values must be equal. Exit codes: 0 all agree, 2 usage, 3 there is no such result or
no command that measures it again, 7 a stored file is damaged, 10 a value disagrees, 11 nothing can
be compared; the codes of the command where that fails.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import shlex
import subprocess
import sys

from iaj.parser import Parser, run_parsed
from lm_jax.console.terminal import format_table
from lm_jax.errors import EXIT_NO_GO, EXIT_UNDECIDED, BadInputError, CorruptError, UsageError
from lm_jax.run.files import read_json
from lm_jax.run.stored_results import (
    SUMMARY_FILE,
    Comparison,
    Reproduction,
    StoredResult,
    compare_summaries,
    list_results,
    load_stored,
)


def listing(root: Path) -> str:
    """A table of all results: name, minutes, device and what was measured."""
    rows = []
    for name in list_results(root):
        described = load_stored(root, name).description
        again = described.reproduce
        cost = (_minutes(again), again.device) if again else ("", described.not_reproducible)
        rows.append((name, *cost, described.title))
    return format_table(("result", "minutes", "on", "what"), rows, left=(0, 2, 3))


def _minutes(again: Reproduction) -> str:
    return "unrecorded" if again.minutes is None else f"{again.minutes:g}"


def comparison_table(comparisons: Sequence[Comparison], *, everything: bool) -> str:
    """Numbers side by side with their tolerance; those that disagree alone unless `everything`."""
    rows = [
        (
            each.path,
            _text(each.stored),
            _text(each.again),
            f"{each.allowed:.3g}" if each.compared else "not compared",
            "" if each.agrees else "differs",
        )
        for each in comparisons
        if everything or not each.agrees
    ]
    return format_table(("number", "stored", "again", "tolerance", ""), rows)


def _text(value: float | str | None) -> str:
    if value is None:
        return "missing"
    return value if isinstance(value, str) else f"{value:.6g}"


def measure_again(result: StoredResult, workdir: Path, checkout: Path) -> Path:
    """Runs the command of a result, which goes on where it was stopped; returns its summary file.

    Args:
      result: result to measure again.
      workdir: folder that the command writes.
      checkout: folder in which it runs.

    Raises:
      BadInputError: no command measures it again, or the folder holds a finished run.
      SystemExit: the command failed; with its exit code.
    """
    again = result.description.reproduce
    if again is None:
        raise BadInputError(
            f"{result.name} cannot be measured again: {result.description.not_reproducible}"
        )
    workdir = workdir.resolve()
    if again.file(workdir).exists():
        raise BadInputError(
            f"{workdir} holds a run that is finished; compare it with --compare={workdir}, or name "
            "another --workdir to measure again"
        )
    words = shlex.split(again.command.replace("{workdir}", shlex.quote(str(workdir))))
    if words[0] == "iaj":
        words = [sys.executable, "-m", *words]
    elif words[0] == "python":
        words[0] = sys.executable
    print(f"{shlex.join(words)}\n{_minutes(again)} minutes on {again.device}", flush=True)
    workdir.mkdir(parents=True, exist_ok=True)
    code = subprocess.run(words, check=False, cwd=checkout).returncode
    if code:
        raise SystemExit(code)
    return again.file(workdir)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = Parser("iaj reproduce", __doc__)
    parser.add_argument("name", nargs="?", help="result to measure again, STUDY/NAME")
    parser.add_argument("--list", action="store_true", help="show all results with their costs")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of results")
    parser.add_argument("--workdir", type=Path, help="folder to write (runs/reproduce/STUDY/NAME)")
    parser.add_argument("--compare", type=Path, help="folder of a run to compare, without running")
    parser.add_argument("--all", action="store_true", help="print the numbers that agree, too")
    return run_parsed(_run, parser, argv)


def _run(arguments: argparse.Namespace) -> int:
    root = arguments.results
    if not root.is_dir():
        raise BadInputError(
            f"there is no folder {root}; run this in a checkout of the repository, or name its "
            "folder with --results"
        )
    if arguments.list:
        print(listing(root))
        return 0
    if arguments.name is None:
        raise UsageError("name a result (iaj reproduce --list shows them)")
    result = load_stored(root, arguments.name)
    if changed := result.changed_files():
        raise CorruptError(
            f"{', '.join(changed)} of {result.name} is not the file of result.toml; restore it "
            "from the repository"
        )
    if arguments.compare is not None:
        again = result.description.reproduce
        file = again.file(arguments.compare) if again else arguments.compare / SUMMARY_FILE
    else:
        workdir = arguments.workdir or Path("runs/reproduce") / result.name
        file = measure_again(result, workdir, root.resolve().parent)
    if not file.is_file():
        raise BadInputError(f"there is no {file}; name the folder of a finished run")
    found = read_json(file)
    if result.description.reproduce is not None:
        found = result.description.reproduce.kept(found)
    comparisons = compare_summaries(result.summary(), found, result.description.tolerance)
    print(comparison_table(comparisons, everything=arguments.all))
    compared = [each for each in comparisons if each.compared]
    differing = sum(not each.agrees for each in compared)
    print(
        f"{len(compared) - differing} of {len(compared)} values agree; "
        f"{len(comparisons) - len(compared)} are not compared"
    )
    for tolerance in result.description.tolerance:
        print(f"  {tolerance.numbers}: {tolerance.why}")
    if not compared:
        print("nothing of this result can be compared on another machine")
        return EXIT_UNDECIDED
    return EXIT_NO_GO if differing else 0


if __name__ == "__main__":
    sys.exit(main())
