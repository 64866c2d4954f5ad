"""An audit beside a model of the paper, and one row of their comparison.

A model that the paper has not tested stands beside the nearest of its four, of the same
architecture family, and that is the first cause of every difference; of weights that have the name
of one of its models, the four and three further ones, it is that they are not verified. Other
causes are lengths that differ by more than a tenth, less than half of the prompts, another length
of the calibration and another dtype (`comparability`). Where none of them but the second is there,
a number is judged.
"""

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq

from lm_jax.run.results import Count, Real
from lm_jax.statistics import Interval
from polyattn_jax.audit.columns import Columns, columns
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.report import comparability, findings, paper
from polyattn_jax.report.paper import PaperModel
from polyattn_jax.suites import openings

# Units of shares, which are printed in percent.
PERCENT = ("%", "points")
# By how much a number may differ and still agree, in its unit, or as a share of the paper's number.
TOLERANCES = {
    "unsafe rows": 5.0,
    "accuracy": 7.0,
    "change of accuracy": 7.0,
    "bound and measure agree": 5.0,
    "b_auto": 0.1,
}
RELATIVE_TOLERANCES = dict.fromkeys(
    ("median S_2", "median relative margin", "median active distractors"), 0.2
)


@dataclasses.dataclass(frozen=True)
class ComparedNumber:
    """A number of the paper beside ours.

    Attributes:
      item: the table, figure or appendix.
      model: name of our model.
      beside: the paper's model whose number it is: that of the same weights, or else of the same
        architecture; null if there is none.
      suite: name of the suite in the files of the audit.
      cell: what the number is of: a recipe, a degree, a set of heads.
      quantity: what was measured.
      unit: unit of all numbers here.
      paper: the paper's number; null where it prints none.
      paper_low: end of the interval or range that the paper prints; null if it prints none.
      paper_high: the other end.
      ours: our number.
      low: end of its 95 % interval; null where it has none.
      high: the other end.
      n: number of our prompts; 0 for what was not measured on prompts.
      causes: what differs between the two, and may be why the numbers do.
    """

    item: str
    model: str
    beside: str | None
    suite: str
    cell: str
    quantity: str
    unit: str
    paper: float | None
    paper_low: float | None
    paper_high: float | None
    ours: Real
    low: Real | None
    high: Real | None
    n: Count
    causes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Audit:
    """A finished audit, and the paper's model that it stands beside.

    Attributes:
      summary: content of its summary.json.
      by_head: columns of its heads.parquet.
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

    @property
    def printed(self) -> PaperModel:
        """The paper's numbers that stand beside the audit's; without a model there are none."""
        return self.beside or paper.NO_MODEL


def read_audit(summary: AuditSummary, folder: Path) -> Audit:
    """The audit in a finished work folder."""
    return audit_of(summary, columns(pq.read_table(folder / "heads.parquet")))


def audit_of(summary: AuditSummary, by_head: Columns) -> Audit:
    """An audit beside the paper's model of its name, or else of its architecture."""
    match = paper.match(summary.model)
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
    ends: tuple[float, float] | None = None,
    causes: tuple[str, ...] = (),
) -> ComparedNumber:
    """One row; `ours` is a share where the unit is one of `PERCENT`.

    `paper` is in the unit, or a range. The item is that of the four models; a number of a further
    one stands in its own table.
    """
    scale = 100.0 if unit in PERCENT else 1.0
    interval = ours if isinstance(ours, Interval) else None
    value = ours.estimate if isinstance(ours, Interval) else ours
    if isinstance(paper, tuple):
        paper, ends = None, paper
    if paper is None and ends is None:
        causes = ("the paper has no number of it",)
    else:
        item = audit.printed.tables.get(item, item)
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


def tolerance(one: ComparedNumber) -> float | None:
    """The difference at which the two numbers still agree; None where they are not judged.

    They are judged where nothing differs but that weights of the paper's name are not verified.
    """
    if one.paper is None or {*one.causes} - {_unverified(one.beside)}:
        return None
    if one.quantity in RELATIVE_TOLERANCES:
        return RELATIVE_TOLERANCES[one.quantity] * abs(one.paper)
    return TOLERANCES.get(one.quantity)


def _model_causes(audit: Audit) -> tuple[str, ...]:
    if audit.beside is None:
        return ()
    if not (audit.same or audit.named):
        causes = comparability.dtype_obstacles(audit.summary)
        return (f"another model than {audit.beside.name}", *causes)
    causes = comparability.model_obstacles(audit.summary, audit.beside)
    return (*[_unverified(audit.beside.name)] * (not audit.same), *causes)


def _unverified(name: str | None) -> str:
    return f"weights of the name {name}, not verified"


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
    return (f"{openings.COUNT} openings (paper: {paper.SETTINGS.prompts})",)


def at_b_auto(recipe: str) -> bool:
    """Whether a recipe has the calibrated bias, from its name."""
    return recipe.endswith("bauto")
