"""What the page of a comparison of scores and its terminal say."""

from pathlib import Path

from lm_jax import report
from lm_jax.console import terminal
from lm_jax.evaluate.judge_prompt import SCORES
from lm_jax.report import Cell, Report, Section, cell, rate, section, table
from lm_jax.report.markup import number
from lm_jax.report.prose import Prose
from protot_jax.studies.scores.results import Difference, ScoreComparison
from protot_jax.studies.scores.settings import ScoresConfig

_PROSE = Prose("protot_jax.studies.scores")


def build(config: ScoresConfig, summary: ScoreComparison, folder: Path) -> Report:
    """The report of a comparison, which holds its settings itself."""
    del config, folder
    return Report(
        "Scores of prototypes of several models",
        lambda: _sections(summary),
        lead=[report.verdict(_answer(summary))],
        lines=[_answer(summary), _table(summary)],
    )


def _answer(result: ScoreComparison) -> str:
    """The groups by their mean of the first score, the best first."""
    score = SCORES[0]
    means = {each.name: mean for each in result.groups if (mean := each.means[score])}
    if not means:
        return f"No group has two units that {result.judge} labelled, so there is no mean score."
    ranked = sorted(means, key=lambda name: -means[name].estimate)
    values = ", ".join(f"{name} {number(means[name].estimate, '.2f')}" for name in ranked)
    return f"{score.capitalize()} as {result.judge} scores it, the best first: {values}."


def _sections(result: ScoreComparison) -> list[Section]:
    """Mean scores and differences, then the histograms of each score."""
    heads = ["Group", "Labelled", *(score.capitalize() for score in SCORES)]
    means = [
        [
            cell(group.name, note=group.model),
            f"{number(len(group.scores[SCORES[0]]))} of {number(group.asked)}",
            *(rate(group.means[score], spec=".2f", scale=1.0) for score in SCORES),
        ]
        for group in result.groups
    ]
    differences = [
        [group.name, *(_tested(group.differences[score]) for score in SCORES)]
        for group in result.groups[1:]
    ]
    tables = [table(heads, means, caption="Mean scores [95 % over prototypes of one model].")]
    if differences:
        caption = (
            f"Mean less that of {result.groups[0].name}, [95 %] of each alone, and p corrected for "
            "the number of rows by Holm's method."
        )
        tables.append(table([heads[0], *heads[2:]], differences, caption=caption))
    sections = [section("Mean scores", _PROSE("score_comparison"), *tables)]
    for score in SCORES:
        charts = [
            report.histogram(
                group.scores[score],
                caption=group.name,
                x_label=score,
                y_label=f"{group.units} (count)",
                bins=[i + 0.5 for i in range(11)],
            )
            for group in result.groups
        ]
        sections.append(section(score.capitalize(), report.grid(*charts)))
    return sections


def _tested(difference: Difference | None) -> Cell:
    if difference is None:
        return cell(None)
    mean = difference.mean
    ends = ", ".join(number(end, ".2f") for end in (mean.low, mean.high))
    return cell(mean.estimate, note=f"[{ends}], p {number(difference.p_holm, '.2g')}", spec="+.2f")


def _table(result: ScoreComparison) -> str:
    """Mean scores and p by group."""
    heads = ["group", "labelled", *(part for score in SCORES for part in (score, "p, Holm"))]
    rows = []
    for group in result.groups:
        cells = [group.name, str(len(group.scores[SCORES[0]]))]
        for score in SCORES:
            mean, difference = group.means[score], group.differences[score]
            cells.append(rate(mean, spec=".2f", scale=1.0).text)
            cells.append(number(difference and difference.p_holm, ".2g"))
        rows.append(cells)
    return terminal.format_table(heads, rows, left=(0,))
