"""A subset by tokens or counts: which documents, in which order, in which split, on the record."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.run.files import file_digest, verify_manifest
from lm_jax.text import subset
from lm_jax.text.preparation import CorpusConfig, document_ids, prepare_corpus
from lm_jax.text.splits import split_point
from lm_jax.text.subset import FORMAT, SubsetConfig, build_subset, exact_shares, nearest_counts
from tests.lm_jax.text.synthetic_corpus import texts

SHARES = (0.7, 0.2, 0.1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two files of 100 documents each, the first by name in a folder; one twice, one empty."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [(f"<{name}>", f"CC-{i // 60}", text) for i, (name, text) in enumerate(texts(200))]
    rows[7] = ("<empty>", "CC-0", " ")
    rows[9] = ("<again>", "CC-0", rows[3][2])
    for name, part in (("a/x.parquet", rows[:100]), ("b.parquet", rows[100:])):
        (folder / name).parent.mkdir(exist_ok=True)
        columns = (pa.array(column) for column in zip(*part, strict=True))
        pq.write_table(pa.Table.from_arrays([*columns], ["id", "dump", "text"]), folder / name)
    return folder, [row for i, row in enumerate(rows) if i not in (7, 9)]


@pytest.fixture(scope="module")
def built(corpus, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "subset"
    config = SubsetConfig(tokens=3_000, splits=SHARES, vocab_size=120)
    manifest = build_subset(corpus[0], folder, config, tokenizer=tokenizer)
    return folder, manifest


def stored(folder):
    table = pq.read_table(folder / subset.DOCUMENTS)
    return list(zip(*(table[name].to_pylist() for name in ("id", "dump", "text")), strict=True))


def test_documents_are_taken_in_order_until_there_are_enough_tokens(corpus, built, tokenizer):
    _, rows = corpus
    folder, manifest = built
    kept = stored(folder)
    assert kept == rows[: len(kept)]
    lengths = [len(document_ids(tokenizer, text)) for _, _, text in kept]
    assert sum(lengths[:-1]) < 3_000 <= sum(lengths) == manifest["tokens"]
    assert manifest["documents"] == len(kept) == sum(manifest["dumps"].values())
    assert manifest["dumps"]["CC-0"] == sum(dump == "CC-0" for _, dump, _ in kept)
    ids = hashlib.sha256("".join(f"{name}\n" for name, _, _ in kept).encode())
    assert manifest["ids_sha256"] == ids.hexdigest()
    # It ended in the first file, which is the only one on the record.
    digest = file_digest(corpus[0] / "a" / "x.parquet")["sha256"]
    assert len(kept) < 98 and manifest["sources"] == {"a/x.parquet": digest}
    assert manifest["skipped"] == {"duplicate": 1, "empty": 1}
    assert verify_manifest(folder, FORMAT) == manifest


def test_the_counts_are_those_of_the_shares_and_of_the_prepared_data(built, tokenizer, tmp_path):
    folder, manifest = built
    counts = [split["documents"] for split in manifest["splits"].values()]
    assert counts == list(nearest_counts(manifest["documents"], SHARES))
    assert np.abs(np.array(counts) - np.array(SHARES) * manifest["documents"]).max() < 1
    corpus = CorpusConfig(
        source=str(folder), unit="document", splits=tuple(manifest["shares"]), seed=0
    )
    prepared = prepare_corpus(tmp_path / "data", corpus, tokenizer=tokenizer)
    for split, wanted in manifest["splits"].items():
        found = prepared.manifest["splits"][split]
        assert {name: found[name] for name in wanted} == wanted


def test_exactly_as_many_documents_as_are_asked_for(corpus, tokenizer, tmp_path):
    config = SubsetConfig(counts=(120, 20, 9), vocab_size=120, seed=5)
    manifest = build_subset(corpus[0], tmp_path / "s", config, tokenizer=tokenizer)
    assert [split["documents"] for split in manifest["splits"].values()] == [120, 20, 9]
    assert list(manifest["sources"]) == ["a/x.parquet", "b.parquet"]
    again = build_subset(corpus[0], tmp_path / "t", config, tokenizer=tokenizer)
    assert again == manifest
    with pytest.raises(BadInputError, match="has 198 documents that can be used, of 199"):
        build_subset(corpus[0], tmp_path / "u", SubsetConfig(counts=(190, 5, 4)))
    assert not (tmp_path / "u").exists()


def test_its_own_tokenizer_is_the_one_that_preparation_learns(corpus, tmp_path):
    """Where the corpus has no document more than the subset; else it learns from what follows."""
    config = SubsetConfig(counts=(180, 9, 9), vocab_size=90)
    manifest = build_subset(corpus[0], tmp_path / "s", config)
    source = CorpusConfig(
        source=str(tmp_path / "s"),
        unit="document",
        splits=tuple(manifest["shares"]),
        vocab_size=90,
    )
    prepared = prepare_corpus(tmp_path / "data", source)
    assert prepared.tokenizer.sha256 == manifest["tokenizer_sha256"]
    for split, wanted in manifest["splits"].items():
        assert prepared.manifest["splits"][split]["tokens"] == wanted["tokens"]


@pytest.mark.parametrize("counts", [(30, 5, 2), (37, 0, 0), (0, 36, 1), (35, 0, 2), (0, 0, 37)])
def test_shares_part_points_exactly(counts):
    points = [split_point(text.encode(), 1) for _, text in texts(37)]
    shares = exact_shares(points, counts)
    assert sum(shares) == pytest.approx(1, abs=1e-12) and min(shares) >= 0
    # A share of 0 where there is no document, as preparation wants it.
    assert [share == 0 for share in shares] == [count == 0 for count in counts]


def test_equal_points_cannot_be_parted():
    with pytest.raises(BadInputError, match="take another seed"):
        exact_shares([0.5, 0.5, 0.7], (1, 1, 1))


def test_the_paper_s_counts_are_its_shares():
    assert nearest_counts(360_313, (0.94, 0.05, 0.01)) == (338_694, 18_016, 3_603)
    assert sum(nearest_counts(7, (1 / 3, 1 / 3, 1 / 3))) == 7


def test_a_changed_file_is_found(corpus, tokenizer, tmp_path):
    config = SubsetConfig(counts=(6, 2, 2), vocab_size=120)
    build_subset(corpus[0], tmp_path / "s", config, tokenizer=tokenizer)
    data = bytearray((tmp_path / "s" / subset.DOCUMENTS).read_bytes())
    data[40] ^= 1
    (tmp_path / "s" / subset.DOCUMENTS).write_bytes(data)
    with pytest.raises(CorruptError, match=r"documents\.parquet does not match its sha256"):
        verify_manifest(tmp_path / "s", FORMAT)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"counts": (0, 0, 0)}, UsageError, "must be three numbers of documents"),
        ({"splits": (0.5, 0.2, 0.2)}, UsageError, "must be three shares with sum 1"),
        ({"tokens": 0}, UsageError, "tokens = 0 must be at least 1"),
        ({"text": "texts"}, BadInputError, "has no column 'texts'; did you mean 'text'"),
        ({"id": "url"}, BadInputError, "has no column 'url'"),
    ],
)
def test_what_cannot_be_is_refused(corpus, changes, error, message, tmp_path):
    with pytest.raises(error, match=message.replace("(", r"\(")):
        build_subset(corpus[0], tmp_path / "s", SubsetConfig(**changes))
    assert not (tmp_path / "s").exists()
    with pytest.raises(BadInputError, match=r"holds no \.parquet file"):
        build_subset(tmp_path, tmp_path / "s", SubsetConfig())


def test_a_document_without_an_id_is_refused(tokenizer, tmp_path):
    table = pa.table({"text": ["one boat", "two boats"], "id": ["a", None]})
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(BadInputError, match="a document has no 'id'"):
        build_subset(tmp_path, tmp_path / "s", SubsetConfig(), tokenizer=tokenizer)
    table = pa.table({"text": ["one boat", "two boats"], "id": ["a", "b"]})
    pq.write_table(table, tmp_path / "x.parquet")
    config = SubsetConfig(splits=(0.5, 0.5, 0.0), dump="CC-MAIN-2024-10")
    manifest = build_subset(tmp_path, tmp_path / "s", config, tokenizer=tokenizer)
    assert manifest["dumps"] == {"CC-MAIN-2024-10": 2}
