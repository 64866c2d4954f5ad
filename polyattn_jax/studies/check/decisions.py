"""The verdict on a recipe by several tasks.

A task that softmax is not shown to solve decides nothing. Of the others, a "no-go" is one of the
recipe if the McNemar test of the task still finds a change after Holm's correction for all tasks
that decide; of several tasks one is easily lost by chance. The recipe preserves if it preserves in
each of them, which needs no correction for their number: every task must pass a test of its own
(Berger 1982, intersection-union).
"""

from collections.abc import Iterable, Sequence
import dataclasses
from typing import NamedTuple

from lm_jax import statistics
from polyattn_jax.audit import decision
from polyattn_jax.audit.results import RowShares, TaskResult, VerdictName
from polyattn_jax.studies.check.tasks import Answers

UNDECIDABLE = "undecidable"
# Of the tests of all tasks together.
LEVEL = 0.95


class Overall(NamedTuple):
    """The verdict of all tasks, why, and what to do next."""

    verdict: VerdictName
    reason: str
    next: str


def task_result(
    name: str, own: Answers, safe: RowShares, *, unmeasured: str, tolerance: float
) -> TaskResult:
    """What one task shows.

    Args:
      name: the task as `--task` takes it.
      own: answers to the task.
      safe: shares of safe rows.
      unmeasured: why a share of safe rows is None.
      tolerance: accuracy that may be lost, as a rate.
    """
    softmax, recipe, unsolved = own.softmax, own.recipe, own.unsolved
    decided = decision.explain(
        recipe,
        softmax,
        safe,
        unmeasured=unmeasured,
        tolerance=tolerance,
        ablated=False,
        unmet=(unsolved,) if unsolved else (),
        floor=own.floor,
    )
    following = decided.next
    if own.most is not None and own.most < decided.least_prompts and recipe.verdict == "undecided":
        following = (
            f"leave the task out: it has {own.most} prompts, and preserve takes "
            f"{decided.least_prompts}"
        )
    return TaskResult(
        name=name,
        tokens=own.tokens,
        softmax=softmax.accuracy,
        recipe=recipe.accuracy,
        delta=recipe.delta,
        p_value=recipe.p_value,
        p_holm=recipe.p_value,
        lost=recipe.lost,
        won=recipe.won,
        control=own.control,
        control_answers=own.answers,
        could_decide=decided.could_decide,
        least_prompts=decided.least_prompts,
        dead_rows_per_prompt=recipe.dead_rows_per_prompt,
        verdict=UNDECIDABLE if unsolved else recipe.verdict,
        reason=decided.reason,
        next=following,
    )


def holm(results: Iterable[TaskResult]) -> tuple[TaskResult, ...]:
    """The results with the p of those that decide corrected for their number."""
    results = tuple(results)
    deciding = [each for each in results if each.verdict != UNDECIDABLE]
    corrected = statistics.holm([each.p_value for each in deciding]) if deciding else []
    by_name = dict(zip((each.name for each in deciding), corrected, strict=True))
    return tuple(
        dataclasses.replace(each, p_holm=float(by_name.get(each.name, each.p_value)))
        for each in results
    )


def overall(results: Sequence[TaskResult], refused: dict[str, str], *, tolerance: float) -> Overall:
    """The verdict of all tasks.

    Args:
      results: those that were asked.
      refused: why others could not be asked.
      tolerance: accuracy that may be lost, as a rate.
    """
    if not results:
        reason = "; ".join(f"{name} cannot be asked: {why}" for name, why in refused.items())
        return Overall("undecided", reason, "ask a task of your own, --task=prompts:FILE")
    if len(results) == 1 and not refused:
        (only,) = results
        name: VerdictName = "undecided" if only.verdict == UNDECIDABLE else only.verdict
        return Overall(name, only.reason, only.next)
    deciding = [each for each in results if each.verdict != UNDECIDABLE]
    lost = [each for each in deciding if each.verdict == "no-go"]
    no_go = [each for each in lost if each.p_holm <= 1 - LEVEL]
    open_ones = [each for each in deciding if each not in no_go and each.verdict != "preserve"]
    if no_go:
        return Overall("no-go", _reasons(no_go), no_go[0].next)
    if open_ones:
        reasons = [_reasons(each for each in open_ones if each not in lost)]
        if lost:
            names = ", ".join(each.name for each in lost)
            reasons.append(f"{names}: a loss that Holm's correction for all tasks leaves open")
        return Overall("undecided", "; ".join(filter(None, reasons)), open_ones[0].next)
    if not deciding and any(decision.solves(each.could_decide, each.softmax.n) for each in results):
        return Overall("undecided", _reasons(results), results[0].next)
    if not deciding:
        counts = ", ".join(
            f"{each.name} ({each.could_decide} of {each.softmax.n} right)" for each in results
        )
        reason = (
            f"softmax itself is not shown to solve {counts}, so that keeping its accuracy would "
            "say nothing"
        )
        return Overall("undecided", reason, results[0].next)
    worst = min(100 * each.delta.low for each in deciding)
    names = ", ".join(each.name for each in deciding)
    reason = (
        f"the loss is smaller than {100 * tolerance:g} points in {names}: at most "
        f"{max(-worst, 0):.1f} (95 %)"
    )
    return Overall("preserve", reason, deciding[0].next)


def _reasons(results: Iterable[TaskResult]) -> str:
    return "; ".join(f"{each.name}: {each.reason}" for each in results)
