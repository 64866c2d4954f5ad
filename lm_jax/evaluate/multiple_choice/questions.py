"""Questions with choices, and those of ARC-Easy, PIQA and OpenBookQA from the asset `mc`.

    arc_easy      Clark et al. 2018: school science, three to five choices
    piqa          Bisk et al. 2020: which of two ways reaches a physical goal
    openbookqa    Mihaylov et al. 2018: elementary science facts, four choices

The prompts are those of the lm-evaluation-harness. The asset has no plain copy of the two test
splits, but prompts made from them: the question is cut out of those.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import gzip
import json
from typing import Any

import pyarrow as pa

from lm_jax import assets
from lm_jax.errors import BadInputError, UsageError, nearest

_QUESTION = ("Question: ", "\nAnswer:")


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and what may continue it after one space; `choices[gold]` is the right one.

    Raises:
      BadInputError: fewer than two choices, an empty one, or no choice of the number `gold`.
    """

    id: str
    context: str
    choices: tuple[str, ...]
    gold: int

    def __post_init__(self) -> None:
        if len(self.choices) < 2 or not all(self.choices):
            raise BadInputError(
                f"question {self.id}: choices {self.choices!r}; give two or more, none empty"
            )
        if not 0 <= self.gold < len(self.choices):
            raise BadInputError(
                f"question {self.id}: choice {self.gold} is to be right, of {len(self.choices)}; "
                "count from 0"
            )


@dataclasses.dataclass(frozen=True)
class Task:
    """Where the questions of a benchmark are.

    Attributes:
      prompt: the text before and after a question.
      splits: split to the member of the asset; the first is the one that results are reported on.
    """

    prompt: tuple[str, str]
    splits: Mapping[str, str]


TASKS: Mapping[str, Task] = {
    "arc_easy": Task(
        _QUESTION,
        {"test": "arc_easy/test_5shot.jsonl.gz", "validation": "arc_easy/validation.arrow"},
    ),
    # The labels of PIQA's test split are not public.
    "piqa": Task(_QUESTION, {"validation": "piqa/validation.arrow"}),
    "openbookqa": Task(
        ("", ""),
        {"test": "openbookqa/test_5shot.jsonl.gz", "validation": "openbookqa/validation.arrow"},
    ),
}


def read(task: str, *, split: str | None = None, limit: int | None = None) -> list[Question]:
    """The questions of a task, in the order in which it was published.

    Args:
      task: a name of `TASKS`.
      split: a split of the task; None is the one that results are reported on.
      limit: number of questions to take, from the first.

    Raises:
      UsageError: no such task or split, or a limit below 1.
      BadInputError: the asset is not in the cache.
    """
    if task not in TASKS:
        raise UsageError(f"task {task!r} is not known{nearest(task, TASKS)}")
    prompt, splits = TASKS[task].prompt, TASKS[task].splits
    split = split or next(iter(splits))
    if split not in splits:
        raise UsageError(f"task {task} has no split {split!r}{nearest(split, splits)}")
    if limit is not None and limit < 1:
        raise UsageError(f"limit = {limit}; give 1 or more, or None for all")
    rows = _from_arrow if splits[split].endswith(".arrow") else _from_requests
    results = [
        Question(name, f"{prompt[0]}{stem}{prompt[1]}", choices, gold)
        for name, stem, choices, gold in rows(splits[split])
    ]
    return results[:limit]


_Row = tuple[str, str, tuple[str, ...], int]


def _from_arrow(member: str) -> Iterator[_Row]:
    with pa.memory_map(str(assets.path("mc", member))) as file:
        rows: list[dict[str, Any]] = pa.ipc.open_stream(file).read_all().to_pylist()
    for i, row in enumerate(rows):
        if "goal" in row:
            yield str(i), row["goal"], (row["sol1"], row["sol2"]), row["label"]
        else:
            stem = row["question"] if "question" in row else row["question_stem"]
            choices = row["choices"]
            gold = choices["label"].index(row["answerKey"])
            yield row["id"], stem, tuple(choices["text"]), gold


def _from_requests(member: str) -> Iterator[_Row]:
    """One row for each question, of which the file has two prompts for every choice."""
    before, after = _QUESTION
    visited = set()
    with gzip.open(assets.path("mc", member), "rt", encoding="utf-8") as file:
        for doc in (json.loads(line)["doc"] for line in file):
            if doc["id"] not in visited:
                visited.add(doc["id"])
                stem = doc["query"].removeprefix(before).removesuffix(after)
                yield doc["id"], stem, tuple(doc["choices"]), doc["gold"]
