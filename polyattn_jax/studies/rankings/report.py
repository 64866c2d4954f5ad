"""The report of a prospective test of rankings."""

from pathlib import Path
import textwrap

from lm_jax import report
from lm_jax.console.terminal import format_table
from lm_jax.report import Column, Report, Section, section, table, table_of
from lm_jax.report.markup import number
from lm_jax.report.tables import interval_text, rate
from polyattn_jax.audit.ranking import WORDS
from polyattn_jax.studies.rankings.results import RankingResult, RankingsSummary
from polyattn_jax.studies.rankings.settings import RankingsConfig

# What each outcome is called.
OUTCOMES = {
    "text_untrained": "text, untrained",
    "text_heads": "text, after stage 1",
    "text_logits": "text, after stage 2",
    "answer_untrained": "answers, untrained",
    "answer_heads": "answers, after stage 1",
    "answer_logits": "answers, after stage 2",
    "accuracy_logits": "wrong answers, after stage 2",
}
TRAINED = "text_logits"
TERMS = {
    "rank correlation": "Spearman's, over the sets of one budget and seed, of the sum of the costs "
    "of the replaced groups with what the set loses. 1 where the statistic orders the sets as "
    "training leaves them, 0 where it says nothing.",
    "gain": "What random sets of the same size lose, less what the set loses that the statistic "
    "chooses; above 0 the statistic is of use.",
    "stage 1": "Every replaced head is trained on the output that softmax gives.",
    "stage 2": "The whole hybrid is trained on the model's distribution of the next token.",
    "interval": "95 %, Student's t over budgets and seeds. The budgets of a seed share a first "
    "stage and may share sets of groups, so that it is a little too narrow.",
}


def build(config: RankingsConfig, summary: RankingsSummary, folder: Path) -> Report:
    """The report of a summary, which holds what it needs of the settings."""
    del config, folder
    return Report(
        f"Rankings of {summary.by.replace('_', ' ')}s: {Path(summary.model).name}, "
        f"{summary.recipe}",
        lambda: [
            section("Rank correlations", _correlations(summary)),
            section("What the chosen sets lose", _gains(summary)),
            _cells(summary),
            section("Terms", report.key_values(TERMS | _words(summary))),
        ],
        lead=[report.verdict(conclusion(summary), _setting(summary))],
        lines=[format_summary(summary)],
        facts={"config_hash": summary.provenance.config_hash},
    )


def conclusion(summary: RankingsSummary) -> str:
    """Which statistic orders trained hybrids best, in one sentence."""
    found = {result.statistic: result.correlation for result in of_outcome(summary, TRAINED)}
    ranked = {name: each for name, each in found.items() if each is not None}
    if not ranked:
        return "No statistic can be judged: all sets lose the same."
    best = max(ranked, key=lambda name: ranked[name].estimate)
    shown = [name for name, correlation in ranked.items() if correlation.low > 0]
    text = (
        f"The loss of trained hybrids on text is best told by {best}: rank correlation "
        f"{interval_text(ranked[best], '+.2f')}"
    )
    if not shown:
        return f"{text}. For no statistic is it shown to be above 0."
    names = ", ".join(shown)
    return f"{text}. It is shown to be above 0 for {names}."


def of_outcome(summary: RankingsSummary, outcome: str) -> list[RankingResult]:
    """The results of one outcome, by statistic."""
    return [result for result in summary.results if result.outcome == outcome]


def _setting(summary: RankingsSummary) -> str:
    shares = ", ".join(f"{share:g}" for share in summary.replaced)
    return (
        f"{summary.sets} hybrids of {summary.recipe} in {shares} % of {summary.groups} "
        f"{summary.by.replace('_', ' ')}s, {summary.seeds} seed{'s' * (summary.seeds > 1)}; "
        f"{summary.first_tokens:,} and {summary.second_tokens:,} tokens of training. Softmax: "
        f"{summary.text_softmax:.3f} nats per token on {summary.windows} windows, "
        f"{summary.right_softmax} of {summary.prompts} prompts of {summary.task}."
    )


def _words(summary: RankingsSummary) -> dict[str, str]:
    names = dict.fromkeys(result.statistic for result in summary.results)
    return {f"rank by {name}": WORDS[name] for name in names}


def _correlations(summary: RankingsSummary):
    by_outcome = {name: of_outcome(summary, name) for name in OUTCOMES}
    rows = [
        [first.statistic, *(_rank(results[at]) for results in by_outcome.values())]
        for at, first in enumerate(by_outcome[TRAINED])
    ]
    return table(
        ["Rank by", *OUTCOMES.values()],
        rows,
        caption="Mean rank correlation over budgets and seeds of what a statistic says of a set "
        "with what the set loses.",
    )


def _rank(result: RankingResult):
    if result.correlation is None:
        return "–"
    return rate(result.correlation, spec="+.2f", scale=1.0)


def _gains(summary: RankingsSummary):
    return table_of(
        of_outcome(summary, TRAINED),
        [
            Column("Rank by", value=lambda r: r.statistic),
            Column("Gain on text", value=lambda r: rate(r.gain, spec="+.3f", scale=1.0)),
            *(
                Column(f"Loss, {share:g} %", value=lambda r, s=share: _chosen(summary, r, s))
                for share in summary.replaced
            ),
        ],
        caption="After stage 2: what random sets lose on text less what the chosen set does, and "
        "the loss over softmax of the chosen set beside the mean of random ones, nats per token.",
    )


def _chosen(summary: RankingsSummary, result: RankingResult, share: float) -> str:
    own = [
        cell
        for cell in summary.cells
        if (cell.statistic, cell.outcome, cell.replaced) == (result.statistic, TRAINED, share)
    ]
    chosen, random = (
        sum(getattr(cell, name) for cell in own) / len(own) for name in ("chosen", "random")
    )
    return f"{number(chosen, '+.3f')} ({number(random, '+.3f')})"


def _cells(summary: RankingsSummary) -> Section:
    own = [cell for cell in summary.cells if cell.outcome == TRAINED]
    return section(
        "Budgets and seeds",
        report.details(
            "Each budget and seed",
            table_of(
                own,
                [
                    Column("Seed", "d", lambda c: c.seed),
                    Column("Replaced, %", value=lambda c: f"{c.replaced:g}"),
                    Column("Rank by", value=lambda c: c.statistic),
                    Column("Sets", "d", lambda c: c.sets),
                    Column("Correlation", "+.2f", lambda c: c.correlation),
                    Column("Chosen", "+.3f", lambda c: c.chosen),
                    Column("Random", "+.3f", lambda c: c.random),
                ],
                caption="On text after stage 2.",
            ),
        ),
    )


def format_summary(summary: RankingsSummary) -> str:
    """The conclusion and the correlations as plain text of at most 80 columns."""
    rows = [
        (
            text.statistic,
            *(
                "-" if r.correlation is None else interval_text(r.correlation, "+.2f")
                for r in (text, answer)
            ),
            interval_text(text.gain, "+.3f"),
        )
        for text, answer in zip(
            of_outcome(summary, TRAINED), of_outcome(summary, "answer_logits"), strict=True
        )
    ]
    heads = ("rank by", "with text", "with answers", "gain on text, nats")
    return "\n".join(
        [
            *textwrap.wrap(conclusion(summary), 80),
            "",
            *textwrap.wrap(_setting(summary), 80),
            "",
            "Rank correlation with the loss after stage 2 [95 %]:",
            format_table(heads, rows),
        ]
    )
