"""What a model answers under the recipes beside the paper: every table and figure of accuracy."""

from collections.abc import Iterator, Mapping, Sequence
import functools
import re

import numpy as np
from scipy import stats

from polyattn_jax.audit import head_sets
from polyattn_jax.audit.results import ConditionResult, Decisiveness
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.report import findings, paper
from polyattn_jax.report.beside import (
    Audit,
    ComparedNumber,
    at_b_auto,
    differences,
    openings_differ,
    row,
)
from polyattn_jax.report.paper import SETTINGS
from polyattn_jax.suites import named


def _answers(
    audit: Audit,
    item: str,
    entry: ConditionResult,
    suite: str,
    theirs: float | tuple[float, float] | None,
    causes: tuple[str, ...],
    *,
    change: bool = False,
) -> ComparedNumber:
    """The accuracy of a condition, or the change of a recipe against softmax."""
    of_entry = functools.partial(
        row, audit, item, suite=suite, cell=entry.recipe, n=entry.accuracy.n, causes=causes
    )
    if change and entry.cell != SOFTMAX.name:
        return of_entry("change of accuracy", entry.delta, theirs, unit="points")
    return of_entry("accuracy", entry.accuracy, theirs)


def answer_differences(
    audit: Audit,
    entry: ConditionResult,
    lengths: tuple[int, int],
    prompts: int = SETTINGS.prompts,
) -> tuple[str, ...]:
    """The `differences` of a recipe on a suite: tokens, ours and the paper's, and its prompts."""
    calibrated = at_b_auto(entry.recipe)
    return differences(audit, lengths, (entry.accuracy.n, prompts), calibrated=calibrated)


def needle_differences(audit: Audit, entry: ConditionResult) -> tuple[str, ...]:
    """The `differences` of a recipe on the needle prompts of the sweep."""
    lengths = (audit.summary.config.sweep_length, SETTINGS.needle_length)
    return answer_differences(audit, entry, lengths)


def literary(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 2: openings of literature."""
    # The range of softmax is that of the models of Table 2.
    of_softmax = SETTINGS.literary_softmax if audit.printed.literary else None
    of_softmax = audit.printed.literary_softmax or of_softmax
    for result in audit.summary.suites:
        if result.suite != "copying":
            continue
        suite = named.key(result.suite, result.length)
        lengths = (result.length, SETTINGS.literary_length)
        for entry in findings.by_recipe(result.conditions):
            base = entry.cell == SOFTMAX.name
            theirs = of_softmax if base else audit.printed.literary.get(entry.recipe)
            causes = (*answer_differences(audit, entry, lengths), *openings_differ(result.suite))
            yield _answers(audit, "Table 2", entry, suite, theirs, causes, change=True)


def needle(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 3: the needle."""
    suite, printed = audit.summary.config.probe, audit.printed
    for entry in findings.by_recipe(audit.summary.sweep):
        base = entry.cell == SOFTMAX.name
        theirs = printed.needle_accuracy(SOFTMAX.name) if base else printed.needle.get(entry.recipe)
        causes = needle_differences(audit, entry)
        yield _answers(audit, "Table 3", entry, suite, theirs, causes, change=True)


def suites(audit: Audit) -> Iterator[ComparedNumber]:
    """Tables 19 to 22, 30 and 32: harder needles. Appendix I: induction answered."""
    for result in audit.summary.suites:
        suite = named.key(result.suite, result.length)
        for sweep in paper.SWEEPS:
            if sweep.suite != result.suite:
                continue
            known = set().union(*sweep.accuracy.values())
            theirs = sweep.accuracy.get(audit.printed.name, {})
            for entry in findings.by_recipe(result.conditions):
                if entry.recipe in known:
                    lengths = (result.length, sweep.length)
                    causes = answer_differences(audit, entry, lengths, sweep.prompts)
                    number = theirs.get(entry.recipe)
                    yield _answers(audit, sweep.item, entry, suite, number, causes)
        if result.suite == "induction":
            base, theirs = findings.softmax_of(result.conditions), audit.printed.induction
            nearest = min(theirs, key=lambda known: abs(known - result.length), default=0)
            causes = answer_differences(audit, base, (result.length, nearest or result.length))
            yield _answers(audit, "Appendix I", base, suite, theirs.get(nearest), causes)


def fixed_bias(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 29: one bias for all models."""
    sweep, suite = paper.NUMBERS.fixed_bias, audit.summary.config.probe
    theirs = sweep.accuracy.get(audit.printed.name, {})
    for entry in findings.by_recipe(audit.summary.sweep):
        if re.fullmatch(r"relu_p4_b\d+", entry.recipe):
            causes = needle_differences(audit, entry)
            yield _answers(audit, sweep.item, entry, suite, theirs.get(entry.recipe), causes)


def ablation(audit: Audit) -> Iterator[ComparedNumber]:
    """Figure 4 and Table 17: one recipe in K heads, by their rank, on needles."""
    summary, printed = audit.summary, audit.printed
    if not summary.ablation:
        return
    causes = needle_differences(audit, findings.softmax_of(summary.ablation))
    suite = summary.config.probe
    yield from _head_sets(
        audit,
        ("Figure 4", "Table 17"),
        (suite, summary.ablation, summary.decisiveness),
        printed.draws,
        printed.head_sets_change,
        causes,
    )


def literary_ablation(audit: Audit) -> Iterator[ComparedNumber]:
    """Figure 3 and Table 27: the same on literary openings."""
    printed = audit.printed
    for result in audit.summary.suite_ablation:
        if result.suite != "copying":
            continue
        n = findings.softmax_of(result.conditions).accuracy.n
        lengths, prompts = (result.length, SETTINGS.literary_length), (n, SETTINGS.prompts)
        causes = differences(audit, lengths, prompts, calibrated=True)
        yield from _head_sets(
            audit,
            ("Figure 3", "Table 27"),
            (named.key(result.suite, result.length), result.conditions, result.decisiveness),
            printed.literary_draws,
            printed.literary_head_sets_change,
            (*causes, *openings_differ(result.suite)),
        )


def _head_sets(
    audit: Audit,
    items: tuple[str, str],
    of_sets: tuple[str, Sequence[ConditionResult], Sequence[Decisiveness]],
    draws: Mapping[int, paper.Draws],
    within: float | tuple[float, float] | None,
    causes: tuple[str, ...],
) -> Iterator[ComparedNumber]:
    """Changes with the top and the bottom K heads, and how the random sets compare.

    Args:
      audit: ours.
      items: the figure of the changes and the table of the random sets.
      of_sets: suite, results of the head sets and their decisiveness.
      draws: the paper's numbers by K.
      within: the paper's changes where it prints one number or a range for all K.
      causes: what differs.
    """
    suite, conditions, decisiveness = of_sets
    by_group = head_sets.groups(conditions)
    causes = (*_other_recipe(audit), *causes)
    base = head_sets.right(findings.softmax_of(conditions).accuracy)
    for result in decisiveness:
        theirs = draws.get(result.size)
        of_size = functools.partial(row, audit, suite=suite, n=result.n)
        for group in ("top", "bottom"):
            (entry,) = by_group[group][result.size]
            yield of_size(
                items[0],
                "change of accuracy",
                entry.delta,
                getattr(theirs, group, within),
                cell=f"{group} {result.size} heads",
                unit="points",
                causes=causes,
            )
        if not result.random:
            continue
        count, printed = len(result.random), getattr(theirs, "sets", None) or SETTINGS.draws
        of_count = [f"{count} random sets (paper: {printed})"] * (count != printed)
        changes = [(right - base) / result.n for right in result.random]
        numbers = [
            ("random sets that do better", result.beaten, "beaten", "sets"),
            ("worst random set", min(changes), "random_least", "points"),
            ("best random set", max(changes), "random_most", "points"),
        ]
        if getattr(theirs, "random_mean", None) is not None:
            mean = sum(changes) / count
            numbers.append(("mean of the random sets", mean, "random_mean", "points"))
        for quantity, ours, name, unit in numbers:
            yield of_size(
                items[1],
                quantity,
                ours,
                getattr(theirs, name, None),
                cell=f"top {result.size} heads against {count} random sets",
                unit=unit,
                causes=(*causes, *of_count),
            )


def single_heads(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 26: the heads at both ends of the ranking, one at a time, on needles."""
    entries = findings.single_conditions(audit.summary)
    if not entries:
        return
    places = [head_sets.layer_and_head(entry.cell) for entry in entries]
    changes = np.array([entry.delta.estimate for entry in entries])
    of_heads = functools.partial(
        row,
        audit,
        "Table 26",
        suite=audit.summary.config.probe,
        cell=f"{len(entries)} heads of both ends of the ranking",
        n=entries[0].accuracy.n,
    )
    of_count = [f"{len(entries)} heads (paper: 40)"] * (len(entries) != 40)
    causes = (*_other_recipe(audit), *of_count, *needle_differences(audit, entries[0]))
    changed, theirs = int(np.count_nonzero(changes)), audit.printed.single_heads
    yield of_heads("heads that change the accuracy", changed, theirs, unit="heads", causes=causes)
    if changed:
        width = audit.summary.heads
        s_2 = np.array([audit.by_head["s_2"][layer * width + head] for layer, head in places])
        correlation = float(stats.spearmanr(s_2, changes).statistic)
        yield of_heads("rank correlation of S_2 and change", correlation, None, unit="1")


def _other_recipe(audit: Audit) -> list[str]:
    """The cause of differences of head sets where the recipe in them is another one."""
    ours, theirs = audit.summary.config.ablation_recipe, SETTINGS.ablation_recipe
    return [f"{ours} (paper: {theirs})"] * (ours != theirs)
