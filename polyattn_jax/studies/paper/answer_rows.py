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
from polyattn_jax.studies.paper import tables
from polyattn_jax.studies.paper.beside import (
    Audit,
    at_b_auto,
    differences,
    openings_differ,
    row,
)
from polyattn_jax.studies.paper.results import ComparedNumber
from polyattn_jax.suites import named

ABLATED = "relu_p2_bauto"
COPYING_LENGTH = 500
DRAWS = 20


def _change(
    audit: Audit,
    item: str,
    entry: ConditionResult,
    suite: str,
    theirs: float | tuple[float, float] | None,
    causes: tuple[str, ...],
) -> ComparedNumber:
    """The accuracy of softmax, or the change of a recipe against it."""
    base = entry.cell == SOFTMAX.name
    return row(
        audit,
        item,
        "accuracy" if base else "change of accuracy",
        entry.accuracy if base else entry.delta,
        theirs,
        suite=suite,
        cell=entry.recipe,
        n=entry.accuracy.n,
        unit="%" if base else "points",
        causes=causes,
    )


def literary(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 2: openings of literature."""
    for result in audit.summary.suites:
        if result.suite != "copying":
            continue
        lengths = (result.length, COPYING_LENGTH)
        for entry in findings.by_recipe(result.conditions):
            theirs: float | tuple[float, float] | None = None
            if audit.beside:
                theirs = audit.beside.literary.get(entry.recipe)
                if entry.cell == SOFTMAX.name:
                    theirs = paper.LITERARY_SOFTMAX
            prompts = (entry.accuracy.n, paper.PROMPTS)
            causes = (
                *differences(audit, lengths, prompts, calibrated=at_b_auto(entry.recipe)),
                *openings_differ(result.suite),
            )
            suite = named.key(result.suite, result.length)
            yield _change(audit, "Table 2", entry, suite, theirs, causes)


def needle_differences(audit: Audit, entry: ConditionResult) -> tuple[str, ...]:
    """As `differences`, of a recipe on the needle prompts of the sweep."""
    lengths = (audit.summary.config.sweep_length, paper.NEEDLE_LENGTH)
    prompts = (entry.accuracy.n, paper.PROMPTS)
    return differences(audit, lengths, prompts, calibrated=at_b_auto(entry.recipe))


def needle(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 3: the needle."""
    suite = named.key("niah", audit.summary.config.sweep_length)
    for entry in findings.by_recipe(audit.summary.sweep):
        theirs = None
        if audit.beside:
            theirs = audit.beside.needle.get(entry.recipe)
            if entry.cell == SOFTMAX.name:
                theirs = audit.beside.needle_accuracy(entry.recipe)
        yield _change(audit, "Table 3", entry, suite, theirs, needle_differences(audit, entry))


def suites(audit: Audit) -> Iterator[ComparedNumber]:
    """Tables 19 to 22, 30 and 32: harder needles. Appendix I: induction answered."""
    beside = audit.beside.name if audit.beside else ""
    for result in audit.summary.suites:
        suite = named.key(result.suite, result.length)
        for sweep in tables.SWEEPS:
            if sweep.suite != result.suite:
                continue
            known = set().union(*sweep.accuracy.values())
            for entry in findings.by_recipe(result.conditions):
                if entry.recipe not in known:
                    continue
                lengths, prompts = (result.length, sweep.length), (entry.accuracy.n, sweep.prompts)
                yield row(
                    audit,
                    sweep.item,
                    "accuracy",
                    entry.accuracy,
                    sweep.accuracy.get(beside, {}).get(entry.recipe),
                    suite=suite,
                    cell=entry.recipe,
                    n=entry.accuracy.n,
                    causes=differences(audit, lengths, prompts, calibrated=at_b_auto(entry.recipe)),
                )
        if result.suite == "induction":
            base = findings.softmax_of(result.conditions)
            theirs = tables.INDUCTION.get(beside, {})
            length = min(theirs, key=lambda known: abs(known - result.length), default=0)
            yield row(
                audit,
                "Appendix I",
                "accuracy",
                base.accuracy,
                theirs.get(length),
                suite=suite,
                cell=base.recipe,
                n=base.accuracy.n,
                causes=differences(
                    audit,
                    (result.length, length or result.length),
                    (base.accuracy.n, paper.PROMPTS),
                    calibrated=False,
                ),
            )


def fixed_bias(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 29: one bias for all models."""
    beside = audit.beside.name if audit.beside else ""
    suite = named.key("niah", audit.summary.config.sweep_length)
    for entry in findings.by_recipe(audit.summary.sweep):
        if re.fullmatch(r"relu_p4_b\d+", entry.recipe):
            yield row(
                audit,
                tables.FIXED_BIAS.item,
                "accuracy",
                entry.accuracy,
                tables.FIXED_BIAS.accuracy.get(beside, {}).get(entry.recipe),
                suite=suite,
                cell=entry.recipe,
                n=entry.accuracy.n,
                causes=needle_differences(audit, entry),
            )


def ablation(audit: Audit) -> Iterator[ComparedNumber]:
    """Figure 4 and Table 17: one recipe in K heads, by their rank, on needles."""
    summary, beside = audit.summary, audit.beside.name if audit.beside else ""
    if not summary.ablation:
        return
    same = 0.0 if beside in tables.NO_CHANGE else None
    draws = tables.DRAWS.get(beside, {})
    causes = needle_differences(audit, findings.softmax_of(summary.ablation))
    suite = named.key("niah", summary.config.sweep_length)
    of_sets = (suite, summary.ablation, summary.decisiveness)
    yield from _head_sets(audit, ("Figure 4", "Table 17"), of_sets, draws, same, causes)


def single_heads(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 26: the heads at both ends of the ranking, one at a time, on needles."""
    entries = findings.single_conditions(audit.summary)
    if not entries:
        return
    config, beside = audit.summary.config, audit.beside.name if audit.beside else ""
    places = [head_sets.layer_and_head(entry.cell) for entry in entries]
    changes = np.array([entry.delta.estimate for entry in entries])
    of_heads = functools.partial(
        row,
        audit,
        "Table 26",
        suite=named.key("niah", config.sweep_length),
        cell=f"{len(entries)} heads of both ends of the ranking",
        n=entries[0].accuracy.n,
        scale=1.0,
    )
    theirs = tables.SINGLE_HEADS.get(beside)
    of_recipe = [f"{config.ablation_recipe} (paper: {ABLATED})"] * (
        config.ablation_recipe != ABLATED
    )
    of_count = [f"{len(entries)} heads (paper: 40)"] * (len(entries) != 40)
    causes = (*of_recipe, *of_count, *needle_differences(audit, entries[0]))
    changed = int(np.count_nonzero(changes))
    yield of_heads("heads that change the accuracy", changed, theirs, unit="heads", causes=causes)
    if changed:
        width = audit.summary.heads
        s_2 = np.array([audit.by_head["s_2"][layer * width + head] for layer, head in places])
        correlation = float(stats.spearmanr(s_2, changes).statistic)
        yield of_heads("rank correlation of S_2 and change", correlation, None, unit="1")


def literary_ablation(audit: Audit) -> Iterator[ComparedNumber]:
    """Figure 3 and Table 27: the same on literary openings."""
    beside = audit.beside.name if audit.beside else ""
    within, draws = tables.WITHIN.get(beside), tables.LITERARY_DRAWS.get(beside, {})
    for result in audit.summary.suite_ablation:
        if result.suite != "copying":
            continue
        n = findings.softmax_of(result.conditions).accuracy.n
        lengths, prompts = (result.length, COPYING_LENGTH), (n, paper.PROMPTS)
        causes = (
            *differences(audit, lengths, prompts, calibrated=True),
            *openings_differ(result.suite),
        )
        of_sets = named.key(result.suite, result.length), result.conditions, result.decisiveness
        yield from _head_sets(audit, ("Figure 3", "Table 27"), of_sets, draws, within, causes)


def _head_sets(
    audit: Audit,
    items: tuple[str, str],
    of_sets: tuple[str, Sequence[ConditionResult], Sequence[Decisiveness]],
    draws: Mapping[int, tables.Draws],
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
    recipe = audit.summary.config.ablation_recipe
    causes = (*[f"{recipe} (paper: {ABLATED})"] * (recipe != ABLATED), *causes)
    base = head_sets.right(findings.softmax_of(conditions).accuracy)
    for result in decisiveness:
        theirs = draws.get(result.size)
        for group in ("top", "bottom"):
            (entry,) = by_group[group][result.size]
            yield row(
                audit,
                items[0],
                "change of accuracy",
                entry.delta,
                getattr(theirs, group) if theirs else within,
                suite=suite,
                cell=f"{group} {result.size} heads",
                n=result.n,
                unit="points",
                causes=causes,
            )
        if not result.random:
            continue
        count = len(result.random)
        of_random = (*causes, *[f"{count} random sets (paper: {DRAWS})"] * (count != DRAWS))
        changes = [(right - base) / result.n for right in result.random]
        for quantity, ours, name, unit, scale in (
            ("random sets that do better", result.beaten, "beaten", "sets", 1.0),
            ("worst random set", min(changes), "random_least", "points", 100.0),
            ("best random set", max(changes), "random_most", "points", 100.0),
        ):
            yield row(
                audit,
                items[1],
                quantity,
                ours,
                getattr(theirs, name, None),
                suite=suite,
                cell=f"top {result.size} heads against {count} random sets",
                n=result.n,
                unit=unit,
                scale=scale,
                causes=of_random,
            )
