"""Whether one meaning in other words is computed by the same heads.

p_h is the share of head h in the absolute mass of all measured edges of a graph. Two graphs overlap
by sum_h min(p_h, q_h), one minus the total variation: 1 where the same heads have the same shares,
0 where no head has a share in both. Prompts with the same `meaning` are rephrasings of each other
(`prompts`); graphs of prompts of other kinds are the control, since some heads are in every graph.
"""

from collections.abc import Sequence
import itertools
import math

import numpy as np

from lm_jax.statistics import Interval
from sparse_jax.studies.graphs import comparison
from sparse_jax.studies.graphs.results import ComparedPrompt, GraphResult, Stability
from sparse_jax.studies.graphs.settings import COMPARED, GraphConfig


def head_shares(size_LNTS: np.ndarray) -> tuple[float, ...]:
    """Each head's share of the absolute mass of some edges, by layer; empty where there is none.

    Args:
      size_LNTS: absolute share of every pair of a query and a key, summed over edges.
    """
    size_C = size_LNTS.sum((2, 3), dtype=np.float64).reshape(-1)
    total = size_C.sum()
    return tuple((size_C / total).tolist()) if total > 0 else ()


def overlap(first: Sequence[float], second: Sequence[float]) -> float:
    """Common mass of two distributions over heads, from 0 to 1."""
    return float(np.minimum(first, second).sum())


def measure(
    config: GraphConfig,
    graphs: Sequence[GraphResult],
    roles: Sequence[str],
    compared: Sequence[ComparedPrompt],
) -> tuple[Stability, ...]:
    """The overlaps of each model, and of two that are compared also the second's minus the first's.

    First over all meanings, then over those of each kind where there are several. Every meaning has
    the same weight. Meanings are left out, for all models, of which a model has fewer than two
    graphs with mass of any head.

    Args:
      config: settings, of which `resamples` and `seed` are used for intervals over meanings.
      graphs: graphs of all models.
      roles: roles of the models.
      compared: prompts, with whether each counts in a comparison: only those count whose graphs
        explain the same right token, because graphs of other targets differ by the target, too.
        Empty for a single model.
    """
    graphs = comparison.counted_graphs(graphs, compared)
    by_role = {role: _means(graphs, role) for role in roles}
    kinds = {
        each.meaning: each.kind
        for each in graphs
        if all(each.meaning in means for means in by_role.values())
    }
    named = [kind for kind in dict.fromkeys(kinds.values()) if kind]
    several = named if len(set(kinds.values())) > 1 else []
    results = []
    for kind in ("", *several) if kinds else ():
        meanings = [meaning for meaning, own in kinds.items() if kind in ("", own)]
        rows = {role: np.array([own[each] for each in meanings]) for role, own in by_role.items()}
        if tuple(roles) == COMPARED:
            dense_M2, sparse_M2 = rows.values()
            rows["sparse minus dense"] = sparse_M2 - dense_M2
        for name, value_M2 in rows.items():
            within, across = (_interval(config, value_M) for value_M in value_M2.T)
            results.append(Stability(name, kind, within, across))
    return tuple(results)


def _means(graphs: Sequence[GraphResult], role: str) -> dict[str, tuple[float, float]]:
    """Mean overlap of each meaning's graphs with each other, and with other kinds (NaN without)."""
    own = [each for each in graphs if each.role == role and each.head_shares]
    results = {}
    for meaning in dict.fromkeys(each.meaning for each in own if each.meaning):
        same = [each for each in own if each.meaning == meaning]
        others = [each for each in own if each.kind not in {one.kind for one in same}]
        within = [overlap(a.head_shares, b.head_shares) for a, b in itertools.combinations(same, 2)]
        across = [overlap(a.head_shares, b.head_shares) for a in same for b in others]
        if within:
            results[meaning] = (
                float(np.mean(within)),
                float(np.mean(across)) if across else math.nan,
            )
    return results


def _interval(config: GraphConfig, value_M: np.ndarray) -> Interval | None:
    """The mean over meanings; None where one has no number."""
    return None if np.isnan(value_M).any() else comparison.interval(config, value_M, np.mean)
