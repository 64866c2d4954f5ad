"""Readers of the official GLUE files, which are tab-separated and not CSV.

A quotation mark is a character like any other: files have unbalanced ones. Lines end at a line feed
alone, because sentences hold other characters that Unicode counts as line ends. A byte order mark
at the beginning (MRPC) is no part of the first column's name.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from pathlib import Path

import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.files import file_digest
from protot_jax.studies.glue.tasks import OFFICIAL, Layout, Task

_REMEDY = "take the file of the official archive as it is"


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Examples of one split, in the order of their file.

    Attributes:
      texts: one text or a pair of each example.
      targets: float64 `[n]`, class indices or scores; None where the labels are not public.
      broken: lines that were left out (`Layout.skips_broken`).
      sha256: digest of the file, or of what the examples were built from.
    """

    texts: Sequence[tuple[str, ...]]
    targets: np.ndarray | None
    broken: int = 0
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: np.ndarray) -> "Split":
        """The examples at `indices`."""
        targets = None if self.targets is None else self.targets[indices]
        texts = [self.texts[i] for i in indices.tolist()]
        return dataclasses.replace(self, texts=texts, targets=targets)


@dataclasses.dataclass(frozen=True, eq=False)
class TaskData:
    """The splits of a task.

    Attributes:
      selection: the split by which epochs, learning rate and warm-up are chosen.
      evaluated: labelled splits that are reported, by name; the first is the main one.
      submitted: splits without labels, by the name of their file in a submission.
      source: what the text is, in a sentence or two.
      selected_on_evaluated: whether the main reported split also selects, as in the paper.
      counts: further numbers of how the splits came about, by name.
    """

    train: Split
    selection: Split
    evaluated: Mapping[str, Split]
    submitted: Mapping[str, Split]
    source: str
    selected_on_evaluated: bool
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def predicted(self) -> dict[str, Split]:
        """Every split that is reported or submitted, by name."""
        return {**self.evaluated, **self.submitted}

    def limited(self, limit: int) -> "TaskData":
        """The task with `limit` examples of every split or fewer, evenly spaced; 0 for all."""
        if not limit:
            return self

        def cut(split: Split) -> Split:
            count = len(split)
            return split if count <= limit else split.take(np.arange(limit) * count // limit)

        return dataclasses.replace(
            self,
            train=cut(self.train),
            selection=cut(self.selection),
            evaluated={name: cut(split) for name, split in self.evaluated.items()},
            submitted={name: cut(split) for name, split in self.submitted.items()},
        )


def read_official(name: str, folder: Path) -> TaskData:
    """The splits of an official task from a folder that holds `CoLA/`, `SST-2/` and so on.

    A test file that is not there is left out: it is needed for a submission only.

    Raises:
      UsageError: `name` is no official task, or the folder is not there.
      BadInputError: a file is missing or has another layout; with file, line and column.
    """
    if name not in OFFICIAL:
        raise UsageError(f"{name} has no official files; name one of {', '.join(OFFICIAL)}")
    if not folder.is_dir():
        raise UsageError(
            f"config.folder = {str(folder)!r} is no folder; name that of the GLUE files"
        )
    task = OFFICIAL[name]
    assert task.train is not None
    train = read_tsv(folder, task.train, task)
    evaluated = {split: read_tsv(folder, layout, task) for split, layout in task.dev.items()}
    submitted = {
        file: read_tsv(folder, layout, task)
        for file, layout in task.test.items()
        if (folder / layout.path).is_file()
    }
    every = [train, *evaluated.values(), *submitted.values()]
    return TaskData(
        train,
        next(iter(evaluated.values())),
        evaluated,
        submitted,
        f"The official files of {task.title}.",
        True,
        {"lines left out": sum(split.broken for split in every)} if task.train.skips_broken else {},
    )


def read_tsv(folder: Path, layout: Layout, task: Task) -> Split:
    """One file as a split.

    Raises:
      BadInputError: it is missing, no UTF-8, or has another layout; with file, line and column.
    """
    path = folder / layout.path
    lines = _lines(path)
    head, first = (list(layout.header), 1) if layout.header else (lines[0].split("\t"), 2)
    wanted = (*layout.texts, *([layout.label] if layout.label else []))
    for column in wanted:
        if column not in head:
            raise BadInputError(
                f"{path}, line 1: there is no column {column!r} among {', '.join(head)}; {_REMEDY}"
            )
    places = [head.index(column) for column in layout.texts]
    texts, targets, broken = [], [], 0
    for number, line in enumerate(lines[first - 1 :], first):
        cells = line.split("\t")
        if len(cells) != len(head):
            if layout.skips_broken:
                broken += 1
                continue
            raise BadInputError(
                f"{path}, line {number}: {len(cells)} columns, not {len(head)} "
                f"({', '.join(head)}); {_REMEDY}"
            )
        texts.append(tuple(cells[place] for place in places))
        if layout.label:
            where = f"{path}, line {number}, column {layout.label!r}"
            targets.append(_target(cells[head.index(layout.label)], task, where))
    if not texts:
        raise BadInputError(f"{path} has no examples; {_REMEDY}")
    labelled = np.array(targets, np.float64) if layout.label else None
    return Split(texts, labelled, broken, file_digest(path)["sha256"])


def _lines(path: Path) -> list[str]:
    """The lines of a file without their ends."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise BadInputError(
            f"{path} is not there; put the official files of the task into that folder"
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"{path}, line {number}: it is no UTF-8; {_REMEDY}") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _target(cell: str, task: Task, where: str) -> float:
    if task.labels:
        if cell not in task.labels:
            raise BadInputError(f"{where}: {cell!r} is none of {', '.join(task.labels)}; {_REMEDY}")
        return float(task.labels.index(cell))
    low, high = task.bounds or (-math.inf, math.inf)
    try:
        score = float(cell)
    except ValueError:
        score = math.nan
    if not low <= score <= high:
        raise BadInputError(f"{where}: {cell!r} is no number from {low:g} to {high:g}; {_REMEDY}")
    return score
