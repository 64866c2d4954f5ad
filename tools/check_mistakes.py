"""Shows that tests fail on the mistakes that they are there for (`tests/mistakes.toml`).

    python -m tools.check_mistakes
    python -m tools.check_mistakes --only=parallel --only=padding

The tests pass first on an unchanged copy of the checkout. Then each mistake is made in the copy,
its test must fail by an assertion or a refusal, and the file is restored. The exit code is 1 if a
test passes with its mistake, or cannot be run.
"""

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import os
from pathlib import Path
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
    """Those of the table."""
    return [Mistake(**entry) for entry in tomllib.loads(TABLE.read_text("utf-8"))["mistake"]]


@contextlib.contextmanager
def made(mistake: Mistake, folder: Path) -> Iterator[None]:
    """Within it, the file of a copy of the checkout has the mistake."""
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
    args = parser.parse_args(argv)
    chosen = [
        each for each in mistakes() if not args.only or any(part in each.name for part in args.only)
    ]
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: no mistake of {TABLE.name} has such a name")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkout"
        shutil.copytree(ROOT, folder, ignore=_LEFT_OUT)
        code, output = run(list(dict.fromkeys(each.test for each in chosen)), folder)
        if code:
            print(output)
            print("the tests do not pass without a mistake")
            return 1
        missed = 0
        for each in chosen:
            start = time.monotonic()
            with made(each, folder):
                code, output = run([each.test], folder)
            noticed = is_noticed(code, output)
            missed += not noticed
            seconds = time.monotonic() - start
            print(f"{'ok  ' if noticed else 'FAIL'}  {each.name} ({seconds:.0f} s)", flush=True)
            if not noticed:
                print(output)
    print(f"{len(chosen) - missed} of {len(chosen)} mistakes are noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
