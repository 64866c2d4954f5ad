"""Rows of MIB's data sets are read as examples; faults are refused with the field."""

import json

import pytest

from lm_jax.errors import BadInputError
from sparse_jax.circuits.generators import mib
from sparse_jax.circuits.tasks import load_task
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer

TEXT = "Mary and John went to the park. {} gave a ball to"


def row(**changes):
    def answered(giver, key):
        return {"prompt": TEXT.format(giver), "choices": ["Mary", "John"], "answerKey": key}

    return {
        **answered("John", 0),
        "template": "park",
        "metadata": {"subject": "John", "indirect_object": "Mary"},
        "abc_counterfactual": answered("Tom", 1),
        "s2_io_flip_counterfactual": answered("Mary", 1),
        **changes,
    }


def test_a_row_is_read_with_the_counterfactual_of_the_circuit_track(tmp_path):
    file = tmp_path / "mib.jsonl"
    file.write_text(json.dumps(row()) + "\n")
    (example,) = load_task(file, word_tokenizer()).examples
    assert example.clean == TEXT.format("John") and example.corrupt == TEXT.format("Mary")
    assert (example.answers, example.wrong_answers) == ((" Mary",), (" John",))
    assert example.template == "park"


def test_labels_of_choices_are_continuations():
    choices = {"label": ["A", "B"], "text": ["red", "blue"]}
    given = {"prompt": "The box is blue. Answer:", "choices": choices}
    other = {**given, "prompt": "The box is red. Answer:", "answerKey": 0}
    example = mib.example({**given, "answerKey": 1, "color_counterfactual": other}, "line 1")
    assert (example.answers, example.wrong_answers) == ((" B",), (" A",))
    spaced = {**given, "prompt": "Answer: "}
    both = {**spaced, "answerKey": 1, "color_counterfactual": {**spaced, "answerKey": 0}}
    assert mib.example(both, "line 1").answers == ("B",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answerKey": 2}, "answerKey = 2 must be the index of one of 2 choices"),
        ({"answerKey": True}, "answerKey = True must be the index"),
        ({"choices": "Mary"}, "choices must be a list of texts"),
        ({"prompt": ""}, "prompt = '' must be a text"),
        ({"s2_io_flip_counterfactual": "x"}, "s2_io_flip_counterfactual must be an object"),
    ],
)
def test_a_faulty_row_is_refused_with_its_field(change, message):
    with pytest.raises(BadInputError, match=rf"line 7: .*{message}|line 7.*{message}"):
        mib.example(row(**change), "line 7")


def test_one_of_several_other_counterfactuals_is_not_guessed():
    several = row(random_names_counterfactual=row()["abc_counterfactual"])
    del several["s2_io_flip_counterfactual"]
    with pytest.raises(BadInputError, match=r"2 fields end with _counterfactual.*leave one"):
        mib.example(several, "line 1")
    with pytest.raises(BadInputError, match="0 fields end with _counterfactual"):
        mib.example({"prompt": "a", "choices": ["b"], "answerKey": 0}, "line 1")
