"""Results of the diagnosis of score rows."""

import dataclasses

from lm_jax.run.results import Count
from lm_jax.statistics import Interval


@dataclasses.dataclass(frozen=True)
class ActiveMedians:
    """Medians over active rows.

    Attributes:
      active: number of active distractors A.
      u_star: score of the target above the threshold -b.
    """

    s_2: float
    s_softmax: float
    relative_margin: float
    active: float
    u_star: float


@dataclasses.dataclass(frozen=True)
class Prevalence:
    """Unsafe rates of one suite and bias, over rows whose target is the argmax (Tables 1, 10, 11).

    A dead row is unsafe. It counts in `softmax`, `unsafe` and `by_window`, as do all rows that have
    a target; the paper's tables have the shares of active rows alone.

    Attributes:
      rows: number of rows of any status.
      dead: share of all rows.
      invalid: number of rows with a score that is not finite.
      argmax_is_answer: share of all rows whose best key holds the answer; null where no key does.
      softmax: unsafe rate of softmax on the rows of `unsafe`; null without such rows.
      unsafe: unsafe rate by degree, of all rows that have a target; empty without such rows.
      softmax_active: the same as `softmax`, of active rows; null without active rows.
      unsafe_active: the same as `unsafe`, of active rows; empty without active rows.
      ties: number of active rows with S_p = 1, by degree.
      undecided: number of rows of `unsafe` that the error bound leaves open, by degree and for
        `softmax`.
      by_window: the same as `unsafe`, of layers with a `window` and of `full` ones, in a model that
        has both; empty in others.
      median: null without active rows.
    """

    suite: str
    bias_kind: str
    bias: float
    rows: Count
    active_rows: Count
    prompts: Count
    dead: Interval
    invalid: Count
    argmax_is_answer: Interval | None
    softmax: Interval | None
    unsafe: dict[str, Interval]
    softmax_active: Interval | None
    unsafe_active: dict[str, Interval]
    ties: dict[str, Count]
    undecided: dict[str, Count]
    by_window: dict[str, dict[str, Interval]] = dataclasses.field(default_factory=dict)
    median: ActiveMedians | None = None


@dataclasses.dataclass(frozen=True)
class SoftmaxComparison:
    """What r^p loses and sharpens against softmax on the rows of one suite and bias.

    Over argmax rows of any status that has a target; a dead row concentrates on nothing.

    Attributes:
      p: the degree; 1 for a feature map, whose S is that of its own weights.
      rows: number of rows.
      lost: share of all rows that softmax concentrates and r^p does not.
      sharpened: share of all rows that r^p concentrates and softmax does not.
      lost_of_concentrated: lost rows as a share of those that softmax concentrates; null where it
        concentrates none.
      concentrated: number of rows that softmax concentrates.
      balance: lost - sharpened, the unsafe share of r^p less that of softmax.
      change: median over rows of the relative change of the head's output.
      change_90: 90 % quantile of that change.
      undecided: number of rows that the error bounds leave open.
    """

    suite: str
    bias_kind: str
    p: int | float
    rows: Count
    lost: Interval
    sharpened: Interval
    lost_of_concentrated: Interval | None
    concentrated: Count
    balance: Interval
    change: Interval
    change_90: float
    undecided: Count


@dataclasses.dataclass(frozen=True)
class BoundAgreement:
    """Safety of active rows, predicted (p >= p*) against measured (S_p < 1) (Table 8).

    Attributes:
      p: the degree.
      n: number of active rows.
      agree: share of rows on which the two agree; null without rows.
      false_negative: number predicted safe and measured unsafe.
      false_negative_eps: number of those with S_p >= 1 + 1e-6.
      false_positive: number predicted unsafe and measured safe.
      undecided: number that the error bound leaves open, in none of the three counts.
    """

    suite: str
    bias_kind: str
    p: int | float
    n: Count
    agree: Interval | None
    false_negative: Count
    false_negative_eps: Count
    false_positive: Count
    undecided: Count


@dataclasses.dataclass(frozen=True)
class RowShares:
    """A share of the rows of one suite that have a target; null where S_p is not measured.

    Dead rows count in each share, and are not safe.

    Attributes:
      recipe: rows under the recipe, over all heads.
      recipe_top: rows under the recipe, over the heads of highest median S_2.
      softmax: rows under softmax, the same rows as `recipe`.
      softmax_top: rows under softmax, the same rows as `recipe_top`.
      dead: rows that are dead under the recipe, over all heads.
      dead_top: the same over the heads of `recipe_top`.
    """

    recipe: Interval | None = None
    recipe_top: Interval | None = None
    softmax: Interval | None = None
    softmax_top: Interval | None = None
    dead: Interval | None = None
    dead_top: Interval | None = None
