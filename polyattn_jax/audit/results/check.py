"""Results of a check: the dataclass of its `summary.json`."""

import dataclasses

from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval
from polyattn_jax.audit.results.conditions import ConditionResult, TextLoss, VerdictName
from polyattn_jax.audit.results.provenance import Provenance
from polyattn_jax.audit.results.rows import RowShares, SoftmaxComparison
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.linear_state import LinearState


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
      recipe: spec of the recipe.
      degree: degree of its row map; null where it has none.
      bias: b of all heads, or by layer and head.
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
