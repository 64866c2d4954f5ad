"""TruthfulQA MC1 (Lin et al. 2022) from a user's file: one true answer among false ones.

The file is one of those that the authors and the Hugging Face hub publish, recognised by its
suffix:

    TruthfulQA.csv      columns `Question`, `Best Answer` and `Incorrect Answers`, the latter
                        divided by `;`
    mc_task.json        a list of objects: `question`, and `mc1_targets` from answer to 1 or 0
    .jsonl, .parquet    rows: `question`, and `mc1_targets` with the lists `choices` and `labels`

Answers keep the order of the file, where the true one often comes first. That tells a model
nothing, since each choice is scored without the others; only an exact tie goes to the first.
"""

from collections.abc import Callable, Iterator, Mapping
import csv
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate.multiple_choice.questions import Question
from lm_jax.run.files import load_json
from lm_jax.text import lines

_COLUMNS = ("Question", "Best Answer", "Incorrect Answers")


def truthfulqa(path: str | Path, *, preset: str = "", limit: int | None = None) -> list[Question]:
    """The questions of a file as `Q: question\\nA:`.

    Args:
      path: the user's file, in a format that the head of this file lists.
      preset: text before every question, an empty line between them. Published numbers have six
        answered questions there, the "QA prompt" of the paper; `harness.truthfulqa_preset` reads it
        from the installed lm-evaluation-harness.
      limit: number of questions to take, from the first.

    Raises:
      UsageError: a limit below 1.
      BadInputError: the file does not exist, is not of a kind above, or a row of it lacks a field
        or has no single true answer; names file, row and field.
    """
    file = Path(path).expanduser()
    if limit is not None and limit < 1:
        raise UsageError(f"limit = {limit}; give 1 or more, or None for all")
    if file.suffix not in _READERS:
        raise BadInputError(f"{file}: not one of {', '.join(_READERS)}; name a file of TruthfulQA")
    if not file.is_file():
        raise BadInputError(f"{file} is not there; name a file of TruthfulQA")
    try:
        rows = list(_READERS[file.suffix](file))
    except BadInputError:
        raise
    except (ValueError, csv.Error, pa.ArrowInvalid) as error:
        raise BadInputError(
            f"{file} cannot be read as {file.suffix} ({error}); fetch it again"
        ) from error
    if not rows:
        raise BadInputError(f"{file} holds no question; name a file of TruthfulQA")
    before = f"{preset}\n\nQ: " if preset else "Q: "
    results = []
    for i, (question, answers) in enumerate(rows):
        true = [n for n, (_, label) in enumerate(answers) if label == 1]
        if len(true) != 1:
            raise BadInputError(
                f"{file}, row {i}: {len(true)} answers are labelled 1; MC1 has one true answer"
            )
        choices = tuple(answer for answer, _ in answers)
        results.append(
            Question(f"{file.name}, row {i}", f"{before}{question}\nA:", choices, true[0])
        )
    return results[:limit]


_Answers = list[tuple[str, int]]
_Row = tuple[str, _Answers]


def _from_csv(file: Path) -> Iterator[_Row]:
    opened = io.StringIO(lines.read_text(file), newline="")
    for i, row in enumerate(csv.DictReader(opened, strict=True)):
        question, best, wrong = (_text(row, name, file, i) for name in _COLUMNS)
        false = [answer.strip() for answer in wrong.split(";")]
        yield question, [(best.strip(), 1), *((answer, 0) for answer in false if answer)]


def _from_json(file: Path) -> Iterator[_Row]:
    rows = load_json(lines.read_text(file))
    if not isinstance(rows, list):
        raise BadInputError(f"{file} is no list of questions; name the file mc_task.json")
    for i, row in enumerate(rows):
        yield _text(row, "question", file, i), list(_targets(row, file, i).items())


def _from_lines(file: Path) -> Iterator[_Row]:
    yield from _listed([line.value for line in lines.read_json_lines(file)], file)


def _from_parquet(file: Path) -> Iterator[_Row]:
    yield from _listed(pq.read_table(file).to_pylist(), file)


def _listed(rows: list[Any], file: Path) -> Iterator[_Row]:
    for i, row in enumerate(rows):
        targets = _targets(row, file, i)
        choices, labels = targets.get("choices"), targets.get("labels")
        if not (isinstance(choices, list) and isinstance(labels, list)):
            raise BadInputError(
                f"{file}, row {i}: mc1_targets lacks the lists choices and labels; name a file of "
                "the subset multiple_choice"
            )
        if len(choices) != len(labels):
            raise BadInputError(
                f"{file}, row {i}: {len(choices)} choices and {len(labels)} labels; fetch the file "
                "again"
            )
        yield _text(row, "question", file, i), list(zip(choices, labels, strict=True))


def _text(row: Any, field: str, file: Path, i: int) -> str:
    value = row.get(field) if isinstance(row, Mapping) else None
    if not isinstance(value, str) or not value.strip():
        raise BadInputError(f"{file}, row {i}: no text in the field {field!r}; see {__name__}")
    return value


def _targets(row: Any, file: Path, i: int) -> Mapping[str, Any]:
    value = row.get("mc1_targets") if isinstance(row, Mapping) else None
    if not isinstance(value, Mapping):
        raise BadInputError(
            f"{file}, row {i}: no object in the field 'mc1_targets'; see {__name__}"
        )
    return value


_READERS: Mapping[str, Callable[[Path], Iterator[_Row]]] = {
    ".csv": _from_csv,
    ".json": _from_json,
    ".jsonl": _from_lines,
    ".parquet": _from_parquet,
}
