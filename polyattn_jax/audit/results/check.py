"""Results of a check: the dataclasses of its `summary.json`."""

import dataclasses
from typing import Literal

from lm_jax.run.results import Count, Real, Share
from lm_jax.statistics import Interval
from polyattn_jax.audit.results.conditions import TextLoss, VerdictName
from polyattn_jax.audit.results.provenance import Provenance
from polyattn_jax.audit.results.rows import RowShares, SoftmaxComparison
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.linear_state import LinearState


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
class TaskResult:
    """One task under softmax and with the recipe in every head.

    Attributes:
      name: the task as `--task` takes it.
      tokens: tokens of the longest prompt; 0 of multiple choice.
      softmax, recipe: accuracies.
      delta: `recipe` less `softmax`, paired.
      p_value: p of the exact two-sided McNemar test, of this task alone.
      p_holm: the same after Holm's correction for the tasks that decide.
      lost, won: prompts that only softmax and that only the recipe gets right.
      control: accuracy of softmax in the control, or that of guessing; null without one.
      control_answers: what the control asks for: "left out" of the prompt, "another prompt's", or
        "guessed".
      could_decide: prompts that softmax gets right, which alone can be lost.
      least_prompts: fewest prompts that can end in "preserve".
      dead_rows_per_prompt: mean, summed over layers, heads and queries; null where not counted.
      verdict: "undecidable" where softmax is not shown to solve the task.
    """

    name: str
    tokens: Count
    softmax: Interval
    recipe: Interval
    delta: Interval
    p_value: Share
    p_holm: Share
    lost: Count
    won: Count
    control: Interval | None
    control_answers: str
    could_decide: Count
    least_prompts: Count
    dead_rows_per_prompt: Real
    verdict: Literal["preserve", "no-go", "undecided", "undecidable"]
    reason: str
    next: str


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """Check of one recipe in all heads of a model.

    Attributes:
      recipe: spec of the recipe.
      degree: degree of its row map; null where it has none.
      bias: b of all heads, or by layer and head; of gdn the mean distance, in tokens.
      calibration: null where no b_auto was needed.
      measured: whether S_p is defined for the recipe and was measured.
      length: tokens of a prompt of a task that can have any number.
      heads: number of heads that count as the top ones.
      rows_of: task whose rows `unsafe` and `against_softmax` are of; empty where none has rows.
      unsafe: share of rows with S_p >= 1, dead ones among them; of softmax with S >= 1.
      against_softmax: null where S_p was not measured or no row has a target.
      texts: null without texts of the user.
      tasks: results of the tasks that were asked, in their order.
      refused: why the other tasks cannot be asked of this model.
      linear: what the recipe costs as linear attention.
      verdict: verdict of all tasks that decide: "preserve" if each of them is.
      replaced: number of heads that have the recipe, those of a file of heads; null for all. Rows
        are of all heads in any case.
      of_heads: number of heads of the model; 0 in a file of an earlier version.
      gated: whether the model has gates; what is reported of rows is then as if all were open.
      trained: whether the heads were trained; what is reported of rows is of the recipe without.
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
    rows_of: str
    unsafe: RowShares
    against_softmax: SoftmaxComparison | None
    texts: TextResults | None
    tasks: tuple[TaskResult, ...]
    refused: dict[str, str]
    linear: LinearState
    verdict: VerdictName
    reason: str
    next: str
    replaced: Count | None = None
    of_heads: Count = 0
    gated: bool = False
    trained: bool = False
