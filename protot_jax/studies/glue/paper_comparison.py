"""The paper's tables with ours, as sections of the fine-tuning report."""

from collections.abc import Sequence
from typing import Any

from lm_jax.report import Cell, Column, Section, cell, section, table
from lm_jax.report.prose import Prose
from protot_jax.studies.glue import paper
from protot_jax.studies.glue.report_text import each_split, over_examples, percent
from protot_jax.studies.glue.results import Average, GlueSummary, ModelSummary
from protot_jax.studies.glue.tasks import OFFICIAL

_PROSE = Prose("protot_jax.studies.glue")


def _ours(result: GlueSummary, model: ModelSummary) -> dict[str, Cell]:
    """Our cells of the paper's columns."""
    own = {one.task: one for one in result.results if one.model == model.name}
    cells = {}
    for column, (task, place) in paper.SPLITS.items():
        if task in own:
            split = own[task].splits[place]
            main = OFFICIAL[task].main
            ends = over_examples(split, main).removeprefix(percent(split.metrics[main].mean))
            cells[column] = cell(percent(split.metrics[main].mean), note=ends.strip())
    return cells


def tables(result: GlueSummary) -> Section:
    """The paper's two tables, with ours under the development one."""
    columns = list(paper.COLUMNS)
    ours = [(model, _ours(result, model)) for model in result.models]
    dev: list[list[object]] = [
        [name, *(row[c] for c in columns)] for name, row in paper.DEV.items()
    ]
    dev.append(["constant", *(paper.CONSTANT_DEV.get(c) for c in columns)])
    for model, cells in ours:
        if cells:
            dev.append([f"ours: {model.name}", *(cells.get(c) for c in columns)])
    test: list[list[object]] = [
        [name, *(row[c] for c in columns), paper.TEST_AVERAGE[name]]
        for name, row in paper.TEST.items()
    ]
    test.append(["constant", *(paper.CONSTANT_TEST.get(c) for c in columns), None])
    heads = [Column(name, ".1f") for name in paper.COLUMNS.values()]
    return section(
        "The paper's tables",
        _PROSE("paper", compared=any(cells for _, cells in ours)),
        table(["Model", *heads], dev, caption="Table 10: development splits, in percent."),
        table(
            ["Model", *heads, Column("GLUE", ".1f")],
            test,
            caption="Table 2: test splits, from the GLUE server, in percent.",
        ),
        *([_averages(result.averages)] if result.averages else []),
    )


def _averages(averages: Sequence[Average]) -> Any:
    rows = [
        [one.model, percent(one.of_pairs), percent(one.of_main), percent(one.without_three)]
        for one in averages
    ]
    return table(
        [
            "Model",
            "Mean of nine, pairs averaged",
            "Mean of nine main metrics",
            "Pairs averaged, without MRPC, RTE, WNLI",
        ],
        rows,
        caption="Averages over development splits, in percent; the two splits of MNLI count once.",
    )


def embedded(result: GlueSummary) -> Section | None:
    """The embedded tasks beside the column of the paper that each is nearest to."""
    rows = []
    kinds = {model.name: paper.MODEL.get(model.kind) for model in result.models}
    for one, task, split in each_split(result):
        if one.task not in paper.NEAREST:
            continue
        column, differs = paper.NEAREST[one.task]
        name, title = kinds[one.model], paper.COLUMNS[column]
        published = None if name is None else paper.DEV[name][column]
        rows.append(
            [
                one.model,
                task.title,
                over_examples(split, task.main),
                cell(published, note=title if name is None else f"{name}, {title}", spec=".1f"),
                differs,
            ]
        )
    if not rows:
        return None
    return section(
        "Beside the nearest column of the paper",
        _PROSE("embedded"),
        table(
            ["Model", "Task", "Ours, % [95 %]", "Paper, %", "What differs in the task"],
            rows,
            caption="Embedded tasks, none of which is a GLUE task, and Table 10.",
        ),
    )
