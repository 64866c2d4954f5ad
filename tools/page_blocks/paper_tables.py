"""Numbers of `iaj polyattn paper`: claims over models, and single tables as one sentence."""

from fnmatch import fnmatchcase
import functools
from typing import Any

import pyarrow.parquet as pq

from tools.page_blocks.sources import ROOT, summary, table

_LABELS = ("quantity", "cell", "suite")


@functools.cache
def _rows(name: str) -> list[dict[str, Any]]:
    return pq.read_table(ROOT / "results" / name / "comparison.parquet").to_pylist()


def claims(name: str) -> str:
    """Every claim of the paper with its own numbers, and ours of each model."""
    found = summary(name)
    models = [each["name"] for each in found["models"]]
    rows = []
    for each in found["claims"]:
        ours = (each["by_model"][model] for model in models)
        cells = (text for one in ours for text in (one["text"], one["verdict"]))
        rows.append((each["claim"], each["where"], each["paper"], *cells))
    heads = (head for model in models for head in (model, "the claim"))
    return table(("claim", "where", "paper", *heads), rows)


def compared(name: str, item: str, **filters: str | tuple[str, ...]) -> str:
    """Our numbers of one of the paper's tables: what they have in common, then each.

    Args:
      name: stored result of `iaj polyattn paper`, with its comparison.parquet.
      item: table, figure or appendix.
      **filters: shell patterns of `quantity`, `cell` or `suite`, one of which is to fit.

    Raises:
      ValueError: it has no such number, or the numbers have several units.
    """
    wanted = {key: (some,) if isinstance(some, str) else some for key, some in filters.items()}
    rows = [
        row
        for row in _rows(name)
        if row["item"] == item
        and all(any(fnmatchcase(row[key], one) for one in some) for key, some in wanted.items())
    ]
    units = {row["unit"] for row in rows}
    if len(units) != 1:
        raise ValueError(f"{item} has {len(rows)} numbers of {filters} in {len(units)} units")
    shared = [key for key in _LABELS if len({row[key] for row in rows}) == 1]
    unit = units.pop()
    entries = (
        " ".join([*(row[key] for key in _LABELS if key not in shared), _value(row)]) for row in rows
    )
    counts = sorted({row["n"] for row in rows})
    prompts = f"; n = {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "")
    start = ", ".join(rows[0][key] for key in shared)
    of_unit = "" if unit == "1" else f" {unit}"
    return f"{start}: {', '.join(entries)}{of_unit}{prompts if counts[-1] else ''}"


def _value(row: dict[str, Any]) -> str:
    digits = ".0f" if row["unit"] in ("heads", "rows", "sets") else ".1f"
    digits = ".3f" if row["unit"] == "1" else digits
    if row["low"] is None:
        return f"{row['ours']:{digits}}"
    return f"{row['ours']:{digits}} [{row['low']:{digits}}, {row['high']:{digits}}]"
