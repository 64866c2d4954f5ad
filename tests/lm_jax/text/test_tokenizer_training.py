"""The 16k recipe: special ids, normalisation, determinism and saving."""

import json
import random

import pytest

from lm_jax.errors import BadInputError
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import BOS, EOS, SPECIAL, train_tokenizer

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
