"""The numbers that the papers print, from `published/<paper>.toml`.

A wheel holds the files inside `lm_jax`, a checkout beside it, as it does with the configs
(`lm_jax.console.config_files`).
"""

import functools
from pathlib import Path
import tomllib
from typing import Any

_FOLDER = "published"


@functools.cache
def published(paper: str) -> dict[str, Any]:
    """The tables of a paper: "polyattn", "protot" or "sparse".

    A table is `table_N`, or `appendix_XN` where a number stands in the text.
    """
    package = Path(__file__).parents[1]
    inside = package / _FOLDER
    folder = inside if inside.is_dir() else package.parent / _FOLDER
    return tomllib.loads((folder / f"{paper}.toml").read_text("utf-8"))
