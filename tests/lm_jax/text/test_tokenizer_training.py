"""Both recipes: special ids, normalisation, determinism and saving."""

import json
import random

from hypothesis import example, given
from hypothesis import strategies as st
import pytest

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import (
    BOS,
    EOS,
    SPECIAL,
    train_byte_tokenizer,
    train_tokenizer,
)

WORDS = ["the", "Café", "river", "naïve", "runs", "Ångström", "quietly", "under", "bridges", "no"]


def texts(count, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        yield " ".join(draw.choices(WORDS, k=30)) + "."


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(texts(50), vocab_size=200)


def test_the_special_tokens_have_the_first_ids(tokenizer):
    assert [tokenizer.token(i) for i in range(5)] == list(SPECIAL)
    assert tokenizer.bos_id == 2 and tokenizer.eos_id == 3
    assert tokenizer.vocab_size <= 200


def test_a_text_is_framed_once_and_decoded_normalised(tokenizer):
    ids = tokenizer.encode("The  CAFE\u0301 runs\tunder\nnaïve bridges.")
    assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(ids[1:-1]) == "the cafe runs under naive bridges ."
    assert tokenizer.encode("runs", add_special_tokens=False) == ids[3:4]


def test_frequent_words_are_one_token_and_pieces_mark_the_end_of_a_word(tokenizer):
    for word in WORDS:
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1
    pieces = [tokenizer.token(i) for i in tokenizer.encode("quietriver", add_special_tokens=False)]
    assert "".join(pieces) == "quietriver</w>"


def test_a_new_character_is_unknown(tokenizer):
    assert tokenizer.encode("π", add_special_tokens=False) == [1]


def test_special_tokens_written_in_a_text_are_text(tokenizer):
    ids = tokenizer.encode("the <eot> river", split_special_tokens=True)
    assert 4 not in ids


def test_no_merge_below_the_minimum_frequency():
    rare = ["zyx"] * 2 + ["abc"] * 3
    vocabulary = train_tokenizer(rare, vocab_size=50).backend.get_vocab()
    assert "abc</w>" in vocabulary and "zyx</w>" not in vocabulary
    assert "zyx</w>" in train_tokenizer(rare, vocab_size=50, min_frequency=2).backend.get_vocab()


def test_it_learns_from_the_first_documents_and_reads_no_further():
    def stream():
        yield from ["alpha"] * 3
        raise AssertionError("read too far")

    assert "alpha</w>" in train_tokenizer(stream(), vocab_size=50, documents=3).backend.get_vocab()


def test_the_same_texts_give_the_same_file(tokenizer, tmp_path):
    again = train_tokenizer(texts(50), vocab_size=200)
    assert again.sha256 == tokenizer.sha256
    other = train_tokenizer(texts(50, seed=1), vocab_size=60)
    assert other.sha256 != tokenizer.sha256
    again.save(tmp_path)
    read = Tokenizer.from_folder(tmp_path)
    assert read.sha256 == tokenizer.sha256
    assert (read.bos_id, read.eos_id) == (2, 3)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"] is None


def test_transformers_reads_the_file_alike(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (theirs.bos_token, theirs.eos_token) == (BOS, EOS)
    for text in texts(5, seed=2):
        assert theirs.encode(text) == tokenizer.encode(text)


def test_without_texts_or_room_for_the_alphabet_it_refuses():
    with pytest.raises(BadInputError, match="no texts to train"):
        train_tokenizer([])
    with pytest.raises(BadInputError, match="vocab_size = 10 is less than"):
        train_tokenizer(["abcdefghijkl"], vocab_size=10)


@pytest.fixture(scope="module")
def byte_tokenizer():
    return train_byte_tokenizer((f"{text} In 1732 ." for text in texts(50)), vocab_size=400)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example("The  CAFE\u0301\truns\n\n in 1999 (it's \u6c34) <bos> ")
def test_bytes_are_decoded_as_they_were(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text, split_special_tokens=True)
    assert ids[0] == byte_tokenizer.bos_id == 0
    assert byte_tokenizer.eos_id == 1 and 1 not in ids
    assert byte_tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize(("digits", "years"), [(1, "1 7 3 2"), (2, "17 32"), (3, "173 2")])
def test_numbers_are_cut_from_the_left(digits, years):
    corpus = [f"{year} {year // 10} {year // 100}" for year in range(1700, 1760)] * 9
    tokenizer = train_byte_tokenizer(corpus, vocab_size=1000, digits=digits)
    ids = tokenizer.encode("1732", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids] == years.split()


def test_bytes_learn_whole_words_and_the_same_texts_give_the_same_file(byte_tokenizer, tmp_path):
    again = train_byte_tokenizer((f"{text} In 1732 ." for text in texts(50)), vocab_size=400)
    assert again.sha256 == byte_tokenizer.sha256
    for word in WORDS:
        assert len(again.encode(f" {word}", add_special_tokens=False)) == 1
    again.save(tmp_path)
    read = Tokenizer.from_folder(tmp_path)
    assert (read.sha256, read.bos_id, read.eos_id) == (again.sha256, 0, 1)
    assert read.encode("the river") == again.encode("the river")


def test_bytes_without_room_or_texts_are_refused():
    with pytest.raises(UsageError, match=r"vocab_size = 257 must be at least 258"):
        train_byte_tokenizer(["a"], vocab_size=257)
    with pytest.raises(BadInputError, match="no texts"):
        train_byte_tokenizer([], vocab_size=300)
