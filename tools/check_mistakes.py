"""Shows that tests fail on the mistakes that they are there for (`tests/mistakes.toml`).

    python -m tools.check_mistakes
    python -m tools.check_mistakes --only=parallel --only=padding

The tests pass first on an unchanged copy of the checkout. Then each mistake is made in a copy, its
test must fail by an assertion or a refusal, and the file is restored. `--jobs` copies are used at
once. The exit code is 1 if a test passes with its mistake, or cannot be run.
"""

import argparse
from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import os
from pathlib import Path
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mistakes.toml"
# Neither is read by a test, and a virtual environment is large.
_LEFT_OUT = shutil.ignore_patterns(".*", "site", "runs", "build", "dist", "__pycache__")


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One change of a file that a test must notice.

    Attributes:
      name: what is wrong, in words.
      file: path in the checkout.
      right, wrong: text of the file, which has it once, and what takes its place.
      test: id of the test, with all of its cases.
    """

    name: str
    file: str
    right: str
    wrong: str
    test: str

    def made(self, text: str) -> str:
        """The text of the file with the mistake.

        Raises:
          ValueError: the text does not have `right` exactly once.
        """
        if (count := text.count(self.right)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {count} times {self.right!r}")
        return text.replace(self.right, self.wrong)


def mistakes() -> list[Mistake]:
    """The mistakes of the table."""
    return [Mistake(**entry) for entry in tomllib.loads(TABLE.read_text("utf-8"))["mistake"]]


@contextlib.contextmanager
def made(mistake: Mistake, folder: Path) -> Iterator[None]:
    """Makes the mistake in a copy of the checkout, and undoes it in the end."""
    file = folder / mistake.file
    text = file.read_text("utf-8")
    file.write_text(mistake.made(text), "utf-8")
    try:
        yield
    finally:
        file.write_text(text, "utf-8")


def run(tests: Sequence[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of pytest, which stops at the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # A bytecode file of the same second and size would stand for the changed file.
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def is_noticed(code: int, output: str) -> bool:
    """Whether a test failed, and not its collection or a fixture."""
    words = re.findall(r"^(FAILED|ERROR) ", output, re.MULTILINE)
    return code == 1 and words == ["FAILED"]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", metavar="WORDS", help="mistakes whose name has these words"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of copies used at once"
    )
    args = parser.parse_args(argv)
    chosen = [
        each for each in mistakes() if not args.only or any(part in each.name for part in args.only)
    ]
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: no mistake of {TABLE.name} has such a name")
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / str(index) for index in range(max(1, args.jobs))]
        for folder in folders:
            shutil.copytree(ROOT, folder, ignore=_LEFT_OUT)
        tests = list(dict.fromkeys(each.test for each in chosen))
        spread = ["-n", str(len(folders)), "--dist", "loadfile"] if len(folders) > 1 else []
        code, output = run([*spread, *tests], folders[0])
        if code:
            print(output)
            print("the tests do not pass without a mistake")
            return 1
        missed = 0
        for each, (noticed, seconds, output) in zip(chosen, try_all(chosen, folders), strict=True):
            missed += not noticed
            print(f"{'ok  ' if noticed else 'FAIL'}  {each.name} ({seconds:.0f} s)", flush=True)
            if not noticed:
                print(output)
    print(f"{len(chosen) - missed} of {len(chosen)} mistakes are noticed")
    return int(missed > 0)


def try_all(
    chosen: Sequence[Mistake], folders: Sequence[Path]
) -> Iterator[tuple[bool, float, str]]:
    """Whether each mistake is noticed, in how many seconds, and what its test printed, in order.

    Args:
      chosen: mistakes to make.
      folders: copies of the checkout, each for one mistake at a time.
    """
    idle: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for folder in folders:
        idle.put(folder)

    def tried(mistake: Mistake) -> tuple[bool, float, str]:
        folder = idle.get()
        try:
            start = time.monotonic()
            with made(mistake, folder):
                code, output = run([mistake.test], folder)
            return is_noticed(code, output), time.monotonic() - start, output
        finally:
            idle.put(folder)

    with concurrent.futures.ThreadPoolExecutor(len(folders)) as pool:
        yield from pool.map(tried, chosen)


if __name__ == "__main__":
    sys.exit(main())
