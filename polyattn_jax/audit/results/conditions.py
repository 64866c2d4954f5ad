"""Results of one condition of a stage: a recipe in some heads, against softmax on the same data."""

import dataclasses
from typing import Literal

from lm_jax.run.results import Count, Real, Share
from lm_jax.statistics import Interval

VerdictName = Literal["preserve", "no-go", "undecided"]


@dataclasses.dataclass(frozen=True)
class LossInterval(Interval):
    """The interval of a mean loss, of its change, or of the exponential of either.

    Unbounded for one prompt, NaN for a NaN, infinite where the exponential overflows.
    """

    estimate: Real
    low: Real
    high: Real


@dataclasses.dataclass(frozen=True)
class ConditionResult:
    """Accuracy of one recipe in some heads, against softmax on the same prompts.

    Attributes:
      cell: the recipe, or the head set of an ablation, as in `answers.parquet`.
      bias: b of all heads, of gdn the mean distance; null where each head has its own.
      heads: number of heads that it replaces softmax in.
      verdict: verdict on the recipe; "undecided" where a control is not met.
      delta: accuracy less that of softmax.
      p_value: p-value of the exact two-sided McNemar test.
      lost: number of prompts that only softmax gets right.
      won: number of prompts that only the recipe gets right.
      loss: mean, of the target token.
      median_rank: rank of the target among the logits, 0 for the prediction.
      dead_rows_per_prompt: mean over prompts, summed over layers, heads and queries.
    """

    cell: str
    recipe: str
    bias: Real
    heads: Count
    accuracy: Interval
    verdict: VerdictName
    delta: Interval
    p_value: Share
    lost: Count
    won: Count
    loss: Real
    median_rank: float
    dead_rows_per_prompt: float


@dataclasses.dataclass(frozen=True)
class TextLoss:
    """Language-modelling loss of texts with one recipe in some heads, against softmax.

    Means are over all predicted tokens, intervals resample texts.

    Attributes:
      cell: the recipe, or a head set.
      bias: b of all heads, of gdn the mean distance; null where each head has its own.
      heads: number of heads that it replaces softmax in.
      loss: nats per token.
      change: `loss` less that of softmax, paired by text.
      perplexity: exp of `loss`, and of the ends of its interval.
      perplexity_ratio: ratio to that of softmax, exp of `change`.
      tokens: how many were predicted.
      dead_rows_per_text: mean over texts, summed over layers, heads and queries.
    """

    cell: str
    recipe: str
    bias: Real
    heads: Count
    loss: LossInterval
    change: LossInterval
    perplexity: LossInterval
    perplexity_ratio: LossInterval
    tokens: Count
    dead_rows_per_text: float
