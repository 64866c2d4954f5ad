"""Typed results of interventions on a graph: on single features, and on supernodes."""

import dataclasses

from lm_jax.run.results import Count, Real, Share
from lm_jax.statistics import Interval
from sparse_jax.graphs.effects import Mode


@dataclasses.dataclass(frozen=True)
class NextToken:
    """A token and its probability of being next, by the model itself."""

    token: str
    id: Count
    probability: Share

    def __str__(self) -> str:
        return f"{self.token!r}, {100 * self.probability:.1f} %"


@dataclasses.dataclass(frozen=True)
class InterventionAgreement:
    """What a graph predicts of interventions against what is measured.

    Over the features that pruning kept, and the logits.

    Attributes:
      mode: what was frozen (`interventions.Mode`).
      interventions: pairs of a feature and a factor.
      spearman: rank correlation with its 95 % interval over features; null where one side is
        constant, or for a single feature.
      error: largest difference of predicted and measured effects, pre-activations and logits.
      largest: measured effect by absolute value.
    """

    mode: Mode
    interventions: Count
    spearman: Interval | None
    error: float
    largest: float


@dataclasses.dataclass(frozen=True)
class GroupOutcome:
    """What becomes of the next token where a group is scaled.

    Attributes:
      mode: what was frozen (`interventions.Mode`).
      change: change of the first logit node from the clean run, demeaned.
      probability: probability of that node's token.
      top: the most probable next tokens.
    """

    mode: Mode
    change: float
    probability: Share
    top: tuple[NextToken, ...]


@dataclasses.dataclass(frozen=True)
class GroupIntervention:
    """A proposed supernode all of whose features are multiplied by a factor (`groups`).

    Attributes:
      label: label as it was proposed, before features had labels.
      members: ids of nodes in the graph's file.
      factor: factor by which the activations are multiplied.
      predicted: change of the first logit node by the graph's edges from them to it.
      outcomes: measured effects, one for each mode.
    """

    label: str
    members: tuple[str, ...]
    factor: float
    predicted: float
    outcomes: tuple[GroupOutcome, ...]


@dataclasses.dataclass(frozen=True)
class SupernodeScore:
    """How far a proposed supernode acts as one thing (`groups.GroupScore`).

    Attributes:
      label: label as it was proposed.
      members: ids of nodes in the graph's file.
      removed: members that were removed, the most influential.
      within: mean cosine of the effects of removing two members; NaN where no two have one.
      outside: mean cosine of the effects of a member and another kept feature of its layers.
      off: distance of the effect of removing all from the sum of single effects, as a share of the
        length of that sum; NaN where it is 0.
    """

    label: str
    members: tuple[str, ...]
    removed: Count
    within: Real
    outside: Real
    off: Real
