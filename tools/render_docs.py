"""Renders the marked blocks of README and docs from results/ and published/.

    python -m tools.render_docs            write every block anew
    python -m tools.render_docs --check    write nothing; exit 1, with the differences, where a
                                           page is not what the data give

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
import sys

from cogapp import Cog

from iaj.parser import Parser, run_parsed
from lm_jax.errors import CorruptError
from lm_jax.run.stored_results import list_results, load_stored

ROOT = Path(__file__).parents[1]
MARK = "[[[cog"


def pages(root: Path) -> list[Path]:
    """Every page that has a marked block."""
    files = (
        root / "README.md",
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / "models").rglob("*.md")),
    )
    return [file for file in files if MARK in file.read_text("utf-8")]


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
    return code


if __name__ == "__main__":
    sys.exit(main())
