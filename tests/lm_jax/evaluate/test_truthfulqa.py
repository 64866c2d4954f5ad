"""TruthfulQA MC1 out of every form in which it is published; refusals name the row."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate.multiple_choice import truthfulqa

# (question, answers, the one that is true)
ROWS = [
    ("What, if anything, is under a hat?", ("A head, as a rule", "A rabbit", "A “dove”"), 0),
    ("Where do socks go?", ("Under the bed", "To the moon"), 0),
]

HEADS = ["Category", "Question", "Best Answer", "Correct Answers", "Incorrect Answers", "Source"]


def listed(rows=ROWS):
    return [
        {
            "question": question,
            "mc1_targets": {
                "choices": list(answers),
                "labels": [int(i == true) for i in range(len(answers))],
            },
        }
        for question, answers, true in rows
    ]


def write(path, rows=ROWS):
    """A file in the format of its suffix."""
    match path.suffix:
        case ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(HEADS)
                for question, (best, *wrong), _ in rows:
                    writer.writerow(["c", question, best, f"{best}; x", "; ".join(wrong), ""])
        case ".json":
            answers = [
                {"question": q, "mc1_targets": {a: int(i == t) for i, a in enumerate(every)}}
                for q, every, t in rows
            ]
            path.write_text(json.dumps(answers), encoding="utf-8")
        case ".jsonl":
            lines = [json.dumps(row, ensure_ascii=False) for row in listed(rows)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(listed(rows)), path)
    return path


@pytest.mark.parametrize(
    "name", ["TruthfulQA.csv", "mc_task.json", "mc.jsonl", "validation.parquet"]
)
def test_every_form_gives_the_same_questions(name, tmp_path):
    first, second = truthfulqa(write(tmp_path / name))
    assert first.context == "Q: What, if anything, is under a hat?\nA:"
    assert first.choices == ("A head, as a rule", "A rabbit", "A “dove”")
    assert second.choices == ("Under the bed", "To the moon")
    assert (first.gold, second.gold) == (0, 0)
    assert second.id == f"{name}, row 1"


def test_the_true_answer_need_not_come_first(tmp_path):
    rows = [(question, answers[::-1], len(answers) - 1) for question, answers, _ in ROWS]
    assert [each.gold for each in truthfulqa(write(tmp_path / "mc.jsonl", rows))] == [2, 1]


def test_a_preset_precedes_every_question(tmp_path):
    asked = truthfulqa(write(tmp_path / "mc.jsonl"), preset="Q: Who?\nA: Me.", limit=1)
    assert [each.context for each in asked] == [
        "Q: Who?\nA: Me.\n\nQ: What, if anything, is under a hat?\nA:"
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mc.txt", "", "not one of .csv, .json, .jsonl, .parquet"),
        ("mc.jsonl", "{", "mc.jsonl:1: not JSON"),
        ("mc.parquet", "PAR1", "cannot be read as .parquet"),
        (
            "mc.csv",
            "Question,Best Answer\nq,a\n",
            "row 0: no text in the field 'Incorrect Answers'",
        ),
        (
            "mc.json",
            '[{"question": "q", "mc1_targets": {"a": 1, "b": 1}}]',
            "2 answers are labelled",
        ),
        ("mc.json", '[{"question": " ", "mc1_targets": {"a": 1, "b": 0}}]', "no text in"),
        (
            "mc.jsonl",
            '{"question": "q", "mc1_targets": {"choices": ["a", "b"], "labels": [1]}}',
            "2 choices and 1 labels",
        ),
    ],
)
def test_a_file_that_is_not_truthfulqa_is_refused(name, text, message, tmp_path):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match=message) as refused:
        truthfulqa(file)
    assert name in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(BadInputError, match="is not there"):
        truthfulqa(tmp_path / "mc.jsonl")
    with pytest.raises(UsageError, match="limit = 0"):
        truthfulqa(tmp_path / "mc.jsonl", limit=0)
