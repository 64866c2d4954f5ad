"""The verdict on a recipe: a non-inferiority test on counts of prompts.

A recipe may replace softmax if its loss of accuracy is shown to be smaller than a tolerance. From
the paired answers of the two, it is one of three:

    preserve    the whole interval of the change is above -tolerance
    no-go       it is below, or the exact McNemar test finds a loss, and that loss is beyond the
                tolerance
    undecided   neither, or softmax itself is not shown to solve the probe (its Wilson interval
                reaches below one half), so that keeping its accuracy would say nothing

The interval is Tango's score interval (Statistics in Medicine 1998;
`lm_jax.statistics.paired_change`). Both of its tails are tests, so that at a true loss of exactly
the tolerance a recipe "preserves" with a chance of about (1 - level) / 2: enumerated, at most 3 %
for 40, 73, 100 and 200 prompts, a tolerance of 0.05 and a level of 0.95
(tests/polyattn_jax/audit/test_decision.py). Nothing is compared after rounding. In an audit a
verdict is "undecided" unless the controls hold (`unmet_controls`).

A verdict is of one recipe. Of many recipes, each with a true loss of the tolerance, one preserves
by chance more often: what a report says of all together is by `preserves`, after Holm's correction.
"""

import bisect
from collections.abc import Sequence
import dataclasses
import fractions
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from lm_jax import statistics
from lm_jax.errors import UsageError
from lm_jax.report.markup import number
from polyattn_jax.audit import head_sets
from polyattn_jax.audit.results import ConditionResult, RecipeVerdict, RowShares, VerdictName

# At or below this safe share of rows all five such cells of the paper collapsed (its Appendix F).
SCREEN = 0.03
# Accuracy from which on softmax solves a probe.
SOLVED = 0.5
# No interval over fewer prompts or texts decides anything.
FEWEST = 10


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a recipe from paired answers.

    `change` is the accuracy of the recipe minus that of softmax, as a rate, `low` and `high` the
    ends of its interval, `p` of the exact two-sided McNemar test.
    """

    name: VerdictName
    change: float
    low: float
    high: float
    p: float


def verdict(
    softmax_right: ArrayLike,
    recipe_right: ArrayLike,
    *,
    tolerance: float = 0.05,
    level: float = 0.95,
) -> Verdict:
    """Whether a recipe keeps the accuracy of softmax.

    Args:
      softmax_right: whether softmax answers each prompt rightly, 1-D and boolean.
      recipe_right: the same with the recipe, for the same prompts in the same order.
      tolerance: accuracy that may be lost, as a rate between 0 and 1.
      level: level of the interval and, as 1 - level, of the test.

    Raises:
      UsageError: for arrays that are no pair of outcomes, or a number that is no rate.
    """
    for field, value in (("tolerance", tolerance), ("level", level)):
        if not 0 < value < 1:
            raise UsageError(f"verdict: {field}={value!r} must be between 0 and 1, both excluded")
    paired = statistics.mcnemar(softmax_right, recipe_right, level)
    change = paired.delta
    name: VerdictName = "undecided"
    if solves(int(np.sum(softmax_right)), change.n, level):
        counts = {"lost": paired.b, "won": paired.c, "p_value": paired.p_value}
        name = of_change(change, **counts, tolerance=tolerance, level=level)
    return Verdict(name, change.estimate, change.low, change.high, paired.p_value)


def of_change(
    change: statistics.Interval,
    *,
    lost: int,
    won: int,
    p_value: float,
    tolerance: float = 0.05,
    level: float = 0.95,
) -> VerdictName:
    """The verdict on a change of accuracy where softmax solves the probe.

    Args:
      change: accuracy of the recipe less that of softmax, with Tango's interval.
      lost, won: prompts that only softmax and that only the recipe gets right.
      p_value: p of the exact McNemar test.
      tolerance: accuracy that may be lost, as a rate between 0 and 1.
      level: level of the interval and, as 1 - level, of the test.
    """
    # Decimal as it was written: 0.05 of 20 prompts is one prompt.
    allowed = fractions.Fraction(repr(float(tolerance))) * change.n
    if change.low > -tolerance:
        return "preserve"
    if change.high < -tolerance or (p_value <= 1 - level and lost - won > allowed):
        return "no-go"
    return "undecided"


def solves(right: int, n: int, level: float = 0.95, floor: float = SOLVED) -> bool:
    """Whether `right` of `n` prompts show an accuracy of `floor` or more (Wilson interval)."""
    return statistics.wilson(right, n, level).low >= floor


def unmet_controls(
    needle: statistics.Interval,
    without: statistics.Interval | None,
    first_loss: float,
    second_loss: float,
) -> tuple[str, ...]:
    """A sentence for each control of an audit that softmax is not shown to meet.

    Softmax must solve the needle probe, find the needle less often where it was left out (Wilson
    intervals apart), and on random tokens written twice have less than half of the first loss on
    the second.

    Args:
      needle: accuracy on the needle suite of the sweep.
      without: accuracy where the needle was left out; None without such prompts.
      first_loss, second_loss: losses on the two copies of random tokens, in nats per token.
    """
    counted = f"{head_sets.right(needle)} of {needle.n}"
    unmet = []
    if not solves(head_sets.right(needle), needle.n):
        unmet.append(
            f"softmax is right in {counted} needle prompts, which does not show that it solves the "
            "probe"
        )
    if without is not None and without.high >= needle.low:
        unmet.append(
            f"softmax finds the needle in {head_sets.right(without)} of {without.n} prompts "
            f"where it was left out, which does not show a difference to {counted} with it"
        )
    # also where a loss is NaN
    if not second_loss < first_loss / 2:
        unmet.append(
            "the loss of softmax on random tokens written twice does not fall to half: "
            f"{first_loss:.1f} and {second_loss:.1f} nats per token"
        )
    return tuple(unmet)


def least_prompts(tolerance: float = 0.05, level: float = 0.95) -> int:
    """The fewest prompts that can end in "preserve": softmax and the recipe get all of them right.

    Without discordant pairs the interval reaches z^2 / (n + z^2) down, which must be less than
    `tolerance`, and softmax is shown to solve n of n prompts from n = z^2 on.
    """
    square = float(special.ndtri((1 + level) / 2)) ** 2
    return max(math.floor(square * (1 - tolerance) / tolerance) + 1, math.ceil(square))


def detectable_loss(
    n: int, tolerance: float = 0.05, level: float = 0.95, power: float = 0.8
) -> float | None:
    """The least true loss that ends in "no-go" with a chance of `power`, as a rate; exact.

    Softmax gets all `n` prompts right and the recipe loses each with the same chance. None where
    even the loss of all prompts is no "no-go".
    """

    def refused(lost: int) -> bool:
        after = np.arange(n) >= lost
        return verdict(np.ones(n, bool), after, tolerance=tolerance, level=level).name == "no-go"

    fewest = bisect.bisect_left(range(n + 1), True, key=refused)
    # P(binomial(n, q) >= fewest) = power
    return float(special.betaincinv(fewest, n - fewest + 1, power)) if fewest <= n else None


def explain(
    entry: ConditionResult,
    base: ConditionResult,
    shares: RowShares,
    *,
    unmeasured: str,
    tolerance: float,
    ablated: bool,
    unmet: Sequence[str] = (),
    floor: float = SOLVED,
) -> RecipeVerdict:
    """A recipe's verdict with its reason and the next step (paper, section 6).

    The share of safe rows explains a verdict and does not decide it: at or below 3 % every such
    case of the paper collapsed, above that anything happens.

    Args:
      entry: result of `summary.behaviour` for the recipe in every head.
      base: the same for softmax.
      shares: shares of rows with S_p < 1 and of dead ones, over all heads and the top K.
      unmeasured: why a share of safe rows is None.
      tolerance: tolerance of the verdict.
      ablated: whether head sets were tried in the same run.
      unmet: result of `unmet_controls`; empty where softmax's accuracy was the only control.
      floor: accuracy from which on softmax solves the probe.
    """
    name, n = entry.verdict, base.accuracy.n
    able, needed = head_sets.right(base.accuracy), least_prompts(tolerance)
    points, reading = f"{100 * tolerance:g} points", ""
    low, high = 100 * entry.delta.low, 100 * entry.delta.high
    safe = shares.recipe
    screened = safe is not None and safe.estimate <= SCREEN
    if not solves(able, n, floor=floor):
        finding = (
            f"softmax itself is right in {able} of {n} prompts, which does not show that it solves "
            "the probe"
        )
        figures = "keeping its accuracy would say nothing"
        step = (
            "use more prompts"
            if 2 * able >= n
            else "use a shorter or easier probe, or a larger model"
        )
    elif unmet:
        finding, figures = "the controls are not shown to hold", "; ".join(unmet)
        step = "first make the controls hold: more prompts, an easier probe, or a larger model"
    elif name == "preserve":
        finding = f"the loss is smaller than {points}"
        figures = f"at most {max(-low, 0):.1f} (95 %)"
        reading = f"yet at most {SCREEN:.0%} of rows are measured safe" if screened else ""
        step = (
            "repeat with longer contexts and a harder probe before you rely on it: one probe "
            "passed is not a guarantee"
        )
    elif name == "undecided":
        finding = f"{n} prompts do not tell whether the loss is smaller than {points}"
        figures = (
            f"the change is anything from {number(low, '+.1f')} to {number(high, '+.1f')} points "
            "(95 %)"
        )
        step = "use more prompts" + (
            f", {needed} at least: fewer cannot show a loss smaller than {points}"
            if n < needed
            else ""
        )
        step += "; until then do not substitute"
    else:
        if high < -100 * tolerance:
            finding, figures = f"the loss is larger than {points}", f"at least {-high:.1f} (95 %)"
        else:
            finding = f"the paired test finds a loss, measured as more than {points}"
            loss = -100 * entry.delta.estimate
            figures = f"{loss:.1f} points, p = {entry.p_value:.2g}"
        if screened:
            reading = f"at most {SCREEN:.0%} of rows are measured safe"
            step = "do not substitute zero-shot; take a sharper map or train with it in place"
        elif safe is None:
            reading = f"no safe share, because {unmeasured}"
            step = "do not substitute zero-shot; train with the map in place"
        else:
            reading = (
                "part of the rows is measured safe, but a share over all heads does not tell which "
                "of them carry retrieval"
            )
            step = "do not substitute everywhere; " + (
                "the ablation shows which sets of heads bear it"
                if ablated
                else "iaj polyattn audit with config.ablation_heads tries the recipe in some heads"
            )
    return RecipeVerdict(
        recipe=entry.recipe,
        verdict=name,
        finding=finding,
        reading=reading,
        reason="; ".join(filter(None, (f"{finding}: {figures}", reading))),
        next=step,
        could_decide=able,
        least_prompts=needed,
        safe=safe,
        top_safe=shares.recipe_top,
        dead=shares.dead,
        top_dead=shares.dead_top,
        loss_p=(p := statistics.noninferiority(entry.lost, entry.won, entry.delta.n, tolerance)),
        loss_p_holm=p,
    )


def corrected(verdicts: Sequence[RecipeVerdict]) -> tuple[RecipeVerdict, ...]:
    """The verdicts with the p of each corrected by Holm for their number.

    The name of a verdict stays that of the recipe alone; `preserves` is of all together.
    """
    adjusted = statistics.holm([verdict.loss_p for verdict in verdicts])
    return tuple(
        dataclasses.replace(verdict, loss_p_holm=p)
        for verdict, p in zip(verdicts, adjusted, strict=True)
    )


def preserves(verdict: RecipeVerdict, level: float = 0.95) -> bool:
    """Whether a recipe preserves after the correction for all recipes that were tried."""
    return verdict.verdict == "preserve" and verdict.loss_p_holm <= (1 - level) / 2
