"""Token files: written, read, refused where they are wrong, and prepared as data."""

import numpy as np
import pytest

from lm_jax.errors import BadInputError
from lm_jax.text import corpora, preparation
from lm_jax.text.exports import export_token_files
from lm_jax.text.preparation import CorpusConfig, prepare_corpus
from lm_jax.text.splits import SPLITS
from lm_jax.text.token_files import read_token_file, write_token_file
from tests.lm_jax.text.synthetic_corpus import stored, texts


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_a_file_holds_what_was_written(vocab_size, dtype, tmp_path):
    documents = [[3, vocab_size - 1, 0], [], [7], []]
    write_token_file(tmp_path / "a.npz", documents, vocab_size=vocab_size)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert file["tokens"].dtype == dtype
        assert file["tokens"].tolist() == [3, vocab_size - 1, 0, 7]
        assert file["offsets"].tolist() == [0, 3, 3, 4, 4]
    read = read_token_file(tmp_path / "a.npz", vocab_size=vocab_size)
    assert [ids.tolist() for ids in read] == documents
    with pytest.raises(BadInputError, match=f"go from 0 to {vocab_size - 1}, and the vocabulary"):
        write_token_file(tmp_path / "b.npz", documents, vocab_size=vocab_size - 1)
    assert not (tmp_path / "b.npz").exists()


def test_a_file_of_no_documents(tmp_path):
    write_token_file(tmp_path / "a.npz", [], vocab_size=5)
    assert read_token_file(tmp_path / "a.npz", vocab_size=5) == []


TOKENS, OFFSETS = np.array([1, 2, 3], "<u2"), np.array([0, 1, 3])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": TOKENS}, "has no array offsets"),
        ({"tokens": TOKENS * 1.0, "offsets": OFFSETS}, "tokens is float64"),
        ({"tokens": TOKENS, "offsets": OFFSETS[:0]}, "offsets go from none"),
        ({"tokens": TOKENS, "offsets": OFFSETS[:2]}, "offsets go from 0 to 1, not from 0 to the 3"),
        (
            {"tokens": TOKENS, "offsets": np.array([0, 2, 1, 3], "u8")},
            "offsets fall from 2 to 1 after document 1",
        ),
        ({"tokens": np.array([1, 9, 3]), "offsets": OFFSETS}, "the id 9, and the vocabulary 9"),
        ({"tokens": np.array([1, "a"], object), "offsets": OFFSETS}, "without Python objects"),
    ],
)
def test_a_wrong_file_is_refused(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(BadInputError, match=message):
        read_token_file(tmp_path / "a.npz", vocab_size=9)


def test_what_is_no_archive_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", TOKENS)
    with pytest.raises(BadInputError, match=r"is no \.npz file"):
        read_token_file(tmp_path / "a.npy", vocab_size=9)
    with pytest.raises(BadInputError, match="is not there"):
        read_token_file(tmp_path / "b.npz", vocab_size=9)
    write_token_file(tmp_path / "c.npz", [np.arange(400) % 9], vocab_size=9)
    data = bytearray((tmp_path / "c.npz").read_bytes())
    data[60] ^= 0xFF
    (tmp_path / "c.npz").write_bytes(data)
    with pytest.raises(BadInputError, match="cannot be read"):
        read_token_file(tmp_path / "c.npz", vocab_size=9)


def test_data_prepared_from_token_files_is_that_of_the_text(tokenizer, tmp_path):
    preparation.prepare(texts(200), tokenizer, tmp_path / "p", splits=(0.8, 0.1, 0.1), seed=0)
    first = preparation.open_prepared(tmp_path / "p")
    export_token_files(first, tmp_path / "files")
    with pytest.raises(BadInputError, match="exists"):
        export_token_files(first, tmp_path / "files")
    corpus = CorpusConfig(source=f"tokens:{tmp_path / 'files'}")
    second = prepare_corpus(tmp_path / "q", corpus)
    for split in SPLITS:
        assert stored(second, split) == stored(first, split) != []
        counts = second.manifest["splits"][split]
        assert counts["documents"] == first.manifest["splits"][split]["documents"]
        assert counts["share"] == counts["documents"] / 200
    assert second.tokenizer.sha256 == first.tokenizer.sha256
    # What has no text cannot be read as text.
    with pytest.raises(BadInputError, match="holds ids and no text"):
        list(preparation.split_documents(corpus, "train"))
    assert set(corpora.hashes(corpus.source)) == {"train.npz", "validation.npz", "test.npz"}


def test_a_document_without_its_end_gets_it_and_an_empty_one_is_counted(tokenizer, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for split in SPLITS:
        write_token_file(folder / f"{split}.npz", [[5, 6], [], [5, 4]], vocab_size=120)
    tokenizer.save(folder)
    prepared = prepare_corpus(tmp_path / "q", CorpusConfig(source=f"tokens:{folder}"))
    assert stored(prepared) == [[5, 6, 4], [5, 4]]
    assert prepared.manifest["skipped"] == {"no tokens": 3}
    (folder / "test.npz").unlink()
    with pytest.raises(BadInputError, match=r"test\.npz is not there"):
        prepare_corpus(tmp_path / "r", CorpusConfig(source=f"tokens:{folder}"))
