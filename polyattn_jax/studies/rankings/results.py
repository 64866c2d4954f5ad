"""Results of `iaj polyattn rankings`: `summary.json`, and the columns of its parquet files."""

import dataclasses

import pyarrow as pa

from lm_jax.run.results import Count, Real, Share
from polyattn_jax.audit.results.provenance import Provenance

# What is measured of a set, and what is trained before: nothing, its heads, the whole hybrid.
STAGES = ("untrained", "heads", "logits")
OUTCOMES = (
    *(f"text_{stage}" for stage in STAGES),
    *(f"answer_{stage}" for stage in STAGES),
    "accuracy_logits",
)

# One row per set: losses over those of softmax, in nats per token; right answers; the names of the
# statistics that chose the set, or "random".
SETS = pa.schema(
    [
        ("seed", pa.int32()),
        ("replaced", pa.float64()),
        ("set", pa.string()),
        ("chosen_by", pa.string()),
        ("groups", pa.list_(pa.int32())),
        *((f"text_{stage}", pa.float64()) for stage in STAGES),
        *((f"answer_{stage}", pa.float64()) for stage in STAGES),
        *((f"right_{stage}", pa.int32()) for stage in STAGES),
        ("right_softmax", pa.int32()),
        ("prompts", pa.int32()),
    ]
)
# One row per statistic and group.
COSTS = pa.schema(
    [
        ("statistic", pa.string()),
        ("group", pa.int32()),
        ("layer", pa.int32()),
        ("first_head", pa.int32()),
        ("cost", pa.float64()),
    ]
)


@dataclasses.dataclass(frozen=True)
class CellResult:
    """One statistic and outcome, of the sets of one size and seed.

    Attributes:
      replaced: percent of the groups that the sets replace.
      outcome: one of `OUTCOMES`.
      sets: number of random sets.
      correlation: rank correlation (Spearman) over random sets of the sum of the costs of the
        replaced groups with the loss, or with the share of wrong answers; null where one of the two
        is the same in all sets.
      chosen: outcome of the set of lowest cost, of an accuracy the share that is wrong; null where
        ties leave the statistic without one.
      random: mean outcome of the random sets.
      beaten: number of random sets that lose more than the chosen one.
    """

    seed: Count
    replaced: Real
    statistic: str
    outcome: str
    sets: Count
    correlation: Real | None
    chosen: Real | None
    random: Real
    beaten: Count


@dataclasses.dataclass(frozen=True)
class RankingResult:
    """One statistic and outcome over all sizes and seeds.

    Attributes:
      cells: number of cells with a correlation.
      correlation: mean rank correlation over them; null without any.
      low, high: least and greatest of them; null likewise.
      p_value: p-value of the mean correlation by deals of the costs to the groups, corrected over
        statistics after Holm; null likewise.
      gain: mean over cells of the outcome of random sets less that of the chosen one; null where
        ties leave the statistic without one.
      gain_low, gain_high: least and greatest of them; null likewise.
      beaten: number of random sets, over all cells, that lose more than the chosen one.
      of: number of random sets that they are of.
    """

    statistic: str
    outcome: str
    cells: Count
    correlation: Real | None
    low: Real | None
    high: Real | None
    p_value: Share | None
    gain: Real | None
    gain_low: Real | None
    gain_high: Real | None
    beaten: Count
    of: Count


@dataclasses.dataclass(frozen=True)
class RankingsSummary:
    """Which statistic tells beforehand what a hybrid loses once it is trained.

    Attributes:
      recipe: spec of the recipe.
      by: what is replaced together.
      groups: number of groups.
      sets: number of trained hybrids.
      first_tokens, second_tokens: tokens of a training in each stage.
      text_softmax: loss of softmax on the held-out windows, nats per token.
      answer_softmax: loss of softmax on the answers, nats per token of the answer.
      right_softmax: number of prompts that softmax answers.
      prompts: number of prompts.
      solved: whether softmax is shown to answer half of the prompts; if not, outcomes of answers
        say little.
      windows: number of held-out windows.
      seeds: number of seeds.
      results: entries by statistic and outcome, over all sizes and seeds.
      cells: entries of each size and seed.
    """

    model: str
    model_sha256: str
    provenance: Provenance
    recipe: str
    by: str
    task: str
    groups: Count
    sets: Count
    steps: Count
    logit_steps: Count
    first_tokens: Count
    second_tokens: Count
    text_softmax: Real
    answer_softmax: Real
    right_softmax: Count
    prompts: Count
    solved: bool
    windows: Count
    seeds: Count
    replaced: tuple[Real, ...]
    results: tuple[RankingResult, ...]
    cells: tuple[CellResult, ...]
