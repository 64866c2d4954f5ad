"""The report of timed decoding."""

from pathlib import Path
import textwrap

from lm_jax import report
from lm_jax.console.terminal import format_table
from lm_jax.report import Column, Report, section, table_of
from lm_jax.report.markup import number
from polyattn_jax.studies.bench import numbers
from polyattn_jax.studies.bench.results import SOFTMAX, BenchResult, BenchSummary
from polyattn_jax.studies.bench.settings import BenchConfig

TERMS = {
    "tokens per second": "Of one text, each token decoded by itself; the median of turns, and "
    "their range.",
    "times softmax": "Tokens per second over those of softmax in the same turn, the median of "
    "turns, and their range.",
    "state": "Bytes of the KV cache of softmax with the text before, or of what the recipe keeps "
    "of it: keys and values of its window, and sums.",
    "deviation": "Largest difference of logits, decoded token by token, from those of the recipe "
    "on whole rows of scores, relative to the largest logit.",
}


def build(config: BenchConfig, summary: BenchSummary, folder: Path) -> Report:
    """The report of a summary, which holds what it needs of the settings."""
    del config, folder
    return Report(
        f"Decoding: {Path(summary.model).name}",
        lambda: [
            section("Rates and states", _table(summary), _deviations(summary)),
            section("Terms", report.key_values(TERMS)),
        ],
        lead=[report.verdict(conclusion(summary), _setting(summary))],
        lines=[format_summary(summary)],
        facts={"config_hash": summary.provenance.config_hash},
    )


def conclusion(summary: BenchSummary) -> str:
    """Rate and state of every recipe after the longest text, in a sentence each."""
    longest = max(result.length for result in summary.results)
    base = summary.softmax(longest)
    return " ".join(
        f"After {longest:,} tokens {result.method} decodes "
        f"{number(numbers.over(result, base).median, '.2f')} times as fast as softmax and keeps "
        f"{_share(result, base)}."
        for result in summary.results
        if result.length == longest and result.method != SOFTMAX
    )


def _share(result: BenchResult, base: BenchResult) -> str:
    share = result.state_bytes / base.state_bytes
    return f"{100 * share:.2g} % of the bytes" if share < 0.995 else f"{share:.1f} times the bytes"


def _setting(summary: BenchSummary) -> str:
    return (
        f"{summary.device}, {summary.cores} cores, {summary.dtype}; {summary.turns} turns of "
        f"{summary.tokens} tokens of one text."
    )


def _range(spread: numbers.Spread, spec: str) -> str:
    median, low, high = (number(value, spec) for value in spread)
    return f"{median} ({low} to {high})"


def _rate(result: BenchResult) -> str:
    return _range(numbers.rate(result), ".1f")


def _over(summary: BenchSummary, result: BenchResult) -> str:
    return _range(numbers.over(result, summary.softmax(result.length)), ".2f")


def _table(summary: BenchSummary):
    return table_of(
        list(summary.results),
        [
            Column("Tokens before", ",d", lambda r: r.length),
            Column("Method", value=lambda r: r.method),
            Column("Tokens per second", value=_rate),
            Column("Times softmax", value=lambda r: _over(summary, r)),
            Column("State, bytes", ",d", lambda r: r.state_bytes),
        ],
        caption="Decoding of one text, timed in turns in one run.",
    )


def _deviations(summary: BenchSummary):
    return table_of(
        list(summary.deviations.items()),
        [
            Column("Recipe", value=lambda item: item[0]),
            Column("Deviation", ".1e", lambda item: item[1]),
            Column("Tokens", ",d", lambda item: summary.compared[item[0]]),
        ],
        caption="Decoded logits against whole rows, on random tokens.",
    )


def format_summary(summary: BenchSummary) -> str:
    """The conclusion and the table as plain text."""
    rows = [
        (f"{r.length:,}", r.method, _rate(r), _over(summary, r), f"{r.state_bytes:,}")
        for r in summary.results
    ]
    heads = ("tokens", "method", "tokens/s", "times softmax", "bytes")
    return "\n".join(
        [
            *textwrap.wrap(conclusion(summary), 80),
            "",
            *textwrap.wrap(_setting(summary), 80),
            "",
            format_table(heads, rows),
        ]
    )
