"""Results of an audit: the dataclasses of its `summary.json`."""

import dataclasses

from lm_jax.evaluate.multiple_choice.results import ChoiceTask
from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results.conditions import (
    ConditionResult,
    LossInterval,
    TextLoss,
    VerdictName,
)
from polyattn_jax.audit.results.matched import MatchedSafety
from polyattn_jax.audit.results.provenance import Provenance
from polyattn_jax.audit.results.rows import BoundAgreement, Prevalence, SoftmaxComparison
from polyattn_jax.audit.results.suites import SuiteResult
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.linear_state import LinearState


@dataclasses.dataclass(frozen=True)
class CopyResult:
    """Softmax on one of the two copies of random tokens.

    Attributes:
      loss: loss per token.
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
      accuracy: share of right answers of each needle suite, and of `control`, where the needle was
        left out.
      first_copy: random tokens, which nothing predicts.
      second_copy: the same tokens again, which induction predicts.
      unmet: a sentence for each condition of a verdict that softmax is not shown to meet.
    """

    accuracy: dict[str, Interval]
    first_copy: CopyResult
    second_copy: CopyResult
    unmet: tuple[str, ...]


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
      suite: name of the suite, one of `suites.named.NAMES`.
      length: tokens that are read of each prompt.
      conditions: one recipe in no head and in each head set.
      decisiveness: what the ranking decides, by size of the head sets.
    """

    suite: str
    length: Count
    conditions: tuple[ConditionResult, ...]
    decisiveness: tuple[Decisiveness, ...]


@dataclasses.dataclass(frozen=True)
class AuditSummary:
    """Audit of a model: every number of its report.

    Attributes:
      layers: number of layers of the model.
      heads: query heads of each layer.
      degrees: degrees p of S_p.
      prevalence: unsafe rows by suite and bias.
      against_softmax: rows lost and sharpened, by suite, bias and degree.
      bound: agreement of bound and measure, by suite, bias and degree.
      sweep: softmax and every recipe in all heads, on the needle prompts.
      prompts: the same on prompts of the user; empty without them.
      texts: softmax and every recipe in all heads, on texts of the user; empty without them.
      choices: softmax and every recipe in all heads, by multiple-choice task, each recipe paired
        with softmax on the same questions; empty without tasks.
      suites: softmax and every recipe in all heads, by suite and length of `config.suites`; empty
        without them.
      linear: what each recipe costs as linear attention.
      verdicts: verdict on each recipe, on the needle prompts.
      matched: S_p on the rows of these prompts, by recipe that is a normalised power.
      ranking_suite: the suite whose rows rank the heads.
      head_types: null without induction prompts.
      ablation: one recipe in no head and in each head set; empty without ablation.
      decisiveness: what the ranking decides, by size of the head sets.
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
