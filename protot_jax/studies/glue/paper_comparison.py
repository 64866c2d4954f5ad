"""The paper's tables with ours, as sections of the fine-tuning report.

The paper's numbers (Tables 2 and 10, appendix A.4) are in percent. Its models were pretrained on
FineWeb-Edu, and the numbers are means over three seeds; test numbers come from the GLUE server.
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
from typing import Any

from lm_jax.assets import papers
from lm_jax.report import Cell, Column, Section, cell, section, table
from lm_jax.report.prose import Prose
from protot_jax.studies.glue.report_text import (
    each_split,
    over_examples,
    percent,
    rate_and_warmup,
)
from protot_jax.studies.glue.results import Average, GlueSummary, ModelSummary
from protot_jax.studies.glue.tasks import OFFICIAL

_PROSE = Prose("protot_jax.studies.glue")
COLUMNS: Mapping[str, str] = {
    "cola": "CoLA, Matthews",
    "sst2": "SST-2, accuracy",
    "mrpc": "MRPC, F1",
    "stsb": "STS-B, Pearson",
    "rte": "RTE, accuracy",
    "wnli": "WNLI, accuracy",
    "qqp": "QQP, F1",
    "qnli": "QNLI, accuracy",
    "mnli": "MNLI, accuracy",
    "mnli_mismatched": "MNLI-MM, accuracy",
}
# The rows of the paper's tables; the last one, the most frequent class of the official splits, is
# calculated from their counts of labels.
_ROWS = {
    "llama": "LLaMA",
    "mamba": "Mamba",
    "deltanet": "DeltaNet",
    "protot": "ProtoT",
    "constant": "constant",
}
# The column that an embedded task is nearest to, and how it differs.
NEAREST: Mapping[str, tuple[str, str]] = {
    "films": (
        "sst2",
        "reported on the same sentences; trained on whole film sentences labelled by their mean "
        "rating, where SST-2 has 67,349 sentences and phrases with labels of its own; "
        "epochs and rate are chosen on held-out film sentences, not on the reported split",
    ),
    "films_rating": (
        "stsb",
        "another task: the sentiment of one sentence, not the similarity of two; only the kind of "
        "target is the same",
    ),
    "qnli_like": (
        "qnli",
        "35 articles of SQuAD 2.0 in place of all of 1.1, split by article; pairs are chosen by "
        "another rule",
    ),
}


@functools.cache
def _paper() -> Mapping[str, Any]:
    return papers.tables("protot")


def row_of(kind: str) -> str | None:
    """The row of the paper's tables that a kind of model stands beside, if it fine-tunes one."""
    name = "mamba" if kind == "mamba_ffn" else kind
    return name if name in _paper()["appendix_a4"] else None


def chosen(kind: str) -> str | None:
    """The learning rate and warm-up that the paper chose for a kind of model."""
    row = row_of(kind)
    return None if row is None else rate_and_warmup(**_paper()["appendix_a4"][row])


def _printed(table: str, columns: Sequence[str]) -> Iterator[list[object]]:
    for name, title in _ROWS.items():
        row = _paper()[table][name]
        yield [title, *(row.get(column) for column in columns)]


def _ours(result: GlueSummary, model: ModelSummary) -> dict[str, Cell]:
    """Our cells of the paper's columns."""
    own = {one.task: one for one in result.results if one.model == model.name}
    cells = {}
    for column in COLUMNS:
        # The second split of its task.
        task, split_of = column.removesuffix("_mismatched"), int(column.endswith("_mismatched"))
        if task in own:
            split = own[task].splits[split_of]
            main = OFFICIAL[task].main
            ends = over_examples(split, main).removeprefix(percent(split.metrics[main].mean))
            cells[column] = cell(percent(split.metrics[main].mean), note=ends.strip())
    return cells


def tables(result: GlueSummary) -> Section:
    """The paper's two tables, with ours under the development one."""
    ours = [(model, _ours(result, model)) for model in result.models]
    dev = [
        *_printed("table_10", list(COLUMNS)),
        *(
            [f"ours: {model.name}", *(cells.get(column) for column in COLUMNS)]
            for model, cells in ours
            if cells
        ),
    ]
    heads = ["Model", *(Column(name, ".1f") for name in COLUMNS.values())]
    return section(
        "The paper's tables",
        _PROSE("paper", compared=any(cells for _, cells in ours)),
        table(heads, dev, caption="Table 10: development splits, in percent."),
        table(
            [*heads, Column("GLUE", ".1f")],
            list(_printed("table_2", [*COLUMNS, "glue"])),
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
    kinds = {model.name: row_of(model.kind) for model in result.models}
    for one, task, split in each_split(result):
        if one.task not in NEAREST:
            continue
        column, differs = NEAREST[one.task]
        name, title = kinds[one.model], COLUMNS[column]
        printed, note = None, title
        if name is not None:
            printed, note = _paper()["table_10"][name][column], f"{_ROWS[name]}, {title}"
        rows.append(
            [
                one.model,
                task.title,
                over_examples(split, task.main),
                cell(printed, note=note, spec=".1f"),
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
