"""What a model answers under the recipes beside the paper: every table and figure of accuracy."""

from collections.abc import Iterator
import re

from polyattn_jax import head_sets, paper
from polyattn_jax.condition_results import ConditionResult
from polyattn_jax.paper_study import tables
from polyattn_jax.paper_study.beside import Audit, at_b_auto, differences, row
from polyattn_jax.paper_study.results import ComparedNumber
from polyattn_jax.report import findings
from polyattn_jax.row_maps import SOFTMAX
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
            causes = differences(audit, lengths, prompts, calibrated=at_b_auto(entry.recipe))
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
    """Figure 4 and Table 17: one recipe in K heads, by their rank."""
    summary, beside = audit.summary, audit.beside.name if audit.beside else ""
    by_group = head_sets.groups(summary.ablation)
    suite = named.key("niah", summary.config.sweep_length)
    recipe = summary.config.ablation_recipe
    for result in summary.decisiveness:
        theirs = tables.DRAWS.get(beside, {}).get(result.size)
        of_group = {"top": theirs.top, "bottom": theirs.bottom} if theirs else {}
        if beside in tables.NO_CHANGE:
            of_group = {"top": 0.0, "bottom": 0.0}
        (top,), (bottom,) = (by_group[group][result.size] for group in ("top", "bottom"))
        other = (f"{recipe} (paper: {ABLATED})",) * (recipe != ABLATED)
        causes = (*other, *needle_differences(audit, top))
        for group, entry in (("top", top), ("bottom", bottom)):
            yield row(
                audit,
                "Figure 4",
                "change of accuracy",
                entry.delta,
                of_group.get(group),
                suite=suite,
                cell=f"{group} {result.size} heads",
                n=result.n,
                unit="points",
                causes=causes,
            )
        if not result.random:
            continue
        base = head_sets.right(findings.softmax_of(summary.ablation).accuracy)
        draws = len(result.random)
        causes = (*causes, *[f"{draws} random sets (paper: {DRAWS})"] * (draws != DRAWS))
        changes = [(right - base) / result.n for right in result.random]
        for quantity, ours, reference, unit, scale in (
            ("random sets that do better", result.beaten, theirs and theirs.beaten, "sets", 1.0),
            ("worst random set", min(changes), theirs and theirs.random_least, "points", 100.0),
            ("best random set", max(changes), theirs and theirs.random_most, "points", 100.0),
        ):
            yield row(
                audit,
                "Table 17",
                quantity,
                ours,
                reference,
                suite=suite,
                cell=f"top {result.size} heads against {draws} random sets",
                n=result.n,
                unit=unit,
                scale=scale,
                causes=causes,
            )
