"""An audit beside a model of the paper, and one row of their comparison.

A model that the paper has not tested stands beside the nearest of its four, of the same
architecture family, and that is the first cause of every difference; of weights that have the name
of one of the four, it is that they are not verified. Other causes are lengths that
differ by more than a tenth, less than half of the prompts, another length of the calibration
(`report.comparability`) and another dtype.
"""

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq

from lm_jax.statistics import Interval
from polyattn_jax.audit.columns import Columns, columns
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.report import comparability, findings, paper
from polyattn_jax.report.paper import PaperModel
from polyattn_jax.studies.paper.results import ComparedNumber
from polyattn_jax.suites import openings


@dataclasses.dataclass(frozen=True)
class Audit:
    """A finished audit, and the paper's model that it stands beside.

    Attributes:
      summary: its summary.json.
      by_head: its heads.parquet.
      beside: the paper's model; None if none is of its architecture.
      same: whether that has the same weights, by their digest.
    """

    summary: AuditSummary
    by_head: Columns
    beside: PaperModel | None
    same: bool

    @property
    def name(self) -> str:
        """The model's own name."""
        return findings.model_name(self.summary)

    @property
    def named(self) -> bool:
        """Whether the model has the name of the paper's, which does not verify its weights."""
        return self.beside is not None and paper.match(self.summary.model) is self.beside


def read_audit(summary: AuditSummary, folder: Path) -> Audit:
    """The audit in a finished work folder."""
    match = paper.match(summary.model)
    by_head = columns(pq.read_table(folder / "heads.parquet"))
    same = match is not None and comparability.is_verified(summary, match)
    return Audit(summary, by_head, match or paper.nearest(summary.family), same)


def row(
    audit: Audit,
    item: str,
    quantity: str,
    ours: Interval | float,
    paper: float | tuple[float, float] | None,
    *,
    suite: str,
    cell: str,
    n: int,
    unit: str = "%",
    scale: float = 100.0,
    ends: tuple[float, float] | None = None,
    causes: tuple[str, ...] = (),
) -> ComparedNumber:
    """One row; `ours` is multiplied by `scale`, `paper` is in its own unit, or a range."""
    interval = ours if isinstance(ours, Interval) else None
    value = ours.estimate if isinstance(ours, Interval) else ours
    if isinstance(paper, tuple):
        paper, ends = None, paper
    if paper is None and ends is None:
        causes = ("the paper has no number of it",)
    else:
        causes = (*_model_causes(audit), *causes)
    return ComparedNumber(
        item=item,
        model=audit.name,
        beside=audit.beside.name if audit.beside else None,
        suite=suite,
        cell=cell,
        quantity=quantity,
        unit=unit,
        paper=paper,
        paper_low=ends[0] if ends else None,
        paper_high=ends[1] if ends else None,
        ours=scale * value,
        low=scale * interval.low if interval else None,
        high=scale * interval.high if interval else None,
        n=n,
        causes=causes,
    )


def _model_causes(audit: Audit) -> tuple[str, ...]:
    if audit.beside is None:
        return ()
    name = audit.beside.name
    if not (audit.same or audit.named):
        causes = comparability.dtype_obstacles(audit.summary)
        return (f"another model than {name}", *causes)
    causes = comparability.model_obstacles(audit.summary, audit.beside)
    unverified = [f"weights of the name {name}, not verified"] * (not audit.same)
    return (*unverified, *causes)


def differences(
    audit: Audit, length: tuple[int, int], prompts: tuple[int, int], *, calibrated: bool
) -> tuple[str, ...]:
    """What differs but for the model: tokens and prompts, ours and the paper's, and b_auto's."""
    causes = comparability.obstacles(length, prompts)
    return (*causes, *comparability.calibration_obstacles(audit.summary) * calibrated)


def openings_differ(suite: str) -> tuple[str, ...]:
    """The cause of every difference on literary openings, of which ours are fewer."""
    if suite != "copying":
        return ()
    return (f"{openings.COUNT} openings (paper: {paper.PROMPTS})",)


def at_b_auto(recipe: str) -> bool:
    """Whether a recipe has the calibrated bias, from its name."""
    return recipe.endswith("bauto")
