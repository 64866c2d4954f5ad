"""Results of `iaj polyattn distill`: `summary.json`, and the columns of its parquet files."""

import dataclasses

import pyarrow as pa

from lm_jax.run.results import Count, Real, Share
from lm_jax.statistics import Interval
from polyattn_jax.audit.results.provenance import Provenance

# One row per head. A row of weights is safe where S < 1 on the key that softmax prefers.
ROWS = pa.schema(
    [
        ("layer", pa.int16()),
        ("head", pa.int16()),
        ("replaced", pa.bool_()),
        ("rows", pa.int32()),
        ("safe_softmax", pa.float32()),
        ("safe_before", pa.float32()),
        ("safe_after", pa.float32()),
        ("s_before", pa.float32()),
        ("s_after", pa.float32()),
        ("error_before", pa.float32()),
        ("error_after", pa.float32()),
    ]
)
# One row per window of text; losses are sums in nats.
LOSSES = pa.schema(
    [
        ("document", pa.int64()),
        ("tokens", pa.int64()),
        ("softmax", pa.float64()),
        ("before", pa.float64()),
        ("after", pa.float64()),
    ]
)
# The same after the first stage and after the second; divergences are KL(softmax || hybrid).
LOGITS = pa.schema(
    [
        ("document", pa.int64()),
        ("tokens", pa.int64()),
        ("softmax", pa.float64()),
        ("first", pa.float64()),
        ("second", pa.float64()),
        ("divergence_first", pa.float64()),
        ("divergence_second", pa.float64()),
    ]
)


@dataclasses.dataclass(frozen=True)
class HeadRepair:
    """One head before and after the training.

    Attributes:
      rows: number of rows whose S was read.
      safe_softmax: share of them with S < 1 under softmax.
      safe_before, safe_after: the same under the recipe, on the key that softmax prefers; null
        where S is not defined, as weights may be negative.
      s_before, s_after: median S.
      error_before, error_after: sum of |z' - z|^2 over that of |z|^2, over all tokens.
    """

    layer: Count
    head: Count
    rows: Count
    safe_softmax: Share
    safe_before: Share | None
    safe_after: Share | None
    s_before: Real
    s_after: Real
    error_before: Real
    error_after: Real

    @property
    def repaired(self) -> float:
        """Share of the error that training removes; negative where it adds to it."""
        return 1 - self.error_after / self.error_before if self.error_before > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class LogitStage:
    """What the second stage changes, on the windows of the first.

    Attributes:
      targets: weights that have adapters.
      parameters: number of trained numbers, with those of the first stage.
      steps: updates.
      trained_tokens: tokens predicted in this stage.
      divergence_before, divergence_after: mean KL(softmax || hybrid) of the next token, in nats,
        before and after this stage.
      divergence_change: difference, after less before, paired.
      after: loss of the hybrid less that of softmax, nats per token, paired; before this stage it
        is that after the first.
      change: loss after less before this stage, paired.
    """

    targets: tuple[str, ...]
    parameters: Count
    steps: Count
    trained_tokens: Count
    divergence_before: Interval
    divergence_after: Interval
    divergence_change: Interval
    after: Interval
    change: Interval


@dataclasses.dataclass(frozen=True)
class DistillSummary:
    """Replaced heads before and after a training, on text that it did not see.

    All but `logits` is of the first stage, on the outputs of heads. Intervals of losses and errors
    resample documents, those of rank correlations heads; they are of one training.

    Attributes:
      recipe: spec of the recipe.
      bias: b of all heads, or by layer and head; of gdn the mean distance, in tokens.
      trained: "matrices of the feature map" or "adapters of queries and keys".
      parameters: number of trained numbers.
      layers: number of layers of the model.
      heads: query heads of each layer.
      replaced: number of heads with the recipe.
      steps: updates.
      trained_tokens: tokens predicted in training.
      windows: number of windows measured.
      documents: number of documents that they are of.
      tokens: number of tokens predicted in them.
      error_before, error_after: sum of |z' - z|^2 over that of |z|^2, over all replaced heads, each
        on the stream of the frozen model.
      error_change: difference, after less before, paired.
      softmax_loss: loss of the frozen model, nats per token.
      before, after: loss of the hybrid less that of softmax, paired.
      change: loss after less before, paired.
      error_rank, repair_rank, after_rank: rank correlation (Spearman) over the replaced heads of
        their safe share before training with the error before, with the share of it that training
        removes, and with the error after; null where one of the two is the same in all heads.
      by_head: the replaced heads.
      logits: the second stage; null without one.
    """

    model: str
    model_sha256: str
    provenance: Provenance
    recipe: str
    bias: float | tuple[tuple[float, ...], ...]
    trained: str
    parameters: Count
    layers: Count
    heads: Count
    replaced: Count
    steps: Count
    trained_tokens: Count
    windows: Count
    documents: Count
    tokens: Count
    error_before: Interval
    error_after: Interval
    error_change: Interval
    softmax_loss: Interval
    before: Interval
    after: Interval
    change: Interval
    error_rank: Interval | None
    repair_rank: Interval | None
    after_rank: Interval | None
    by_head: tuple[HeadRepair, ...]
    logits: LogitStage | None = None
