"""Tile sizes from a table measured on the device, or the defaults of the operation.

The defaults are the function `default_tiles(sizes, dtype)` in the operation's `tile.py`. A table
`tuned/<device>.json` maps operation -> bucket -> tiles; it is written by `tools/tune_kernels.py` on
that device, and none comes with the package. A bucket is the call's dtype and its sizes, those that
grow with the data (B, T, S) rounded up to powers of two.
"""

from collections.abc import Iterator, Mapping
import contextlib
import contextvars
import functools
import json
from pathlib import Path
import re

TABLES = Path(__file__).parents[1] / "tuned"
_ROUNDED = ("B", "T", "S")
_TRIED: contextvars.ContextVar[tuple[str, Mapping[str, int]] | None] = contextvars.ContextVar(
    "tried", default=None
)


def device_key(device_kind: str) -> str:
    """The file name of a device: `NVIDIA H200` gives `nvidia_h200`."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")


def bucket(sizes: Mapping[str, int], dtype: object) -> str:
    """The key of a call: `bfloat16 B32 E128 R32 T256`."""
    letters = sorted(sizes)
    rounded = {
        letter: 1 << max(sizes[letter] - 1, 0).bit_length() if letter in _ROUNDED else sizes[letter]
        for letter in letters
    }
    return " ".join([str(dtype), *(f"{letter}{rounded[letter]}" for letter in letters)])


@functools.cache
def table(key: str) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    """The table of one device; empty if none was measured."""
    path = TABLES / f"{key}.json"
    return json.loads(path.read_text("utf-8"))["tiles"] if path.exists() else {}


@contextlib.contextmanager
def trying(op: str, tiles: Mapping[str, int]) -> Iterator[None]:
    """Traces `op` with these tiles instead of the table's: for tuning, and for tests of tiles."""
    token = _TRIED.set((op, tiles))
    try:
        yield
    finally:
        _TRIED.reset(token)


def tiles(
    op: str,
    device_kind: str,
    sizes: Mapping[str, int],
    dtype: object,
    default: Mapping[str, int],
) -> dict[str, int]:
    """The tiles of a call: the default entries, some of them replaced by the table's.

    Raises:
      ValueError: the table names an entry that the operation does not have.
    """
    key = device_key(device_kind)
    chosen = table(key).get(op, {}).get(bucket(sizes, dtype), {})
    tried = _TRIED.get()
    if tried is not None and tried[0] == op:
        chosen = tried[1]
    unknown = set(chosen) - set(default)
    if unknown:
        raise ValueError(
            f"{op} has no tile {', '.join(sorted(unknown))}, only {', '.join(default)}; if "
            f"kernels/iaj_kernels/tuned/{key}.json names it, tune again with tools/tune_kernels.py"
        )
    return {**default, **chosen}
