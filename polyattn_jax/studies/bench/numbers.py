"""Rates and ratios of timed decoding, from the seconds of each turn."""

from collections.abc import Sequence
import statistics
from typing import Any, NamedTuple

import pyarrow as pa

from polyattn_jax.studies.bench.results import SOFTMAX, BenchResult
from polyattn_jax.studies.bench.settings import BenchConfig


class Spread(NamedTuple):
    """The median of the turns, and the least and the greatest of them."""

    median: float
    low: float
    high: float


def rate(result: BenchResult) -> Spread:
    """Tokens per second."""
    return _spread([1 / each for each in result.seconds])


def over(result: BenchResult, base: BenchResult) -> Spread:
    """Tokens per second over those of another method in the same turn."""
    return _spread([b / a for a, b in zip(result.seconds, base.seconds, strict=True)])


def results(table: pa.Table, config: BenchConfig) -> tuple[BenchResult, ...]:
    """The entries of every length and method, in the order of the settings.

    Args:
      table: rows of `results.TURNS`, in any order.
      config: lengths and recipes.
    """
    rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["turn"]):
        rows.setdefault((row["length"], row["method"]), []).append(row)
    return tuple(
        BenchResult(
            length,
            method,
            rows[length, method][0]["state_bytes"],
            tuple(row["seconds"] for row in rows[length, method]),
        )
        for length in config.lengths
        for method in (SOFTMAX, *config.recipes)
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
