"""Renders the marked blocks of README and docs from results/ and published/.

    python -m tools.render_docs            write every block anew
    python -m tools.render_docs --check    write nothing; exit 1, with the differences, where a
                                           page is not what the data give or has a measured number
                                           outside of a block

A block is Python in a comment of a page, run by cog (https://cog.readthedocs.io), and its output:

    <!-- [[[cog cog.out(kernel_times("bench_kernels/h200")) ]]] -->
    | kernel | ... |
    <!-- [[[end]]] -->

The functions are those of `tools/page_blocks`. A file of results/ that is not the one that its
`result.toml` names is an error, so that a number changes only where a run was made again and kept
(`tools/keep_result.py`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import re
import sys

from cogapp import Cog

from iaj.parser import Parser, run_parsed
from lm_jax.errors import CorruptError
from lm_jax.run.stored_results import list_results, load_stored

ROOT = Path(__file__).parents[1]
MARK = "[[[cog"
_NUMBER = r"[−+-]?\d[\d,]*(?:\.\d+)?"
# How a measured number is written: with its interval, its count or its commit, or as a ratio.
_MEASURED = re.compile(
    rf"{_NUMBER}(?: ?%)? ?\[{_NUMBER},? |\({_NUMBER} to {_NUMBER}[;)]|\bn = \d"
    r"|\bcommits? [0-9a-f]{7}|\d\.\d+ times\b|perplexity (?:(?:of|is|was) )?\d"
)
_BLOCK = re.compile(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->|```.*?```|`[^`\n]*`", re.DOTALL)


def all_pages(root: Path) -> list[Path]:
    """README, every page of docs and those of the models."""
    folders = (root / "docs", root / "models")
    return [root / "README.md", *(file for each in folders for file in sorted(each.rglob("*.md")))]


def pages(root: Path) -> list[Path]:
    """Every page that has a marked block."""
    return [file for file in all_pages(root) if MARK in file.read_text("utf-8")]


def numbers_without_data(text: str) -> list[tuple[int, str]]:
    """Measured numbers of a page outside its blocks, each with its line, from 1.

    A number is known by how a measured one is written, so that one in plain words is not found.
    """
    prose = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    return [
        (prose.count("\n", 0, found.start()) + 1, found[0].strip())
        for found in _MEASURED.finditer(prose)
    ]


def check_results(root: Path) -> list[str]:
    """One line for each file of results/ that is missing or not that of its `result.toml`."""
    folder = root / "results"
    stored = (load_stored(folder, name) for name in list_results(folder))
    return [f"results/{each.name}: {file}" for each in stored for file in each.changed_files()]


def render(files: Sequence[Path], *, check: bool) -> int:
    """Runs cog on the pages; with `check` nothing is written and 1 says that a page differs."""
    mode = ["--check", "--diff"] if check else ["-r"]
    prologue = ["-p", "import cog\nfrom tools.page_blocks import *"]
    code = Cog().main(["cog", *mode, *prologue, *map(str, files)])
    return 1 if code else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = Parser("python -m tools.render_docs", __doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a page differs"
    )
    return run_parsed(_run, parser, argv)


def _run(arguments: argparse.Namespace) -> int:
    if changed := check_results(ROOT):
        raise CorruptError(
            f"{'; '.join(changed)} is not the file that its result.toml names; restore it, or, if "
            "the run was made again, python -m tools.keep_result results/STUDY/NAME"
        )
    code = render(pages(ROOT), check=arguments.check)
    if code:
        print(
            "error: a page is not what results/ give; run python -m tools.render_docs",
            file=sys.stderr,
        )
    for page in all_pages(ROOT):
        for line, words in numbers_without_data(page.read_text("utf-8")):
            print(
                f"error: {page.relative_to(ROOT)}:{line}: '{words}' is a measured number without "
                "data; keep its run in results/ and render it, or leave it out",
                file=sys.stderr,
            )
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
