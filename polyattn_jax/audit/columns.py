"""Tables as numpy arrays by name: what the statistics of an audit are computed from."""

import re
from typing import Any

import numpy as np
import pyarrow as pa

_S_P = re.compile(r"s_\d+(\.\d+)?")

Columns = dict[str, np.ndarray]


def columns(table: pa.Table) -> Columns:
    """A table as numpy arrays by name."""
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def degrees(c: Columns) -> tuple[int | float, ...]:
    """The degrees p whose S_p the rows hold, ascending; an int where p is whole."""
    results = [name.removeprefix("s_") for name in c if _S_P.fullmatch(name)]
    return tuple(sorted(float(p) if "." in p else int(p) for p in results))


def where(c: Columns, **equal: Any) -> Columns:
    """The rows whose columns have the given values."""
    mask = np.ones(len(next(iter(c.values()))), bool)
    for name, value in equal.items():
        mask &= c[name] == value
    return take(c, mask)


def take(c: Columns, mask: np.ndarray) -> Columns:
    """The rows where the mask is true."""
    return {name: column[mask] for name, column in c.items()}
