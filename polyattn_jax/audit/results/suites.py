"""Results of the suites that a setting names: one suite at one length."""

import dataclasses

from lm_jax.run.results import Count
from lm_jax.statistics import Interval
from polyattn_jax.audit.results.conditions import ConditionResult


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """Answers to one suite at one length, and the diagnostic on the rows of the same prompts.

    Attributes:
      suite: name of the suite, one of `suites.named.NAMES`.
      length: tokens that are read of each prompt.
      conditions: softmax and every recipe in all heads. An answer is right if greedy decoding
        writes all of it; the loss is per token of the answer. A verdict has the accuracy of
        softmax on this suite as its only control.
      failures: wrong answers by recipe and by the name of the needle that they copy, or "other".
      safe: share of rows with S_p < 1 by recipe, of softmax S < 1; a dead row is not safe. Null
        where it is not measured.
      dead: share of the same rows that are dead, by recipe; null likewise.
    """

    suite: str
    length: Count
    conditions: tuple[ConditionResult, ...]
    failures: dict[str, dict[str, Count]]
    safe: dict[str, Interval | None]
    dead: dict[str, Interval | None]
