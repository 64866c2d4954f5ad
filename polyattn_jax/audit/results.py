"""Results of an audit and of a check: the dataclasses of their `summary.json`.

The report shows the numbers of `summary.json` and draws the parquet files (columns: `schema`).
Rates, shares and accuracies are between 0 and 1, losses in nats, intervals of 95 %. A suite is
named as in `suites.json`: `niah_256`, `control`, `induction`, `mqar`, `prompts`. A kind of bias is
`zero`, `auto`, or the number b of a recipe.
"""

import dataclasses

from lm_jax.evaluate.multiple_choice.results import ChoiceTask
from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval
from polyattn_jax.audit.condition_results import (
    ConditionResult,
    LossInterval,
    TextLoss,
    VerdictName,
)
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.matched_results import MatchedSafety
from polyattn_jax.audit.provenance import Provenance
from polyattn_jax.audit.suite_results import SuiteResult
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.linear_state import LinearState


@dataclasses.dataclass(frozen=True)
class CopyResult:
    """Softmax on one of the two copies of random tokens.

    Attributes:
      loss: per token.
      top_1: share of tokens that are the most likely one.
      tokens: how many were predicted, over all prompts.
    """

    loss: LossInterval
    top_1: Interval
    tokens: Count


@dataclasses.dataclass(frozen=True)
class Controls:
    """What softmax does on the control prompts.

    Attributes:
      accuracy: of each needle suite, and of `control`, where the needle was left out.
      first_copy: random tokens, which nothing predicts.
      second_copy: the same tokens again, which induction predicts.
      unmet: a sentence for each condition of a verdict that softmax is not shown to meet.
    """

    accuracy: dict[str, Interval]
    first_copy: CopyResult
    second_copy: CopyResult
    unmet: tuple[str, ...]


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
      softmax_active: as `softmax`, of active rows; null without active rows.
      unsafe_active: as `unsafe`, of active rows; empty without active rows.
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
    """Predicted (p >= p*) against measured (S_p < 1) safety of active rows (Table 8).

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
class RecipeVerdict:
    """A recipe's verdict with its reason and the next step (section 6).

    Attributes:
      finding: what the test found, the same for all recipes that fare alike.
      reading: what the safe share adds; may be empty.
      reason: `finding` with its figures, and `reading`.
      next: what to do next.
      could_decide: number of prompts that softmax gets right, which alone can be lost.
      least_prompts: fewest prompts that can end in "preserve".
      safe: share of rows with S_p < 1, over all heads; a dead row is not safe. Null where it is
        not measured.
      top_safe: the same over the `config.top_heads` heads of highest median S_2.
      dead, top_dead: share of the same rows that are dead.
      loss_p: one-sided p of a loss of the tolerance or more, of this recipe alone: "preserve" takes
        2.5 % or less.
      loss_p_holm: the same corrected by Holm for the number of recipes tried.
    """

    recipe: str
    verdict: VerdictName
    finding: str
    reading: str
    reason: str
    next: str
    could_decide: Count
    least_prompts: Count
    safe: Interval | None
    top_safe: Interval | None
    dead: Interval | None
    top_dead: Interval | None
    loss_p: Share
    loss_p_holm: Share


@dataclasses.dataclass(frozen=True)
class HeadTypes:
    """Number of heads of each type, in all and at both ends of the ranking.

    Attributes:
      size: number of heads at an end.
    """

    size: Count
    all: dict[str, Count]
    top: dict[str, Count]
    bottom: dict[str, Count]


@dataclasses.dataclass(frozen=True)
class Decisiveness:
    """Prompts that head sets of one size leave right, and the paper's flag.

    Attributes:
      size: number K of heads in a set.
      n: number of prompts.
      top: prompts right with the recipe in the K heads of highest median S_2.
      bottom: the same for the lowest.
      random: the same for each random set.
      beaten: number of random sets that the top set is strictly worse than.
      decisive: whether these are all; null with fewer than 19 sets.
    """

    size: Count
    n: Count
    top: Count
    bottom: Count
    random: tuple[Count, ...]
    beaten: Count
    decisive: bool | None


@dataclasses.dataclass(frozen=True)
class SuiteAblation:
    """The head sets of the ablation on one suite at one length.

    Attributes:
      suite: its name, of `suites.named.NAMES`.
      length: tokens that are read of each prompt.
      conditions: one recipe in no head and in each head set.
      decisiveness: by size of the head sets.
    """

    suite: str
    length: Count
    conditions: tuple[ConditionResult, ...]
    decisiveness: tuple[Decisiveness, ...]


@dataclasses.dataclass(frozen=True)
class AuditSummary:
    """Audit of a model: every number of its report.

    Attributes:
      layers: of the model.
      heads: query heads of each layer.
      degrees: of S_p.
      prevalence: by suite and bias.
      against_softmax: by suite, bias and degree.
      bound: by suite, bias and degree.
      sweep: softmax and every recipe in all heads, on the needle prompts.
      prompts: the same on prompts of the user; empty without them.
      texts: softmax and every recipe in all heads, on texts of the user; empty without them.
      choices: softmax and every recipe in all heads, by multiple-choice task, each recipe paired
        with softmax on the same questions; empty without tasks.
      suites: softmax and every recipe in all heads, by suite and length of `config.suites`; empty
        without them.
      linear: by recipe, what it costs as linear attention.
      verdicts: by recipe, on the needle prompts.
      matched: S_p on the rows of these prompts, by recipe that is a normalised power.
      ranking_suite: the suite whose rows rank the heads.
      head_types: null without induction prompts.
      ablation: one recipe in no head and in each head set; empty without ablation.
      decisiveness: by size of the head sets.
      suite_ablation: the same on the suites of `config.ablation_suites`; empty without them.
      single_heads: the recipe of the ablation in no head, and in single heads at both ends of the
        ranking; empty without `config.single_heads`.
      rows: number of rows of `rows.parquet`.
      answers: number of rows of `answers.parquet`.
      weights: names of the weight files.
    """

    model: str
    config: AuditConfig
    layers: Count
    heads: Count
    degrees: tuple[int | float, ...]
    calibration: Calibration
    controls: Controls
    prevalence: tuple[Prevalence, ...]
    against_softmax: tuple[SoftmaxComparison, ...]
    bound: tuple[BoundAgreement, ...]
    sweep: tuple[ConditionResult, ...]
    prompts: tuple[ConditionResult, ...]
    texts: tuple[TextLoss, ...]
    choices: dict[str, ChoiceTask]
    suites: tuple[SuiteResult, ...]
    linear: tuple[LinearState, ...]
    verdicts: tuple[RecipeVerdict, ...]
    matched: tuple[MatchedSafety, ...]
    ranking_suite: str
    head_types: HeadTypes | None
    ablation: tuple[ConditionResult, ...]
    decisiveness: tuple[Decisiveness, ...]
    suite_ablation: tuple[SuiteAblation, ...]
    single_heads: tuple[ConditionResult, ...]
    rows: Count
    answers: Count
    model_sha256: str
    family: str
    weights: tuple[str, ...]
    provenance: Provenance


@dataclasses.dataclass(frozen=True)
class RowShares:
    """A share of the rows of one suite that have a target; null where S_p is not measured.

    Dead rows count in each share, and are not safe.

    Attributes:
      recipe: under the recipe, over all heads.
      recipe_top: under the recipe, over the heads of highest median S_2.
      softmax: under softmax, on the same rows as `recipe`.
      softmax_top: under softmax, on the same rows as `recipe_top`.
      dead: rows that are dead under the recipe, over all heads.
      dead_top: the same over the heads of `recipe_top`.
    """

    recipe: Interval | None = None
    recipe_top: Interval | None = None
    softmax: Interval | None = None
    softmax_top: Interval | None = None
    dead: Interval | None = None
    dead_top: Interval | None = None


@dataclasses.dataclass(frozen=True)
class PromptResults:
    """The answers to prompts of the user."""

    softmax: ConditionResult
    recipe: ConditionResult


@dataclasses.dataclass(frozen=True)
class TextResults:
    """Loss and rows of texts of the user.

    Attributes:
      unsafe: share of rows with S_p >= 1, dead ones among them; of softmax with S >= 1.
      against_softmax: null where S_p was not measured or no row has a target.
    """

    softmax: TextLoss
    recipe: TextLoss
    unsafe: RowShares
    against_softmax: SoftmaxComparison | None


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """Check of one recipe in all heads of a model.

    Attributes:
      recipe: its spec.
      degree: of its row map; null where it has none.
      bias: of all heads, or by layer and head.
      calibration: null where no b_auto was needed.
      measured: whether S_p is defined for the recipe and was measured.
      length: tokens of a needle prompt.
      heads: number of heads that count as the top ones.
      unsafe: share of rows with S_p >= 1, dead ones among them; of softmax with S >= 1.
      against_softmax: null where S_p was not measured or no row has a target.
      prompts: null without prompts of the user.
      texts: null without texts of the user.
      softmax: accuracy on the needle prompts.
      substituted: accuracy on the needle prompts with the recipe.
      delta: `substituted` less `softmax`.
      linear: what the recipe costs as linear attention.
    """

    model: str
    provenance: Provenance
    recipe: str
    degree: float | None
    bias: float | tuple[tuple[float, ...], ...]
    calibration: Calibration | None
    measured: bool
    length: Count
    heads: Count
    unsafe: RowShares
    against_softmax: SoftmaxComparison | None
    prompts: PromptResults | None
    texts: TextResults | None
    softmax: Interval
    substituted: Interval
    delta: Interval
    p_value: Share
    lost: Count
    won: Count
    dead_rows_per_prompt: float
    could_decide: Count
    least_prompts: Count
    linear: LinearState
    verdict: VerdictName
    reason: str
    next: str
