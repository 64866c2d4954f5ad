"""Numbers of the heads study, from its rows."""

from collections.abc import Mapping, Sequence
import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_jax.inspect.head_measures import MEASURES, WEIGHTS
from sparse_jax.studies.heads.results import REPEATED, TEXT, EqualWeights, HeadResult

# Kinds of heads: the field that says how much a head is of it, on the page and in a sentence.
KINDS: Mapping[str, str] = {
    "induction": "induction",
    "previous": "previous-token",
    "duplicate": "duplicate-token",
    "first": "first-token",
    "written": "most writing",
}


def results(table: pa.Table, copying_LN: np.ndarray) -> tuple[HeadResult, ...]:
    """The results of every head.

    Args:
      table: rows of `results.ROWS`.
      copying_LN: copying scores.
    """
    sums = {on: _sums(table, on, copying_LN.shape) for on in (TEXT, REPEATED)}
    text, repeated = sums[TEXT], sums[REPEATED]
    found = []
    for layer, head in np.ndindex(copying_LN.shape):
        place = layer, head
        queries, again = text["queries"][place], text["again"][place]
        means = {name: float(text[name][place] / queries) for name in MEASURES}
        found.append(
            HeadResult(
                *(layer, head),
                first=means["first"],
                previous=means["previous"],
                self_=means["self"],
                duplicate=float(text["duplicate"][place] / again) if again else None,
                induction=float(repeated["induction"][place] / repeated["again"][place]),
                entropy=means["entropy"],
                written=means["written"],
                copying=float(copying_LN[place]),
            )
        )
    return tuple(found)


def _sums(table: pa.Table, on: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    own = table.filter(pc.equal(table["on"], on))
    at = own["layer"].to_numpy(), own["head"].to_numpy()
    sums = {}
    for name in ("queries", "again", *MEASURES, *(f"equal_{name}" for name in WEIGHTS)):
        sums[name] = np.zeros(shape)
        np.add.at(sums[name], at, own[name].to_numpy())
    return sums


def equal_weights(table: pa.Table, shape: tuple[int, int]) -> tuple[EqualWeights, ...]:
    """The results of equal weights in each layer.

    Args:
      table: rows of `results.ROWS`.
      shape: numbers of layers and of heads in one.
    """
    text, repeated = (_sums(table, on, shape) for on in (TEXT, REPEATED))
    found = []
    for layer in range(shape[0]):
        place = layer, 0
        queries, again = text["queries"][place], text["again"][place]
        mean = {name: float(text[f"equal_{name}"][place] / queries) for name in WEIGHTS}
        found.append(
            EqualWeights(
                layer,
                *(mean["first"], mean["previous"], mean["self"]),
                duplicate=float(text["equal_duplicate"][place] / again) if again else None,
                induction=float(repeated["equal_induction"][place] / repeated["again"][place]),
            )
        )
    return tuple(found)


def counted(table: pa.Table, on: str, name: str) -> int:
    """The number of queries of texts or repeated rows, or of those whose token came before.

    Args:
      table: rows of `results.ROWS`.
      on: what they are on.
      name: the column, "queries" or "again".
    """
    own = pc.and_(pc.equal(table["layer"], 0), pc.equal(table["head"], 0))
    own = pc.and_(own, pc.equal(table["on"], on))
    return int(pc.sum(table.filter(own)[name]).as_py())


def strongest(heads: Sequence[HeadResult], field: str, count: int) -> list[HeadResult]:
    """The heads of the largest values of a field, largest first; without those that have none."""
    known = [
        each
        for each in heads
        if (value := getattr(each, field)) is not None and math.isfinite(value)
    ]
    return sorted(known, key=lambda each: -getattr(each, field))[:count]
