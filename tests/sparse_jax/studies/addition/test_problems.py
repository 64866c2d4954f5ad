"""The sums as tokens, against Python's own integers."""

import numpy as np
import pytest

from lm_jax.errors import BadInputError, UsageError
from sparse_jax.studies.addition import problems

ALL = np.arange(problems.COUNT)


def columns(first: int, second: int) -> list[int]:
    """The carry into ones, tens and hundreds, by adding column for column."""
    carry, result = 0, []
    for place in (1, 10, 100):
        result.append(carry)
        carry = (first // place % 10 + second // place % 10 + carry) // 10
    return result


def test_a_row_is_the_problem_and_its_sum():
    assert problems.rows(np.array([3628])).tolist() == [
        [4, 7, 11, 3, 9, 12, 13, 13, 13, 13, 13, 1, 1, 1, 7, 5]
    ]
    for number, row in zip(ALL.tolist(), problems.rows(ALL), strict=True):
        first, second = divmod(number, 100)
        assert problems.decode(row) == f"{first:02}+{second:02}=?????{first + second:05}"
    assert problems.rows(ALL).max() == problems.VOCAB_SIZE - 1


def test_the_places_of_digits_are_where_the_row_has_them():
    row = problems.rows(np.array([3628]))[0]
    read = [[problems.decode(row[at]) for at in places] for places in problems.OPERANDS]
    assert read == [["6", "8"], ["3", "2"]]
    answered = [problems.decode(row[at + problems.ANSWERED]) for at in problems.ANSWERS]
    assert answered == ["4", "6", "0", "0", "0"]


def test_carries_are_those_of_adding_by_columns():
    want = [columns(*divmod(number, 100)) for number in ALL.tolist()]
    np.testing.assert_array_equal(problems.carried(ALL), want)
    np.testing.assert_array_equal(problems.carries(ALL), np.sum(want, axis=1))
    assert [int(problems.carries(np.array([n]))[0]) for n in (5321, 3628, 4359)] == [0, 1, 2]


def test_text_and_numbers_are_one():
    assert problems.number("36+28") == 3628
    assert problems.format_problem(907) == "09+07="
    assert problems.number(problems.format_problem(907).rstrip("=")) == 907
    for text in ("36+2", "36-28", "3６+28", "36+28=", ""):
        with pytest.raises(UsageError, match="two numbers of two digits"):
            problems.number(text)
    with pytest.raises(UsageError, match="holds 'a'"):
        problems.encode("3a")


def test_a_split_is_disjoint_complete_and_seeded():
    train, held_out = problems.split(2000, 7, always=(5321, 3628))
    assert len(held_out) == 2000 and {5321, 3628} <= set(held_out.tolist())
    np.testing.assert_array_equal(np.sort(np.concatenate([train, held_out])), ALL)
    again, other = (problems.split(2000, seed, always=(5321, 3628))[1] for seed in (7, 8))
    np.testing.assert_array_equal(held_out, again)
    assert (held_out != other).any()
    for held in (0, 1, problems.COUNT):
        with pytest.raises(UsageError, match="held_out"):
            problems.split(held, 7, always=(5321, 3628))


def test_the_answer_is_predicted_where_it_is_asked():
    rows = problems.rows(np.array([3628]))
    filled = np.concatenate([rows, np.zeros_like(rows)])
    batch = problems.answer_batch(filled)
    assert batch.input_BT.shape == (2, 11)
    np.testing.assert_array_equal(batch.input_BT[0], rows[0, :11])
    assert batch.target_BT.tolist() == [[0] * 6 + [1, 1, 1, 7, 5], [0] * 11]
    assert batch.loss_mask_BT.tolist() == [[False] * 6 + [True] * 5, [False] * 11]
    assert batch.input_mask_BT.tolist() == [[True] * 11, [False] * 11]


def test_an_epoch_has_every_problem_once_in_an_order_of_its_own():
    numbers = problems.split(9970, 0)[0]
    batches = problems.Batches(numbers, batch_size=8, seed=3)
    drawn = [batches.at(k) for k in range(15)]
    documents = np.concatenate([batch["document"] for batch in drawn])
    for epoch in range(4):
        np.testing.assert_array_equal(np.sort(documents[30 * epoch : 30 * epoch + 30]), numbers)
    assert (documents[:30] != documents[30:60]).any()
    assert batches.per_epoch == 3
    for batch in drawn:
        np.testing.assert_array_equal(batch["tokens"], problems.rows(batch["document"]))
        assert batch["tokens"].dtype == np.int32
    again = problems.Batches(numbers, batch_size=8, seed=3)
    np.testing.assert_array_equal(again.at(11)["document"], drawn[11]["document"])
    others = [
        problems.Batches(numbers[1:], batch_size=8, seed=3),
        problems.Batches(numbers, batch_size=7, seed=3),
        problems.Batches(numbers, batch_size=8, seed=4),
        problems.OnePass(numbers, batch_size=8),
    ]
    assert len({batches.fingerprint, *(other.fingerprint for other in others)}) == 5
    with pytest.raises(BadInputError, match="fewer than one batch of 31"):
        problems.Batches(numbers, batch_size=31, seed=3)


def test_one_pass_fills_up_with_padding():
    numbers = np.array([5, 6, 7])
    batches = problems.OnePass(numbers, batch_size=2)
    assert batches.per_epoch == 2
    last = batches.at(1)
    assert last["document"].tolist() == [7, -1]
    np.testing.assert_array_equal(last["tokens"][0], problems.rows(np.array([7]))[0])
    assert not last["tokens"][1].any()
