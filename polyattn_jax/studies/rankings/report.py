"""The report of a prospective test of rankings."""

from pathlib import Path
import textwrap

from lm_jax import report
from lm_jax.console.terminal import format_table
from lm_jax.report import Column, Report, Section, section, table, table_of
from lm_jax.report.markup import number
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
# What is called shown.
LEVEL = 0.05
TERMS = {
    "rank correlation": "Spearman's, over the random sets of one budget and seed, of the sum of "
    "the costs of the replaced groups with what the set loses; the mean over budgets and seeds, "
    "and its least and greatest. 1 where the statistic orders the sets as training leaves them, 0 "
    "where it says nothing.",
    "p": "Share of 5,000 deals of the same costs to the groups, and of the deal as it is, whose "
    "mean correlation is as far from 0 or farther; corrected over statistics after Holm. It is "
    "about these groups and sets of this model; other models may differ.",
    "gain": "What random sets of the same size lose on average, less what the set loses that the "
    "statistic chooses; the mean over budgets and seeds, and its least and greatest. Above 0 the "
    "statistic is of use.",
    "stage 1": "Every replaced head is trained on the output that softmax gives, in one training "
    "of all heads for all sets of a seed. Heads that share weights there are not apart: the "
    "adapters of a layer have one factor for all its heads, and W of a key head is that of its "
    "query heads.",
    "stage 2": "The whole hybrid is trained on the model's distribution of the next token, each "
    "set of a seed on the same tokens.",
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
    """Which statistics order trained hybrids, in at most three sentences."""
    found = [r for r in of_outcome(summary, TRAINED) if r.correlation is not None]
    if not found:
        return "No statistic can be judged: it, or what the sets lose, is the same in all of them."
    shown = [r for r in found if r.p_value is not None and r.p_value < LEVEL]
    ranked = sorted(shown, key=lambda r: -(r.correlation or 0.0))
    right = [_described(r) for r in ranked if (r.correlation or 0.0) > 0]
    wrong = [_described(r) for r in reversed(ranked) if (r.correlation or 0.0) < 0]
    lines = [
        f"What trained hybrids lose on text is told beforehand by {', '.join(right)}."
        if right
        else "No statistic is shown to tell what trained hybrids lose on text."
    ]
    if wrong:
        lines.append(f"It is told the wrong way round by {', '.join(wrong)}.")
    rest = [r.statistic for r in of_outcome(summary, TRAINED) if r not in shown]
    if rest:
        lines.append(f"Of {', '.join(rest)} neither is shown.")
    return " ".join(lines)


def _described(result: RankingResult) -> str:
    return f"{result.statistic} ({number(result.correlation, '+.2f')})"


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
    unsolved = ""
    if not summary.solved:
        unsolved = (
            " Softmax is not shown to answer half of the prompts, so that the columns of answers "
            "say little."
        )
    return table(
        ["Rank by", *OUTCOMES.values()],
        rows,
        caption="Mean rank correlation over budgets and seeds of what a statistic says of a random "
        f"set with what the set loses; * marks p < {LEVEL:g}.{unsolved}",
    )


def _rank(result: RankingResult) -> str:
    if result.correlation is None:
        return "–"
    mark = "*" if result.p_value is not None and result.p_value < LEVEL else ""
    return f"{number(result.correlation, '+.2f')}{mark}"


def _range(mean: float | None, low: float | None, high: float | None, spec: str) -> str:
    if mean is None:
        return "–"
    return f"{number(mean, spec)} ({number(low, spec)} to {number(high, spec)})"


def _gains(summary: RankingsSummary):
    return table_of(
        of_outcome(summary, TRAINED),
        [
            Column("Rank by", value=lambda r: r.statistic),
            Column("Correlation", value=lambda r: _range(r.correlation, r.low, r.high, "+.2f")),
            Column("p", ".4f", lambda r: r.p_value),
            Column("Gain", value=lambda r: _range(r.gain, r.gain_low, r.gain_high, "+.3f")),
            Column("Random sets beaten", value=lambda r: f"{r.beaten} of {r.of}"),
            *(
                Column(f"Loss, {share:g} %", value=lambda r, s=share: _chosen(summary, r, s))
                for share in summary.replaced
            ),
        ],
        caption="On text after stage 2, nats per token: the loss over softmax of the chosen set "
        "beside the mean of random ones, the mean over seeds.",
    )


def _chosen(summary: RankingsSummary, result: RankingResult, share: float) -> str:
    own = [
        cell
        for cell in summary.cells
        if (cell.statistic, cell.outcome, cell.replaced) == (result.statistic, TRAINED, share)
    ]
    chosen = [cell.chosen for cell in own if cell.chosen is not None]
    random = sum(cell.random for cell in own) / len(own)
    of_chosen = number(sum(chosen) / len(chosen), "+.3f") if chosen else "–"
    return f"{of_chosen} ({number(random, '+.3f')})"


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
                    Column("Random sets", "d", lambda c: c.sets),
                    Column("Correlation", "+.2f", lambda c: c.correlation),
                    Column("Chosen", "+.3f", lambda c: c.chosen),
                    Column("Random", "+.3f", lambda c: c.random),
                    Column("Beaten", "d", lambda c: c.beaten),
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
            _range(text.correlation, text.low, text.high, "+.2f"),
            "-" if text.p_value is None else f"{text.p_value:.4f}",
            _range(text.gain, text.gain_low, text.gain_high, "+.3f"),
            f"{text.beaten} of {text.of}",
        )
        for text in of_outcome(summary, TRAINED)
    ]
    heads = ("rank by", "correlation", "p", "gain, nats", "beaten")
    return "\n".join(
        [
            *textwrap.wrap(conclusion(summary), 80),
            "",
            *textwrap.wrap(_setting(summary), 80),
            "",
            "With the loss on text after stage 2, over budgets and seeds (least to greatest):",
            format_table(heads, rows),
        ]
    )
