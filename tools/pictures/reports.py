"""Pictures of three reports for the README, after `make quickstart`.

    python -m tools.pictures.reports
    python -m tools.pictures.reports --runs=FOLDER

One of each library, as a reader meets it: a window of headless Chromium at the top of the page or
at a heading, at 0.6 of its size. They are written to docs/figures.

Exit codes: 0, 1 no browser, 3 a report is not there.
"""

import argparse
from collections.abc import Sequence
import dataclasses
from pathlib import Path
import sys

from iaj.parser import Parser, run_parsed
from lm_jax.errors import BadInputError
from tools.pictures import browser

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
WIDTH, HEIGHT, SCALE = 1280, 800, 0.6


@dataclasses.dataclass(frozen=True)
class Picture:
    """A report below the folder of all runs, and where in it the window opens."""

    report: str
    anchor: str = ""


PICTURES = {
    "polyattn_report": Picture("quickstart/audit/report.html"),
    "protot_report": Picture("quickstart/concepts/report.html", "#1-explore-the-prototypes"),
    "sparse_report": Picture("quickstart/graph/report.html", "#1-explore-the-graph"),
}


def run(arguments: argparse.Namespace) -> int:
    """Takes every picture."""
    reports = {name: Path(arguments.runs) / each.report for name, each in PICTURES.items()}
    if missing := [str(path) for path in reports.values() if not path.is_file()]:
        raise BadInputError(f"{', '.join(missing)}: not there; run make quickstart first")
    for name, path in reports.items():
        file = FIGURES / f"{name}.png"
        browser.picture(
            path, file, anchor=PICTURES[name].anchor, width=WIDTH, height=HEIGHT, scale=SCALE
        )
        print(f"wrote {file.relative_to(FIGURES.parents[1])}, {file.stat().st_size:,} bytes")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; a refusal is one line on standard error."""
    parser = Parser("python -m tools.pictures.reports", __doc__)
    parser.add_argument("--runs", default="runs", help="the folder of `make quickstart`'s runs")
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
