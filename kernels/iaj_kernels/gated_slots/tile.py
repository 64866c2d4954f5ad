"""The default tile of `gated_slots`."""

from collections.abc import Mapping
from typing import Any


def default_tiles(sizes: Mapping[str, int], dtype: Any) -> dict[str, int]:
    """The longest chunk, in steps: one of C steps holds C x C numbers for every slot."""
    del sizes, dtype
    return {"longest_chunk": 16}
