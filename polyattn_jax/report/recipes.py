"""The sections of a report on what the model answers: every recipe in all heads, and in some.

Each takes the summary and returns a section of the page; `page.build` puts them together with those
on rows and heads (`score_rows`).
"""

from pathlib import Path

from markupsafe import Markup

from lm_jax import report
from lm_jax.report import Cell, Column, Section, cell, rate, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from lm_jax.statistics import Interval, wilson
from polyattn_jax.audit import head_sets
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import (
    AuditSummary,
    BoundAgreement,
    ConditionResult,
    Decisiveness,
    Prevalence,
    RecipeVerdict,
    SoftmaxComparison,
    SuiteAblation,
)
from polyattn_jax.report import figures, findings, paper, sharpness
from polyattn_jax.report.findings import suite_label
from polyattn_jax.suites import named

_PROSE = Prose("polyattn_jax.report")

# Intervals over fewer prompts are Student's (`lm_jax.statistics.clustered_bootstrap`).
FEW_PROMPTS = 30
_OF_SETS = ("K", "Highest S₂", "Lowest S₂", "Random, worst to best", "Worse than", "Decisive")


def substitution(summary: AuditSummary, model: paper.PaperModel | None) -> Section:
    """The sweep: every recipe in all heads, on the same prompts as softmax."""
    config, sweep = summary.config, findings.by_recipe(summary.sweep)
    base = findings.softmax_of(sweep)
    n = f"{number(base.accuracy.n)} prompts"
    total = summary.layers * summary.heads * config.sweep_length
    verdicts = {v.recipe: v for v in summary.verdicts}
    control = sharpness.softmax_safe(summary)
    lines = [_sweep_row(entry, verdicts.get(entry.recipe), control) for entry in sweep]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for entry in sweep:
        if v := verdicts.get(entry.recipe):
            why = "; ".join(filter(None, (v.finding, v.reading)))
            reasons.setdefault((v.verdict, why, v.next), []).append(v.recipe)
    return section(
        "Substitution: which recipes keep retrieval?",
        _PROSE("substitution", points=f"{100 * config.tolerance:g}"),
        table(
            [
                "Recipe",
                "Verdict",
                "Accuracy, %",
                "Change, pts",
                "McNemar p",
                Column("Loss, nats", ".2f"),
                "Rank",
                Column("Dead rows", ",.1f"),
                "Safe, %",
                "Dead, %",
                f"Top {config.top_heads}, %",
                "Dead, %",
            ],
            lines,
            caption=_PROSE(
                "substitution_caption",
                length=number(config.sweep_length),
                comparisons=number(len(lines) - 1),
                rows=number(total),
                top=number(config.top_heads),
            ),
            n=n,
        ),
        figures.accuracy_bars(sweep, model, n),
        table(
            ["Recipes", "Verdict", "Because, and next step"],
            [
                [
                    ", ".join(names),
                    verdict_cell(verdict),
                    cell(f"{reason}.", note=f"Next: {step}."),
                ]
                for (verdict, reason, step), names in reasons.items()
            ],
            caption="Reasons and next steps.",
        ),
    )


def _sweep_row(
    entry: ConditionResult, verdict: RecipeVerdict | None, control: Interval | None
) -> list[object]:
    rank = entry.median_rank
    numbers = (
        entry.loss,
        int(rank) if rank.is_integer() else cell(rank, spec=",.1f"),
        entry.dead_rows_per_prompt,
    )
    accuracy, dash = stacked(entry.accuracy), cell(None)
    if verdict is None:
        safe = stacked(control) if control else dash
        return [entry.recipe, "baseline", accuracy, dash, dash, *numbers, safe, *[dash] * 3]
    shares = (verdict.safe, verdict.dead, verdict.top_safe, verdict.top_dead)
    counts = f"{number(entry.lost)} lost, {number(entry.won)} won"
    return [
        cell(entry.recipe, note=findings.bias_text(entry.bias)),
        verdict_cell(verdict.verdict),
        accuracy,
        stacked(entry.delta, signed=True),
        cell(entry.p_value, spec=".2g", note=counts),
        *numbers,
        *(stacked(share) if share else dash for share in shares),
    ]


def own_prompts(summary: AuditSummary) -> Section | None:
    """The prompts of the user: every recipe in all heads, each with its own verdict."""
    if not summary.prompts:
        return None
    cells = findings.by_recipe(summary.prompts)
    base = findings.softmax_of(cells)
    lines = []
    for entry in cells:
        accuracy = stacked(entry.accuracy)
        loss = cell(entry.loss, spec=".2f")
        if entry is base:
            lines.append([entry.recipe, "baseline", accuracy, cell(None), cell(None), loss])
            continue
        counts = f"{number(entry.lost)} lost, {number(entry.won)} won"
        change = stacked(entry.delta, signed=True)
        p_value = cell(entry.p_value, spec=".2g", note=counts)
        verdict = verdict_cell(entry.verdict)
        lines.append([entry.recipe, verdict, accuracy, change, p_value, loss])
    return section(
        "Your prompts: do they keep their answers?",
        _PROSE("own_prompts", file=Path(summary.config.prompts).name),
        table(
            ["Recipe", "Verdict", "Accuracy, %", "Change, pts", "McNemar p", "Loss, nats"],
            lines,
            caption="Your prompts. Brackets: 95 % intervals (accuracy: Wilson; change against "
            "softmax: paired, Tango). Loss is of the answer's first token.",
            n=f"{number(base.accuracy.n)} prompts",
        ),
    )


def own_texts(summary: AuditSummary) -> Section | None:
    """The texts of the user: their loss under every recipe in all heads."""
    if not summary.texts:
        return None
    entries = findings.by_recipe(summary.texts)
    base = findings.softmax_of(entries)
    lines = [
        [
            entry.recipe,
            nats(entry.loss),
            cell(None) if entry is base else nats(entry.change, signed=True),
            _perplexity(entry.perplexity),
            cell(None) if entry is base else _perplexity(entry.perplexity_ratio),
            entry.dead_rows_per_text,
        ]
        for entry in entries
    ]
    few = FEW_PROMPTS if base.loss.n < FEW_PROMPTS else None
    return section(
        "Your texts: does the model still predict them?",
        _PROSE("own_texts", file=Path(summary.config.text).name),
        table(
            [
                "Recipe",
                "Loss, nats per token",
                "Change, nats per token",
                "Perplexity",
                "Times softmax",
                Column("Dead rows", ",.1f"),
            ],
            lines,
            caption=_PROSE("own_texts_caption", few=few),
            n=f"{number(base.loss.n)} texts, {number(base.tokens)} predicted tokens",
        ),
    )


def ablation(summary: AuditSummary) -> Section | None:
    """One recipe in some heads: those of highest, of lowest and of random median S_2."""
    if not summary.ablation:
        return None
    config = summary.config
    rows = [_ablation_row(findings.softmax_of(summary.ablation), "none: softmax everywhere", 0)]
    for kind, cells in head_sets.groups(summary.ablation).items():
        for size, entries in cells.items():
            for draw, entry in enumerate(entries):
                which = f"random, seed {draw}" if kind == "random" else f"{kind} of the ranking"
                rows.append(_ablation_row(entry, which, size))
    for entry in findings.single_conditions(summary):
        layer, head = head_sets.layer_and_head(entry.cell)
        rows.append(_ablation_row(entry, f"layer {layer}, head {head} alone", 1))
    draws = config.ablation_draws
    suite = suite_label(summary.ranking_suite, config)
    return section(
        "Ablation: which heads need softmax?",
        _PROSE("ablation", recipe=config.ablation_recipe),
        findings.in_part(summary),
        table(
            _OF_SETS,
            [_decisive_row(entry) for entry in summary.decisiveness],
            caption=_PROSE("decisive_caption", draws=head_sets.FEWEST_DRAWS),
            n=f"{number(summary.ablation[0].accuracy.n)} prompts per set",
        ),
        figures.ablation_curves(
            summary.ablation,
            caption=f"Needle accuracy at {number(config.sweep_length)} tokens against the "
            f"number of replaced heads. Heads are ranked by their median S₂ at b_auto ({suite}); "
            f"random sets: {number(draws)} draw{'s' * (draws != 1)} per K.",
        ),
        *(_suite_ablation(entry, config) for entry in summary.suite_ablation),
        findings.single_heads(summary),
        report.details(
            "Every head set, with intervals",
            table(
                ["Heads", "K", "Accuracy, %", "Change, points", "Lost, won", "Loss, nats"],
                rows,
                caption="Group ablation; 95 % intervals (Wilson, and paired for the change).",
                n=f"{number(summary.ablation[0].accuracy.n)} prompts per row",
            ),
        ),
    )


def _suite_ablation(entry: SuiteAblation, config: AuditConfig) -> Markup:
    base = findings.softmax_of(entry.conditions).accuracy
    return table(
        _OF_SETS,
        [_decisive_row(one) for one in entry.decisiveness],
        caption=f"The same head sets on {suite_label(named.key(entry.suite, entry.length), config)}"
        f": prompts that stay right; softmax {findings.counted(base)}.",
        n=f"{number(base.n)} prompts per set",
    )


def _decisive_row(entry: Decisiveness) -> list[object]:
    n, drawn = entry.n, sorted(entry.random)
    flag = {None: "too few draws", True: "yes", False: "no"}[entry.decisive]
    ends = [
        cell(right, note=findings.ends(wilson(right, n))) for right in (entry.top, entry.bottom)
    ]
    return [
        entry.size,
        *ends,
        f"{drawn[0]} to {drawn[-1]}",
        f"{entry.beaten} of {len(drawn)}",
        flag,
    ]


def _ablation_row(entry: ConditionResult, which: str, size: int) -> list[object]:
    return [
        which,
        size,
        percent(entry.accuracy),
        percent(entry.delta, signed=True),
        f"{entry.lost}, {entry.won}",
        cell(entry.loss, spec=".2f"),
    ]


def percent(result: Interval, *, signed: bool = False) -> Cell:
    """A share with its interval in one line, in percent, without n."""
    return Cell(rate(result, spec="+.1f" if signed else ".1f").text, numeric=True)


def stacked(result: Interval, *, signed: bool = False) -> Cell:
    """A share in percent with its interval under it, for tables of many columns."""
    spec = "+.1f" if signed else ".1f"
    low, high = (number(100 * end, spec) for end in (result.low, result.high))
    note = findings.NO_INTERVAL if findings.unknown_ends(result) else f"[{low}, {high}]"
    return cell(100 * result.estimate, spec=spec, note=note)


def nats(result: Interval, *, signed: bool = False) -> Cell:
    """A loss or its change with its interval under it."""
    spec = "+.3f" if signed else ".3f"
    low, high = (number(end, spec) for end in (result.low, result.high))
    note = findings.NO_INTERVAL if findings.unknown_ends(result) else f"[{low}, {high}]"
    return cell(result.estimate, spec=spec, note=note)


def _perplexity(result: Interval) -> Cell:
    """A perplexity or a ratio of two with its interval under it."""
    low, high = (number(end, ".4g") for end in (result.low, result.high))
    note = findings.NO_INTERVAL if findings.unknown_ends(result) else f"[{low}, {high}]"
    return cell(result.estimate, spec=".4g", note=note)


def suite_cell(entry: Prevalence | SoftmaxComparison | BoundAgreement, config: AuditConfig) -> Cell:
    """A suite with the length of its prompts and the bias under it."""
    tokens = findings.suite_tokens(entry.suite, config)
    bias = findings.bias_label(entry.bias_kind)
    return cell(findings.suite_name(entry.suite), note=", ".join(filter(None, (tokens, bias))))


def verdict_cell(verdict: str) -> Cell:
    """A verdict in its tone."""
    return cell(verdict, tone=findings.TONES[verdict])
