"""Results of the paper's tables on given models: the dataclasses of summary.json."""

import dataclasses
from typing import Literal

from lm_jax.run.provenance import Provenance
from lm_jax.run.results import Count
from polyattn_jax.audit.config import AuditConfig

ClaimVerdict = Literal["holds", "fails", "undecided", "not measured"]


@dataclasses.dataclass(frozen=True)
class Unmeasured:
    """A table or figure of the paper without a number of ours.

    Attributes:
      item: the table or figure.
      title: what it shows.
      reason: why there is no number.
    """

    item: str
    title: str
    reason: str


@dataclasses.dataclass(frozen=True)
class StudiedModel:
    """A model that was asked for.

    Attributes:
      model: the model as it was asked for.
      name: name of the model.
      available: whether it was audited.
      reason: why not; empty where it was.
      folder: folder of its audit, in the work folder; empty without one.
      family: family of its architecture; empty without an audit.
      beside: the paper's model of the same name, or else of the same architecture; null if there
        is none.
      same: whether that has the same weights, by their digest.
      named: whether it has the same name.
    """

    model: str
    name: str
    available: bool
    reason: str
    folder: str
    family: str
    beside: str | None
    same: bool
    named: bool = False


@dataclasses.dataclass(frozen=True)
class ClaimFinding:
    """What one model says of a claim: a verdict, and its numbers in a few words."""

    verdict: ClaimVerdict
    text: str


@dataclasses.dataclass(frozen=True)
class ClaimResult:
    """A claim of the paper, and whether it holds on our models.

    Attributes:
      claim: the claim in one sentence.
      where: section of the paper.
      paper: the paper's own numbers.
      evidence: the files of each audit, and what of them, that it is judged by.
      verdict: verdict over all models that were measured.
      by_model: findings by the name of the model.
    """

    claim: str
    where: str
    paper: str
    evidence: str
    verdict: ClaimVerdict
    by_model: dict[str, ClaimFinding]


@dataclasses.dataclass(frozen=True)
class PaperSummary:
    """The paper's tables and figures on given models.

    Attributes:
      models: those that were asked for.
      config: settings of each audit, but for its model.
      claims: judged claims, in the order of the paper.
      rows: number of lines of comparison.parquet.
      compared: how many of them stand beside a number of the paper.
      items: tables, figures and appendices with a number of ours.
      unmeasured: those without.
    """

    models: tuple[StudiedModel, ...]
    config: AuditConfig
    claims: tuple[ClaimResult, ...]
    rows: Count
    compared: Count
    items: tuple[str, ...]
    unmeasured: tuple[Unmeasured, ...]
    provenance: Provenance
