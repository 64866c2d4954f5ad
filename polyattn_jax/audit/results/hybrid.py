"""The settings and the summary of the search for heads that may have a recipe."""

import dataclasses

from lm_jax.errors import UsageError
from lm_jax.run.results import Count
from polyattn_jax.audit.results.conditions import ConditionResult, LossInterval, TextLoss
from polyattn_jax.audit.results.provenance import Provenance
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe


@dataclasses.dataclass(frozen=True)
class Search:
    """What `check --hybrid` tries.

    Attributes:
      keep: percent of all heads that keep softmax.
      draws: random sets of each size.
      max_loss: nats per token that the loss on text may rise.
    """

    keep: tuple[float, ...]
    draws: int
    max_loss: float

    def __post_init__(self) -> None:
        if not self.keep or not all(0 <= share < 100 for share in self.keep):
            raise UsageError(f"--keep={self.keep} must be percentages from 0 to below 100")


@dataclasses.dataclass(frozen=True)
class SingleHead:
    """The recipe in one head alone.

    Attributes:
      change: change of the loss on the texts of the search, nats per token.
      rank: 0 for the head that costs most. Heads that are replaced together have one change and
        one rank.
    """

    layer: Count
    head: Count
    change: LossInterval
    rank: Count


@dataclasses.dataclass(frozen=True)
class HeadSet:
    """The recipe in all heads but some.

    Attributes:
      kept: number of heads that keep softmax.
      seed: seed of the random heads that keep it; null for the heads that cost most.
      text: loss on the texts of the measurement.
      needle: accuracy on the first task, by default the needle.
      accepted: whether the text and all tasks hold.
      others: accuracy on further tasks, by name.
      freed: number of key heads that no softmax head reads, whose cache goes.
    """

    kept: Count
    seed: Count | None
    text: TextLoss
    needle: ConditionResult
    accepted: bool
    others: dict[str, ConditionResult] = dataclasses.field(default_factory=dict)
    freed: Count = 0

    @property
    def answers(self) -> tuple[ConditionResult, ...]:
        """The results of all tasks in their order."""
        return (self.needle, *self.others.values())


@dataclasses.dataclass(frozen=True)
class HybridResult:
    """Search for the heads that a recipe may have.

    Attributes:
      search: what was tried.
      bias: b of all heads, or by layer and head.
      layers: number of layers of the model.
      heads: query heads of each layer.
      search_texts: number of texts that ranked the heads.
      documents: number of documents that all texts come from; fewer than texts where they are
        windows of a document, which are not independent.
      singles: results of single heads, by layer and head.
      softmax: loss of softmax on the texts of the measurement.
      softmax_needle: accuracy of softmax on the first task.
      frontier: ranked sets by the number of heads kept, each followed by the random ones.
      best: the accepted ranked set with the fewest softmax heads; null where none is.
      tasks: names of the tasks in their order.
      softmax_others: accuracy of softmax on further tasks, by name.
      kv_heads: number of key heads of the model; 0 in a file of an earlier version.
    """

    model: str
    provenance: Provenance
    search: Search
    recipe: str
    bias: float | tuple[tuple[float, ...], ...]
    layers: Count
    heads: Count
    search_texts: Count
    documents: Count
    singles: tuple[SingleHead, ...]
    softmax: TextLoss
    softmax_needle: ConditionResult
    frontier: tuple[HeadSet, ...]
    best: HybridRecipe | None
    tasks: tuple[str, ...] = ("needle",)
    softmax_others: dict[str, ConditionResult] = dataclasses.field(default_factory=dict)
    kv_heads: Count = 0
