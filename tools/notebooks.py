"""The notebooks as files of Jupyter, each with a badge that opens it in Colab.

    python -m tools.notebooks --repository OWNER/NAME

`notebooks/*.py` are the sources; for each a file `.ipynb` is written, which belongs to the
repository that the badge names. Its first cell of code installs the wheel and, where the notebook
reads a pretrained model, fetches it.
"""

import argparse
from pathlib import Path
import re
import sys
from typing import Any

import jupytext
import nbformat

SOURCES = Path(__file__).parents[1] / "notebooks"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_COLAB = "https://colab.research.google.com"


def notebook(source: Path, repository: str, branch: str, install: str) -> Any:
    """A notebook of Jupyter.

    Args:
      source: a Python file in cells.
      repository: `OWNER/NAME` on GitHub, where the notebook will be.
      branch: branch of the repository.
      install: what pip installs: a name, a version, or the address of a wheel.
    """
    result: Any = jupytext.read(source, fmt="py:percent")
    page = f"{_COLAB}/github/{repository}/blob/{branch}/notebooks/{source.stem}.ipynb"
    badge = f"[![Open in Colab]({_COLAB}/assets/colab-badge.svg)]({page})"
    lines = [f"%pip install --quiet '{install}'"]
    if names := _fetched(source.read_text("utf-8")):
        lines.append(f"!iaj fetch {' '.join(names)}")
    first = [
        nbformat.v4.new_markdown_cell(badge, id="badge"),
        nbformat.v4.new_code_cell("\n".join(lines), id="install"),
    ]
    result.cells[:0] = first
    for number, cell in enumerate(result.cells[len(first) :]):
        # A random one would change with every run.
        cell.id = f"cell-{number}"
    nbformat.validate(result)
    return result


def _fetched(text: str) -> list[str]:
    """The assets that a notebook says are to be fetched."""
    return sorted(
        {name for line in re.findall(r"`iaj fetch ([\w ]+)`", text) for name in line.split()}
    )


def main(argv: list[str] | None = None) -> int:
    """Writes all notebooks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", required=True, help="OWNER/NAME on GitHub")
    parser.add_argument("--branch", default="main", help="branch of the repository")
    parser.add_argument(
        "--install", default="interpretable-attention-jax", help="what pip installs"
    )
    parser.add_argument("--out", type=Path, default=SOURCES, help="folder of the .ipynb files")
    arguments = parser.parse_args(argv)
    if not _REPOSITORY.fullmatch(arguments.repository):
        parser.error(f"--repository={arguments.repository} is not OWNER/NAME")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for source in sorted(SOURCES.glob("*.py")):
        made = notebook(source, arguments.repository, arguments.branch, arguments.install)
        target = arguments.out / f"{source.stem}.ipynb"
        nbformat.write(made, target)
        print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
