"""Circuits that edge pruning found, beside others of their size: numbers and page."""

from collections.abc import Iterator
import dataclasses

import numpy as np
import pyarrow as pa

from lm_jax.report import Cell, Column, Section, cell, section, table_of
from lm_jax.report.prose import Prose
from lm_jax.report.tables import interval_text
from sparse_jax.circuits.discover import Curve
from sparse_jax.studies.circuits.measurements import array, read_curve
from sparse_jax.studies.circuits.results import CircuitSummary, PrunedCircuit
from sparse_jax.studies.circuits.settings import CircuitConfig
from sparse_jax.studies.circuits.transfer import explained_interval

# Rankings of the circuits that are compared; each is a field of `PrunedCircuit`.
RANKINGS = ("pruned", "attributed", "drawn")
_EDGES = "component_edges"
_PROSE = Prose("sparse_jax.studies.circuits")


def pruned_circuits(
    config: CircuitConfig, table: pa.Table, prompt_B: np.ndarray
) -> Iterator[PrunedCircuit]:
    """Explained effects of the circuits of every size of `config.pruned`.

    Args:
      config: settings of the study.
      table: rows of one model on one task.
      prompt_B: number of each pair's clean prompt, from 0.
    """
    if not config.pruned:
        return
    about = {"component": _EDGES, "ablation": config.ablations[0]}
    whole = read_curve(table, **about, ranking="signed", scope="task")
    for size in config.pruned:
        explained = {}
        for ranking in RANKINGS:
            labels = {"quantity": "curve", "ranking": ranking, "size": size}
            metric_B, _ = array(table, ["prompt"], **about, **labels)
            own = Curve(np.array([size]), metric_B[None], whole.empty_B, whole.whole_B)
            explained[ranking] = explained_interval(config, own, prompt_B)
        yield PrunedCircuit(config.ablations[0], size, **explained)


@dataclasses.dataclass(frozen=True)
class _Row:
    """One circuit of one model on one task."""

    task: str
    model: str
    solved: bool
    edges: int
    own: PrunedCircuit


def pruned(summary: CircuitSummary) -> Section:
    """Circuits of edge pruning beside those of the same size by attribution and at random."""
    rows = [
        _Row(result.task, result.model, result.solved, result.components[_EDGES], own)
        for result in summary.results
        for own in result.pruned
    ]
    columns = [
        Column("Task", value=lambda each: each.task),
        Column("Model", value=_model),
        Column("Edges", value=lambda each: each.own.size),
        Column("Of", value=lambda each: each.edges),
        *(
            Column(name, value=lambda each, field=field: _explained(each.own, field))
            for field, name in zip(
                RANKINGS, ("Edge pruning", "Attribution", "Random order"), strict=True
            )
        ),
    ]
    return section(
        "Does edge pruning find better circuits?",
        _PROSE("pruned", summary.config.pruning_steps),
        table_of(
            rows,
            columns,
            caption="Explained effect of circuits of component edges of one size "
            f"({summary.config.ablations[0]} ablation), with intervals over prompts.",
        ),
    )


def _model(row: _Row) -> Cell:
    """The model, marked where it does not solve the task, of which no circuit has a meaning."""
    return cell(row.model) if row.solved else cell(row.model, tone="bad", note="not solved")


def _explained(circuit: PrunedCircuit, ranking: str) -> str:
    return interval_text(getattr(circuit, ranking), ".2f")
