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
        lead=[f"{number(len(summary.groups))} groups, labelled by {summary.judge}."],
        lines=[_table(summary)],
    )


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
    note = f"[{mean.low:.2f}, {mean.high:.2f}], p {difference.p_holm:.2g}"
    return cell(f"{mean.estimate:+.2f}", note=note)


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
