"""The numbers that the papers print, each under its table: `published/<paper>.toml`.

    paper = numbers("polyattn", PaperNumbers)

The same files hold the claims of the papers with what our runs say of them, for docs/claims/.
"""

import dataclasses
from pathlib import Path
import tomllib
from typing import Any, TypeVar

from lm_jax.run.results import parse_result

T = TypeVar("T")
FOLDER = "published"


def numbers(paper: str, cls: type[T]) -> T:
    """The tables of a paper's file that the fields of a dataclass name.

    Args:
      paper: name of the file.
      cls: a dataclass, into whose fields the tables are read strictly.

    Raises:
      InvalidError: entries are missing, unknown or of another type.
    """
    wanted: Any = cls
    names = {field.name for field in dataclasses.fields(wanted)}
    return parse_result({name: held for name, held in tables(paper).items() if name in names}, cls)


def tables(paper: str) -> dict[str, Any]:
    """Everything in a paper's file: its numbers, and `claim`, the ledger of its claims."""
    return tomllib.loads((_folder() / f"{paper}.toml").read_text("utf-8"))


def _folder() -> Path:
    """The folder of the files, which a wheel holds inside `lm_jax` and a checkout beside it."""
    package = Path(__file__).parents[1]
    inside = package / FOLDER
    return inside if inside.is_dir() else package.parent / FOLDER
