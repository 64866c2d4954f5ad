"""The summary of a check that an earlier version finished, and what it is now."""

import dataclasses
from typing import Any

from lm_jax.run.results import Count, Share
from lm_jax.statistics import Interval
from polyattn_jax.audit.results.check import CheckResult, TaskResult, TextResults
from polyattn_jax.audit.results.conditions import ConditionResult, VerdictName
from polyattn_jax.audit.results.provenance import Provenance
from polyattn_jax.audit.results.rows import RowShares, SoftmaxComparison
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.linear_state import LinearState

# Fields of a task that the needle's numbers and a `ConditionResult` have by the same names.
_SAME = ("delta", "p_value", "lost", "won", "dead_rows_per_prompt", "verdict")


@dataclasses.dataclass(frozen=True)
class PromptResults:
    """The answers to prompts of the user."""

    softmax: ConditionResult
    recipe: ConditionResult


@dataclasses.dataclass(frozen=True)
class EarlierCheck:
    """Check of one recipe on needles, by a version that asked nothing else.

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

    @property
    def current(self) -> CheckResult:
        """The same as a check of today: the needle is its task, and prompts of the user another."""
        names = {field.name for field in dataclasses.fields(CheckResult)}
        kept: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in names
        }
        return CheckResult(
            **kept, rows_of="needle", tasks=(self._needle, *self._prompts), refused={}
        )

    @property
    def _needle(self) -> TaskResult:
        same = {name: getattr(self, name) for name in _SAME}
        rest = {name: getattr(self, name) for name in ("could_decide", "reason", "next")}
        accuracies = {"softmax": self.softmax, "recipe": self.substituted}
        return self._task("needle", self.length, **accuracies, **same, **rest)

    @property
    def _prompts(self) -> tuple[TaskResult, ...]:
        if self.prompts is None:
            return ()
        before, own = self.prompts.softmax.accuracy, self.prompts.recipe
        same = {name: getattr(own, name) for name in _SAME}
        rest = {"could_decide": round(before.estimate * before.n), "reason": "", "next": ""}
        return (self._task("prompts", 0, softmax=before, recipe=own.accuracy, **same, **rest),)

    def _task(self, name: str, tokens: int, **numbers: Any) -> TaskResult:
        return TaskResult(
            name=name,
            tokens=tokens,
            p_holm=numbers["p_value"],
            control=None,
            control_answers="",
            least_prompts=self.least_prompts,
            **numbers,
        )
