"""The sections of a report on what the model answers: every recipe in all heads, and in some.

Each takes the summary and returns a section of the page; `page.build` puts them together with those
on rows and heads (`score_rows`).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from lm_jax import report
from lm_jax.report import Cell, Column, Section, cell, rate, section, table, table_of
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
    SoftmaxComparison,
    SuiteAblation,
    TextLoss,
)
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.report import figures, findings, paper, sharpness
from polyattn_jax.report.findings import suite_label
from polyattn_jax.suites import named

_PROSE = Prose("polyattn_jax.report")

# Intervals over fewer prompts are Student's (`lm_jax.statistics.clustered_bootstrap`).
FEW_PROMPTS = 30


def substitution(summary: AuditSummary, model: paper.PaperModel | None) -> Section:
    """The sweep: every recipe in all heads, on the same prompts as softmax."""
    config, sweep = summary.config, findings.by_recipe(summary.sweep)
    n = f"{number(findings.softmax_of(sweep).accuracy.n)} prompts"
    verdicts = {v.recipe: v for v in summary.verdicts}
    control = sharpness.softmax_safe(summary)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for entry in sweep:
        if v := verdicts.get(entry.recipe):
            why = "; ".join(filter(None, (v.finding, v.reading)))
            reasons.setdefault((v.verdict, why, v.next), []).append(v.recipe)

    def share(name: str, of_softmax: Interval | None = None) -> Callable[[ConditionResult], Cell]:
        return lambda e: stacked(getattr(verdicts.get(e.recipe), name, of_softmax))

    return section(
        "Substitution: which recipes keep retrieval?",
        _PROSE("substitution", points=f"{100 * config.tolerance:g}"),
        table_of(
            sweep,
            [
                Column("Recipe", value=lambda e: _recipe_cell(e, config)),
                *answer_columns(),
                Column("Loss, nats", ".2f", lambda e: e.loss),
                Column("Rank", value=_rank),
                Column("Dead rows", ",.1f", lambda e: e.dead_rows_per_prompt),
                Column("Safe, %", value=share("safe", control)),
                Column("Dead, %", value=share("dead")),
                Column(f"Top {config.top_heads}, %", value=share("top_safe")),
                Column("Dead, %", value=share("top_dead")),
            ],
            caption=_PROSE(
                "substitution_caption",
                length=number(config.sweep_length),
                comparisons=number(len(sweep) - 1),
                rows=number(summary.layers * summary.heads * config.sweep_length),
                top=number(config.top_heads),
            ),
            n=n,
        ),
        figures.accuracy_bars(sweep, model, n),
        table(
            ["Recipes", "Verdict", "Because, and next step"],
            [
                [", ".join(names), verdict_cell(verdict), cell(f"{why}.", note=f"Next: {step}.")]
                for (verdict, why, step), names in reasons.items()
            ],
            caption="Reasons and next steps.",
        ),
    )


def answer_columns(of: Callable[[Any], ConditionResult] = lambda row: row) -> list[Column]:
    """Columns of the verdict on a recipe, its accuracy and the change against softmax.

    Args:
      of: function of a row that gives the result.
    """

    def change(value: Callable[[ConditionResult], Cell]) -> Callable[[Any], Cell]:
        """The value, and a dash for softmax."""
        return lambda row: cell(None) if _is_softmax(of(row)) else value(of(row))

    return [
        Column(
            "Verdict",
            value=lambda row: "baseline" if _is_softmax(of(row)) else verdict_cell(of(row).verdict),
        ),
        Column("Accuracy, %", value=lambda row: stacked(of(row).accuracy)),
        Column("Change, pts", value=change(lambda e: stacked(e.delta, "+.1f"))),
        Column("McNemar p", value=change(lambda e: p_value(e.p_value, e.lost, e.won))),
    ]


def p_value(value: float, lost: int, won: int) -> Cell:
    """The p-value of McNemar's test, with the counts that it compares."""
    return cell(value, spec=".2g", note=f"{number(lost)} lost, {number(won)} won")


def _is_softmax(entry: ConditionResult | TextLoss) -> bool:
    return entry.cell == SOFTMAX.name


def _recipe_cell(entry: ConditionResult, config: AuditConfig) -> Cell:
    if _is_softmax(entry):
        return cell(entry.recipe)
    recipe = config.with_ablation.get(entry.recipe, SOFTMAX)
    return cell(entry.recipe, note=findings.bias_text(entry.bias, recipe.option))


def _rank(entry: ConditionResult) -> int | Cell:
    rank = entry.median_rank
    return int(rank) if rank.is_integer() else cell(rank, spec=",.1f")


def own_prompts(summary: AuditSummary) -> Section | None:
    """The prompts of the user: every recipe in all heads, each with its own verdict."""
    if not summary.prompts:
        return None
    entries = findings.by_recipe(summary.prompts)
    return section(
        "Your prompts: do they keep their answers?",
        _PROSE("own_prompts", file=Path(summary.config.prompts).name),
        table_of(
            entries,
            [
                Column("Recipe", value=lambda e: e.recipe),
                *answer_columns(),
                Column("Loss, nats", ".2f", lambda e: e.loss),
            ],
            caption="Your prompts. Brackets: 95 % intervals (accuracy: Wilson; change against "
            "softmax: paired, Tango). Loss is of the answer's first token.",
            n=f"{number(findings.softmax_of(entries).accuracy.n)} prompts",
        ),
    )


def own_texts(summary: AuditSummary) -> Section | None:
    """The texts of the user: their loss under every recipe in all heads."""
    if not summary.texts:
        return None
    entries = findings.by_recipe(summary.texts)
    base = findings.softmax_of(entries)

    def against(name: str, spec: str) -> Callable[[TextLoss], Cell]:
        return lambda e: stacked(None if e is base else getattr(e, name), spec, scale=1.0)

    few = FEW_PROMPTS if base.loss.n < FEW_PROMPTS else None
    return section(
        "Your texts: does the model still predict them?",
        _PROSE("own_texts", file=Path(summary.config.text).name),
        table_of(
            entries,
            [
                Column("Recipe", value=lambda e: e.recipe),
                Column("Loss, nats per token", value=lambda e: stacked(e.loss, ".3f", scale=1.0)),
                Column("Change, nats per token", value=against("change", "+.3f")),
                Column("Perplexity", value=lambda e: stacked(e.perplexity, ".4g", scale=1.0)),
                Column("Times softmax", value=against("perplexity_ratio", ".4g")),
                Column("Dead rows", ",.1f", lambda e: e.dead_rows_per_text),
            ],
            caption=_PROSE("own_texts_caption", few=few),
            n=f"{number(base.loss.n)} texts, {number(base.tokens)} predicted tokens",
        ),
    )


def ablation(summary: AuditSummary) -> Section | None:
    """One recipe in some heads: those of highest, of lowest and of random median S_2."""
    if not summary.ablation:
        return None
    config, draws = summary.config, summary.config.ablation_draws
    n, suite = summary.ablation[0].accuracy.n, suite_label(summary.ranking_suite, config)
    return section(
        "Ablation: which heads need softmax?",
        _PROSE("ablation", recipe=config.ablation_recipe),
        findings.in_part(summary),
        _decisiveness(
            summary.decisiveness, _PROSE("decisive_caption", draws=head_sets.FEWEST_DRAWS), n
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
            table_of(
                _head_sets(summary),
                [
                    Column("Heads", value=lambda row: row.name),
                    Column("K", value=lambda row: row.size),
                    Column("Accuracy, %", value=lambda row: in_line(row.result.accuracy)),
                    Column("Change, points", value=lambda row: in_line(row.result.delta, "+.1f")),
                    Column("Lost, won", value=lambda row: f"{row.result.lost}, {row.result.won}"),
                    Column("Loss, nats", ".2f", lambda row: row.result.loss),
                ],
                caption="Group ablation; 95 % intervals (Wilson, and paired for the change).",
                n=f"{number(n)} prompts per row",
            ),
        ),
    )


class _HeadSet(NamedTuple):
    """A head set of the ablation in words, its size, and its result."""

    name: str
    size: int
    result: ConditionResult


def _head_sets(summary: AuditSummary) -> Iterator[_HeadSet]:
    yield _HeadSet("none: softmax everywhere", 0, findings.softmax_of(summary.ablation))
    for kind, cells in head_sets.groups(summary.ablation).items():
        for size, entries in cells.items():
            for draw, entry in enumerate(entries):
                which = f"random, seed {draw}" if kind == "random" else f"{kind} of the ranking"
                yield _HeadSet(which, size, entry)
    for entry in findings.single_conditions(summary):
        layer, head = head_sets.layer_and_head(entry.cell)
        yield _HeadSet(f"layer {layer}, head {head} alone", 1, entry)


def _suite_ablation(entry: SuiteAblation, config: AuditConfig) -> Markup:
    base = findings.softmax_of(entry.conditions).accuracy
    where = suite_label(named.key(entry.suite, entry.length), config)
    caption = (
        f"The same head sets on {where}: prompts that stay right; softmax {findings.counted(base)}."
    )
    return _decisiveness(entry.decisiveness, caption, base.n)


def _decisiveness(entries: Sequence[Decisiveness], caption: str, n: int) -> Markup:
    """Whether the heads of highest S_2 do worse than random ones, by their number K."""

    def right(e: Decisiveness, count: int) -> Cell:
        return cell(count, note=findings.ends(wilson(count, e.n)))

    flags = {None: "too few draws", True: "yes", False: "no"}
    return table_of(
        entries,
        [
            Column("K", value=lambda e: e.size),
            Column("Highest S₂", value=lambda e: right(e, e.top)),
            Column("Lowest S₂", value=lambda e: right(e, e.bottom)),
            Column("Random, worst to best", value=lambda e: f"{min(e.random)} to {max(e.random)}"),
            Column("Worse than", value=lambda e: f"{e.beaten} of {len(e.random)}"),
            Column("Decisive", value=lambda e: flags[e.decisive]),
        ],
        caption=caption,
        n=f"{number(n)} prompts per set",
    )


def in_line(result: Interval, spec: str = ".1f", *, scale: float = 100.0) -> Cell:
    """A number with its interval in one line, without n: by default in percent."""
    return rate(result, spec=spec, scale=scale)._replace(note="")


def stacked(result: Interval | None, spec: str = ".1f", *, scale: float = 100.0) -> Cell:
    """A number with its interval under it, for tables of many columns: by default in percent."""
    if result is None:
        return cell(None)
    low, high = (number(scale * end, spec) for end in (result.low, result.high))
    note = findings.NO_INTERVAL if findings.unknown_ends(result) else f"[{low}, {high}]"
    return cell(scale * result.estimate, spec=spec, note=note)


def suite_cell(entry: Prevalence | SoftmaxComparison | BoundAgreement, config: AuditConfig) -> Cell:
    """A suite with the length of its prompts and the bias under it."""
    tokens = findings.suite_tokens(entry.suite, config)
    bias = findings.bias_label(entry.bias_kind)
    return cell(findings.suite_name(entry.suite), note=", ".join(filter(None, (tokens, bias))))


def verdict_cell(verdict: str) -> Cell:
    """A verdict in its tone."""
    return cell(verdict, tone=findings.TONES[verdict])
