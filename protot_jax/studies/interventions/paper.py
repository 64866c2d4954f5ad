"""The paper's intervention results (appendix A.3, Tables 6 to 9), for comparison.

The models were trained on FineWeb-Edu, and their prototypes chosen by eye. `reinitialise` is a
single draw. Numbers are relative changes of the target's probability in percent.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

MODES = ("reinitialise", "mask_write", "mask_read")


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

    table: int
    prototype: str
    role: str
    sentences: int
    rows: Sequence[Row]

    def mean(self, mode: str) -> float:
        """Mean change of the sentences that the paper kept."""
        return sum(getattr(row, mode) for row in self.rows) / len(self.rows)


def _gender(prototype: str, role: str, changes: Sequence[tuple[float, float, float]]) -> Column:
    rows = [Row(*case, *change) for case, change in zip(_GENDER_CASES, changes, strict=True)]
    return Column(6, prototype, role, 14, rows)


def _covid(prototype: str, role: str, rows: Sequence[tuple[float, float, float, float]]) -> Column:
    return Column(7, prototype, role, 21, [Row("COVID", *row) for row in rows])


_GENDER_CASES = (
    ("women", 3.21),
    ("women", 4.24),
    ("women", 13.54),
    ("women", 10.14),
    ("women", 11.87),
    ("girls", 2.80),
    ("girls", 68.55),
    ("girls", 78.63),
    ("girls", 60.49),
    ("girls", 64.33),
    ("girls", 68.66),
    ("girls", 38.32),
)

_SEED = "The released script uses the model of seed 124."
REMARKS: Mapping[str, str] = {
    "COVID": "Its caption says percentage points, which is impossible: a baseline of 1.6 % would "
    "fall by 13.4. So its numbers are read as relative changes.",
    "New Zealand": _SEED,
    "mental health": _SEED,
}

# By concept of `sentences.jsonl`; the first column is the concept's own prototype.
TABLES: Mapping[str, tuple[Column, ...]] = {
    "women and girls": (
        _gender(
            "L9 P7",
            "the concept's",
            [
                (-17.80, -16.60, 7.57),
                (-3.00, 1.43, -3.06),
                (1.37, -2.29, 1.56),
                (-0.67, 3.45, -0.76),
                (1.81, -1.65, 1.86),
                (-10.62, -10.67, 5.49),
                (0.11, 0.39, 0.23),
                (-0.45, -0.41, 0.76),
                (-0.17, 0.01, 0.58),
                (-1.56, -1.43, 0.35),
                (-1.01, -0.95, 0.72),
                (-3.89, -3.51, 1.68),
            ],
        ),
        _gender(
            "L9 P18",
            "of men and boys",
            [
                (11.50, 16.95, 12.71),
                (-0.13, 7.09, -0.18),
                (1.43, -1.03, 1.64),
                (-0.31, 2.20, -0.31),
                (0.12, -2.61, 0.22),
                (0.50, -1.57, 0.19),
                (0.28, 0.79, 0.39),
                (0.64, 0.70, 0.64),
                (0.56, 0.84, 0.65),
                (0.62, 0.94, 0.72),
                (1.39, 1.50, 1.52),
                (2.39, 4.15, 2.64),
            ],
        ),
        _gender(
            "L9 P2",
            "the one control",
            [
                (0.74, 2.30, -0.61),
                (-0.17, 0.35, -0.33),
                (0.09, -0.22, 0.38),
                (-0.75, 0.49, -1.08),
                (0.34, -0.32, 0.58),
                (0.03, -0.46, 0.03),
                (-0.28, 0.02, -0.26),
                (-0.04, -0.03, -0.13),
                (-0.19, 0.02, -0.27),
                (-0.15, 0.05, -0.19),
                (-0.10, -0.05, -0.21),
                (-0.55, -0.11, -1.10),
            ],
        ),
    ),
    "COVID": (
        _covid(
            "L1 P14",
            "the concept's",
            [
                (12.4, 0.3, 0.5, -0.0),
                (6.4, -1.5, -1.7, 0.2),
                (10.4, -0.1, -0.6, 0.0),
                (6.0, 0.2, -0.2, -0.1),
                (2.5, -0.3, -0.1, 0.1),
                (7.9, 0.2, 0.4, 0.0),
                (1.8, -0.4, -0.4, 0.1),
                (2.4, 2.0, 2.3, -0.2),
                (1.3, 0.8, 0.9, -0.1),
                (2.7, 0.3, 0.3, 0.0),
                (2.3, 0.4, 0.4, -0.1),
            ],
        ),
        _covid(
            "L7 P29",
            "the concept's, seed 124",
            [
                (48.7, -8.6, -8.4, 0.1),
                (16.2, -0.4, 0.1, -0.1),
                (13.3, -0.9, -0.9, 0.4),
                (1.4, 1.7, 2.0, -0.1),
                (3.4, 0.8, 0.8, -0.1),
                (2.2, -3.7, -3.6, 0.0),
                (3.3, 0.5, 0.5, -0.0),
                (3.4, -0.9, -0.5, 0.1),
                (5.4, -0.1, 0.0, 0.0),
                (2.3, 0.5, 0.9, -0.0),
                (2.0, 0.2, -0.0, -0.0),
                (1.0, -0.1, 0.2, 0.1),
                (2.9, 0.1, -0.0, 0.0),
                (4.0, -0.2, 0.2, 0.1),
            ],
        ),
        _covid(
            "L6 P31",
            "the concept's, seed 325",
            [
                (27.4, 4.6, 6.3, -5.7),
                (9.7, 12.6, 13.0, 13.1),
                (1.4, 0.4, -0.4, 0.1),
                (17.3, -0.5, 0.3, -0.4),
                (2.4, 23.3, 27.3, 22.1),
                (1.1, 9.3, 5.9, -3.8),
                (2.4, 2.8, 2.6, 2.2),
                (12.7, -2.7, -8.1, -2.9),
                (3.5, 3.4, -10.8, 5.7),
                (6.5, 1.4, -1.8, 1.6),
                (4.0, 1.2, -0.9, 1.3),
                (1.5, -4.9, 3.1, -5.1),
                (2.5, 0.0, -2.9, 0.3),
                (1.6, -6.5, -13.4, -6.8),
                (5.1, 0.3, -0.3, 1.6),
                (2.9, 3.9, -22.0, 4.0),
            ],
        ),
    ),
    "New Zealand": (
        Column(
            8,
            "L5 P9",
            "the concept's",
            4,
            [
                Row("Zealand", 35.7, -20.7, -21.5, -21.0),
                Row("Zealand", 91.9, -12.4, -12.5, -12.9),
                Row("Zealand", 33.4, -1.1, -2.3, -1.2),
                Row("Zealand", 99.7, -0.2, -0.2, -0.2),
            ],
        ),
    ),
    "mental health": (
        Column(
            9,
            "L6 P9",
            "the concept's",
            4,
            [
                Row("mental", 5.0, -1.6, -2.2, -2.3),
                Row("mental", 2.1, -0.6, -0.4, -0.7),
                Row("mental", 1.4, -0.2, -0.2, -0.2),
                Row("mental", 1.3, -0.0, -0.1, -0.0),
            ],
        ),
    ),
}
