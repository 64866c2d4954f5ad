"""Rank correlations of what statistics say of a set with what the trained set loses.

A statistic predicts of a set the sum of the costs of its replaced groups. S may be infinite, so a
median S counts as S / (1 + S), the share of the weight that is not on softmax's key; any other
infinite cost as more than all finite ones together.

Correlations are over random sets alone, whose members no statistic has chosen. The cells of one
model, budgets and seeds, share costs and texts, and are no sample: there is no interval over them.
Whether a mean correlation could be chance is asked by the statistic's own null: its costs are dealt
out anew to the groups, with the same sets and losses. The p-value is the share of such deals whose
mean correlation is at least as far from 0, corrected over statistics after Holm.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import stats

from lm_jax import statistics
from polyattn_jax.studies.rankings.results import OUTCOMES, CellResult, RankingResult

RANDOM = "random"
# Deals of the costs to the groups.
DEALS = 5_000


def predicted(name: str, cost_G: np.ndarray) -> np.ndarray:
    """The costs of groups as they are summed over a set, finite."""
    infinite = np.isinf(cost_G)
    finite_G = np.where(infinite, 0.0, cost_G)
    if name == "s":
        return np.where(infinite, 1.0, finite_G / (1 + finite_G))
    return np.where(infinite, 1 + 2 * np.abs(finite_G).sum(), finite_G)


@dataclasses.dataclass(frozen=True)
class _Cell:
    """The sets of one seed and size: members of the random ones, and all rows."""

    place: tuple[int, float]
    rows: list[dict[str, Any]]

    @property
    def drawn(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if RANDOM in row["chosen_by"].split(",")]

    def members(self, groups: int) -> np.ndarray:
        """Which groups each random set replaces, `[sets, G]`."""
        members = np.zeros((len(self.drawn), groups))
        for row, own in zip(members, self.drawn, strict=True):
            row[own["groups"]] = 1
        return members


def _cells(sets: pa.Table) -> list[_Cell]:
    rows = sets.to_pylist()
    places = sorted({(row["seed"], row["replaced"]) for row in rows})
    return [
        _Cell(place, [row for row in rows if (row["seed"], row["replaced"]) == place])
        for place in places
    ]


def cells(
    sets: pa.Table, costs: Mapping[str, np.ndarray], outcomes: Sequence[str] = OUTCOMES
) -> tuple[CellResult, ...]:
    """The results of every seed, size, statistic and outcome.

    Args:
      sets: rows, as `results.SETS` declares them.
      costs: cost of each group by statistic.
      outcomes: names of outcomes.
    """
    results = []
    for cell, name in itertools.product(_cells(sets), costs):
        cost_G = predicted(name, costs[name])
        expected = cell.members(len(cost_G)) @ cost_G
        chosen = [row for row in cell.rows if name in row["chosen_by"].split(",")]
        for outcome in outcomes:
            measured = np.array([_outcome(row, outcome) for row in cell.drawn])
            results.append(
                CellResult(
                    seed=cell.place[0],
                    replaced=cell.place[1],
                    statistic=name,
                    outcome=outcome,
                    sets=len(measured),
                    correlation=spearman(expected, measured),
                    chosen=_outcome(chosen[0], outcome) if chosen else None,
                    random=float(measured.mean()),
                    beaten=sum(_outcome(chosen[0], outcome) < measured) if chosen else 0,
                )
            )
    return tuple(results)


def over_cells(
    sets: pa.Table,
    costs: Mapping[str, np.ndarray],
    found: Sequence[CellResult],
    *,
    deals: int = DEALS,
    seed: int = 0,
) -> tuple[RankingResult, ...]:
    """The results of every statistic and outcome over seeds and sizes, in the order of the cells.

    Args:
      sets, costs: arguments of `cells`.
      found: result of `cells`.
      deals: number of deals of the null.
      seed: random seed of the deals.
    """
    results = []
    for name, outcome in dict.fromkeys((cell.statistic, cell.outcome) for cell in found):
        own = [c for c in found if (c.statistic, c.outcome) == (name, outcome)]
        ranks = [c.correlation for c in own if c.correlation is not None]
        gains = [c.random - c.chosen for c in own if c.chosen is not None]
        results.append(
            RankingResult(
                statistic=name,
                outcome=outcome,
                cells=len(ranks),
                correlation=float(np.mean(ranks)) if ranks else None,
                low=min(ranks, default=None),
                high=max(ranks, default=None),
                p_value=_p_value(sets, predicted(name, costs[name]), outcome, deals, seed)
                if ranks
                else None,
                gain=float(np.mean(gains)) if gains else None,
                gain_low=min(gains, default=None),
                gain_high=max(gains, default=None),
                beaten=sum(c.beaten for c in own),
                of=sum(c.sets for c in own if c.chosen is not None),
            )
        )
    return _corrected(results)


def spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    """Spearman's rank correlation; None for fewer than three, or where either is constant."""
    if len(first) < 3 or (first == first[0]).all() or (second == second[0]).all():
        return None
    return float(stats.spearmanr(first, second).statistic)


def _p_value(sets: pa.Table, cost_G: np.ndarray, outcome: str, deals: int, seed: int) -> float:
    """Share of deals of the costs whose mean correlation is as far from 0, this one included."""
    generator = np.random.default_rng(seed)
    dealt = [cost_G, *(generator.permutation(cost_G) for _ in range(deals))]
    cost_GP = np.stack(dealt, axis=1)
    by_cell = []
    for cell in _cells(sets):
        measured = np.array([_outcome(row, outcome) for row in cell.drawn])
        if len(measured) < 3 or (measured == measured[0]).all():
            continue
        by_cell.append(_correlations(cell.members(len(cost_G)) @ cost_GP, measured))
    size_P = np.abs(np.mean(by_cell, axis=0))
    # Sums of the same costs in another order differ by rounding.
    return float((size_P >= size_P[0] - 1e-9).mean())


def _correlations(expected_SP: np.ndarray, measured_S: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of each column with the outcome; 0 of a constant column."""
    # Equal sums of costs are equal but for rounding.
    rank_SP = stats.rankdata(np.round(expected_SP, 12), axis=0)
    rank_S = stats.rankdata(measured_S)
    x_SP, y_S = rank_SP - rank_SP.mean(0), rank_S - rank_S.mean()
    size_P = np.linalg.norm(x_SP, axis=0)
    return (y_S @ x_SP) / np.where(size_P > 0, size_P, 1) / np.linalg.norm(y_S)


def _corrected(results: Sequence[RankingResult]) -> tuple[RankingResult, ...]:
    """The results with p-values corrected over the statistics of each outcome, after Holm."""
    by_outcome: dict[str, dict[str, float]] = {}
    for result in results:
        if result.p_value is not None:
            by_outcome.setdefault(result.outcome, {})[result.statistic] = result.p_value
    corrected = {
        outcome: dict(zip(values, map(float, statistics.holm(list(values.values()))), strict=True))
        for outcome, values in by_outcome.items()
    }
    return tuple(
        result
        if result.p_value is None
        else dataclasses.replace(result, p_value=corrected[result.outcome][result.statistic])
        for result in results
    )


def _outcome(row: Mapping[str, Any], outcome: str) -> float:
    kind, _, stage = outcome.partition("_")
    if kind == "accuracy":
        return 1 - row[f"right_{stage}"] / row["prompts"]
    return row[outcome]
