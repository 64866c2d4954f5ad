"""Summary of an audit for a terminal: controls, calibration, verdicts.

Plain text of at most 100 columns; no text of a run is read as markup.
"""

from collections.abc import Sequence
import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lm_jax.report.markup import clean, number
from lm_jax.statistics import Interval
from polyattn_jax.audit.results import (
    AuditSummary,
    ConditionResult,
    RecipeVerdict,
    SoftmaxComparison,
)
from polyattn_jax.recipes.row_maps import SOFTMAX
from polyattn_jax.report import findings, sharpness

WIDTH = 100


def lines(summary: AuditSummary) -> list[str]:
    """The findings of an audit as lines of text."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None)

    def say(text: str) -> None:
        console.print(_text(text), highlight=False)

    controls_finding, overall_finding = findings.controls(summary), findings.overall(summary)
    result = summary.calibration
    say(controls_finding.text)
    say(
        f"Calibration: b_auto = {findings.b_auto(result)} (95 % over {result.texts} texts of "
        f"{result.length:,} tokens) leaves {result.mass:.2%} of the softmax "
        "mass below "
        f"-b_auto; {findings.b_auto_by_length(result)}."
    )
    base, heads = findings.softmax_of(summary.sweep), summary.layers * summary.heads
    say(
        f"Needle probe at {summary.config.sweep_length:,} tokens, n = "
        f"{base.accuracy.n:,} prompts, each recipe in all {heads:,} heads:"
    )
    console.print(
        "", _plain_table(_sweep_rows(summary), ("verdict",)), "", sep="\n", highlight=False
    )
    say(overall_finding.text)
    for text, rows in (
        (_of_texts(summary), _text_rows(summary)),
        (_of_choices(summary), _choice_rows(summary)),
        (_of_suites(summary), _suite_rows(summary)),
    ):
        if text:
            say(text)
            console.print("", _plain_table(rows), "", sep="\n", highlight=False)
    for text in (
        sharpness.sentence(summary),
        findings.in_part(summary),
        findings.as_linear(summary),
        findings.resolution(summary),
    ):
        if text:
            say(text)
    return file.getvalue().splitlines()


def _text(text: str) -> Text:
    """Text without control characters, with ASCII for what fonts of terminals lack."""
    return Text(clean(text).replace("S₂", "S_2").replace("rᵖ", "r^p"))


def _of_texts(summary: AuditSummary) -> str:
    """What the table of losses on texts is of; empty without them."""
    if not summary.texts:
        return ""
    base = findings.softmax_of(summary.texts)
    texts = f"{base.loss.n:,} text{'s' * (base.loss.n != 1)}"
    return (
        f"Loss on your {texts} ({base.tokens:,} tokens), nats per token, and perplexity; change "
        "and ratio are against softmax:"
    )


def _of_suites(summary: AuditSummary) -> str:
    """What the table of named suites is of; empty without them."""
    if not summary.suites:
        return ""
    return (
        f"Other suites, n = {summary.config.suite_n:,} prompts each, right in % with softmax and "
        "with the best recipe, and the verdicts on all recipes:"
    )


def _of_choices(summary: AuditSummary) -> str:
    """What the table of multiple choice is of; empty without tasks."""
    counts = ", ".join(f"{name}: {task.n:,}" for name, task in summary.choices.items())
    return (
        f"Multiple choice ({counts} questions), acc in %, and the 95 % interval of its change in "
        "points:"
        if counts
        else ""
    )


def _text_rows(summary: AuditSummary) -> list[Sequence[str]]:
    """Loss and perplexity on texts by recipe, under a line of titles."""
    rows: list[Sequence[str]] = [("recipe", "nats [95 %]", "change [95 %]", "perplexity", "ratio")]
    for entry in findings.by_recipe(summary.texts):
        change, ratio = "-", "-"
        if entry.recipe != SOFTMAX.name:
            change, ratio = _ends(entry.change, "+.3f"), f"{entry.perplexity_ratio.estimate:.4g}"
        perplexity = f"{entry.perplexity.estimate:.4g}"
        rows.append((entry.recipe, _ends(entry.loss, ".3f"), change, perplexity, ratio))
    return rows


def _choice_rows(summary: AuditSummary) -> list[Sequence[str]]:
    """Accuracy by recipe and task, with the interval of its change, under a line of titles."""
    metrics = [task.metrics["acc"] for task in summary.choices.values()]
    rows: list[Sequence[str]] = [("recipe", *summary.choices)]
    for recipe in findings.in_order(metrics[0].accuracy if metrics else ()):
        cells = []
        for metric in metrics:
            text = f"{100 * metric.accuracy[recipe].estimate:.1f}"
            if paired := metric.paired.get(recipe):
                change = paired.change
                low, high = (number(100 * end, "+.1f") for end in (change.low, change.high))
                text += f" [{low}, {high}]"
            cells.append(text)
        rows.append((recipe, *cells))
    return rows


def _suite_rows(summary: AuditSummary) -> list[Sequence[str]]:
    """A line for each suite and length, under a line of titles."""
    rows: list[Sequence[str]] = [("suite", "tokens", "softmax", "best recipe", "right", "verdicts")]
    for entry in summary.suites:
        base = findings.softmax_of(entry.conditions)
        others = [one for one in entry.conditions if one is not base]
        best, right = "-", "-"
        if others:
            result = findings.best_of(others)
            best, right = result.recipe, f"{100 * result.accuracy.estimate:.1f}"
        verdicts = findings.verdict_counts(others)
        name, softmax = findings.suite_name(entry.suite), f"{100 * base.accuracy.estimate:.1f}"
        rows.append((name, f"{entry.length:,}", softmax, best, right, verdicts))
    return rows


def _ends(interval: Interval, spec: str) -> str:
    if findings.unknown_ends(interval):
        return f"{interval.estimate:{spec}}, {findings.NO_INTERVAL}"
    low, high = f"{interval.low:{spec}}", f"{interval.high:{spec}}"
    return f"{interval.estimate:{spec}} [{low}, {high}]"


def _plain_table(rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A table of texts whose first line holds the titles; the first column and `left` are words."""
    table = Table(box=None, pad_edge=False, show_edge=False, collapse_padding=True)
    for title in rows[0]:
        justify = "left" if title in (rows[0][0], *left) else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows[1:]:
        table.add_row(*map(_text, row))
    return table


def _sweep_rows(summary: AuditSummary) -> list[Sequence[str]]:
    """The verdict on each recipe with the rows that explain it, under a line of titles."""
    verdicts = {v.recipe: v for v in summary.verdicts}
    top = f"top-{summary.config.top_heads} %"
    titles = ("right % [95 %]", "p", "loss", "safe %", "dead %", top, "dead %", "lost %", "sharp %")
    rows: list[Sequence[str]] = [("recipe", *titles, "verdict")]
    for entry in findings.by_recipe(summary.sweep):
        verdict = verdicts.get(entry.recipe)
        against = sharpness.of_recipe(summary, entry.recipe) if verdict else None
        cells = _cells(entry, verdict, against, sharpness.softmax_safe(summary))
        rows.append((*cells, verdict.verdict if verdict else "baseline"))
    return rows


def _cells(
    entry: ConditionResult,
    verdict: RecipeVerdict | None,
    against: SoftmaxComparison | None,
    control: Interval | None,
) -> Sequence[str]:
    accuracy = entry.accuracy
    low, high = f"{100 * accuracy.low:.0f}", f"{100 * accuracy.high:.0f}"
    shares = (
        verdict.safe if verdict else control,
        verdict.dead if verdict else None,
        verdict.top_safe if verdict else None,
        verdict.top_dead if verdict else None,
        against.lost if against else None,
        against.sharpened if against else None,
    )
    return (
        entry.recipe,
        f"{100 * accuracy.estimate:.1f} [{low}, {high}]",
        f"{entry.p_value:.2g}" if verdict else "-",
        f"{entry.loss:.2f}",
        *(f"{100 * share.estimate:.1f}" if share else "-" for share in shares),
    )
