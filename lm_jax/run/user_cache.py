"""The folder of this project among the user's caches: assets, and compiled programs.

It is `~/.cache/interpretable-attention-jax`, or the folder in INTERPRETABLE_ATTENTION_CACHE.
"""

import os
from pathlib import Path

CACHE_VARIABLE = "INTERPRETABLE_ATTENTION_CACHE"


def folder() -> Path:
    """The folder, which may not exist yet."""
    default = Path.home() / ".cache" / "interpretable-attention-jax"
    return Path(os.environ.get(CACHE_VARIABLE) or default).expanduser()
