"""The settings and the summary of the search for heads that may have a recipe."""

import dataclasses
import math
import operator

from lm_jax.errors import UsageError
from lm_jax.run.results import Count, Real
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
      rank: statistic that ranks the heads (`audit.ranking`).
      max_state: percent of the bytes of softmax's cache that a set may keep; 0 is no limit.
    """

    keep: tuple[float, ...]
    draws: int
    max_loss: float
    rank: str = "text"
    max_state: float = 0.0

    def __post_init__(self) -> None:
        if not self.keep or not all(0 <= share < 100 for share in self.keep):
            raise UsageError(f"--keep={self.keep} must be percentages from 0 to below 100")


@dataclasses.dataclass(frozen=True)
class SingleHead:
    """The recipe in one head alone.

    Attributes:
      change: change of the loss on the texts of the search, nats per token; null where another
        statistic ranks.
      rank: 0 for the head that costs most. Heads that are replaced together have one change and
        one rank.
      cost: what ranks the head, infinite where it is not finite.
    """

    layer: Count
    head: Count
    change: LossInterval | None
    rank: Count
    cost: Real | None = None

    @property
    def value(self) -> float:
        """The cost, which an earlier version has as the change alone."""
        if self.change is not None:
            return self.change.estimate
        return math.inf if self.cost is None else self.cost


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
      state: bytes that a prompt keeps in decoding; 0 in a summary of an earlier version.
    """

    kept: Count
    seed: Count | None
    text: TextLoss
    needle: ConditionResult
    accepted: bool
    others: dict[str, ConditionResult] = dataclasses.field(default_factory=dict)
    freed: Count = 0
    state: Count = 0

    @property
    def answers(self) -> tuple[ConditionResult, ...]:
        """The results of all tasks in their order."""
        return (self.needle, *self.others.values())


@dataclasses.dataclass(frozen=True)
class HybridResult:
    """Search for the heads that a recipe may have.

    Attributes:
      search: what was tried.
      bias: b of all heads, or by layer and head; of gdn the mean distance, in tokens.
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
      softmax_state: bytes that a prompt keeps with softmax; 0 likewise.
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
    softmax_state: Count = 0

    @property
    def front(self) -> tuple[HeadSet, ...]:
        """The sets that no other one betters: the Pareto front of state, loss and tasks.

        A set is bettered by one, or by softmax in all heads, that is no worse in the bytes of its
        state, its loss on text and its accuracy in every task, and better in one of them, by their
        estimates.
        """

        def goods(entry: HeadSet) -> tuple[float, ...]:
            accuracies = (own.accuracy.estimate for own in entry.answers)
            change = entry.text.change.estimate
            loss = math.inf if math.isnan(change) else change
            return (-float(entry.state), -loss, *accuracies)

        by_softmax = (self.softmax_needle, *self.softmax_others.values())
        softmax = (-float(self.softmax_state), 0.0, *(a.accuracy.estimate for a in by_softmax))
        tried = [softmax, *map(goods, self.frontier)]

        def bettered(one: HeadSet) -> bool:
            own = goods(one)
            return any(other != own and all(map(operator.ge, other, own)) for other in tried)

        return tuple(entry for entry in self.frontier if not bettered(entry))
