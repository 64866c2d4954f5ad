"""Examples become aligned arrays, or are dropped and refused with the reason."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.errors import BadInputError, UsageError
from sparse_jax.circuits.ablation import ablated_values
from sparse_jax.circuits.generators import GENERATORS, Example
from sparse_jax.circuits.runs import Batch
from sparse_jax.circuits.tasks import check_disjoint, load_task, make_task
from tests.sparse_jax.circuits.word_tokenizer import word_tokenizer, year_tokenizer


@pytest.mark.parametrize("name", sorted(set(GENERATORS) - {"copy_unspaced", "docstring_printed"}))
def test_arrays_hold_the_prompts_and_their_continuations(name):
    tokenizer = word_tokenizer(digits=2, with_stories=name.startswith("story"))
    task = make_task(name, tokenizer, count=12, seed=3)
    arrays, continuations = task.arrays, task.arrays.continuations
    assert task.manifest.kept == len(task.examples) == 12
    for b, example in enumerate(task.examples):
        clean, corrupt = (tokenizer.encode(text) for text in (example.clean, example.corrupt))
        length = arrays.lengths_B[b]
        assert length == len(clean) == len(corrupt)
        assert arrays.clean_BT[b].tolist() == clean + [0] * (arrays.clean_BT.shape[1] - length)
        assert arrays.corrupt_BT[b, :length].tolist() == corrupt
        assert arrays.valid_BT[b].tolist() == [t < length for t in range(len(arrays.valid_BT[b]))]
        assert arrays.position_B[b] == length - 1
        right = [tokenizer.token(i) for i in continuations.right_BA[b] if i >= 0]
        wrong = [tokenizer.token(i) for i in continuations.wrong_BA[b] if i >= 0]
        assert right == [text.strip() for text in example.answers]
        assert wrong == [text.strip() for text in example.wrong_answers]
    assert continuations.second_wrong_BA.shape[1] == 0


def test_the_letter_to_copy_is_at_another_distance_in_every_length_of_prompt():
    arrays = make_task("copy", word_tokenizer(), count=60, seed=0).arrays
    rows = np.arange(60)
    letters_B = arrays.position_B // 2 + 1
    assert set(letters_B.tolist()) == set(range(10, 19))
    np.testing.assert_array_equal(arrays.lengths_B, 2 * letters_B)
    for tokens_BT, answers_BA in (
        (arrays.clean_BT, arrays.continuations.right_BA),
        (arrays.corrupt_BT, arrays.continuations.wrong_BA),
    ):
        copied_B = tokens_BT[rows, arrays.position_B + 1 - letters_B - 1]
        np.testing.assert_array_equal(copied_B, answers_BA[:, 0])
        # The same distance in all prompts finds the letter of one length alone.
        same_B = tokens_BT[rows, arrays.position_B - 18]
        assert (same_B[letters_B == 18] == answers_BA[letters_B == 18, 0]).all()
        assert (same_B[letters_B != 18] != answers_BA[letters_B != 18, 0]).all()


def test_numbers_of_one_digit_a_token_are_read_at_two_positions():
    tokenizer = word_tokenizer(digits=1)
    task = make_task("greater_than", tokenizer, count=40, seed=0)
    arrays, continuations = task.arrays, task.arrays.continuations

    def digits(ids):
        return {int(tokenizer.token(i)) for i in ids if i >= 0}

    for b, example in enumerate(task.examples):
        tens, units = divmod(len(example.wrong_answers) - 1, 10)
        length = arrays.lengths_B[b]
        prompt = [*tokenizer.encode(example.clean), tokenizer.encode(str(tens))[0]]
        assert arrays.clean_BT[b, :length].tolist() == prompt
        assert arrays.corrupt_BT[b, length - 1] == prompt[-1] == continuations.tens_B[b]
        assert arrays.position_B[b] == length - 2
        assert digits(continuations.right_BA[b]) == set(range(tens + 1, 10))
        assert digits(continuations.wrong_BA[b]) == set(range(tens))
        assert digits(continuations.second_right_BA[b]) == set(range(units + 1, 10))
        assert digits(continuations.second_wrong_BA[b]) == set(range(units + 1))


@pytest.mark.parametrize("fused", [(), ("1700",), [f"{c}00" for c in range(11, 18)]])
def test_years_fit_whatever_the_prompt_and_a_continuation_would_be_as_one_word(fused):
    """One year of a century that is a token, such as " 1700", dropped the whole century."""
    tokenizer = year_tokenizer(fused)
    task = make_task("greater_than", tokenizer, count=50, seed=0)
    assert task.manifest.drawn == 50 and not task.manifest.dropped
    for b, example in enumerate(task.examples):
        year = int(re.search(r"\d{4}", example.clean)[0][2:])
        for ids_BA, numbers in (
            (task.arrays.continuations.right_BA, range(year + 1, 100)),
            (task.arrays.continuations.wrong_BA, range(year + 1)),
        ):
            tokens = [tokenizer.token(i) for i in ids_BA[b] if i >= 0]
            assert tokens == [f"{number:02d}" for number in numbers]
        assert (
            tokenizer.token(task.arrays.clean_BT[b, task.arrays.position_B[b]])[1:]
            == (example.clean[-2:])
        )


def test_a_year_that_is_one_token_is_left_out_and_counted_by_its_century():
    whole = [f"{year}" for year in (*range(1150, 1160), *range(1600, 1700), 1701, 1776)]
    tokenizer = year_tokenizer(whole)
    task = make_task("greater_than", tokenizer, count=200, seed=0)
    years = {re.search(r"\d{4}", example.clean)[0] for example in task.examples}
    assert not years & set(whole) and not any(year.startswith("17") for year in years)
    assert {year[:2] for year in years} == {"11", "12", "13", "14", "15"}
    reasons = {reason for reason in task.manifest.dropped if reason != "drawn before"}
    of_the = "its year, in the {}00s, is not encoded as its century and two digits"
    # 1776 is a year of a century whose corrupt year is a token as well.
    assert reasons - {of_the.format(17)} == {
        *(of_the.format(century) for century in (11, 16)),
        "the corrupt year 1701 is not encoded as its century and two digits",
    }
    assert task.manifest.drawn == 200 + sum(task.manifest.dropped.values())
    every = year_tokenizer([f"{year}" for year in range(1100, 1800)])
    with pytest.raises(BadInputError, match=r"0 of 2 examples fit \(.* x its year, in the 1.00s"):
        make_task("greater_than", every, count=2, seed=0)


def test_numbers_of_a_file_are_their_own_tokens_after_the_prompt(tmp_path):
    tokenizer = year_tokenizer(("1743", "1702"))
    row = {
        "clean": "The war lasted from the year 1742 to 17",
        "corrupt": "The war lasted from the year 1701 to 17",
        "answers": ["43", "44"],
        "wrong_answers": ["02"],
    }
    continuations = load_task(written(tmp_path, row), tokenizer).arrays.continuations
    assert [tokenizer.token(i) for i in continuations.right_BA[0]] == ["43", "44"]
    assert [tokenizer.token(i) for i in continuations.wrong_BA[0]] == ["02"]
    # A word that would fuse was meant to begin with a space.
    row |= {"clean": "It is a 1", "corrupt": "It is a 2", "answers": ["7 "], "wrong_answers": ["x"]}
    with pytest.raises(BadInputError, match="fuses with the end of the prompt"):
        load_task(written(tmp_path, row), tokenizer)


def test_examples_that_do_not_fit_are_dropped_by_reason():
    tokenizer = word_tokenizer()
    task = make_task("ioi", tokenizer, count=10, seed=0, max_length=17)
    assert set(task.manifest.dropped) == {"it is longer than the 17 positions of the model"}
    assert task.manifest.drawn == 10 + sum(task.manifest.dropped.values())
    assert task.arrays.clean_BT.shape[1] <= 17

    with pytest.raises(BadInputError, match=r"0 of 5 examples fit .*100 x clean and .*diff"):
        make_task("docstring_printed", tokenizer, count=5, seed=0)


def test_the_same_seed_gives_the_same_task_and_excluded_examples_do_not_come_again():
    tokenizer = word_tokenizer()
    first = make_task("greater_than", tokenizer, count=250, seed=0)
    again = make_task("greater_than", tokenizer, count=250, seed=0)
    assert first.manifest == again.manifest
    np.testing.assert_array_equal(first.arrays.clean_BT, again.arrays.clean_BT)
    other = make_task("greater_than", tokenizer, count=250, seed=1)
    with pytest.raises(BadInputError, match=r"prompts are in two splits, such as 'The .*exclude"):
        check_disjoint(first, other)
    apart = make_task("greater_than", tokenizer, count=250, seed=1, exclude=first.examples)
    check_disjoint(first, apart)
    assert apart.manifest.dropped["drawn before"] > other.manifest.dropped["drawn before"]


def test_prompts_of_a_training_text_are_dropped_and_others_drawn():
    tokenizer = word_tokenizer()
    task = make_task("greater_than", tokenizer, count=40, seed=0)
    seen = task.examples[:30]
    text = {each.clean + each.answers[-1] for each in seen}
    # With a wrong continuation it is another line.
    text |= {each.clean + each.wrong_answers[0] for each in task.examples[30:]}
    unseen = make_task("greater_than", tokenizer, count=40, seed=0, trained_on=text)
    assert not {each.clean for each in seen} & {each.clean for each in unseen.examples}
    assert unseen.examples[:10] == task.examples[30:]
    # Each comes once in the first 40, and perhaps again in the further draws.
    assert unseen.manifest.kept == 40 and unseen.manifest.dropped["in the training text"] >= 30
    everything = {each.clean + each.answers[0] for each in unseen.examples} | text
    with pytest.raises(BadInputError, match=r"0 of 2 examples fit \(40 x in the training text\)"):
        make_task("greater_than", tokenizer, count=2, seed=0, trained_on=everything)


def test_a_first_token_of_id_0_is_a_token():
    """Padding has that id as well; only `valid_BT` tells them apart."""
    tokenizer = word_tokenizer(special=["<bos>"])
    assert tokenizer.encode("Mary")[0] == 0
    arrays = make_task("ioi", tokenizer, count=12, seed=3).arrays
    plain = make_task("ioi", word_tokenizer(), count=12, seed=3).arrays
    assert (arrays.clean_BT[:, 0] == 0).all() and (arrays.corrupt_BT[:, 0] == 0).all()
    assert arrays.valid_BT[:, 0].all()
    np.testing.assert_array_equal(arrays.lengths_B, plain.lengths_B + 1)
    np.testing.assert_array_equal(arrays.position_B, plain.position_B + 1)
    # All later ids are one more, for that of the first token.
    np.testing.assert_array_equal(arrays.clean_BT[:, 1:], plain.clean_BT + plain.valid_BT)
    # A mean over tokens counts it.
    first_1BT = jnp.asarray(
        (np.arange(arrays.valid_BT.shape[1]) == 0)[None, None] * np.ones((12, 1))
    )
    mean = ablated_values("mean", first_1BT, first_1BT, jnp.asarray(arrays.valid_BT))
    np.testing.assert_allclose(mean.ravel(), [12 / arrays.lengths_B.sum()], rtol=2.0**-22)


def test_arrays_with_padding_or_metric_elsewhere_are_refused():
    arrays = make_task("ioi", word_tokenizer(), count=12, seed=3).arrays
    row = int(arrays.lengths_B.argmin())
    length, T = int(arrays.lengths_B[row]), arrays.valid_BT.shape[1]
    assert length < T

    def changed(**rows):
        fields = {name: np.array(getattr(arrays, name)) for name in rows}
        for name, value in rows.items():
            fields[name][row] = value
        return dataclasses.replace(arrays, **fields)

    left = changed(position_B=length - 2).valid_BT[row, ::-1]
    with pytest.raises(BadInputError, match=rf"row {row} of valid_BT is not padded on the right"):
        changed(valid_BT=left)
    with pytest.raises(BadInputError, match=rf"row {row} of valid_BT is not padded on the right"):
        changed(valid_BT=np.arange(T) == length)
    for position in (T - 1, length, length - 3):
        message = (
            rf"position_B\[{row}\] = {position} is not the last of the {length} .*{length - 1}"
        )
        with pytest.raises(BadInputError, match=message):
            changed(position_B=position)


def test_unknown_names_are_refused_with_the_nearest():
    tokenizer = word_tokenizer()
    with pytest.raises(UsageError, match=r"no task 'iio'.*'ioi'"):
        make_task("iio", tokenizer, count=1, seed=0)
    with pytest.raises(UsageError, match=r"no metric 'logit_diff'.*'logit_difference'"):
        make_task("ioi", tokenizer, count=1, seed=0, metric="logit_diff")


def written(folder, *rows):
    file = folder / "mine.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


ROW = {
    "clean": "Mary and John went to the park. John gave a ball to",
    "corrupt": "Anna and Tom went to the park. Paul gave a ball to",
    "answers": [" Mary"],
    "wrong_answers": [" John"],
}
OTHER = ROW | {"clean": ROW["clean"].replace("ball", "ring")}


def test_a_file_is_read_as_it_is_written(tmp_path):
    tokenizer = word_tokenizer()
    second = ROW | {"clean": ROW["clean"].replace("ball", "book"), "template": "mine"}
    task = load_task(written(tmp_path, ROW, second), tokenizer)
    assert task.examples[1] == Example(
        second["clean"], ROW["corrupt"], (" Mary",), (" John",), "mine"
    )
    assert task.manifest.name == "mine" and task.manifest.seed is None
    assert task.arrays.clean_BT[0].tolist() == tokenizer.encode(ROW["clean"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"corrupt": "Anna went to the park. Paul gave a ball to"},
            "differ in .*have 13 and 11; ch",
        ),
        ({"corrupt": OTHER["clean"]}, "same tokens; write a corrupt prompt"),
        (
            {"answers": [" Mary Anna"], "wrong_answers": [" Mary"]},
            "a right continuation begins a wrong one.*; write continuations that part",
        ),
        (
            {"answers": [" Mary Anna", " Tom Mary"]},
            "right continuations part before their last token; write those of one beginning",
        ),
        (
            {"answers": [" Mary Anna", " Mary"]},
            "a right continuation begins another one; leave the longer one out",
        ),
        ({"answers": [" John"]}, "a right continuation is also a wrong one"),
        ({"answers": []}, "it has no right or no wrong continuation"),
        ({"answers": [" "]}, "gives no token; ' ' needs a word"),
        ({"answers": " Mary"}, r"answers = ' Mary'"),
        ({"answer": [" Mary"]}, "answer"),
        ({"clean": ""}, "a prompt is empty"),
    ],
)
def test_a_faulty_line_is_refused_with_its_number(tmp_path, change, message):
    with pytest.raises(BadInputError, match=rf"mine\.jsonl:2: .*{message}"):
        load_task(written(tmp_path, ROW, OTHER | change), word_tokenizer())


def test_faulty_files_are_refused(tmp_path):
    tokenizer = word_tokenizer()
    with pytest.raises(BadInputError, match=r"mine.jsonl:2: both prompts are those of line 1"):
        load_task(written(tmp_path, ROW, ROW), tokenizer)
    with pytest.raises(BadInputError, match="no examples; write one"):
        load_task(written(tmp_path), tokenizer)
    with pytest.raises(BadInputError, match=r"give a readable .jsonl file"):
        load_task(tmp_path / "none.jsonl", tokenizer)


def test_a_clean_prompt_comes_again_with_another_corruption(tmp_path):
    """Its pairs have one number, which generated prompts never share."""
    again = ROW | {"corrupt": ROW["corrupt"].replace("Anna", "Laura")}
    task = load_task(written(tmp_path, ROW, OTHER, again), word_tokenizer())
    assert task.prompt_B.tolist() == Batch.of(task).prompt_B.tolist() == [0, 1, 0]
    made = make_task("ioi", word_tokenizer(), count=7, seed=0)
    assert made.prompt_B.tolist() == Batch.of(made).prompt_B.tolist() == list(range(7))


def test_every_refused_line_is_named_with_its_reason(tmp_path):
    long = OTHER | {"answers": [" Mary Anna"], "wrong_answers": [" Mary"]}
    with pytest.raises(BadInputError) as caught:
        load_task(
            written(tmp_path, ROW, long, OTHER | {"corrupt": OTHER["clean"]}), word_tokenizer()
        )
    assert re.search(
        r"mine\.jsonl: 2 lines are refused; line 2: a right continuation begins a wrong "
        r"one, .*; write .*; line 3: clean and corrupt prompts are the same tokens; ",
        str(caught.value),
    )
    rows = [long | {"corrupt": f"{n}"} for n in range(7)]
    with pytest.raises(BadInputError, match=r": 7 lines are refused; line 1: .*; and 2 more$"):
        load_task(written(tmp_path, *rows), word_tokenizer())
