"""Results of post-training and of multiple choice: the dataclasses of their JSON files.

    run.json         RunIdentity      settings, weights, data and seed of one run
    dense.json       DenseResult      loss of the dense model
    start.json       StartResult      one run before its first update
    result.json      RunResult        one bound of one seed; of a control ControlResult
    patterns.json    TextPatterns     attention of chosen heads, a list with one entry per text
    summary.json     PosttrainSummary

Two things make a number uncertain. An interval resamples documents: it holds for the one model that
was trained. Another seed trains another model, and so does another processor or number of threads,
because sums are then rounded in another order; the range over seeds shows how far they differ.
"""

import dataclasses
from typing import Any

from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval
from lm_jax.text.preparation import SplitSize


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean, least and greatest of a number over the runs of n seeds."""

    mean: float
    least: float
    most: float
    n: Count


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Settings, weights, data and seed that the folder of a run belongs to: `run.json`.

    Attributes:
      trained: what decides the parameters.
      shown: what decides only the report and the export.
    """

    trained: dict[str, Any]
    shown: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class DenseResult:
    """Loss of the dense model on the validation windows: `dense.json`.

    Attributes:
      base_sha256: identity of the model (`ModelIdentity.text`).
      validation: fingerprint of the windows.
      dtype: dtype of the computation.
      loss: loss in nats per token.
    """

    base_sha256: str
    validation: str
    dtype: str
    loss: float
    tokens: Count


@dataclasses.dataclass(frozen=True)
class HeadPatterns:
    """Attention weights of one head on one text, by query and key, in both models.

    Attributes:
      dense: weights before post-training, rounded to three digits; 0 where the softmax rounds to 0.
      sparse: weights after it; 0 also where the edge is closed.
      open: open edges.
      pairs: visible pairs.
    """

    layer: Count
    head: Count
    dense: tuple[tuple[Share, ...], ...]
    sparse: tuple[tuple[Share, ...], ...]
    open: Count
    pairs: Count


@dataclasses.dataclass(frozen=True)
class TextPatterns:
    """Attention on the beginning of a text: an entry of `patterns.json`."""

    text: str
    tokens: tuple[str, ...]
    heads: tuple[HeadPatterns, ...]


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Cost of merging adapters into weights of a lower precision.

    Attributes:
      dtype: dtype of the weights.
      update_lost: share of the adapters' update that rounding takes.
      loss_before: loss in nats per token before the adapters are merged; null where it was not
        evaluated.
      loss_after: the same, merged, on the same windows.
    """

    dtype: str
    update_lost: float
    loss_before: float | None
    loss_after: float


@dataclasses.dataclass(frozen=True)
class StartResult:
    """A run before its first update, with sampled gates on the held-out windows: `start.json`.

    Attributes:
      difference: loss less the dense model's, in nats per token.
      divergence: KL(dense || sparse), in nats per token.
      edges: expected share of open edges as sampled.
      bias: biases `[L][N]` that open the gates (`open_at_start`); null where they have one bias.
    """

    difference: float
    divergence: float
    edges: Share
    bias: tuple[tuple[float, ...], ...] | None


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One bound of one seed: `result.json`, on the held-out windows.

    Attributes:
      target: the bound of the loss or of the divergence, in nats per token.
      folder: folder of the run, in the work folder.
      loss: loss of the exported model, in nats per token.
      difference: the loss less the dense model's.
      edges: share of the visible edges that are open.
      open_edges_per_head: mean per head and window.
      strength: strength of the penalty at the end.
      tokens_seen: tokens seen in training.
      rounding: null where all weights were trained.
      divergence: KL(dense || sparse) in nats per token; null in results of earlier versions.
      start: the run before its first update; null in results of earlier versions.
      at_floor: updates at which the strength was on its floor.
      at_ceiling: updates at which it was on its ceiling.
      kinds: shares of the open edges by what they lead to, in 16 windows (`kinds.edge_kinds`); null
        in results of earlier versions.
    """

    seed: Count
    target: float
    folder: str
    loss: Interval
    dense_loss: Interval
    difference: Interval
    edges: Interval
    open_edges_per_head: float
    windows: Count
    validation_tokens: Count
    strength: float
    steps: Count
    tokens_seen: Count
    rounding: Rounding | None
    divergence: Interval | None = dataclasses.field(default=None, kw_only=True)
    start: StartResult | None = dataclasses.field(default=None, kw_only=True)
    at_floor: Count = dataclasses.field(default=0, kw_only=True)
    at_ceiling: Count = dataclasses.field(default=0, kw_only=True)
    kinds: dict[str, Share] | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class ComparedRun(RunResult):
    """A run beside the control of its seed.

    Attributes:
      bound: index of its bound in `PosttrainSummary.bounds`.
      over_control: the loss less the control's; null without controls.
    """

    bound: Count
    over_control: Interval | None


@dataclasses.dataclass(frozen=True)
class ControlResult:
    """The same training with every gate open: `result.json` of a control."""

    seed: Count
    folder: str
    loss: Interval
    difference: Interval
    steps: Count
    tokens_seen: Count
    rounding: Rounding | None


@dataclasses.dataclass(frozen=True)
class ControlLoss:
    """The loss of a control that bounds refer to, in nats per token: `loss.json`."""

    loss: float


@dataclasses.dataclass(frozen=True)
class SharedControls:
    """Where the controls are of a post-training without its own: `shared_controls.json`.

    Attributes:
      folder: the work folder that has them, from the one of this file.
    """

    folder: str


@dataclasses.dataclass(frozen=True)
class BoundSummary:
    """A bound with its share of edges and its losses over all seeds.

    Attributes:
      target: the bound in nats per token; its mean over seeds, where it is relative to controls.
      slack: the bound less the dense loss; of the divergence, the bound.
      over_control: null where not all runs have a control.
      divergence: null where not all runs have measured it.
    """

    target: float
    slack: float
    seeds: tuple[Count, ...]
    edges: Spread
    loss: Spread
    difference: Spread
    over_control: Spread | None
    divergence: Spread | None = None


@dataclasses.dataclass(frozen=True)
class CorpusSummary:
    """What was trained on."""

    source: str
    splits: dict[str, SplitSize]


@dataclasses.dataclass(frozen=True)
class PosttrainSummary:
    """Post-training under bounds: `summary.json`.

    Attributes:
      model: the folder or name of the base.
      dense_loss: loss of the base, in nats per token.
    """

    model: str
    model_sha256: str
    family: str
    context: Count
    corpus: CorpusSummary
    trained_parameters: Count
    dense_loss: float
    validation_tokens: Count
    seeds: tuple[Count, ...]
    bounds: tuple[BoundSummary, ...]
    runs: tuple[ComparedRun, ...]
    controls: tuple[ControlResult, ...]
    device: str
