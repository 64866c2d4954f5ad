"""Rows of ids: layout, cutting, targets, and batches by number."""

import numpy as np
import pytest

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text.tokenizer_training import train_tokenizer
from protot_jax.studies.glue import encoding
from protot_jax.studies.glue.encoding import EvalBatches, Rows, TrainBatches
from protot_jax.studies.glue.readers import Split, TaskData
from protot_jax.studies.glue.tasks import EMBEDDED, OFFICIAL

TEXT = "a b c d e f g h i j k l [ sep ]"


@pytest.fixture(scope="module")
def tokenizer():
    """A token for every letter, so that lengths are the numbers of words."""
    return train_tokenizer([TEXT] * 3, vocab_size=60)


def data_of(train, targets, **others):
    split = Split(train, np.array(targets, np.float64))
    return TaskData(split, split, {"dev": split}, others, "", True)


def tokens(tokenizer, row):
    return [tokenizer.token(i).removesuffix("</w>") for i in row if i]


def test_a_pair_is_joined_by_the_separator_as_text(tokenizer):
    train = data_of([("a b", "c"), ("d", "e f g h")], [0, 1])
    encoded = encoding.encode_task(train, OFFICIAL["rte"], tokenizer, length=30)
    first, second = encoded.train.rows_NS
    assert tokens(tokenizer, first[:-1]) == ["<bos>", "a", "b", "[", "sep", "]", "c", "<eos>"]
    assert [first[-1], second[-1]] == [0, 1]
    # Padded with 0 to the longest.
    assert first[:-1].tolist().count(0) == 2 and encoded.train.truncated == 0


def test_special_tokens_in_a_text_are_text(tokenizer):
    (row,), _ = encoding.encode_texts([("a <eos> b",)], tokenizer, 30)
    assert row.count(tokenizer.eos_id) == 1 and row[-1] == tokenizer.eos_id
    assert 0 not in row


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        # Room for six ids of text.
        (2, 3, (2, 3)),
        (3, 3, (3, 3)),
        (2, 9, (2, 4)),
        (9, 1, (5, 1)),
        (9, 9, (3, 3)),
        (4, 9, (3, 3)),
        (9, 4, (3, 3)),
    ],
)
def test_the_longer_of_two_texts_is_cut(first, second, kept):
    parts = [list(range(first)), list(range(second))]
    result = encoding._fitted(parts, 6)
    assert tuple(map(len, result)) == kept
    assert all(own == part[: len(own)] for own, part in zip(result, parts, strict=True))


def test_cut_texts_are_counted_and_keep_their_ends(tokenizer):
    train = data_of([("a b c d e f",), ("a b",)], [0, 1])
    encoded = encoding.encode_task(train, OFFICIAL["sst2"], tokenizer, length=5)
    assert encoded.train.truncated == 1
    assert tokens(tokenizer, encoded.train.rows_NS[0, :-1]) == ["<bos>", "a", "b", "c", "<eos>"]


def test_without_room_for_a_pair_the_length_is_refused(tokenizer):
    with pytest.raises(UsageError, match="max_length = 6 leaves 1 ids for text; raise it"):
        encoding.encode_texts([("a", "b")], tokenizer, 6)


def test_scores_are_standardised_by_the_training_split_and_come_back(tokenizer):
    task = EMBEDDED["films_rating"]
    dev = Split([("a",)], np.array([3.0]))
    train = Split([("a",), ("b",), ("c",)], np.array([-2.0, 0.0, 2.0]))
    data = TaskData(train, dev, {"dev": dev}, {}, "", False)
    encoded = encoding.encode_task(data, task, tokenizer, length=9)
    standard = encoded.train.rows_NS[:, -1].view(np.float32)
    assert standard.mean() == 0 and standard.std() == pytest.approx(1, abs=2**-23)
    (score,) = encoded.predicted["dev"].rows_NS[:, -1].view(np.float32)
    assert encoded.scale.mean + encoded.scale.deviation * score == pytest.approx(3.0, abs=2**-22)
    with pytest.raises(BadInputError, match="every score of the training split is 1; give others"):
        encoding.encode_task(data_of([("a",)] * 2, [1, 1]), task, tokenizer, length=9)


ROWS = Rows(np.arange(1, 23, dtype=np.int32).reshape(11, 2), 0)


def test_an_epoch_holds_every_example_once_in_an_order_of_its_own():
    batches = TrainBatches(ROWS, batch_size=4, seed=3)
    assert batches.per_epoch == 2
    places = np.concatenate([batches.at(k)["document"] for k in range(11)])
    epochs = places.reshape(4, 11)
    assert (np.sort(epochs, axis=1) == np.arange(11)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    batch = batches.at(5)
    np.testing.assert_array_equal(batch["tokens"], ROWS.rows_NS[batch["document"]])
    with pytest.raises(BadInputError, match="fewer than one batch of 12; lower"):
        TrainBatches(ROWS, batch_size=12, seed=0)


def test_the_fingerprint_is_of_rows_seed_and_size():
    fingerprint = TrainBatches(ROWS, batch_size=4, seed=3).fingerprint
    other = Rows(ROWS.rows_NS[::-1], 0)
    assert (
        len(
            {
                fingerprint,
                TrainBatches(other, batch_size=4, seed=3).fingerprint,
                TrainBatches(ROWS, batch_size=4, seed=4).fingerprint,
                TrainBatches(ROWS, batch_size=5, seed=3).fingerprint,
            }
        )
        == 4
    )


def test_an_evaluation_reads_every_example_once_and_pads_the_last_batch():
    batches = EvalBatches(ROWS, batch_size=4)
    parts = [batches.at(k) for k in range(batches.per_epoch)]
    assert [part["tokens"].shape for part in parts] == [(4, 2)] * 3
    document = np.concatenate([part["document"] for part in parts])
    assert document.tolist() == [*range(11), -1]
    assert (parts[-1]["tokens"][-1] == 0).all()
