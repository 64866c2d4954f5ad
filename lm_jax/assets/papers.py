"""The numbers that the papers print, each under its table: `published/<paper>.toml`.

    paper = numbers("polyattn", PaperNumbers)

The same files hold the claims of the papers with what our runs say of them, for docs/claims/.
"""

from collections.abc import Mapping
import dataclasses
import functools
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
    return parse_result({name: x for name, x in published(paper).items() if name in names}, cls)


@functools.cache
def published(paper: str) -> Mapping[str, Any]:
    """The content of a paper's file, which a wheel holds inside `lm_jax` and a checkout beside it.

    A table is `table_N`, or `appendix_XN` where a number stands in the text.
    """
    package = Path(__file__).parents[1]
    inside = package / FOLDER
    folder = inside if inside.is_dir() else package.parent / FOLDER
    return tomllib.loads((folder / f"{paper}.toml").read_text("utf-8"))
