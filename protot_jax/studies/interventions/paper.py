"""The paper's intervention results (appendix A.3, Tables 6 to 9), for comparison.

The models were trained on FineWeb-Edu, and their prototypes chosen by eye. `reinitialise` is a
single draw. Numbers are relative changes of the target's probability in percent.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

from lm_jax.assets import papers

MODES = ("reinitialise", "mask_write", "mask_read")
_TABLES = (6, 7, 8, 9)


class Row(NamedTuple):
    """A sentence: its target, baseline probability and changes, all in percent."""

    target: str
    baseline: float
    reinitialise: float
    mask_write: float
    mask_read: float


@dataclasses.dataclass(frozen=True)
class Column:
    """One prototype of the paper, such as "L9 P7", with its role."""

    prototype: str
    role: str
    sentences: int
    rows: Sequence[Row]

    def changes(self, mode: str) -> list[float]:
        """The change of each sentence that the paper kept."""
        return [getattr(row, mode) for row in self.rows]

    def mean(self, mode: str) -> float:
        """The mean of the changes."""
        return sum(self.changes(mode)) / len(self.rows)


@dataclasses.dataclass(frozen=True)
class Table:
    """The table of a concept of `sentences.jsonl`; its first column is the concept's prototype."""

    number: int
    concept: str
    columns: Sequence[Column]
    remark: str = ""


def tables() -> dict[str, Table]:
    """The tables by concept."""
    result, published = {}, papers.tables("protot")
    for number in _TABLES:
        entry = published[f"table_{number}"]
        columns = [
            Column(**each | {"rows": [Row(*row) for row in each["rows"]]})
            for each in entry["columns"]
        ]
        table = Table(number, **entry | {"columns": columns})
        result[table.concept] = table
    return result
