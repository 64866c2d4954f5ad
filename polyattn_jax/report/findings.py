"""Findings of an audit in sentences, for its page and for the terminal, and their order."""

from collections.abc import Iterable, Mapping, Sequence
import math
from pathlib import Path
import re
from typing import Any, Literal, NamedTuple, TypeVar

from lm_jax import assets
from lm_jax.statistics import Interval
from polyattn_jax.audit import decision, head_sets
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import (
    AuditSummary,
    BoundAgreement,
    ConditionResult,
    Decisiveness,
    Prevalence,
    SoftmaxComparison,
    TextLoss,
)
from polyattn_jax.recipes import linear_state
from polyattn_jax.recipes.calibrate import AtLength, Calibration
from polyattn_jax.recipes.row_maps import RECIPES, SOFTMAX
from polyattn_jax.suites import named

# In place of the interval over a single text or prompt.
NO_INTERVAL = "one text, no interval"
BySuite = TypeVar("BySuite", Prevalence, SoftmaxComparison, BoundAgreement)
Condition = TypeVar("Condition", ConditionResult, TextLoss)
OfRecipe = TypeVar("OfRecipe", ConditionResult, TextLoss, linear_state.LinearState)
Tone = Literal["good", "warn", "bad"]
TONES: Mapping[str, Tone] = {"preserve": "good", "undecided": "warn", "no-go": "bad"}


class Finding(NamedTuple):
    """A sentence with the tone of a banner."""

    text: str
    tone: Tone


def counted(accuracy: Interval) -> str:
    """An accuracy as a count: "9 of 10"."""
    return f"{head_sets.right(accuracy):,} of {accuracy.n:,}"


def solves(accuracy: Interval) -> bool:
    """Whether an accuracy of softmax shows that it solves the probe."""
    return decision.solves(head_sets.right(accuracy), accuracy.n)


def ends(accuracy: Interval) -> str:
    """The interval of an accuracy: "60 to 98 %"."""
    return f"{100 * accuracy.low:.0f} to {100 * accuracy.high:.0f} %"


def model_name(summary: AuditSummary) -> str:
    """The model by its own name (`own_name`)."""
    return own_name(summary.model)


def own_name(model: str) -> str:
    """A model by the name in the manifest, or of its folder or file."""
    asset = assets.entries().get(model)
    if asset is not None:
        return re.split("[,:]", asset.description)[0]
    return Path(model).name or model


def suite_length(suite: str, config: AuditConfig) -> int | None:
    """Tokens of a suite's prompts; None where they differ."""
    length = named.split(suite)[1]
    if length is not None:
        return length
    lengths = {
        "control": config.niah_lengths[0],
        "induction": config.induction_length,
        "mqar": config.mqar_length,
    }
    return lengths.get(suite)


def suite_tokens(suite: str, config: AuditConfig) -> str:
    """The length of a suite's prompts: "256 tokens"; empty where they differ."""
    length = suite_length(suite, config)
    return "" if length is None else f"{length:,} tokens"


def suite_name(suite: str) -> str:
    """A suite by its own name, without the length."""
    suite = named.split(suite)[0]
    names = {
        "niah": "needle",
        "two_needles": "two needles",
        "four_needles": "four needles",
        "pass_key": "pass key",
        "ruler_single": "RULER, one key",
        "ruler_multi": "RULER, four keys",
        "ruler_paper_single": "RULER, one UUID",
        "ruler_paper_multi": "RULER, four UUIDs",
        "copying": "literary openings",
        "induction_pair": "induction, one pair",
        "control": "needle left out",
        "mqar": "MQAR",
        "prompts": "your prompts",
        "texts": "your texts",
    }
    return names.get(suite, suite)


def suite_label(suite: str, config: AuditConfig) -> str:
    """A suite with the length of its prompts: "needle, 256 tokens"."""
    return ", ".join(filter(None, (suite_name(suite), suite_tokens(suite, config))))


def bias_label(kind: str) -> str:
    """A kind of bias as it is written in tables."""
    return {"zero": "b = 0", "auto": "b_auto"}.get(kind, f"b = {kind}".replace("-", "−"))


def bias_text(bias: float, option: str) -> str:
    """The bias of a condition, by its name in recipes; NaN is one of each head."""
    return f"{option} by head" if math.isnan(bias) else f"{option} = {bias:.3g}".replace("-", "−")


def b_auto(calibration: Calibration | AtLength, *, ends: bool = True) -> str:
    """b_auto to two digits of its uncertainty, with its interval: "1.15 [0.98, 1.31]"."""
    numbers = (calibration.bias, calibration.low, calibration.high)
    half = (numbers[2] - numbers[1]) / 2
    places = min(max(1 - math.floor(math.log10(half)), 0), 4) if half > 0 else 4
    bias, low, high = (f"{number:.{places}f}" for number in numbers)
    return f"{bias} [{low}, {high}]" if ends else bias


def b_auto_by_length(calibration: Calibration) -> str:
    """What b_auto would be at other lengths: "0.63 at 64 tokens, 1.1 at 256"."""
    parts = [
        f"{b_auto(one, ends=False)} at {one.length:,}{' tokens' * (i == 0)}"
        for i, one in enumerate(calibration.curve)
    ]
    return ", ".join(parts)


def by_suite(entries: Sequence[BySuite]) -> list[BySuite]:
    """Entries in reading order: induction, MQAR, needles by length; b = 0 before b_auto."""

    def place(entry: BySuite) -> tuple[Any, ...]:
        name, length = named.split(entry.suite)
        return name, length or 0, entry.bias_kind != "zero"

    return sorted(entries, key=place)


def by_recipe(sweep: Sequence[OfRecipe]) -> list[OfRecipe]:
    """Entries in reading order: softmax, the recipes of the paper as it lists them, others."""
    by_name = {entry.recipe: [] for entry in sweep}
    for entry in sweep:
        by_name[entry.recipe].append(entry)
    return [entry for name in in_order(by_name) for entry in by_name[name]]


def in_order(recipes: Iterable[str]) -> list[str]:
    """Names of recipes in reading order: softmax, those of the paper as it lists them, others."""
    order = {name: place for place, name in enumerate((SOFTMAX.name, *RECIPES))}
    return sorted(recipes, key=lambda name: order.get(name, len(order)))


def softmax_of(cells: Sequence[Condition]) -> Condition:
    """The cell without any substitution."""
    return next(entry for entry in cells if entry.cell == SOFTMAX.name)


def best_of(cells: Sequence[ConditionResult]) -> ConditionResult:
    """The cell of highest accuracy; among equals, of lowest loss."""
    return max(cells, key=lambda e: (e.accuracy.estimate, -e.loss))


def verdict_counts(entries: Sequence[ConditionResult]) -> str:
    """How many results have each verdict: "2 preserve, 1 no-go"."""
    names = [entry.verdict for entry in entries]
    return ", ".join(f"{names.count(name)} {name}" for name in TONES if name in names)


def controls(summary: AuditSummary) -> Finding:
    """Whether the controls hold, on which all other results depend."""
    result, config = summary.controls, summary.config
    length = config.sweep_length
    needle = result.accuracy[config.probe]
    without = result.accuracy.get("control")
    first, second = result.first_copy.loss.estimate, result.second_copy.loss.estimate
    text = f"softmax finds the needle in {counted(needle)} prompts at {length:,} tokens"
    for other in config.niah_lengths:
        if other != length:
            text += f", {counted(result.accuracy[f'niah_{other}'])} at {other:,}"
    if without is not None:
        text += f", and in {counted(without)} where it was left out"
    text += (
        f"; on random tokens written twice the loss goes from {first:.1f} to {second:.1f} nats per "
        "token."
    )
    if not result.unmet:
        return Finding(f"The controls hold: {text}", "good")
    if needle.estimate >= 0.5 and second < first / 2 and (without or needle).n < 10:
        return Finding(f"Too few prompts for the controls: {text}", "warn")
    return Finding(f"The controls do not hold: {text}", "bad")


def overall(summary: AuditSummary) -> Finding:
    """The sentence to quote: which recipes may replace softmax in every head of this model.

    Its tone is that of the best verdict: one recipe that preserves is a success.
    """
    base = softmax_of(summary.sweep)
    others = [entry for entry in by_recipe(summary.sweep) if entry is not base]
    name, length = model_name(summary), summary.config.sweep_length
    right, points = counted(base.accuracy), f"{100 * summary.config.tolerance:g} points"
    if not others:
        return Finding(f"No recipe was tried on {name}; softmax: {right}.", "warn")
    if not solves(base.accuracy):
        return Finding(
            f"No verdict on {name}: softmax itself is right in {right} needle prompts at "
            f"{length:,} tokens, which does not show that it solves the probe.",
            TONES["undecided"],
        )
    if unmet := summary.controls.unmet:
        return Finding(
            f"No verdict on {name}: the controls are not shown to hold: {'; '.join(unmet)}.",
            TONES["undecided"],
        )
    named = {verdict: [entry for entry in others if entry.verdict == verdict] for verdict in TONES}
    where = f"in all {summary.layers * summary.heads:,} heads of {name}"
    of = f"{{}} of the {len(others)} recipes tried" if len(others) > 1 else "The recipe tried"

    def listed(entries: Sequence[ConditionResult]) -> str:
        return ", ".join(f"{e.recipe} ({counted(e.accuracy)})" for e in entries)

    shown = {verdict.recipe for verdict in summary.verdicts if decision.preserves(verdict)}
    if kept := [entry for entry in named["preserve"] if entry.recipe in shown]:
        alone = [entry for entry in named["preserve"] if entry.recipe not in shown]
        counts = {f"preserve alone, not after Holm's correction: {listed(alone)}": len(alone)}
        counts |= {verdict: len(named[verdict]) for verdict in ("undecided", "no-go")}
        rest = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        return Finding(
            f"{of.format(len(kept))} can replace softmax {where} and lose less than {points} of "
            f"needle accuracy at {length:,} tokens{_after_holm(others)}: {listed(kept)}; softmax "
            f"{right}{f'. Of the others: {rest}' if rest else ''}.",
            TONES["preserve"],
        )
    if alone := named["preserve"]:
        return Finding(
            f"{of.format('None')} is shown to lose less than {points} of needle accuracy at "
            f"{length:,} tokens when it replaces softmax {where}{_after_holm(others)}. Alone, that "
            f"is without the correction, {len(alone)} would preserve: {listed(alone)}; softmax "
            f"{right}. Repeat with these alone on new prompts.",
            TONES["undecided"],
        )
    if unclear := named["undecided"]:
        return Finding(
            f"{of.format('None')} {'is' if len(others) > 1 else 'is not'} shown to lose less than "
            f"{points} of needle accuracy at {length:,} tokens when it replaces softmax {where}; "
            f"undecided: {listed(unclear)}; softmax {right}.",
            TONES["undecided"],
        )
    best = best_of(others)
    return Finding(
        f"{of.format('None')} {'preserves' if len(others) > 1 else 'does not preserve'} needle "
        f"retrieval at {length:,} tokens when it replaces softmax {where}: "
        f"{'the best, ' if len(others) > 1 else ''}{best.recipe}, is right in "
        f"{counted(best.accuracy)} prompts, softmax in {right}.",
        TONES["no-go"],
    )


def _after_holm(others: Sequence[ConditionResult]) -> str:
    return f" after Holm's correction for {len(others)} recipes" if len(others) > 1 else ""


def unknown_ends(interval: Interval) -> bool:
    """Whether an interval holds every value, since it is over a single text or prompt.

    Of a share, a change of it, a loss, a change of it, and the exponential of a loss.
    """
    ends = (0.0, 1.0), (-1.0, 1.0), (0.0, math.inf), (-math.inf, math.inf), (1.0, math.inf)
    return interval.n == 1 and (interval.low, interval.high) in ends


def in_part(summary: AuditSummary) -> str:
    """What the ablation adds: every size K, and the paper's flag where the draws allow it."""
    result = summary.decisiveness
    if not result:
        return ""
    draws = len(result[0].random)

    def of_random(entry: Decisiveness) -> str:
        low, high = min(entry.random), max(entry.random)
        return f"random {low}" if low == high else f"random {low} to {high}"

    parts = [f"K = {e.size}: highest S₂ {e.top}, lowest {e.bottom}, {of_random(e)}" for e in result]
    text = (
        f"{summary.config.ablation_recipe} in K heads only, right of {result[0].n:,} "
        f"(softmax {head_sets.right(softmax_of(summary.ablation).accuracy)}), "
        f"{draws:,} random set{'s' * (draws != 1)} per K: {'; '.join(parts)}."
    )
    if draws < head_sets.FEWEST_DRAWS:
        return (
            f"{text} Whether the ranking by S₂ is decisive (worse than every random set) is not "
            f"stated below {head_sets.FEWEST_DRAWS} draws."
        )
    flags = [
        f"{e.beaten} of {draws} at K = {e.size} ({'decisive' if e.decisive else 'not decisive'})"
        for e in result
    ]
    return f"{text} Random sets that the highest S₂ does worse than: {', '.join(flags)}."


def single_heads(summary: AuditSummary) -> str:
    """What single heads at both ends of the ranking do; empty where none was tried."""
    if not summary.single_heads:
        return ""
    base = head_sets.right(softmax_of(summary.single_heads).accuracy)
    changes = [head_sets.right(e.accuracy) - base for e in single_conditions(summary)]
    text = (
        f"In one head alone, for each of the {len(changes)} at both ends of the ranking: "
        f"{sum(map(bool, changes))} of them change the number of right prompts"
    )
    if any(changes):
        text += (
            f", by {min(changes):+d} to {max(changes):+d} of {summary.single_heads[0].accuracy.n:,}"
        )
    return f"{text}."


def single_conditions(summary: AuditSummary) -> list[ConditionResult]:
    """The conditions of single heads, without softmax."""
    return [entry for entry in summary.single_heads if entry.cell != SOFTMAX.name]


def best_recipe(summary: AuditSummary) -> str | None:
    """The recipe of highest accuracy on the needle; None where none was tried."""
    base = softmax_of(summary.sweep)
    others = [entry for entry in summary.sweep if entry is not base]
    return best_of(others).recipe if others else None


def next_step(summary: AuditSummary) -> str:
    """What to do with the best recipe; empty where none was tried."""
    if (best := best_recipe(summary)) is None:
        return ""
    step = next(v.next for v in summary.verdicts if v.recipe == best)
    return f"Next, for {best}: {step}."


def as_linear(summary: AuditSummary) -> str:
    """What the best recipe would cost as linear attention; empty where none was tried."""
    if (best := best_recipe(summary)) is None:
        return ""
    entry = next(one for one in summary.linear if one.recipe == best)
    return f"As linear attention, {best} has {linear_state.sentence(entry)}."


def resolution(summary: AuditSummary) -> str:
    """What the number of prompts can tell; empty where no number of them makes a verdict."""
    if summary.controls.unmet:
        return ""
    base, tolerance = softmax_of(summary.sweep), summary.config.tolerance
    n, reach = base.accuracy.n, -100 * base.delta.low
    loss = decision.detectable_loss(n, tolerance)
    tried = len(summary.sweep) - 1
    least = decision.least_prompts(tolerance, 1 - 0.05 / max(tried, 1))
    result = "no loss" if loss is None else f"a true loss of {100 * loss:.0f} points"
    return (
        f"Softmax gets {counted(base.accuracy)} prompts right; only these can be lost. Even "
        f"where none is, a loss of up to {reach:.1f} points stays possible; “preserve” within "
        f"{100 * tolerance:g} points takes {decision.least_prompts(tolerance)} prompts or more"
        f"{f', {least} after Holm for {tried} recipes' if tried > 1 else ''}. "
        f"With the {n:,} of this run {result} ends in “no-go” four times of five."
    )
