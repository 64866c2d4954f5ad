"""Rank correlations of what statistics say of a set with what the trained set loses.

A statistic predicts of a set the sum of the costs of its replaced groups. S may be infinite, so a
median S counts as S / (1 + S), the share of the weight that is not on softmax's key.
"""

from collections.abc import Mapping, Sequence
import itertools
import math
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import stats

from lm_jax import statistics
from polyattn_jax.audit.results import LossInterval
from polyattn_jax.studies.rankings.results import OUTCOMES, CellResult, RankingResult

RANDOM = "random"


def predicted(name: str, cost_G: np.ndarray) -> np.ndarray:
    """The costs of groups as they are summed over a set."""
    if name == "s":
        return np.where(np.isinf(cost_G), 1.0, cost_G / (1 + np.where(np.isinf(cost_G), 0, cost_G)))
    return cost_G


def cells(
    sets: pa.Table, costs: Mapping[str, np.ndarray], outcomes: Sequence[str] = OUTCOMES
) -> tuple[CellResult, ...]:
    """The results of every seed, size, statistic and outcome.

    Args:
      sets: rows, as `results.SETS` declares them.
      costs: cost of each group by statistic.
      outcomes: names of outcomes.
    """
    rows = sets.to_pylist()
    places = sorted({(row["seed"], row["replaced"]) for row in rows})
    results = []
    for (seed, share), name in itertools.product(places, costs):
        own = [row for row in rows if (row["seed"], row["replaced"]) == (seed, share)]
        cost_G = predicted(name, costs[name])
        expected = np.array([cost_G[row["groups"]].sum() for row in own])
        chosen = [name in row["chosen_by"].split(",") for row in own]
        drawn = [row["chosen_by"].split(",")[-1] == RANDOM for row in own]
        for outcome in outcomes:
            measured = np.array([_outcome(row, outcome) for row in own])
            results.append(
                CellResult(
                    seed=seed,
                    replaced=share,
                    statistic=name,
                    outcome=outcome,
                    sets=len(own),
                    correlation=spearman(expected, measured),
                    chosen=float(measured[chosen].mean()),
                    random=float(measured[drawn].mean()),
                )
            )
    return tuple(results)


def over_cells(found: Sequence[CellResult]) -> tuple[RankingResult, ...]:
    """The results of every statistic and outcome over seeds and sizes."""
    results = []
    for name, outcome in dict.fromkeys((cell.statistic, cell.outcome) for cell in found):
        own = [c for c in found if (c.statistic, c.outcome) == (name, outcome)]
        ranks = [c.correlation for c in own if c.correlation is not None]
        whole = len(ranks) == len(own)
        results.append(
            RankingResult(
                statistic=name,
                outcome=outcome,
                correlation=_mean(ranks, within=(-1.0, 1.0)) if whole else None,
                low=min(ranks) if whole else None,
                high=max(ranks) if whole else None,
                gain=_mean([c.random - c.chosen for c in own]),
            )
        )
    return tuple(results)


def spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    """Spearman's rank correlation; None for fewer than three, or where either is constant."""
    if len(first) < 3 or (first == first[0]).all() or (second == second[0]).all():
        return None
    return float(stats.spearmanr(first, second).statistic)


def _outcome(row: Mapping[str, Any], outcome: str) -> float:
    kind, _, stage = outcome.partition("_")
    if kind == "accuracy":
        return 1 - row[f"right_{stage}"] / row["prompts"]
    return row[outcome]


def _mean(values: Sequence[float], within: tuple[float, float] = (-np.inf, np.inf)) -> LossInterval:
    if len(values) == 1 or not np.isfinite(values).all():
        estimate = values[0] if len(values) == 1 else math.nan
        return LossInterval(estimate, *within, len(values))
    found = statistics.student_interval(np.array(values))
    low, high = max(found.low, within[0]), min(found.high, within[1])
    return LossInterval(found.estimate, low, high, found.n)
