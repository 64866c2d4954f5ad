"""Two models by the mass of what mediates their edges, with intervals over prompts.

A comparison counts prompts that both models answer rightly, whose graphs explain one token; the
others are named with the reason (`results.ComparedPrompt`). Every one that counts has
the same weight. Curves of shorter prompts, which have fewer pairs, end at 1.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_jax.assets import papers
from lm_jax.statistics import Interval, cluster_interval
from sparse_jax.studies.graphs import mass
from sparse_jax.studies.graphs.mass import KINDS, Component, Kind
from sparse_jax.studies.graphs.results import (
    ComparedPrompt,
    EdgeCounts,
    GraphResult,
    MassRatio,
    RoleMass,
)
from sparse_jax.studies.graphs.settings import COMPARED, GraphConfig


@dataclasses.dataclass(frozen=True)
class _Numbers:
    graph_masses: dict[Component, float]


# Figure 6 is about the absolute scores of every edge.
PAPER = {
    Kind(component, "absolute", "any"): ratio
    for component, ratio in papers.numbers("sparse", _Numbers).graph_masses.items()
}


def counted(table: pa.Table, compared: Sequence[ComparedPrompt]) -> pa.Table:
    """The rows of prompts that count; all rows for a single model."""
    if not compared:
        return table
    slugs = [each.slug for each in compared if not each.why]
    return table.filter(pc.is_in(table["slug"], value_set=pa.array(slugs, pa.string())))


def counted_graphs(
    graphs: Sequence[GraphResult], compared: Sequence[ComparedPrompt]
) -> list[GraphResult]:
    """The graphs of prompts that count; all graphs for a single model."""
    left_out = {each.slug for each in compared if each.why}
    return [each for each in graphs if each.slug not in left_out]


def _rows(table: pa.Table, kind: Kind) -> list[dict[str, Any]]:
    """The rows of a kind."""
    wanted = [pc.field(name) == value for name, value in kind._asdict().items()]
    return table.filter(wanted[0] & wanted[1] & wanted[2]).to_pylist()


def curves(table: pa.Table, roles: Sequence[str], kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Mean masses of each prompt `[P, R, C]` and mean counts per edge `[P, R]`.

    Prompts on which a model has no mediated edge are left out, for all models.

    Args:
      table: rows of `run.SCHEMA`.
      roles: roles of the R models.
      kind: kind of mass that is selected.
    """
    every = _rows(table, kind)
    rows = {(row["slug"], row["role"]): row for row in every if row["mass"]}
    slugs = [
        slug
        for slug in dict.fromkeys(row["slug"] for row in every)
        if all((slug, role) in rows for role in roles)
    ]
    C = max((len(row["mass"]) for row in rows.values()), default=0)
    mass_PRC = np.ones((len(slugs), len(roles), C))
    needed_PR = np.empty((len(slugs), len(roles)))
    for p, slug in enumerate(slugs):
        for r, role in enumerate(roles):
            own = rows[slug, role]
            mass_PRC[p, r, : len(own["mass"])] = own["mass"]
            needed_PR[p, r] = own["needed"]
    return mass_PRC, needed_PR


def edge_counts(table: pa.Table, role: str, kind: Kind) -> EdgeCounts:
    """Edges of a model on all prompts, and how many of them no component carries."""
    rows = [row for row in _rows(table, kind) if row["role"] == role]
    unmediated = sum(row["unmediated"] for row in rows)
    return EdgeCounts(unmediated + sum(row["edges"] for row in rows), unmediated)


def role_masses(config: GraphConfig, table: pa.Table, roles: Sequence[str]) -> list[RoleMass]:
    """The counts of each model."""
    results = []
    for role in roles:
        for kind in KINDS:
            mass_PRC, needed_PR = curves(table, [role], kind)
            results.append(
                RoleMass(
                    role,
                    *kind,
                    edge_counts(table, role, kind),
                    interval(config, needed_PR[:, 0], np.mean),
                    interval(
                        config,
                        mass_PRC[:, 0],
                        lambda rows: mass.needed_of_mean(rows.mean(0), config.fraction),
                    ),
                )
            )
    return results


def ratios(config: GraphConfig, table: pa.Table, roles: Sequence[str]) -> list[MassRatio]:
    """Dense over sparse, resampled over prompts in pairs; empty for a single model."""
    if tuple(roles) != COMPARED:
        return []

    def of_mean(rows: np.ndarray) -> float:
        dense, sparse = (mass.needed_of_mean(curve, config.fraction) for curve in rows.mean(0))
        return dense / sparse

    def per_edge(rows: np.ndarray) -> float:
        dense, sparse = rows.mean(0)
        return float(dense / sparse)

    results = []
    for kind in KINDS:
        mass_PRC, needed_PR = curves(table, roles, kind)
        results.append(
            MassRatio(
                *kind,
                dense=edge_counts(table, COMPARED[0], kind),
                sparse=edge_counts(table, COMPARED[1], kind),
                of_mean=interval(config, mass_PRC, of_mean, log=True),
                per_edge=interval(config, needed_PR, per_edge, log=True),
                paper=PAPER.get(kind) if config.fraction == 0.9 else None,
            )
        )
    return results


def interval(
    config: GraphConfig, rows: np.ndarray, statistic, *, log: bool = False
) -> Interval | None:
    """95 % interval over rows, of prompts or of meanings; None of fewer than two."""
    if len(rows) < 2:
        return None
    return cluster_interval(
        rows, np.arange(len(rows)), statistic, resamples=config.resamples, log=log, seed=config.seed
    )
