"""Results of the matched diagnostic: S_p on the rows of the prompts that are answered."""

import dataclasses

from lm_jax.run.results import Count
from lm_jax.statistics import Interval


@dataclasses.dataclass(frozen=True)
class SafeShares:
    """Safe rows among active ones, as the paper has them; null where no row is active.

    Attributes:
      measured: share with S_p < 1.
      predicted: share with p >= p*.
      rows: number of active rows.
      dead: share of active and dead rows together that are dead; null without rows.
    """

    measured: Interval | None
    predicted: Interval | None
    rows: Count
    dead: Interval | None


@dataclasses.dataclass(frozen=True)
class MatchedSafety:
    """One recipe on the rows of the needle prompts of the sweep (Tables 5, 12 and 14).

    Attributes:
      p: degree of the recipe.
      all: shares over all heads, the target being the argmax.
      top: shares over the `config.top_heads` heads of highest median S_2 at b_auto.
      own_top: shares over as many of highest median S_p at the recipe's degree and bias.
      top_false_negative: rows of `top` predicted safe and measured unsafe.
      answer_is_argmax: share of rows whose best key holds the answer.
      answer_dead: share of rows whose answer key has no weight.
      answer: shares over all heads, the target being the answer's key.
      answer_argmax: those of `answer` whose best key holds the answer.
      answer_argmax_top: those of `answer_argmax` in the heads of `top`.
    """

    recipe: str
    bias_kind: str
    p: int | float
    all: SafeShares
    top: SafeShares
    own_top: SafeShares
    top_false_negative: Count
    answer_is_argmax: Interval | None
    answer_dead: Interval | None
    answer: SafeShares
    answer_argmax: SafeShares
    answer_argmax_top: SafeShares
